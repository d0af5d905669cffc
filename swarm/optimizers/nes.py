"""Natural evolution strategy with antithetic pairs (Wierstra et al. 2014) on coefficients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm._util.settings import Positive, PositiveNumber, checked
from swarm.optimizers.base import (
    High,
    Low,
    Particles,
    rank_weights,
)
from swarm.optimizers.static_merges import WarmStartOptimizer


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class NaturalEvolution(WarmStartOptimizer):
    """Follows a gradient estimated from pairs of positions m + sigma e and m - sigma e.

    e is drawn from N(0, I) for each pair, and both positions of a pair are evaluated in the same
    ask, so on the same items (antithetic sampling; Salimans et al. 2017, arXiv 1703.03864).
    Utilities are used by rank alone, by the shaping of Wierstra et al. (2014, "Natural Evolution
    Strategies", JMLR 15): u_i = max(0, ln(P/2 + 1) - ln(rank_i)), divided by its sum, minus 1/P for
    the P positions of an ask; equal utilities share the mean of theirs. `update=plain` is
    their separable strategy (SNES, algorithm 6) except for the pairs:

        m <- m + rate sigma sum_i u_i e_i
        sigma <- sigma exp((3 + ln D) / (10 sqrt(D)) sum_i u_i (e_i^2 - 1))

    `update=adam` passes sum_i u_i e_i to Adam (Kingma and Ba 2015, arXiv 1412.6980) and adds `rate`
    times its direction, in units of a coefficient; sigma remains constant.

    The last row of an ask is m itself: in many dimensions it is better than any sample around it,
    and a search can only choose among evaluated positions. It is not used for the update.

    The mean starts at the best position of the start, the experts and the static recipes
    (`WarmStartOptimizer`). A pair with a failed evaluation is ignored.

    Args:
        particles: N, odd for pairs and m; None is 4 + floor(3 ln D) for D dimensions, or K if
            larger, and one more if that is even. An even one leaves a row idle after the start.
        step: Initial sigma, in units of a coefficient.
        sum_to_one: See `WarmStartOptimizer`.
        start_scales: See `WarmStartOptimizer`.
        low: Lower bound of a coefficient; positions outside are projected before evaluation.
        high: Upper bound of a coefficient.
    """

    NAME: ClassVar[str] = "nes"
    STATE = (*WarmStartOptimizer.STATE, "mean", "sigma")

    particles: Particles | None = None
    max_iterations: Positive = 100
    step: PositiveNumber = 0.1
    sum_to_one: bool = False
    low: Low = -1.0
    high: High = 2.0

    @property
    def is_starting(self) -> bool:
        """True if the last ask belongs to the start; the first one always does."""
        return self.iteration == 0 or super().is_starting

    def _population_size(self, experts: int) -> int:
        return max(experts, 4 + int(3 * np.log(self._dimensions(experts)))) | 1

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        self.mean = np.zeros(self._dimensions(experts))
        self.sigma = np.full(len(self.mean), float(self.step))
        return super()._initial_population(experts, count)

    def _propose_after_start(self) -> np.ndarray:
        noise = self.sigma * self._draw_noise()
        pairs = np.stack([self.mean + noise, self.mean - noise], axis=1)
        points = np.vstack([pairs.reshape(-1, len(self.mean)), self.mean])
        region = self._bounds(self.low, self.high)
        return region.project(region.to_positions(points[: len(self.evaluate)]))

    def _update_state(self, utilities: np.ndarray) -> None:
        if not self.is_starting:
            self._update_distribution(utilities)
            return
        super()._update_state(utilities)
        self.mean = self._bounds(self.low, self.high).to_coordinates(self.best_start)

    def _update_distribution(self, utilities: np.ndarray) -> None:
        pairs = utilities[: 2 * self._pair_count].reshape(-1, 2)
        complete = np.isfinite(pairs).all(axis=1)
        if not complete.any():
            return
        shaped = rank_weights(pairs[complete].ravel()).reshape(-1, 2)
        noise = self._draw_noise()[complete]
        direction = (shaped[:, 0] - shaped[:, 1]) @ noise
        self.mean = self.mean + self.sigma * direction
        dimensions = len(self.mean)
        growth = (3 + np.log(dimensions)) / (10 * np.sqrt(dimensions))
        self.sigma = self.sigma * np.exp(growth * (shaped.sum(axis=1) @ (noise**2 - 1)))

    @property
    def _pair_count(self) -> int:
        return max(1, (len(self.evaluate) - 1) // 2)

    def _draw_noise(self) -> np.ndarray:
        """Draw e of each pair of this iteration, [P / 2, D]."""
        each = [self._iteration_rng(particle=pair) for pair in range(self._pair_count)]
        return np.array([draw.normal(size=len(self.mean)) for draw in each])
