"""AdaMerging (Yang et al. 2024, ICLR, arXiv 2310.02575): entropy on unlabelled items."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm._util.settings import Positive, PositiveNumber, checked
from swarm.optimizers.base import (
    OPTIMIZER_STREAM,
    Descending,
    DescentPlan,
    EntropyRequest,
    Fraction,
    Optimizer,
    Particles,
    Rows,
    adam_direction,
)
from swarm.optimizers.random_streams import initial_population, minibatch

MINIBATCH_STREAM = OPTIMIZER_STREAM + 1
"""Purpose id of the random stream of item orders."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class AdaMerging(Optimizer):
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
    STATE = (*Optimizer.STATE, "weights", "moments", "count")

    particles: Particles | None = None
    max_iterations: Positive = 50
    steps: Positive = 10
    batch: Rows = 16
    rate: PositiveNumber = 0.001
    start_value: Fraction = 0.3

    @property
    def needs_gradients(self) -> bool | None:
        return True

    def _population_size(self, experts: int) -> int:
        return experts + 1

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        self.weights = np.full(self.groups * experts, self.start_value)
        self.moments, self.count = np.zeros((2, len(self.weights))), 0
        rows = initial_population(experts, count, self.seed, groups=self.groups)
        rows[experts : experts + 1] = self.weights
        return rows

    @property
    def new_rows(self) -> int:
        return 1

    def plan_descent(self, items: int) -> DescentPlan | None:
        return DescentPlan(1, self.steps, self.batch)

    def descend(self, items: int) -> Descending:
        """Take the steps before the next score."""
        for _ in range(self.steps if self.has_utilities else 0):
            where = self.seed, 0, MINIBATCH_STREAM, self.count, self.batch, items
            chosen, position = tuple(minibatch(*where)), np.clip(self.weights, 0.0, 1.0)
            (answer,) = yield [EntropyRequest(position, chosen)]
            self.count += 1
            if np.isfinite(answer.slope).all():
                slope = np.where(self.weights == position, answer.slope, 0.0)
                # Beta 2 of the authors' code.
                step = adam_direction(slope, self.moments, self.count, beta_2=0.999)
                self.weights = self.weights - self.rate * step

    def _propose_positions(self) -> np.ndarray:
        return np.clip(self.weights, 0.0, 1.0)[None]

    def _proposal_rows(self, count: int) -> np.ndarray:
        # With N = K the position replaces the last expert.
        return np.array([min(self.experts, len(self.positions) - 1)])

    def _update_state(self, utilities: np.ndarray) -> None:
        pass
