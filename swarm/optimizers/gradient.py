"""The swarm's gradient term: Adam on mixing coefficients, with one state per particle."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from swarm._util.settings import Count, Number, Positive, PositiveNumber, checked
from swarm.optimizers import random_streams
from swarm.optimizers.base import (
    BelowOne,
    LossGradient,
    LossRequest,
    Rows,
    adam_direction,
    load_state,
    save_state,
)

MINIBATCH_STREAM, HOLDOUT_STREAM, LOSS_ITEMS_STREAM, DROPOUT_STREAM = 100, 101, 102, 103
"""Purpose ids of random streams, above those of all optimizers."""

MIN_RATE_FACTOR = 1 / 16
"""Rate factor at which a particle stops descending."""

MIN_ROUTE_ITEMS = 20
"""Mean number of dev items on a route below which `pool.groups=auto` is one set for all modules.

Below it, routes of equal coefficients learn as one, and if the number is still below it for
those that differ, they are pulled back (`Descent`). Measured in benchmarks/notes/decisions.md.
"""


@checked("optimizer.descent")
@dataclass(kw_only=True)
class Descent:
    """Moves positions down the gold answers' loss, through their coefficients alone.

    A position of G groups is decomposed into the coefficients that its groups share (their mean
    over groups) and each group's deviation from them; the two have separate Adam moments, and
    deviations are pulled to zero, so that 60 groups of 9 experts overfit little more than one.

    With R routes of prompts each has its own G groups, and nothing is shared between routes. A step
    sees 1 / R of its items on a route, so the rate is divided by the square root of R (Malladi et
    al., 2022, arXiv 2205.10287). Routes of the same kind learn as one, and R is the number of
    kinds; with fewer than `MIN_ROUTE_ITEMS` dev items a kind, all routes with equal coefficients
    do. If several differ, and there are fewer than `MIN_ROUTE_ITEMS` dev items for each, all are
    pulled back to the position before the iteration's steps.

    A particle learns from its own sequence of minibatches, without the fold of dev that is held out
    for it; of F = round(1 / holdout) folds, particle i has the fold i mod F. The result of an
    iteration's steps is the mean of the last half of the iterates (Polyak and Juditsky, 1992). If
    the held-out loss there is not the particle's lowest so far, its rate is halved; after the
    fourth time it stops descending.

    Adam's steps have the same length for all experts, unless `step_scales` shortens those of some:
    a step of .1 of an update that is fifty times as large as the others' destroys the model.

    Args:
        weight: w_d, of this term in the velocity; 1 applies the complete descent.
        steps: Adam steps per particle and iteration.
        batch: Dev items per step.
        rate: Adam's rate for the shared coefficients.
        fine_rate: Rate for the deviations of groups, as a multiple of `rate`.
        pull: Share by which deviations shrink per step.
        route_pull: Share of the way back to the position before the iteration's steps, per step,
            if several routes differ and have fewer than `MIN_ROUTE_ITEMS` dev items each.
        dropout: Probability that a coefficient is 0 in a step; the others are divided by one minus
            it (Srivastava et al., 2014). No coefficient can then rely on all the others being
            exactly what they are, which narrows the gap between dev and test.
        warmup: Number of first steps of a particle in which the rate grows to its full value.
        holdout: Share of the dev items that are held out; 0 disables holdout and halving.
        required: Whether to refuse a task without gold answers; else the swarm moves without.
    """

    STATE = ("moments", "count", "rate_factor", "held_loss")
    DESCRIPTION: ClassVar[str] = "the keys of the gradient term, e.g. optimizer.descent.steps=20"

    weight: PositiveNumber = 1.0
    steps: Positive = 20
    batch: Rows = 8
    rate: PositiveNumber = 0.1
    fine_rate: Number = 0.5
    pull: BelowOne = 0.02
    route_pull: BelowOne = 0.1
    dropout: BelowOne = 0.0
    warmup: Count = 5
    holdout: BelowOne = 0.2
    required: bool = False

    step_scales = np.ones(1)
    kinds = np.arange(1)
    """[R]: the first route of each route's kind."""

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
        self.groups, self.seed, self.kinds = groups, seed, np.arange(routes)
        self.step_scales = np.ones(experts) if step_scales is None else step_scales
        # Layout: moments of the shared coefficients first, then those of all deviations.
        self.moments = np.zeros((particles, 2, (groups + routes) * experts))
        self.count = np.zeros(particles, int)
        self.rate_factor = np.ones(particles)
        self.held_loss = np.full(particles, np.nan)

    def state_dict(self) -> dict[str, Any]:
        """Return everything `load_state_dict` needs; exact, None is an unknown loss."""
        return save_state(self, self.STATE)

    def load_state_dict(
        self, state: dict[str, Any], groups: int, seed: int, kinds: np.ndarray
    ) -> None:
        """Resume from a `state_dict`."""
        self.groups, self.seed, self.kinds = groups, seed, kinds
        load_state(self, state)

    def evaluate_losses(
        self, positions: np.ndarray, items: int
    ) -> Generator[list[LossRequest], list[LossGradient], np.ndarray]:
        """Return the losses [N] of positions [N, G * K] on the same `batch` items.

        A descent should start where the loss is low, which utilities hardly show: an expert with
        one of nine skills has a higher utility than the soup, and three times its loss.
        """
        order = random_streams.permutation(self.seed, 0, 0, LOSS_ITEMS_STREAM, items)
        chosen = tuple(int(i) for i in np.sort(order[: self.batch]))
        answers = yield [
            LossRequest(x, chosen, slope=False, particle=i) for i, x in enumerate(positions)
        ]
        losses = np.array([answer.loss for answer in answers])
        return np.where(np.isnan(losses), np.inf, losses)

    def descend(
        self, positions: np.ndarray, particles: Sequence[int], items: int
    ) -> Generator[list[LossRequest], list[LossGradient], np.ndarray]:
        """Descend from positions [M, G * K] of these M particles; return the final positions.

        Yields requests, to be answered with mean losses and gradients. If the generator is closed
        early, `reached` [M, G * K] contains the latest positions.
        """
        x, self.reached = positions.copy(), positions.copy()
        rows = [row for row, i in enumerate(particles) if not self.rests(i)]
        tail: list[np.ndarray] = []
        for _ in range(self.steps if rows else 0):
            masks = {row: self._draw_mask(particles[row], x[row].size) for row in rows}
            wanted = [
                LossRequest(
                    x[row] * masks[row],
                    self._next_minibatch(particles[row], items),
                    particle=particles[row],
                )
                for row in rows
            ]
            for row, answer in zip(rows, (yield wanted), strict=True):
                if np.isfinite(answer.slope).all():
                    slope, sets = self._tie_routes(x[row], answer.slope * masks[row], items)
                    x[row] = self._adam_step(particles[row], x[row], slope, sets)
                    if sets > 1 and items < MIN_ROUTE_ITEMS * sets:
                        x[row] -= self.route_pull * (x[row] - positions[row])
            tail = [*tail, x.copy()][-max(1, self.steps // 2) :]
            self.reached = np.mean(tail, axis=0)
        if rows and self._split_holdout(0, items)[1]:
            chosen = [particles[row] for row in rows]
            held_out = [self._split_holdout(i, items)[1] for i in chosen]
            wanted = [
                LossRequest(self.reached[row], kept, slope=False, particle=i)
                for row, i, kept in zip(rows, chosen, held_out, strict=True)
            ]
            for i, answer in zip(chosen, (yield wanted), strict=True):
                if answer.loss >= self.held_loss[i]:
                    self.rate_factor[i] /= 2
                self.held_loss[i] = np.fmin(answer.loss, self.held_loss[i])
        return self.reached

    def rests(self, particle: int) -> bool:
        """Return whether a particle no longer descends."""
        return bool(self.rate_factor[particle] <= MIN_RATE_FACTOR)

    def items_without_gradient(self, items: int) -> tuple[int, ...]:
        """Return the dev items held out for every particle that has descended."""
        folds = [set(self._split_holdout(int(i), items)[1]) for i in np.flatnonzero(self.count)]
        return tuple(sorted(set.intersection(*folds))) if folds else ()

    def _draw_mask(self, particle: int, size: int) -> np.ndarray:
        """Return the factors [G * K] of a particle's next step: 0, or 1 / (1 - dropout)."""
        if not self.dropout:
            return np.ones(size)
        draws = random_streams.counter_rng(
            self.seed, int(self.count[particle]), particle, DROPOUT_STREAM
        )
        return (draws.random(size) >= self.dropout) / (1 - self.dropout)

    def _tie_routes(self, x: np.ndarray, slope: np.ndarray, items: int) -> tuple[np.ndarray, int]:
        """Return each route's slope, summed over those that learn as one, and how many differ."""
        rows = x.reshape(len(self.kinds), -1)
        owner = np.unique(self.kinds, return_inverse=True)[1]
        if items < MIN_ROUTE_ITEMS * (int(owner.max()) + 1):
            owner = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        sums = np.zeros((int(owner.max()) + 1, rows.shape[1]))
        np.add.at(sums, owner, slope.reshape(rows.shape))
        return sums[owner].reshape(-1), len(sums)

    def _adam_step(self, particle: int, x: np.ndarray, slope: np.ndarray, sets: int) -> np.ndarray:
        """Take one Adam step of a position [G * K]; the rate grows in the first steps.

        Args:
            sets: Number of routes with coefficients of their own.
        """
        experts = x.size // self.groups
        by_group = slope.reshape(len(self.kinds), -1, experts)
        gradient = np.concatenate([by_group.sum(axis=1).reshape(-1), slope])
        self.count[particle] += 1
        count = int(self.count[particle])
        scaled = adam_direction(gradient, self.moments[particle], count)
        rate = self.rate * self.rate_factor[particle] * min(1.0, count / (self.warmup + 1))
        rows = x.reshape(by_group.shape)
        shared = rows.mean(axis=1, keepdims=True)
        rates = rate * self.step_scales / sets**0.5
        shared_size = len(self.kinds) * experts
        moved = shared - rates * scaled[:shared_size].reshape(shared.shape)
        if self.groups == len(self.kinds):
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

    def _next_minibatch(self, particle: int, items: int) -> tuple[int, ...]:
        """Return the items of a particle's next step."""
        learnt, step = self._split_holdout(particle, items)[0], int(self.count[particle])
        where = self.seed, particle, MINIBATCH_STREAM
        found = random_streams.minibatch(*where, step, self.batch, len(learnt))
        return tuple(learnt[found].tolist())
