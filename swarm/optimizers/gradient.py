"""The gradient term of the swarm: Adam on mixing coefficients, one state for each particle."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm.optimizers import random_streams
from swarm.optimizers.base import LossGradient, LossRequest
from swarm.optimizers.checks import (
    AT_LEAST_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    ROWS,
    SWITCH,
    Rule,
    check_number,
)

MINIBATCH_STREAM, HOLDOUT_STREAM, LOSS_ITEMS_STREAM = 100, 101, 102
"""Purposes of draws; beyond those of every optimizer that descends."""

BETA_1, BETA_2, EPSILON = 0.9, 0.99, 1e-8
"""Adam's constants (Kingma and Ba, 2015, arXiv 1412.6980). The second is lower than its .999:
a descent has tens of steps."""

MIN_RATE_FACTOR = 1 / 16
"""A particle whose rate has been halved as often as this descends no more."""

BELOW_ONE: Rule = (float, lambda value: 0 <= value < 1, "a number from 0 to below 1")

ARRAYS = ("first", "second", "count", "rate_factor", "held_loss")

NUMBERS: dict[str, tuple[Rule, str]] = {
    "weight": (POSITIVE, "1 applies the whole descent; optimizer.descent=null is off"),
    "steps": (AT_LEAST_ONE, "Adam steps between two evaluations"),
    "batch": (ROWS, "dev items in a step"),
    "rate": (POSITIVE, "the change of a coefficient in a step"),
    "fine_rate": (NOT_NEGATIVE, "of a group's deviation, as a multiple of rate"),
    "pull": (BELOW_ONE, "by which deviations shrink in a step"),
    "warmup": (COUNT, "steps with a growing rate"),
    "holdout": (BELOW_ONE, "share of dev that a particle does not learn from"),
    "required": (SWITCH, "true refuses tasks without gold answers"),
}


@dataclass(kw_only=True)
class Descent:
    """Moves positions down the gold answers' loss, through their coefficients alone.

    A position of G groups is seen as the coefficients that its groups share (their mean over
    groups) and each group's deviation from them; the two have Adam moments of their own, and
    deviations are pulled to zero, so that 60 groups of 9 experts overfit little more than one.

    A particle learns from minibatches of its own order, and does not learn from a fold of dev that
    is held out for it; of F = round(1 / holdout) folds, particle i has the fold i mod F. After the
    steps of an iteration the mean of the last half of its iterates (Polyak and Juditsky, 1992) is
    where it ends. Where the loss of the held-out fold is not lower there than it has been, the
    particle's rate is halved, and after the fourth time it rests.

    Args:
        weight: w_d, of this term in the velocity; 1 is the whole descent.
        steps: Adam steps of a particle in an iteration.
        batch: Dev items in a step.
        rate: Adam's rate for the shared coefficients.
        fine_rate: That for the deviations of groups, as a multiple of `rate`.
        pull: By which deviations shrink in a step.
        warmup: First steps of a particle, with a rate that grows to the full one.
        holdout: Share of the dev items that are held out; 0 holds out none and halves nothing.
        required: Whether a task without gold answers is refused; else the swarm moves without.

    Raises:
        UserError: An option is out of its range; named with what is allowed.
    """

    weight: float = 1.0
    steps: int = 20
    batch: int = 8
    rate: float = 0.1
    fine_rate: float = 0.5
    pull: float = 0.02
    warmup: int = 5
    holdout: float = 0.2
    required: bool = False

    def __post_init__(self) -> None:
        for name, (rule, advice) in NUMBERS.items():
            check_number(f"descent.{name}", getattr(self, name), rule, advice)

    def start(self, particles: int, groups: int, experts: int, seed: int) -> None:
        """Begin with N particles at rest."""
        self.groups, self.seed = groups, seed
        # The shared coefficients' moments first, then those of all deviations.
        self.first = np.zeros((particles, (groups + 1) * experts))
        self.second = np.zeros_like(self.first)
        self.count = np.zeros(particles, int)
        self.rate_factor = np.ones(particles)
        self.held_loss = np.full(particles, np.nan)

    def state_dict(self) -> dict[str, Any]:
        """Everything `load` needs; exact, None stands for a loss that is not known."""
        found = {name: getattr(self, name).tolist() for name in ARRAYS}
        found["held_loss"] = [None if np.isnan(loss) else loss for loss in found["held_loss"]]
        return found

    def load_state_dict(self, state: dict[str, Any], groups: int, seed: int) -> None:
        """Go on from `state()`."""
        self.groups, self.seed = groups, seed
        for name in ARRAYS:
            kind = int if name == "count" else float
            setattr(self, name, np.array(state[name], dtype=kind))

    def evaluate_losses(
        self, positions: np.ndarray, items: int
    ) -> Generator[list[LossRequest], list[LossGradient], np.ndarray]:
        """The losses [N] of positions [N, G * K] on the same `batch` items.

        A descent begins where the loss is low, of which utilities say little: an expert with one of
        nine skills has a higher utility than the soup, and three times its loss.
        """
        order = random_streams.counter_rng(self.seed, 0, 0, LOSS_ITEMS_STREAM).permutation(items)
        chosen = tuple(int(i) for i in np.sort(order[: self.batch]))
        answers = yield [
            LossRequest(x, chosen, slope=False, particle=i) for i, x in enumerate(positions)
        ]
        losses = np.array([answer.loss for answer in answers])
        return np.where(np.isnan(losses), np.inf, losses)

    def descend(
        self, positions: np.ndarray, particles: Sequence[int], items: int
    ) -> Generator[list[LossRequest], list[LossGradient], np.ndarray]:
        """Descend from positions [M, G * K] of these M particles; returns where they end.

        What is yielded is answered with the mean losses and their derivatives. A descent that is
        closed has come as far as `reached` [M, G * K].
        """
        x, self.reached = positions.copy(), positions.copy()
        rows = [row for row, i in enumerate(particles) if self.rate_factor[i] > MIN_RATE_FACTOR]
        tail: list[np.ndarray] = []
        for _ in range(self.steps if rows else 0):
            wanted = [
                LossRequest(
                    x[row], self._next_minibatch(particles[row], items), particle=particles[row]
                )
                for row in rows
            ]
            for row, answer in zip(rows, (yield wanted), strict=True):
                if np.isfinite(answer.slope).all():
                    x[row] = self._adam_step(particles[row], x[row], answer.slope)
            tail = [*tail, x.copy()][-max(1, self.steps // 2) :]
            self.reached = np.mean(tail, axis=0)
        if rows and self._split_holdout(0, items)[1]:
            yield from self._halve_rates(
                [(particles[row], self.reached[row]) for row in rows], items
            )
        return self.reached

    def _halve_rates(
        self, reached: Sequence[tuple[int, np.ndarray]], items: int
    ) -> Generator[list[LossRequest], list[LossGradient], None]:
        """Halve the rate of each particle whose held-out loss is not its lowest so far."""
        answers = yield [
            LossRequest(x, self._split_holdout(particle, items)[1], slope=False, particle=particle)
            for particle, x in reached
        ]
        for (particle, _), answer in zip(reached, answers, strict=True):
            if answer.loss >= self.held_loss[particle]:
                self.rate_factor[particle] /= 2
            self.held_loss[particle] = np.fmin(answer.loss, self.held_loss[particle])

    def _adam_step(self, particle: int, x: np.ndarray, slope: np.ndarray) -> np.ndarray:
        """One Adam step of a position [G * K]; its rate grows in the first steps."""
        by_group = slope.reshape(self.groups, -1)
        whole = np.concatenate([by_group.sum(axis=0), slope])
        self.first[particle] += (1 - BETA_1) * (whole - self.first[particle])
        self.second[particle] += (1 - BETA_2) * (whole**2 - self.second[particle])
        self.count[particle] += 1
        count = int(self.count[particle])
        first = self.first[particle] / (1 - BETA_1**count)
        second = self.second[particle] / (1 - BETA_2**count)
        scaled = first / (np.sqrt(second) + EPSILON)
        experts = by_group.shape[1]
        rate = self.rate * self.rate_factor[particle] * min(1.0, count / (self.warmup + 1))
        rows = x.reshape(self.groups, experts)
        shared = rows.mean(axis=0)
        moved = shared - rate * scaled[:experts]
        if self.groups == 1:
            return moved
        deviations = rows - shared - self.fine_rate * rate * scaled[experts:].reshape(rows.shape)
        return (moved + (1 - self.pull) * deviations).reshape(-1)

    def _split_holdout(self, particle: int, items: int) -> tuple[np.ndarray, tuple[int, ...]]:
        """The items that a particle learns from, and those that are held out for it."""
        order = random_streams.counter_rng(self.seed, 0, 0, HOLDOUT_STREAM).permutation(items)
        folds = min(items, max(2, round(1 / self.holdout))) if self.holdout else 1
        if folds < 2:
            return order, ()
        mine = np.arange(items) % folds == particle % folds
        return order[~mine], tuple(int(i) for i in np.sort(order[mine]))

    def _next_minibatch(self, particle: int, items: int) -> tuple[int, ...]:
        """The items of a particle's next step: all in a drawn order, then in another one."""
        learnt = self._split_holdout(particle, items)[0]
        found = []
        for place in range(
            self.batch * self.count[particle], self.batch * (self.count[particle] + 1)
        ):
            epoch = int(place // len(learnt))
            order = random_streams.counter_rng(
                self.seed, epoch, particle, MINIBATCH_STREAM
            ).permutation(len(learnt))
            found.append(int(learnt[order[place % len(learnt)]]))
        return tuple(found)
