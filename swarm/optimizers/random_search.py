"""Random search over mixtures: the baseline of every other optimizer."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm._util.settings import PositiveNumber, checked
from swarm.optimizers import random_streams
from swarm.optimizers.base import Optimizer

GREATEST_SUM = 2.0


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class RandomSearch(Optimizer):
    """Samples from a Dirichlet distribution over the simplex of the experts, or a scaled simplex.

    Every group of modules is sampled independently.

    Args:
        concentration: Concentration of the distribution; 1 is uniform, less favours mixes of few
            experts.
        reach: Distance from the uniform mix: 1 is the simplex itself; with 2 every coefficient is
            between -1/K and 2 - 1/K, and all still sum to 1.
        sum_to_one: Sums are 1; false draws the sum of a position from U(0, 2).
    """

    NAME: ClassVar[str] = "random"

    concentration: PositiveNumber = 1.0
    reach: PositiveNumber = 1.0
    sum_to_one: bool = True

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        return np.vstack(
            [
                random_streams.expert_positions(experts, self.groups),
                self._sample_mixtures(count - experts),
            ]
        )

    def _propose_positions(self) -> np.ndarray:
        return self._sample_mixtures(len(self.positions))

    def _update_state(self, utilities: np.ndarray) -> None:
        pass

    def _sample_mixtures(self, count: int) -> np.ndarray:
        size = count, self.experts, self.groups
        draw = self._iteration_rng()
        rows = random_streams.sample_mixtures(draw, *size, self.concentration)
        rows = 1 / self.experts + self.reach * (rows - 1 / self.experts)
        if self.sum_to_one:
            return rows
        return draw.uniform(0.0, GREATEST_SUM, size=(count, 1)) * rows
