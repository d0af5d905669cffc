"""CMA-ES with restarts (Hansen 2016, arXiv 1604.00772), full or separable, on coefficients."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from swarm._util.settings import Positive, PositiveNumber, checked
from swarm.optimizers import random_streams
from swarm.optimizers.base import OPTIMIZER_STREAM, High, Low, Particles
from swarm.optimizers.static_merges import WarmStartOptimizer

if TYPE_CHECKING:
    from cmaes import CMA, SepCMA


FREE_SUM_STEP = 0.1
"""Initial standard deviation of a coefficient around the best recipe."""

RESTART_STREAM = OPTIMIZER_STREAM + 1
"""Purpose id of the random stream of restarts."""

MAX_REDRAWS = 100
"""Number of redraws of an out-of-bounds position before it is projected."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class CMAES(WarmStartOptimizer):
    """A normal distribution that adapts towards high utilities, starting from the experts.

    It starts at the uniform mix with the step 1 / sqrt(K): the K experts are then at the typical
    distance of a sample, and form the first generation (Hansen 2011, arXiv 1110.4181, on injected
    solutions). It learns from generations of N measured positions; failed ones are redrawn, so a
    generation with failures takes more than one `ask`. When the distribution has converged (as
    reported by the package `cmaes`), a new one starts at a random mixture with twice the generation
    size (IPOP; Auger and Hansen 2005), over as many asks of N rows as that takes.

    With free sums it evaluates static recipes first (`start_scales`) and starts around the best of
    them and of the experts; the first generation are the samples after that.

    `separable` learns only the variances, in time and memory linear in the dimensions and from
    fewer positions (sep-CMA-ES; Ros and Hansen 2008): for per-layer and per-module groups.

    The distribution is not saved: it is rebuilt exactly from all measured positions `rows` [M, G x
    K] and their `utilities` [M].

    Args:
        particles: N; None is 4 + floor(3 ln n) for n dimensions, the usual size, or K if larger.
        step: Initial standard deviation of a coefficient; None is 1 / sqrt(K), or 0.1 around the
            best recipe.
        separable: Use a diagonal covariance.
        sum_to_one: Use the G (K - 1) dimensions where coefficients sum to 1 in each group, as the
            particle swarm does; false frees the sum.
        start_scales: See `WarmStartOptimizer`.
        low: Lower bound of a coefficient.
        high: Upper bound of a coefficient.
        restart: Restart on convergence; else continue sampling.
    """

    NAME: ClassVar[str] = "cmaes"

    particles: Particles | None = None
    max_iterations: Positive = 100
    step: PositiveNumber | None = None
    separable: bool = False
    low: Low = -1.0
    high: High = 2.0
    restart: bool = True

    def _population_size(self, experts: int) -> int:
        return max(experts, 4 + int(3 * np.log(self._dimensions(experts))))

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        self._reset_distribution(count)
        return super()._initial_population(experts, count)

    def _initial_positions(self, experts: int, count: int) -> np.ndarray:
        known = random_streams.expert_positions(experts, self.groups)
        return np.vstack([known, *map(self._sample_position, range(experts, count))])

    def _propose_after_start(self) -> np.ndarray:
        missing = self._cma.population_size - self._pending_count
        return np.array(
            [self._sample_position(i) for i in range(min(missing, len(self.positions)))]
        )

    def _update_state(self, utilities: np.ndarray) -> None:
        super()._update_state(utilities)
        if self.is_starting:
            self._reset_distribution(len(self.positions))
        self._update_distribution()

    def _restore_state(self) -> None:
        super()._restore_state()
        self._reset_distribution(len(self.positions))
        self._update_distribution()

    def _reset_distribution(self, count: int) -> None:
        """Reset to the initial distribution."""
        self._region = self._bounds(self.low, self.high)
        self._learnt, self._restarts = self.start_count, 0
        self._cma = self._build_distribution(self._initial_mean(), count)

    def _initial_mean(self) -> np.ndarray:
        return self.best_start

    def _build_distribution(self, mean: np.ndarray, population: int) -> "CMA | SepCMA":
        from cmaes import CMA, SepCMA

        step = self.step or (FREE_SUM_STEP if self.active_scales else self.experts**-0.5)
        point = self._region.to_coordinates(mean)
        # One dimension has no covariance, and SepCMA requires two or more.
        kind = SepCMA if self.separable and len(point) > 1 else CMA
        return kind(point, step, population_size=population, seed=0)

    @property
    def _pending_count(self) -> int:
        return len(self.rows) - self._learnt

    def _update_distribution(self) -> None:
        """Update the distribution with every complete generation that is pending."""
        while self._pending_count >= (size := self._cma.population_size):
            generation = slice(self._learnt, self._learnt + size)
            points = self._region.to_coordinates(self.rows[generation])
            losses = self._compute_losses(self.rows[generation], self.utilities[generation])
            self._cma.tell(list(zip(points, losses.tolist(), strict=True)))
            self._learnt += size
            if self.restart and self._cma.should_stop():
                self._restarts += 1
                draw = random_streams.counter_rng(self.seed, self._restarts, 0, RESTART_STREAM)
                mean = random_streams.sample_mixtures(draw, 1, self.experts, self.groups)[0]
                self._cma = self._build_distribution(mean, 2 * size)

    def _compute_losses(self, rows: np.ndarray, utilities: np.ndarray) -> np.ndarray:
        """Return the losses [M] to minimize, from positions [M, G x K] and their utilities."""
        return -utilities

    def _sample_position(self, particle: int) -> np.ndarray:
        """Sample a position inside the bounds, [G x K]."""
        self._cma.reseed_rng(int(self._iteration_rng(particle=particle).integers(2**32)))
        for _ in range(MAX_REDRAWS):
            row = self._region.to_positions(self._cma.ask())
            if self._region.contains(row):
                return row
        return self._region.project(row[None])[0]
