"""Bayesian optimization with Optuna's samplers on rows of mixing coefficients."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np

from swarm._util.settings import Positive, PositiveNumber, checked
from swarm.errors import UserError, install_command
from swarm.optimizers.base import Particles, Rows
from swarm.optimizers.static_merges import WarmStartOptimizer

REQUIRED_PACKAGES = {"gp": ("optuna", "greenlet"), "tpe": ("optuna",)}
"""Packages required by each sampler. Without greenlet, Optuna falls back to a slower search."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class BayesianSearch(WarmStartOptimizer):
    """Proposes positions from a surrogate model of the utility, fitted to all scores so far.

    It models the G (K - 1) coordinates in which coefficients sum to 1 in each group, each within
    `reach` of the uniform mix (the experts are within 1); or, with free sums, the G K coefficients
    themselves, each within `reach` of the best static recipe or expert. `gp` is a Gaussian process
    with noise and log expected improvement: the better one, but a position takes a fraction of a
    second at first and seconds after some hundreds. `tpe` is the multivariate tree-structured
    Parzen estimator (Bergstra et al., NeurIPS 2011), milliseconds per position. The positions of
    one ask are chosen sequentially, treating the previous ones as still running.

    With 30 groups of 9 experts, 240 dimensions, an ask of 5 after 40 scores took 1.3 s by `gp` and
    0.25 s by `tpe` on one core (on a quadratic bowl, `gp` had improved by then, `tpe` had not).

    Every ask creates a new sampler, seeded by (seed, iteration), over all measured `rows` [M, G x
    K] and their `utilities` [M]: on the same machine a resumed search proposes the same positions.
    Failed evaluations are ignored.

    Args:
        particles: N, scored at the start: the experts, and crossover children of two; None is K.
        batch: New positions per ask.
        sampler: "gp" or "tpe".
        reach: Half the width of the box of coordinates. With free sums, measured positions outside
            it are not modelled; else they count as the nearest one inside.
        max_dimensions: Maximum for `gp`, which models more dimensions poorly from a few hundred
            positions.
        sum_to_one: See `WarmStartOptimizer`.
        start_scales: See `WarmStartOptimizer`.
    """

    NAME: ClassVar[str] = "bayes"

    particles: Particles | None = None
    max_iterations: Positive = 20
    batch: Rows = 5
    sampler: Literal["gp", "tpe"] = "gp"
    reach: PositiveNumber = 1.0
    max_dimensions: Positive = 20

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """See `Optimizer.start`; a UserError also without the packages of the sampler."""
        for package in REQUIRED_PACKAGES[self.sampler]:
            if find_spec(package) is None:
                raise UserError(f"""optimizer.sampler={self.sampler}: needs the package {package}:
                    {install_command("bayes")}; or use another optimizer""")
        dimensions = groups * (experts - self.sum_to_one)
        if self.sampler == "gp" and dimensions > self.max_dimensions:
            raise UserError(f"""optimizer.sampler=gp: {groups} groups of {experts} experts make
                {dimensions} dimensions, above optimizer.max_dimensions={self.max_dimensions};
                use fewer pool.groups, optimizer.sampler=tpe, optimizer=nes, or raise the limit""")
        super().start(experts, seed, groups)

    @property
    def new_rows(self) -> int:
        return min(self.batch, len(self.positions))

    def _proposal_rows(self, count: int) -> np.ndarray:
        rows = len(self.positions)
        return (self.batch * (self.iteration - 1) + np.arange(count)) % rows

    def _propose_after_start(self) -> np.ndarray:
        import optuna

        # Coordinates [M, D] with 0 at the centre of the box, and finished trials at those inside.
        region, utilities = self._bounds(-np.inf, np.inf), self.utilities
        if self.sum_to_one:
            points = np.clip(region.to_coordinates(self.rows), -self.reach, self.reach)
        else:
            points = self.rows - self.best_start
            inside = (np.abs(points) <= self.reach).all(axis=1)
            points, utilities = points[inside], utilities[inside]
        side = optuna.distributions.FloatDistribution(-self.reach, self.reach)
        box: dict[str, Any] = {f"y{i:03}": side for i in range(points.shape[1])}
        seed = int(self._iteration_rng().integers(2**31))
        sampler: optuna.samplers.BaseSampler
        if self.sampler == "gp":
            sampler = optuna.samplers.GPSampler(seed=seed)
        else:
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        for point, value in zip(points.tolist(), utilities.tolist(), strict=True):
            known = dict(zip(box, point, strict=True))
            study.add_trial(optuna.trial.create_trial(params=known, distributions=box, value=value))
        trials = [study.ask(box) for _ in range(self.new_rows)]
        found = np.array([[*trial.params.values()] for trial in trials])
        return region.to_positions(found) if self.sum_to_one else self.best_start + found
