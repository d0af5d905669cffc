"""Automatic choice of a method by the task, the size of the pool and the budget."""

from collections.abc import Generator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from swarm.errors import UserError
from swarm.optimizers.base import (
    AT_LEAST_ONE,
    SWITCH,
    LossGradient,
    LossRequest,
    Optimizer,
    ResourceAware,
    SearchResources,
    check_number,
)
from swarm.optimizers.bayes import REQUIRED_PACKAGES, BayesianSearch
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.nes import NaturalEvolution
from swarm.optimizers.pso import GradientDescent, ParticleSwarm

SURROGATE_DIMENSIONS = 20
"""Number of coefficients up to which a Gaussian process models a utility well."""

SURROGATE_POSITIONS = 100
"""Number of positions up to which fitting it is fast compared with running a model."""

FULL_COVARIANCE_DIMENSIONS = 60
"""Number of coefficients up to which a full covariance matrix can be learnt."""


@dataclass(kw_only=True, eq=False)
class AutoOptimizer:
    """Delegates to the method that suits the task, the pool and the budget.

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

    Raises:
        UserError: An option is out of range.
    """

    NAME: ClassVar[str] = "auto"

    particles: int | None = None
    max_iterations: int = 50
    surrogate: bool = True

    def __post_init__(self) -> None:
        check_number("max_iterations", self.max_iterations, AT_LEAST_ONE, "it bounds the budget")
        check_number("surrogate", self.surrogate, SWITCH, "false never takes a Gaussian process")
        self.resources, self.reason = SearchResources(), ""
        self._inner: Optimizer | None = None

    def set_resources(self, resources: SearchResources) -> None:
        """Set the available resources; must be called before `start`."""
        self.resources = resources

    def choose_method(self, dimensions: int) -> tuple[Optimizer, str]:
        """Return the method for this many coefficients, and the reason in one line."""
        common: dict[str, Any] = {"max_iterations": self.max_iterations}
        positions = self.resources.positions or self.max_iterations
        if self.particles is not None:
            common["particles"] = self.particles
        if self._mutation_affordable():
            reason = "a black box, mutated by the gradient of the reference texts' loss"
            return ParticleSwarm(**common), f"pso: {reason}"
        if self.resources.gradients and not self.resources.black_box:
            reason = f"gold answers have a gradient through the {dimensions} coefficients"
            return GradientDescent(**common), f"gradient: {reason}"
        installed = all(map(find_spec, REQUIRED_PACKAGES["gp"]))
        few = dimensions <= SURROGATE_DIMENSIONS and positions <= SURROGATE_POSITIONS
        if self.surrogate and few and installed:
            reason = f"a black box with {dimensions} coefficients and few positions"
            return BayesianSearch(**common, sum_to_one=False), f"bayes: {reason}"
        if dimensions <= FULL_COVARIANCE_DIMENSIONS:
            reason = f"a black box with {dimensions} coefficients"
            return CMAES(**common, sum_to_one=False), f"cmaes: {reason}"
        reason = f"a black box with {dimensions} coefficients, too many for a covariance matrix"
        return NaturalEvolution(**common), f"nes: {reason}"

    def _mutation_affordable(self) -> bool:
        positions = self.resources.positions or 0
        return (
            self.resources.gradients
            and self.resources.black_box
            and positions > SURROGATE_POSITIONS
        )

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """Choose and start the method; see `Optimizer.start`."""
        self._inner = self._choose_inner(experts * groups)
        self._inner.start(experts, seed, groups)

    def _choose_inner(self, dimensions: int) -> Optimizer:
        """Return the method for this many coefficients, with the resources; set `why`."""
        inner, self.reason = self.choose_method(dimensions)
        if isinstance(inner, ResourceAware):
            inner.set_resources(self.resources)
        return inner

    @property
    def inner_optimizer(self) -> Optimizer:
        """The chosen method; available after `start`."""
        if self._inner is None:
            raise RuntimeError("the optimizer is not started: call start() first")
        return self._inner

    @property
    def evaluate(self) -> np.ndarray:
        """See `Optimizer.evaluate`."""
        return self.inner_optimizer.evaluate

    @property
    def iteration(self) -> int:
        """Number of asks after the first."""
        return self.inner_optimizer.iteration  # type: ignore[attr-defined, no-any-return]

    @property
    def composes_routes(self) -> bool:
        """See `SupportsRoutes`; the swarm and its single particle do, other methods do not."""
        return self.resources.gradients and (
            not self.resources.black_box or self._mutation_affordable()
        )

    @property
    def composes_next(self) -> bool:
        """See `SupportsRoutes`."""
        return isinstance(self._inner, ParticleSwarm) and self._inner.composes_next

    def tell_routes(self, values: np.ndarray) -> None:
        """See `SupportsRoutes`."""
        if isinstance(self.inner_optimizer, ParticleSwarm):
            self.inner_optimizer.tell_routes(values)

    @property
    def needs_gradients(self) -> bool | None:
        """See `SupportsGradients.needs_gradients`; before `start`, by the available resources."""
        if self._inner is None:
            return False if self.resources.gradients else None
        return getattr(self.inner_optimizer, "needs_gradients", None)

    def descend(self, items: int) -> Generator[list[LossRequest], list[LossGradient], None]:
        """See `SupportsGradients.descend`."""
        if isinstance(self.inner_optimizer, ParticleSwarm):
            yield from self.inner_optimizer.descend(items)

    def ask(self) -> np.ndarray:
        """See `Optimizer.ask`."""
        return self.inner_optimizer.ask()

    def tell(self, utilities: np.ndarray) -> None:
        """See `Optimizer.tell`."""
        self.inner_optimizer.tell(utilities)

    def stop_reason(self) -> str | None:
        """See `Optimizer.stop_reason`."""
        return self.inner_optimizer.stop_reason()

    def state_dict(self) -> dict[str, Any]:
        """See `Optimizer.state_dict`; the method's own state, with the name of this choice."""
        state = self.inner_optimizer.state_dict()
        return {**state, "optimizer": self.NAME, "method": state["optimizer"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Optimizer.load_state_dict`.

        Raises:
            UserError: The state belongs to another optimizer, or another method was chosen then.
        """
        if state.get("optimizer") != self.NAME:
            raise UserError(
                f"optimizer: the saved search is of {state.get('optimizer')!r}, not of 'auto'; "
                "resume with that optimizer, or start a new run"
            )
        if self._inner is None:
            width = len(state["positions"][0])
            self._inner = self._choose_inner(width)
        if self.particles is not None:
            self._inner.particles = self.particles  # type: ignore[attr-defined]
        self._inner.load_state_dict({**state, "optimizer": state["method"]})
