"""Bayesian optimization with Optuna's samplers on rows of mixing coefficients."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from swarm.errors import UserError
from swarm.optimizers import draws
from swarm.optimizers.ask_tell import OWN, Remembering
from swarm.optimizers.draws import populate
from swarm.optimizers.pso_options import AT_LEAST_ONE, POSITIVE, Rule
from swarm.optimizers.region import Region

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler

NEEDS = {"gp": ("optuna", "scipy", "greenlet"), "tpe": ("optuna",)}
"""Packages of each sampler. Without greenlet the process searches in another way, more slowly."""


@dataclass(kw_only=True, eq=False)
class BayesianSearch(Remembering):
    """A model of the utility, learnt from all scores so far, says where to look next.

    It models the G (K - 1) coordinates in which coefficients sum to 1 in each group, each within
    `reach` of the uniform mix (the experts lie within 1). `gp` is a Gaussian process with noise
    and log expected improvement: the better one, but a position takes a fraction of a second at
    first and seconds after some hundreds. `tpe` is the multivariate tree-structured Parzen
    estimator (Bergstra et al., NeurIPS 2011), milliseconds for a position. The positions of one
    ask are chosen one after the other, each with those before it taken as still running.

    With 30 groups of 9 experts, 240 dimensions, an ask of 5 after 40 scores took 1.3 s by `gp` and
    0.25 s by `tpe` on one core (of a bowl, `gp` had learnt something by then, `tpe` nothing).

    Every ask has a sampler of its own, seeded by (seed, iteration), over all `rows` [M, G x K]
    that were measured and their `utilities` [M]: on the same machine a resumed search proposes the
    same. A lost evaluation teaches nothing.

    Args:
        particles: N, scored at the start: the experts, and crossover children of two; None is K.
        batch: New positions of an ask.
        sampler: As above.
        reach: Half the width of the box of coordinates.
    """

    NAME: ClassVar[str] = "bayes"
    NUMBERS: ClassVar[dict[str, tuple[Rule, str]]] = {
        "batch": (AT_LEAST_ONE, "1 learns from every score before the next"),
        "reach": (POSITIVE, "1 is a box around the experts"),
    }
    WORDS: ClassVar[dict[str, tuple[str, ...]]] = {"sampler": ("gp", "tpe")}

    particles: int | None = None
    max_iterations: int = 20
    batch: int = 5
    sampler: Literal["gp", "tpe"] = "gp"
    reach: float = 1.0

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """As `AskTell.start`.

        Raises:
            UserError: A package of the sampler is not installed, too.
        """
        for package in NEEDS[self.sampler]:
            if find_spec(package) is None:
                raise UserError(f"""optimizer.sampler={self.sampler}: needs the package {package};
                    install it with pip install "model-swarms[bayes]", or use another optimizer""")
        super().start(experts, seed, groups)

    def _begin(self, experts: int, count: int) -> np.ndarray:
        return populate(experts, count, self.seed, groups=self.groups)

    def _places(self, count: int) -> np.ndarray:
        rows = len(self.positions)
        return (self.batch * (self.iteration - 1) + np.arange(count)) % rows

    def _next(self) -> np.ndarray:
        region = Region(self.experts, -np.inf, np.inf, groups=self.groups)
        points = region.coordinates(self.rows)
        study, box = self._study(points), self._box(points.shape[1])
        trials = [study.ask(box) for _ in range(min(self.batch, len(self.positions)))]
        points = np.array([[*trial.params.values()] for trial in trials])
        return region.rows(points)

    def _box(self, dimensions: int) -> dict[str, Any]:
        from optuna.distributions import FloatDistribution

        side = FloatDistribution(-self.reach, self.reach)
        return {f"y{i:03}": side for i in range(dimensions)}

    def _study(self, points: np.ndarray) -> "Study":
        """All measured points [M, D] as finished trials."""
        import optuna

        box = self._box(points.shape[1])
        inside = np.clip(points, -self.reach, self.reach)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=self._sampler(), direction="maximize")
        for point, utility in zip(inside.tolist(), self.utilities.tolist(), strict=True):
            told = dict(zip(box, point, strict=True))
            study.add_trial(
                optuna.trial.create_trial(params=told, distributions=box, value=utility)
            )
        return study

    def _sampler(self) -> "BaseSampler":
        from optuna.samplers import GPSampler, TPESampler

        word = int(draws.generator(self.seed, self.iteration, 0, OWN).integers(2**31))
        if self.sampler == "gp":
            return GPSampler(seed=word)
        return TPESampler(seed=word, multivariate=True, constant_liar=True)
