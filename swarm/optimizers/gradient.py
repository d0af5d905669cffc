"""The swarm's gradient term: Adam on mixing coefficients, with one state per particle."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field

from swarm._util.settings import Count, Number, Positive, PositiveNumber, Share, checked
from swarm.optimizers import random_streams
from swarm.optimizers.base import (
    BelowOne,
    LossGradient,
    Rows,
    load_state,
    save_state,
)

MINIBATCH_STREAM, HOLDOUT_STREAM, LOSS_ITEMS_STREAM = 100, 101, 102
"""Purpose ids of random streams, above those of all optimizers."""

GOLD_STEPS, SCORE_STEPS = 30, 15
"""Default number of steps between two evaluations, by gold answers and by scores."""

MIN_RATE_FACTOR = 1 / 16
"""Rate factor at which a particle stops descending."""


class Learner(Protocol):
    """The model that a particle descends with, and its items by their numbers."""

    def measure(
        self, position: np.ndarray, items: Sequence[int], slope: bool = True
    ) -> LossGradient:
        """Return the mean loss of items at a position [R * G * K], and its slope.

        Without a slope it is a bounded one, of held-out items (`Example.bounded`): with more steps
        the cross-entropy rises by a few confident errors while more answers are right. Before the
        first `step` it is that of the adapter that the items' route has kept.
        """
        ...

    def step(self, factor: float) -> None:
        """Move the position's learned adapter, if it has one, as the last slope says.

        Args:
            factor: Multiple of its rate.
        """
        ...


@checked("optimizer.descent")
@dataclass(kw_only=True)
class Descent:
    """Moves positions down a loss of dev items, through their coefficients.

    The loss is that of the gold answers, or of scored answers of the swarm itself
    (`swarm.engine.gradient.expected_score_loss`); the position's own adapter, if it learns one
    (`swarm.pool.learned`), moves with the coefficients.

    A position of G groups is decomposed into the coefficients that its groups share (their mean
    over groups) and each group's deviation from them; the two have separate Adam moments, and
    deviations are pulled to zero, so that 60 groups of 9 experts overfit little more than one.

    With R routes of prompts each has its own G groups, and nothing is shared between routes. A step
    sees 1 / R of its items on a route, so the rate is divided by the square root of R (Malladi et
    al., 2022, arXiv 2205.10287). A route whose held-out loss is higher at the end than before the
    steps keeps its coefficients of before.

    A particle learns from its own sequence of minibatches, without the fold of dev that is held out
    for it; of F = round(1 / holdout) folds, particle i has the fold i mod F. All rates fall
    linearly to zero over the search's budget, if there is one, so that its last iterate needs no
    averaging. If the held-out loss is not lower after an iteration's steps than before, the
    particle's rate is halved; after the fourth time it stops descending.

    Adam's steps have the same length for all experts, unless `step_scales` shortens those of some:
    a step of .1 of an update that is fifty times as large as the others' destroys the model.

    Args:
        signal: What teaches: "gold" answers; "scores" of the swarm's own answers, for any task
            that scores texts; "auto" is gold answers where they are known, else scores.
        weight: w_d, of this term in the velocity; 1 applies the complete descent.
        steps: Adam steps per particle and iteration; `None` is `GOLD_STEPS`, or `SCORE_STEPS` by
            scores, where each iteration brings better answers to learn from.
        batch: Dev items per step.
        rate: Adam's rate for the shared coefficients.
        fine_rate: Rate for the deviations of groups, as a multiple of `rate`.
        pull: Share by which deviations shrink per step.
        warmup: Number of first steps of a particle in which the rate grows to its full value.
        holdout: Share of the dev items that are held out; 0 disables holdout and halving.
        candidates: Maximum number of scored answers per item of a step.
        samples: Texts drawn at temperature 1 before a descent by scores, for each dev item without
            an answer of the highest score.
        new_rate: AdamW's rate for the factors of the adapter that is learned beside
            (`pool.new_adapter`).
        new_decay: Its weight decay, from 0 to 1.
        required: Whether to refuse a task that nothing teaches; else the swarm moves without.
    """

    STATE = ("moments", "count", "rate_factor")
    DESCRIPTION: ClassVar[str] = "the keys of the gradient term, e.g. optimizer.descent.steps=20"

    signal: Literal["auto", "gold", "scores"] = "auto"
    weight: PositiveNumber = 1.0
    steps: Positive | None = None
    batch: Rows = 8
    rate: PositiveNumber = 0.1
    fine_rate: Number = 0.5
    pull: BelowOne = 0.02
    warmup: Count = 5
    holdout: BelowOne = 0.2
    candidates: Annotated[int, Field(ge=2, le=100)] = 6
    samples: Count = 2
    new_rate: PositiveNumber = 0.002
    new_decay: Share = 0.0
    required: bool = False

    step_scales = np.ones(1)

    def start(
        self,
        particles: int,
        groups: int,
        experts: int,
        seed: int,
        step_scales: np.ndarray | None = None,
        routes: int = 1,
    ) -> None:
        """Start with N particles and zero moments.

        Args:
            groups: R * G, the groups of all routes.
            step_scales: Factors [K] of Adam's rate; `None` is 1.
        """
        self.groups, self.seed, self.routes = groups, seed, routes
        self.step_scales = np.ones(experts) if step_scales is None else step_scales
        # Layout: moments of the shared coefficients first, then those of all deviations.
        self.moments = np.zeros((particles, 2, (groups + routes) * experts))
        self.count = np.zeros(particles, int)
        self.rate_factor = np.ones(particles)

    def state_dict(self) -> dict[str, Any]:
        """Return everything `load_state_dict` needs."""
        return save_state(self, self.STATE)

    def load_state_dict(self, state: dict[str, Any], groups: int, seed: int, routes: int) -> None:
        """Resume from a `state_dict`."""
        self.groups, self.seed, self.routes = groups, seed, routes
        load_state(self, state)

    def extract(self, particle: int) -> "Descent":
        """Return the descent of one particle alone, which is number 0 of it."""
        found = copy.copy(self)
        for name in self.STATE:
            setattr(found, name, getattr(self, name)[[particle]])
        return found

    def absorb(self, particle: int, ended: "Descent") -> None:
        """Take over the state of what `extract` returned."""
        for name in self.STATE:
            getattr(self, name)[particle] = getattr(ended, name)[0]

    def steps_by(self, scores: bool) -> int:
        """Return the number of steps between two evaluations, by scores or by gold answers."""
        return self.steps or (SCORE_STEPS if scores else GOLD_STEPS)

    def draw_loss_items(self, items: int) -> tuple[int, ...]:
        """Return `batch` items whose loss says where a descent should start.

        Utilities hardly show it: an expert with one of nine skills has a higher utility than the
        soup, and three times its loss.
        """
        order = random_streams.permutation(self.seed, 0, 0, LOSS_ITEMS_STREAM, items)
        return tuple(np.sort(order[: self.batch]).tolist())

    def run(
        self,
        start: np.ndarray,
        particle: int,
        routes: Sequence[int | None],
        steps: int,
        learner: Learner,
        spent: tuple[float, float] = (0.0, 0.0),
    ) -> np.ndarray:
        """Descend from a position [R * G * K]; return the position reached.

        Args:
            particle: Number of the particle in the swarm, of which this is the extract.
            routes: The route of each dev item, by its number; `None` for an item that has no loss.
            steps: Number of steps.
            spent: Share of the budget that is spent before the first step, and after the last.
        """
        reached, (begin, end) = start.copy(), spent
        learnt, held_out = self._split_holdout(particle, len(routes))
        learnt = np.array([i for i in learnt.tolist() if routes[i] is not None], int)
        if not len(learnt):
            return start
        parts = [[i for i in held_out if routes[i] == route] for route in range(self.routes)]
        untaught = sorted({*range(self.routes)} - {routes[i] for i in learnt})
        before = self._measure(learner, start, parts)
        for number in range(steps):
            where = self.seed, particle, MINIBATCH_STREAM, int(self.count[0])
            chosen = learnt[random_streams.minibatch(*where, self.batch, len(learnt))]
            slope = learner.measure(reached, chosen.tolist()).slope
            self.count[0] += 1
            warm = min(1.0, int(self.count[0]) / (self.warmup + 1))
            fade = 1 - begin - (end - begin) * number / steps
            factor = float(self.rate_factor[0]) * warm * fade
            if np.isfinite(slope).all():
                reached = self._adam_step(reached, slope, factor)
            learner.step(factor)
        gains = before - self._measure(learner, reached, parts)
        if self.routes > 1:
            gains[untaught] = -1
            rows, old = (one.reshape(self.routes, -1) for one in (reached, start))
            reached = np.where(gains[:, None] < 0, old, rows).reshape(-1)
            gains = gains.clip(min=0)
        if any(parts) and not np.nansum(gains * [len(part) for part in parts]) > 0:
            self.rate_factor[0] /= 2
        return reached

    @staticmethod
    def _measure(learner: Learner, x: np.ndarray, parts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the mean loss of each part's items; NaN without items."""
        return np.array(
            [learner.measure(x, part, slope=False).loss if part else np.nan for part in parts]
        )

    def rests(self, particle: int) -> bool:
        """Return whether a particle no longer descends."""
        return bool(self.rate_factor[particle] <= MIN_RATE_FACTOR)

    def items_without_gradient(self, items: int) -> tuple[int, ...]:
        """Return the dev items held out for every particle that has descended."""
        folds = [set(self._split_holdout(int(i), items)[1]) for i in np.flatnonzero(self.count)]
        return tuple(sorted(set.intersection(*folds))) if folds else ()

    def _adam_step(self, x: np.ndarray, slope: np.ndarray, factor: float) -> np.ndarray:
        """Take one Adam step of a position [R * G * K], with a multiple of the rates."""
        experts = x.size // self.groups
        by_group = slope.reshape(self.routes, -1, experts)
        gradient = np.concatenate([by_group.sum(axis=1).reshape(-1), slope])
        scaled = adam_direction(gradient, self.moments[0], int(self.count[0]))
        rows = x.reshape(by_group.shape)
        shared = rows.mean(axis=1, keepdims=True)
        rates = self.rate * factor * self.step_scales / self.routes**0.5
        shared_size = self.routes * experts
        moved = shared - rates * scaled[:shared_size].reshape(shared.shape)
        if self.groups == self.routes:
            return moved.reshape(-1)
        deviations = (
            rows - shared - self.fine_rate * rates * scaled[shared_size:].reshape(rows.shape)
        )
        return (moved + (1 - self.pull) * deviations).reshape(-1)

    def _split_holdout(self, particle: int, items: int) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the items that a particle learns from, and those that are held out for it."""
        order = random_streams.permutation(self.seed, 0, 0, HOLDOUT_STREAM, items)
        if not self.holdout or items < 2:
            return order, ()
        folds = min(items, max(2, round(1 / self.holdout)))
        mine = np.arange(items) % folds == particle % folds
        return order[~mine], tuple(np.sort(order[mine]).tolist())


BETA_1, BETA_2, EPSILON = 0.9, 0.99, 1e-8
"""Adam's constants (Kingma and Ba, 2015, arXiv 1412.6980); beta 2 is below the usual .999, as a
search has only tens of steps."""


def adam_direction(gradient: np.ndarray, moments: np.ndarray, step: int) -> np.ndarray:
    """Update Adam's moments in place, and return the direction of a step, [D].

    Args:
        gradient: [D].
        moments: [2, D], the means of the gradient and of its square.
        step: Number of the step, from 1.
    """
    moments[0] += (1 - BETA_1) * (gradient - moments[0])
    moments[1] += (1 - BETA_2) * (gradient**2 - moments[1])
    mean, square = moments[0] / (1 - BETA_1**step), moments[1] / (1 - BETA_2**step)
    return np.asarray(mean / (np.sqrt(square) + EPSILON))
