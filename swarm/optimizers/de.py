"""Differential evolution (Storn and Price 1997) on rows of mixing coefficients."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from swarm._util.settings import Share, checked
from swarm.optimizers.base import CoefficientBounds, FourOrMore, High, Low, Optimizer
from swarm.optimizers.random_streams import expert_positions, sample_mixtures
from swarm.optimizers.static_merges import static_start_positions

WEIGHT_RANGE = (0.5, 1.0)
"""Range of F, which is drawn once per iteration (dither)."""

SCALE_RANGE = (0.5, 2.0)
"""Range of the coefficient sums of the first random members with free sums."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class DifferentialEvolution(Optimizer):
    """Each member is replaced by base + F (a - b), crossed with it, if that is at least as good.

    The population starts with the experts and uniform samples of their simplex. The members a and b
    differ from each other, and from a random base. A challenger with an equal utility wins, so that
    plateaus of equal accuracies can be crossed; one whose evaluation failed does not.

    With `sum_to_one` coefficients sum to 1 in each group: F (a - b) sums to 0, and violations by
    crossover and bounds are repaired by projection to the nearest valid position. Without it sums
    are free, and the population starts with the experts, static recipes times four scales
    (`static_start_positions`), and uniform samples times a scale from U(0.5, 2).

    Args:
        strategy: The base: the `best` member (best/1/bin) or a random one (`rand`/1/bin).
        crossover: CR, the probability of each coefficient to be taken from the challenger; at least
            one is.
        sum_to_one: As above.
        low: Lower bound of a coefficient.
        high: Upper bound of a coefficient.
    """

    NAME: ClassVar[str] = "de"
    STATE = (*Optimizer.STATE, "members", "utilities")

    particles: FourOrMore | None = 20
    strategy: Literal["best", "rand"] = "best"
    crossover: Share = 0.9
    sum_to_one: bool = True
    low: Low = -1.0
    high: High = 2.0

    def _population_size(self, experts: int) -> int:
        return max(experts, 4)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        draw, known = self._iteration_rng(), expert_positions(experts, self.groups)
        if not self.sum_to_one:
            known = np.vstack([known, static_start_positions(experts, self.groups)[1]])[:count]
        drawn = sample_mixtures(draw, count - len(known), experts, self.groups)
        if not self.sum_to_one:
            drawn = draw.uniform(*SCALE_RANGE, size=(len(drawn), 1)) * drawn
        self.members = np.vstack([known, drawn])
        self.utilities = np.full(count, np.nan)
        return self.members

    def _propose_positions(self) -> np.ndarray:
        draw, (count, dimensions) = self._iteration_rng(), self.members.shape
        # Three distinct other members per member: indices below count - 1, shifted past the member
        # itself.
        orders = [draw.permutation(count - 1)[:3] for _ in range(count)]
        first, second, third = (
            self.members[o + (o >= np.arange(count))] for o in np.transpose(orders)
        )
        if self.strategy == "best" and np.isfinite(self.utilities).any():
            first = self.members[np.nanargmax(self.utilities)]
        weight = draw.uniform(*WEIGHT_RANGE)
        mutants = first + weight * (second - third)
        crossed = draw.integers(dimensions, size=(count, 1)) == np.arange(dimensions)
        crossed |= draw.random((count, dimensions)) < self.crossover
        rows = np.where(crossed, mutants, self.members)
        bounds = self.low, self.high
        return CoefficientBounds(self.experts, *bounds, self.sum_to_one, self.groups).project(rows)

    def _update_state(self, utilities: np.ndarray) -> None:
        wins = np.isfinite(utilities) & ~(utilities < self.utilities)
        self.utilities = np.where(wins, utilities, self.utilities)
        self.members = np.where(wins[:, None], self.positions, self.members)
