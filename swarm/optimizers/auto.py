"""Automatic choice of a method by the task, the size of the pool and the budget."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from swarm._util.settings import checked
from swarm.optimizers.base import Optimizer, Particles
from swarm.optimizers.bayes import REQUIRED_PACKAGES, BayesianSearch
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.nes import NaturalEvolution
from swarm.optimizers.swarm import GradientDescent, MemeticSwarm

SURROGATE_DIMENSIONS = 20
"""Number of coefficients up to which a Gaussian process models a utility well."""

SURROGATE_POSITIONS = 100
"""Number of positions up to which fitting it is fast compared with running a model."""

FULL_COVARIANCE_DIMENSIONS = 60
"""Number of coefficients up to which a full covariance matrix can be learnt."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class AutoOptimizer(Optimizer):
    """Chooses the method that suits the task, the pool and the budget.

    - Gold answers and gradients available: gradient descent through the coefficients.
    - A black box with reference texts, gradients available and a budget of more than 100
      positions: the swarm, with the gradient of these texts' loss as a mutation. With 36 positions
      a single mutation fits, and did not help (docs/pso.md).
    - A black box with at most 20 coefficients, 100 positions and the extra [bayes]: a Gaussian
      process.
    - At most 60 coefficients: CMA-ES, free sums.
    - More: natural evolution strategies with antithetic pairs.

    Args:
        particles: N of the method's asks; None is the method's default.
        surrogate: Whether the Gaussian process may be chosen.
        max_iterations: Maximum number of asks after the first, whichever the method.
    """

    NAME: ClassVar[str] = "auto"

    particles: Particles | None = None
    surrogate: bool = True

    def choose(self, dimensions: int) -> Optimizer:
        """Return the method for this many coefficients, with the reason."""
        chosen, chosen_for = self._choose_method(dimensions)
        chosen.reason = f"{chosen.NAME}: {chosen_for}"
        chosen.set_resources(self.resources)
        return chosen

    def _choose_method(self, dimensions: int) -> tuple[Optimizer, str]:
        common: dict[str, Any] = {"max_iterations": self.max_iterations}
        if self.particles is not None:
            common["particles"] = self.particles
        if self._mutates:
            reason = "a black box, mutated by the gradient of the reference texts' loss"
            return MemeticSwarm(**common), reason
        if self._descends:
            reason = f"gold answers have a gradient through the {dimensions} coefficients"
            return GradientDescent(**common), reason
        reason = f"a black box with {dimensions} coefficients"
        positions = self.resources.positions or self.max_iterations
        few = dimensions <= SURROGATE_DIMENSIONS and positions <= SURROGATE_POSITIONS
        if self.surrogate and few and all(map(find_spec, REQUIRED_PACKAGES["gp"])):
            return BayesianSearch(**common, sum_to_one=False), f"{reason} and few positions"
        if dimensions <= FULL_COVARIANCE_DIMENSIONS:
            return CMAES(**common, sum_to_one=False), reason
        return NaturalEvolution(**common), f"{reason}, too many for a covariance matrix"

    @property
    def _descends(self) -> bool:
        return self.resources.gradients

    @property
    def _mutates(self) -> bool:
        return False

    @property
    def needs_gradients(self) -> bool | None:
        return False if self.resources.gradients else None
