"""AdaMerging (Yang et al. 2024, ICLR, arXiv 2310.02575): entropy on unlabelled items."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm.optimizers import random_streams
from swarm.optimizers.base import (
    AT_LEAST_ONE,
    OPTIMIZER_STREAM,
    POSITIVE,
    ROWS,
    SHARE,
    BaseOptimizer,
    LossGradient,
    LossRequest,
    Rule,
    freeze_array,
)
from swarm.optimizers.random_streams import initial_population

MINIBATCH_STREAM = OPTIMIZER_STREAM + 1
"""Purpose id of the random stream of item orders."""

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants (Kingma and Ba 2015, arXiv 1412.6980), as in the authors' code."""


@dataclass(kw_only=True, eq=False)
class AdaMerging(BaseOptimizer):
    """Adam on the Shannon entropy of the answers' distribution, through the coefficients alone.

    One position starts with the same coefficient for every expert and follows the derivative of the
    mean entropy on minibatches of dev items, without their gold answers. It is scored after every
    `steps` steps. Coefficients are clamped to [0, 1], with a derivative of 0 beyond.

    Layer-wise AdaMerging is `pool.groups=per_module`, the default of an optimizer with gradients;
    task-wise is `pool.groups=global`; both with `pool.space=delta`, the default.

    Source: the authors' code (github.com/EnnengYang/AdaMerging, commit 2c64d7d), whose values are
    the defaults: 0.3, Adam at 0.001 with (0.9, 0.999), 500 steps, a score after every 10.

    The paper is on image classification. Choices made here for language models:

    - With options (multiple choice), the distribution is that of their normalised probabilities.
      Without, it is that of the first token of the answer, over the vocabulary.
    - The items are those of dev in random order, reshuffled each epoch; the authors' are the test
      items. A minibatch is one batch of 16 of the complete task; theirs is two of each of 8 tasks.
    - The result is the best position scored on dev, as for every optimizer here, so gold answers
      choose the final step; theirs is the last step.
    - The experts are scored first and do not influence the steps. Particles beyond them and the
      position are crossover children of two experts.

    Args:
        particles: N; None is the experts and the position.
        max_iterations: Maximum number of asks after the first.
        steps: Adam steps between two scores.
        batch: Items per step.
        rate: Adam's learning rate.
        start_value: Initial value of every coefficient.
    """

    NAME: ClassVar[str] = "adamerging"
    NUMBERS: ClassVar[dict[str, tuple[Rule, str]]] = {
        "steps": (AT_LEAST_ONE, "the authors score after every 10"),
        "batch": (ROWS, "the authors' is 16"),
        "rate": (POSITIVE, "the authors' is 0.001"),
        "start_value": (SHARE, "the authors' is 0.3"),
    }
    ARRAYS: ClassVar[tuple[str, ...]] = ("weights", "first", "second", "count")

    particles: int | None = None
    max_iterations: int = 50
    steps: int = 10
    batch: int = 16
    rate: float = 0.001
    start_value: float = 0.3

    @property
    def needs_gradients(self) -> bool | None:
        """See `swarm.optimizers.base.SupportsGradients`."""
        return True

    def _population_size(self, experts: int) -> int:
        return experts + 1

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        self.weights = np.full(self.groups * experts, self.start_value)
        self.first, self.second = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.count = np.zeros(1)
        rows = initial_population(experts, count, self.seed, groups=self.groups)
        if count > experts:
            rows[self._position_row(count)] = self.weights
        return rows

    def descend(self, items: int) -> Generator[list[LossRequest], list[LossGradient], None]:
        """Take the steps before the next score; see `SupportsGradients.descend`."""
        for _ in range(self.steps if self.has_utilities else 0):
            batch = self._next_minibatch(items)
            (answer,) = yield [LossRequest(self._clamp_weights(), batch, entropy=True)]
            if np.isfinite(answer.slope).all():
                self._adam_step(answer.slope)
            self.count = freeze_array(self.count + 1)

    def _propose_positions(self) -> np.ndarray:
        return self._clamp_weights()[None]

    def _proposal_rows(self, count: int) -> np.ndarray:
        return np.array([self._position_row(len(self.positions))])

    def _update_state(self, utilities: np.ndarray) -> None:
        pass

    def _position_row(self, count: int) -> int:
        """Return the row of the position; with N = K it replaces the last expert later on."""
        return min(self.experts, count - 1)

    def _clamp_weights(self) -> np.ndarray:
        return np.clip(self.weights, 0.0, 1.0)

    def _adam_step(self, slope: np.ndarray) -> None:
        """Take one Adam step against a gradient [G * K]."""
        slope = np.where((self.weights >= 0) & (self.weights <= 1), slope, 0.0)
        count = self.count[0] + 1
        self.first = freeze_array(BETA_1 * self.first + (1 - BETA_1) * slope)
        self.second = freeze_array(BETA_2 * self.second + (1 - BETA_2) * slope**2)
        mean = self.first / (1 - BETA_1**count)
        scale = np.sqrt(self.second / (1 - BETA_2**count)) + EPSILON
        self.weights = freeze_array(self.weights - self.rate * mean / scale)

    def _next_minibatch(self, items: int) -> tuple[int, ...]:
        """Return the items of the next step."""
        found: list[int] = []
        first = int(self.count[0]) * self.batch
        for index in range(first, first + self.batch):
            epoch, offset = divmod(index, items)
            order = random_streams.counter_rng(self.seed, epoch, 0, MINIBATCH_STREAM).permutation(
                items
            )
            found.append(int(order[offset]))
        return tuple(found)
