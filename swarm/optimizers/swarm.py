"""The default swarm: the paper's, with soups, a gradient term, and one adapter per kind of prompt.

Also `GradientDescent`, a swarm of one particle that moves by the gradient term alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from swarm._util.settings import Number, Positive, checked
from swarm.errors import UserError
from swarm.optimizers.base import (
    Descending,
    DescentPlan,
    DescentRequest,
    LossRequest,
    freeze_array,
    load_state,
    save_state,
)
from swarm.optimizers.gradient import Descent
from swarm.optimizers.pso import ParticleSwarm

SOUP_SCALES = (1.5, 1.0, 2.0, 0.5, 3.0)
"""Sums of the coefficients of the uniform soups that a swarm starts with, the likeliest first."""

ACTIVE_POSITIONS, MAX_ACTIVE = 25, 4
"""Positions in the budget per descending particle, and the maximum number of such particles.

Four iterations of 20 steps of 8 items, at 3 prompts per item, and of an evaluation on 80 items cost
28 positions.
"""

NORM_LIMIT = 4.0
"""Multiple of the median norm from which an expert counts less in soups and moves less."""

Coefficient = Annotated[float, Field(allow_inf_nan=False)]


def damp_huge_updates(norms: Sequence[float]) -> np.ndarray:
    """Return factors [K] of the experts' coefficients in soups and of all their moves.

    They are 1 up to `NORM_LIMIT` times the median norm of all updates, and beyond it fall with the
    square of the norm, as the curvature of the loss along a coefficient grows with it. Two experts
    have no usual norm.

    Args:
        norms: Frobenius norm of each expert's update; 0 is no update.
    """
    values = np.array(norms, dtype=float)
    positive = values[values > 0]
    if len(positive) < 3:
        return np.ones(len(values))
    limit = NORM_LIMIT * np.median(positive)
    return np.asarray((limit / np.maximum(limit, values)) ** 2)


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class MemeticSwarm(ParticleSwarm):
    """A particle swarm whose particles also move down the gradient of a loss.

    The fifth term of the velocity is w_d d / lambda, where d is the displacement by the particle's
    own descent (`swarm.optimizers.gradient`) and lambda the step length, so that the position moves
    by w_d d whatever the step length is. With soups=0, active=None and descent=None it is the
    paper's swarm.

    With R routes of prompts (`SearchResources.routes`) the first iteration is followed by one that
    evaluates a single position, composed of the best of the first iteration on each route.

    Args:
        soups: Number of particles after the experts that start as uniform soups, with coefficients
            that sum to `SOUP_SCALES`; sums are free from then on. 0 is the paper.
        starts: Further positions to start from, after the soups: K coefficients each, in the order
            of the pool's experts, the same in all groups. None is none.
        active: Number of particles that move and are evaluated, the best after the first iteration
            (with a gradient term by the loss of some items, else by utility); the others do not
            move. None is all of them; "auto" is that without a gradient term, and with it one for
            each `ACTIVE_POSITIONS` that the budget allows after the first iteration, at most
            `MAX_ACTIVE`.
        descent: The gradient term of the velocity; None is none, as in the paper.

    Attributes:
        moving: [N] bool, the particles that still move.
        composed: Index of the particle composed of the best on each route, if any.
        by_route: [N, R], the mean values of the first iteration on each route.
        damping: [G x K], see `damp_huge_updates`.
    """

    STATE = (*ParticleSwarm.STATE, "moving")

    soups: Annotated[int, Field(ge=0, le=len(SOUP_SCALES))] = 1
    starts: list[Annotated[list[Coefficient], Field(min_length=1)]] | None = None
    active: Positive | Literal["auto"] | None = "auto"
    descent: Descent | None = field(default_factory=Descent)

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """See `Optimizer.start`; `starts` must fit the pool, and there must be room for them."""
        starts, routes = self.starts or [], self.resources.routes
        if wrong := [len(row) for row in starts if len(row) != experts]:
            raise UserError(f"""optimizer.starts: a position has {wrong[0]} coefficients, and the
                pool has {experts} experts; give one per expert""")
        least = self._population_size(experts)
        count = least if self.particles is None else self.particles
        if starts and count < least:
            routed = " and the best of each route" if routes > 1 else ""
            raise UserError(f"""optimizer.particles={count}: must be at least {least}, for
                {experts} experts, {self.soups} soups and {len(starts)} starts{routed}; null is
                that""")
        composed = count - 1 if routes > 1 and count >= least else None
        self._reset(count, groups * experts, composed)
        if self.resources.norms and (self.soups or self.descent is not None):
            self.damping = np.tile(damp_huge_updates(self.resources.norms()), groups)
        super().start(experts, seed, groups)
        self.moving = np.ones(count, bool)
        if self.descent is not None:
            damping = self.damping[:experts]
            self.descent.start(count, groups, experts, self.seed, damping, routes)
        if self.composed is not None:
            self.velocities[self.composed] = 0.0
            self.evaluate[self.composed] = False

    def _reset(self, count: int, width: int, composed: int | None = None) -> None:
        """Set what a state leaves out while it has these values."""
        self.composed = composed
        self.by_route: np.ndarray | None = None
        self.damping = np.ones(width)
        self._displacements: np.ndarray | None = None

    def state_dict(self) -> dict[str, Any]:
        has_routes = self.resources.routes > 1
        present = {
            "composed": has_routes,
            "by_route": self.by_route is not None and not self.iteration,
            "damping": (self.damping < 1).any(),
        }
        more = save_state(self, (name for name, is_set in present.items() if is_set))
        descent = {} if self.descent is None else {"descent": self.descent.state_dict()}
        return {**super().state_dict(), **more, **descent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._reset(*self.positions.shape)
        optional = ("composed", "by_route", "damping")
        load_state(self, {name: state[name] for name in optional if name in state})
        if self.descent is not None:
            self.descent.step_scales = self.damping[: self.experts]
            routes = self.resources.routes
            self.descent.load_state_dict(state["descent"], self.groups, self.seed, routes)

    # The start.

    def _can_move(self) -> bool:
        return super()._can_move() or self.descent is not None

    def _population_size(self, experts: int) -> int:
        routed = self.resources.routes > 1
        return experts + self.soups + len(self.starts or ()) + routed

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        """Return [N, G x K]: the experts, uniform soups, `starts`, then crossover children."""
        rows = super()._initial_population(experts, count)
        damping = self.damping[:experts]
        for row, scale in zip(rows[experts : experts + self.soups], SOUP_SCALES, strict=False):
            row[:] = np.tile(scale * damping / damping.sum(), self.groups)
        for row, start in zip(rows[experts + self.soups :], self.starts or [], strict=False):
            row[:] = np.tile(start, self.groups)
        return rows

    @property
    def last_start(self) -> int:
        """The last iteration of the start: 1 evaluates the best of each route."""
        return 0 if self.composed is None else 1

    # Moving.

    @property
    def new_rows(self) -> int:
        return min(len(self.positions), self.most_active or len(self.positions))

    @property
    def most_active(self) -> int | None:
        """Number of particles that move after the first iteration; None is all of them."""
        if self.active != "auto":
            return self.active
        if self.descent is None or not self.resources.gradients:
            return None
        if self.resources.positions is None:
            return MAX_ACTIVE
        remaining = self.resources.positions - len(self.positions)
        return max(1, min(MAX_ACTIVE, remaining // ACTIVE_POSITIONS))

    @property
    def damped_experts(self) -> list[int]:
        return np.flatnonzero(self.damping[: self.experts] < 1).tolist()

    def _advance(self) -> None:
        if self.iteration <= self.last_start:
            self._compose_routes()
            return
        before = self.positions, self.velocities, self.cooling
        super()._advance()
        mask = self.moving[:, None]
        self.positions = freeze_array(np.where(mask, self.positions, before[0]))
        self.velocities = np.where(mask, self.velocities, before[1])
        self.cooling = np.where(self.moving, self.cooling, before[2])
        self.restarted = self.restarted & self.moving
        self.evaluate = self.evaluate & self.moving
        self._displacements = None

    def _update_velocities(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """v <- damping * (the paper's v) + w_d d / lambda."""
        v = self.damping * super()._update_velocities(x, v)
        if self.descent is not None and self._displacements is not None:
            v = v + self.descent.weight * self._displacements / self.current_step_length
        return v

    def _update_state(self, utilities: np.ndarray) -> None:
        super()._update_state(utilities)
        if self.composed is not None and self.iteration <= self.last_start:
            self.velocities[self.composed] = 0.0
        if self.iteration == self.last_start:
            best = self.personal_utilities
            self._keep_moving(np.where(np.isnan(best), np.inf, -best))

    def _keep_moving(self, losses: np.ndarray) -> None:
        """Let the particles with the lowest losses [N] move on, at most `most_active`."""
        rank = np.argsort(losses, kind="stable")
        self.moving = np.isin(np.arange(len(losses)), rank[: self.most_active])

    def _counts_stale(self) -> np.ndarray | bool:
        return self.moving & super()._counts_stale()

    # The gradient term.

    @property
    def learns(self) -> bool:
        return self.descent is not None

    @property
    def needs_gradients(self) -> bool | None:
        return None if self.descent is None else self.descent.required

    @property
    def signal(self) -> Literal["auto", "gold", "scores"]:
        return "gold" if self.descent is None else self.descent.signal

    def plan_descent(self, items: int) -> DescentPlan | None:
        if self.descent is None:
            return None
        count, descent = self.new_rows, self.descent
        held = round(descent.holdout * items)
        by_scores = self.resources.draws_texts
        steps, samples = descent.steps_by(by_scores), descent.samples * items * by_scores
        return DescentPlan(count, steps, descent.batch, held, samples)

    def items_without_gradient(self, items: int) -> tuple[int, ...]:
        return () if self.descent is None else self.descent.items_without_gradient(items)

    def descend(self, items: int) -> Descending:
        """Compute the displacements of the particles that move next."""
        if self.descent is None or not self.has_utilities or self.iteration < self.last_start:
            return
        if self.iteration == self.last_start and self.most_active is not None:
            chosen, mine = self.descent.draw_loss_items(items), self.descent.extract(0)
            losses = np.array(
                [one.loss for one in (yield [LossRequest(x, chosen, mine) for x in self.positions])]
            )
            self._keep_moving(np.where(np.isnan(losses), np.inf, losses))
        particles = [int(i) for i in np.flatnonzero(self.moving) if not self.descent.rests(int(i))]
        self._displacements = np.zeros_like(self.positions)
        start = self._apply_restarts(self._stray_particles())[0]
        wanted = [DescentRequest(start[i], i, self.descent.extract(i)) for i in particles]
        for i, answer in zip(particles, (yield wanted) if wanted else (), strict=True):
            self._displacements[i] = answer.position - start[i]
            self.descent.absorb(i, answer.descent)

    # Kinds of prompts.

    @property
    def kinds_start(self) -> int:
        return self.experts + self.soups + len(self.starts or ()) if self.soups else 0

    @property
    def composes_next(self) -> bool:
        return self.composed is not None and not self.iteration and self.has_utilities

    def tell_routes(self, values: np.ndarray) -> None:
        if self.composed is not None:
            self.by_route = values

    def _compose_routes(self) -> None:
        """Set the last particle to the best of the first iteration on each route.

        Equally good positions are chosen by their utility on all routes, then the last of them: a
        soup, whose loss is lower than that of an expert which has learnt something else.
        """
        assert self.by_route is not None and self.composed is not None
        x = self.positions.copy()
        rows = x.reshape(len(x), self.by_route.shape[1], -1)
        u = np.where(np.isnan(self.personal_utilities), -np.inf, self.personal_utilities)
        for route, values in enumerate(self.by_route.T):
            known = np.where(np.isnan(values), -np.inf, values)
            rows[self.composed, route] = rows[np.lexsort((np.arange(len(u)), u, known))[-1], route]
        self.positions = freeze_array(x)
        self.evaluate = np.arange(len(x)) == self.composed
        self.restarted = np.zeros(len(x), bool)


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class GradientDescent(MemeticSwarm):
    """Gradient descent through the mixing coefficients, with a single particle.

    The first soup, or without soups the best expert, moves by its descent alone, until no
    evaluation has been better for `patience` iterations.
    """

    NAME: ClassVar[str] = "gradient"

    max_iterations: Positive = 20
    patience: Positive = 4
    descent: Descent | None = field(default_factory=partial(Descent, required=True))
    active: Positive | Literal["auto"] | None = 1
    # No term of the paper's velocity, and no restart from the personal best.
    inertia: Number = 0.0
    cognitive: Number = 0.0
    social: Number = 0.0
    repel: Number = 0.0
    starting_velocity: Literal["random", "zero", "best"] = "zero"
    restart: bool = False
