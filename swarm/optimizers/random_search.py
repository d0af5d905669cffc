"""Random search over mixtures: the baseline of every other optimizer."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm._util.settings import checked
from swarm.optimizers import random_streams
from swarm.optimizers.base import Optimizer

GREATEST_SUM = 2.0


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class RandomSearch(Optimizer):
    """Samples uniformly from the simplex of the experts, each group of modules independently.

    Args:
        sum_to_one: Sums are 1; false draws the sum of a position from U(0, 2).
    """

    NAME: ClassVar[str] = "random"

    sum_to_one: bool = True

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        known = random_streams.expert_positions(experts, self.groups)
        return np.vstack([known, self._sample_mixtures(count - experts)])

    def _propose_positions(self) -> np.ndarray:
        return self._sample_mixtures(len(self.positions))

    def _update_state(self, utilities: np.ndarray) -> None:
        pass

    def _sample_mixtures(self, count: int) -> np.ndarray:
        draw = self._iteration_rng()
        rows = random_streams.sample_mixtures(draw, count, self.experts, self.groups)
        if self.sum_to_one:
            return rows
        return draw.uniform(0.0, GREATEST_SUM, size=(count, 1)) * rows
