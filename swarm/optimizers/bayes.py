"""Bayesian optimization with Optuna's samplers on rows of mixing coefficients."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from swarm.errors import UserError
from swarm.optimizers import random_streams
from swarm.optimizers.base import OPTIMIZER_STREAM, CoefficientBounds
from swarm.optimizers.checks import AT_LEAST_ONE, POSITIVE, ROWS, Rule
from swarm.optimizers.static_merges import WarmStartOptimizer

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler

REQUIRED_PACKAGES = {"gp": ("optuna", "scipy", "greenlet"), "tpe": ("optuna",)}
"""Packages of each sampler. Without greenlet the process searches in another way, more slowly."""


@dataclass(kw_only=True, eq=False)
class BayesianSearch(WarmStartOptimizer):
    """A model of the utility, learnt from all scores so far, says where to look next.

    It models the G (K - 1) coordinates in which coefficients sum to 1 in each group, each within
    `reach` of the uniform mix (the experts lie within 1); or, with free sums, the G K coefficients
    themselves, each within `reach` of the best static recipe or expert. `gp` is a Gaussian process
    with noise and log expected improvement: the better one, but a position takes a fraction of a
    second at first and seconds after some hundreds. `tpe` is the multivariate tree-structured
    Parzen estimator (Bergstra et al., NeurIPS 2011), milliseconds for a position. The positions of
    one ask are chosen one after the other, each with those before it taken as still running.

    With 30 groups of 9 experts, 240 dimensions, an ask of 5 after 40 scores took 1.3 s by `gp` and
    0.25 s by `tpe` on one core (of a bowl, `gp` had learnt something by then, `tpe` nothing).

    Every ask has a sampler of its own, seeded by (seed, iteration), over all `rows` [M, G x K]
    that were measured and their `utilities` [M]: on the same machine a resumed search proposes the
    same. A lost evaluation teaches nothing.

    Args:
        particles: N, scored at the start: the experts, and crossover children of two; None is K.
        batch: New positions of an ask.
        sampler: As above.
        reach: Half the width of the box of coordinates. With free sums a position that was measured
            outside of it is not modelled; else it counts as the nearest one inside.
        most_dimensions: More than that are refused for `gp`, which learns little of them from the
            few hundred positions that it can be given.
        sum_to_one: See `Starting`.
        start_scales: See `sum_to_one`.
    """

    NAME: ClassVar[str] = "bayes"
    NUMBERS: ClassVar[dict[str, tuple[Rule, str]]] = {
        "batch": (ROWS, "1 learns from every score before the next"),
        "reach": (POSITIVE, "1 is a box around the experts"),
        "most_dimensions": (AT_LEAST_ONE, "20 is what a Gaussian process is good for"),
    }
    WORDS: ClassVar[dict[str, tuple[str, ...]]] = {"sampler": ("gp", "tpe")}

    particles: int | None = None
    max_iterations: int = 20
    batch: int = 5
    sampler: Literal["gp", "tpe"] = "gp"
    reach: float = 1.0
    most_dimensions: int = 20

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """As `AskTell.start`.

        Raises:
            UserError: A package of the sampler is not installed, or there are too many dimensions
                for it, too.
        """
        for package in REQUIRED_PACKAGES[self.sampler]:
            if find_spec(package) is None:
                raise UserError(f"""optimizer.sampler={self.sampler}: needs the package {package};
                    install it with pip install "model-swarms[bayes]", or use another optimizer""")
        dimensions = groups * (experts - self.sum_to_one)
        if self.sampler == "gp" and dimensions > self.most_dimensions:
            raise UserError(f"""optimizer.sampler=gp: {groups} groups of {experts} experts make
                {dimensions} dimensions, more than optimizer.most_dimensions={self.most_dimensions};
                use fewer pool.groups, optimizer.sampler=tpe, optimizer=nes, or raise the limit""")
        super().start(experts, seed, groups)

    def _proposal_rows(self, count: int) -> np.ndarray:
        rows = len(self.positions)
        return (self.batch * (self.iteration - 1) + np.arange(count)) % rows

    def _propose_after_start(self) -> np.ndarray:
        points, utilities = self._to_points(self.rows), self.utilities
        if self.sum_to_one:
            points = np.clip(points, -self.reach, self.reach)
        else:
            inside = (np.abs(points) <= self.reach).all(axis=1)
            points, utilities = points[inside], utilities[inside]
        study, box = (
            self._build_study(points, utilities),
            self._search_distributions(points.shape[1]),
        )
        trials = [study.ask(box) for _ in range(min(self.batch, len(self.positions)))]
        found = np.array([[*trial.params.values()] for trial in trials])
        return (
            self._search_bounds().to_positions(found)
            if self.sum_to_one
            else self.best_start + found
        )

    def _to_points(self, rows: np.ndarray) -> np.ndarray:
        """Coordinates [M, D] of positions, 0 in the middle of the box."""
        return (
            self._search_bounds().to_coordinates(rows)
            if self.sum_to_one
            else rows - self.best_start
        )

    def _search_bounds(self) -> CoefficientBounds:
        return CoefficientBounds(self.experts, -np.inf, np.inf, groups=self.groups)

    def _search_distributions(self, dimensions: int) -> dict[str, Any]:
        from optuna.distributions import FloatDistribution

        side = FloatDistribution(-self.reach, self.reach)
        return {f"y{i:03}": side for i in range(dimensions)}

    def _build_study(self, points: np.ndarray, utilities: np.ndarray) -> "Study":
        """Measured points [M, D] inside of the box as finished trials."""
        import optuna

        box = self._search_distributions(points.shape[1])
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=self._build_sampler(), direction="maximize")
        for point, utility in zip(points.tolist(), utilities.tolist(), strict=True):
            told = dict(zip(box, point, strict=True))
            study.add_trial(
                optuna.trial.create_trial(params=told, distributions=box, value=utility)
            )
        return study

    def _build_sampler(self) -> "BaseSampler":
        from optuna.samplers import GPSampler, TPESampler

        word = int(
            random_streams.counter_rng(self.seed, self.iteration, 0, OPTIMIZER_STREAM).integers(
                2**31
            )
        )
        if self.sampler == "gp":
            return GPSampler(seed=word)
        return TPESampler(seed=word, multivariate=True, constant_liar=True)
