"""The particle swarm of Model Swarms (arXiv 2410.11163) on rows of mixing coefficients."""

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from swarm.errors import UserError
from swarm.optimizers import random_streams
from swarm.optimizers.base import (
    ROWS,
    LossGradient,
    LossRequest,
    SearchResources,
    check_number,
    check_pool_size,
    check_saved_state,
)
from swarm.optimizers.gradient import Descent, damp_huge_updates
from swarm.optimizers.pso_options import ParticleSwarmOptions

ARRAYS = {
    "positions": float,
    "velocities": float,
    "evaluate": bool,
    "restarted": bool,
    "moving": bool,
    "personal_positions": float,
    "personal_utilities": float,
    "stale": int,
    "cooling": int,
}
SCALARS = (
    *("seed", "groups", "iteration", "has_utilities", "current_step_length", "swarm_stale"),
    *("swarm_counted", "best_utility", "worst_utility"),
)

SOUP_SCALES = (1.5, 1.0, 2.0, 0.5, 3.0)
"""Sums of the coefficients of the uniform soups that a swarm starts with, the likeliest first."""

ACTIVE_POSITIONS, MAX_ACTIVE = 25, 4
"""Positions in the budget per descending particle, and the maximum number of such particles.

Four iterations of 20 steps of 8 items, at 3 prompts per item, and of an evaluation on 80 items cost
28 positions.
"""


class ParticleSwarm(ParticleSwarmOptions):
    """Particles attracted to their personal best and the swarm's best, repelled from its worst.

    With a `descent` they also move down the gradient of the gold answers' loss (a memetic swarm).
    The fifth term of the velocity is w_d d / lambda, where d is the displacement by the particle's
    own descent (`swarm.optimizers.gradient`) and lambda the step length, so that the position moves
    by w_d d whatever the step length is. Without a descent it is the paper's swarm.

    Where the utility is a black box and the loss is that of reference texts
    (`SearchResources.black_box`), the descent is a mutation: all particles move as without it, and
    the `most_descending` best ones by personal utility also descend. If the utility of such a
    particle is no new personal best, its rate halves, so that a loss that does not serve the
    utility ends after four descents of each.

    Read-only attributes: `groups` (G), `iteration`, `current_step_length`, `positions` and
    `velocities` [N, G x K], `evaluate` and `restarted` [N], `personal_positions` [N, G x K],
    `personal_utilities` [N] (NaN: none yet), `best_position`, `best_utility`, `worst_position` and
    `worst_utility` (None: none yet). `moving` [N]: the particles that still move. In each group
    positions sum to 1 and velocities to 0, as every step is a combination of them, unless `soups`,
    `starts` or a `descent` leave that plane.
    """

    NAME: ClassVar[str] = "pso"

    best_position: np.ndarray | None
    best_utility: float | None
    worst_position: np.ndarray | None
    worst_utility: float | None
    _offer = SearchResources()
    _damping = np.ones(1)
    composed: int | None = None
    _by_route: np.ndarray | None = None
    _kinds = np.arange(1)

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """Start: every expert is a particle, crossover children fill up (the paper's populate).

        Raises:
            UserError: Fewer than 2 experts, or fewer particles than experts and `starts`.
        """
        check_pool_size(experts, self.particles)
        starts = self.starts or []
        if wrong := [len(row) for row in starts if len(row) != experts]:
            raise UserError(f"""optimizer.starts: a position has {wrong[0]} coefficients, and the
                pool has {experts} experts; give one per expert""")
        routes = self._offer.routes
        least = experts + self.soups + len(starts) + (routes > 1)
        count = least if self.particles is None else self.particles
        if starts and count < least:
            routed = " and the best of each route" if routes > 1 else ""
            raise UserError(f"""optimizer.particles={count}: must be at least {least}, for
                {experts} experts, {self.soups} soups and {len(starts)} starts{routed}; null is
                that""")
        self.seed, self.groups, self.iteration, self.has_utilities = int(seed), groups, 0, False
        self.current_step_length = float(self.step_length)
        self.swarm_stale = self.swarm_counted = 0
        norms = self._offer.norms if self.soups or self.descent is not None else None
        damping = np.ones(experts) if norms is None else damp_huge_updates(norms())
        self._damping = np.tile(damping, groups)
        self.composed = count - 1 if routes > 1 and count >= least else None
        self._by_route, self._kinds = None, np.arange(routes)
        x = self._starting_positions(experts, count, damping)
        if self.descent is not None:
            self.descent.start(count, groups, experts, self.seed, damping, routes)
        self._displacements: np.ndarray | None = None
        self.mutated = np.zeros(count, bool)
        self.moving = np.ones(count, bool)
        self.positions = self.personal_positions = freeze_array(x)
        v = self._starting_velocities()
        if self.composed is not None:
            v[self.composed] = 0.0
        self.velocities = freeze_array(v)
        self.evaluate, self.restarted = np.ones(count, bool), np.zeros(count, bool)
        self.personal_utilities = freeze_array(np.full(count, np.nan))
        self.stale, self.cooling = np.zeros(count, int), np.zeros(count, int)
        if self.composed is not None:
            self.evaluate[self.composed] = False
        self.best_position = self.worst_position = None
        self.best_utility = self.worst_utility = None

    def ask(self) -> np.ndarray:
        """Return positions [N, G x K]; after a `tell`, one restart-and-move step further."""
        if self.has_utilities:
            self.iteration, self.has_utilities = self.iteration + 1, False
            if self.iteration <= self._last_start:
                self._compose_routes()
                return self.positions
            before = self.positions, self.velocities, self.cooling
            self._move_particles()
            turn = self._moving_particles(self.iteration)
            self.restarted = self.restarted & turn
            self.positions = freeze_array(np.where(turn[:, None], self.positions, before[0]))
            self.velocities = freeze_array(np.where(turn[:, None], self.velocities, before[1]))
            self.cooling = freeze_array(np.where(turn, self.cooling, before[2]))
            self.evaluate = self._evaluation_mask() & turn
            self.mutated = self._mutated_particles() & self.evaluate
            self._displacements = None
        return self.positions

    @property
    def needs_gradients(self) -> bool | None:
        """See `swarm.optimizers.base.SupportsGradients`."""
        return None if self.descent is None else self.descent.required

    def descend(self, items: int) -> Generator[list[LossRequest], list[LossGradient], None]:
        """Compute the displacements of the particles that move next; see `SupportsGradients`."""
        if self.descent is None or not self.has_utilities or self.iteration < self._last_start:
            return
        by_loss = self.iteration == self._last_start and not self._offer.black_box
        if by_loss and (limit := self.most_active) is not None:
            losses = yield from self.descent.evaluate_losses(self.positions, items)
            self.moving = np.isin(np.arange(len(losses)), np.argsort(losses, kind="stable")[:limit])
        particles = self._descending_particles()
        start = self._apply_restarts(self._stray_particles())[0][particles]
        self._displacements = np.zeros_like(self.positions)
        try:
            ends = yield from self.descent.descend(start, particles, items)
        except GeneratorExit:
            # Closed by the budget: one evaluation is left, to be spent on the positions reached so
            # far.
            self._displacements[particles] = self.descent.reached - start
            raise
        self._displacements[particles] = ends - start

    def tell(self, utilities: np.ndarray, stopped: np.ndarray | None = None) -> None:
        """Set the utilities [N]; non-finite values count as not measured.

        Args:
            stopped: [N] bool: measured in part and known not to beat their personal best; they
                count as stale, and are not candidates for the swarm's worst.

        Raises:
            ValueError: Not one utility per particle, or called twice without an `ask`; or a stopped
                particle has a utility, or no personal best.
        """
        u = np.asarray(utilities, dtype=np.float64)
        if u.shape != self.evaluate.shape or self.has_utilities:
            raise ValueError(
                f"tell needs {len(self.evaluate)} utilities once per ask, not {u.shape}"
            )
        short = np.zeros(u.shape, bool) if stopped is None else np.asarray(stopped, dtype=bool)
        if (short & (np.isfinite(u) | np.isnan(self.personal_utilities))).any():
            raise ValueError("a stopped particle needs a personal best")
        self._update_personal_bests(u, short)
        self._update_swarm_bests(u, short)
        if self.descent is not None:
            failed = self.mutated & (np.isfinite(u) | short) & (self.stale > 0)
            for particle in np.flatnonzero(failed):
                self.descent.halve_rate(int(particle))
        if self.iteration == self._last_start:
            best = self.personal_utilities
            rank = np.argsort(np.where(np.isnan(best), np.inf, -best), kind="stable")
            self.moving = np.isin(np.arange(len(u)), rank[: self.most_active])
        if self.iteration > self._last_start:
            decayed = self.current_step_length * self.step_length_factor ** self._moving_share()
            self.current_step_length = float(max(decayed, self.minimum_step_length))
        elif self.starting_velocity == "best" and self.best_position is not None:
            v = self.best_position - self.positions
            if self.composed is not None:
                v[self.composed] = 0.0
            self.velocities = freeze_array(v)
        self.has_utilities = True

    def stop_reason(self) -> str | None:
        """Return why the search has ended: c stale iterations of the swarm, or K iterations."""
        # The original compares the last c entries of a history that contains the best itself, once
        # the history is longer than c: one stale iteration less, except for a start never beaten.
        stale = self.swarm_stale
        if self.stale_count == "including":
            stale += self.swarm_counted > stale
        if stale * self._moving_share() >= self.patience:
            return f"no new global best in {self.swarm_stale} iterations"
        finished = self.iteration if self.has_utilities else self.iteration - 1
        words = f"{finished} iteration{'s' * (finished != 1)} done"
        return words if finished >= self.max_iterations else None

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state; None is an unmeasured utility."""
        single = {name: getattr(self, name) for name in SCALARS}
        array = {name: getattr(self, name).tolist() for name in ARRAYS}
        array["personal_utilities"] = [
            None if np.isnan(u) else u for u in array["personal_utilities"]
        ]
        for name in ("best_position", "worst_position"):
            position = getattr(self, name)
            single[name] = None if position is None else position.tolist()
        if self.mutated.any():
            array["mutated"] = self.mutated.tolist()
        if self._offer.routes > 1:
            single |= {"composed": self.composed, "kinds": self._kinds.tolist()}
        if self._by_route is not None and not self.iteration:
            array["by_route"] = [
                [None if np.isnan(value) else value for value in row]
                for row in self._by_route.tolist()
            ]
        if (self._damping < 1).any():
            array["damping"] = self._damping.tolist()
        descent = {} if self.descent is None else {"descent": self.descent.state_dict()}
        return {"optimizer": self.NAME, **single, **array, **descent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, between ask and tell or after it.

        Raises:
            UserError: The state belongs to another optimizer, number of particles or groups.
        """
        check_saved_state(state, self.NAME, self.particles, getattr(self, "groups", None))
        for name in SCALARS:
            setattr(self, name, state[name])
        for name, kind in ARRAYS.items():
            setattr(self, name, freeze_array(np.array(state[name], dtype=kind)))
        self._displacements = None
        self.mutated = np.array(state.get("mutated", np.zeros(len(self.evaluate))), dtype=bool)
        self.composed = state.get("composed")
        self._by_route = np.array(state["by_route"], float) if "by_route" in state else None
        self._kinds = np.array(state.get("kinds", range(self._offer.routes)))
        self._damping = np.array(state.get("damping", np.ones(self.positions.shape[1])))
        if self.descent is not None:
            self.descent.step_scales = self._damping[: self.positions.shape[1] // self.groups]
            self.descent.load_state_dict(state["descent"], self.groups, self.seed, self._kinds)
        for name in ("best_position", "worst_position"):
            position = state[name]
            setattr(
                self, name, None if position is None else freeze_array(np.array(position, float))
            )

    def set_resources(self, resources: SearchResources) -> None:
        """See `swarm.optimizers.base.ResourceAware`."""
        self._offer = resources

    @property
    def most_active(self) -> int | None:
        """Number of particles that move after the first iteration; None is all of them."""
        if self.active != "auto":
            return self.active
        if self.descent is None or not self._offer.gradients or self._offer.black_box:
            return None
        return self._affordable_descents()

    @property
    def most_descending(self) -> int | None:
        """Number of particles that descend between two iterations; None is all that move."""
        return self._affordable_descents() if self._offer.black_box else None

    def _affordable_descents(self) -> int:
        if self._offer.positions is None:
            return MAX_ACTIVE
        remaining = self._offer.positions - len(self.positions)
        return max(1, min(MAX_ACTIVE, remaining // ACTIVE_POSITIONS))

    @property
    def composes_routes(self) -> bool:
        """See `swarm.optimizers.base.SupportsRoutes`."""
        return self.soups > 0

    def tell_routes(self, values: np.ndarray) -> None:
        """See `swarm.optimizers.base.SupportsRoutes`."""
        if self.composed is not None:
            self._by_route = values

    @property
    def composes_next(self) -> bool:
        """See `swarm.optimizers.base.SupportsRoutes`."""
        return self.composed is not None and not self.iteration and self.has_utilities

    @property
    def _last_start(self) -> int:
        """The last iteration of the start: 1 evaluates the best of each route."""
        return 0 if self.composed is None else 1

    def _compose_routes(self) -> None:
        """Set the last particle to the best of the first iteration on each route.

        Equally good positions are chosen by their utility on all routes, then the last of them: a
        soup, whose loss is lower than that of an expert which has learnt something else. Routes
        with the same best are one kind from here on: their coefficients remain equal.
        """
        assert self._by_route is not None and self.composed is not None
        x = self.positions.copy()
        rows = x.reshape(len(x), self._by_route.shape[1], -1)
        u = np.where(np.isnan(self.personal_utilities), -np.inf, self.personal_utilities)
        for route, values in enumerate(self._by_route.T):
            known = np.where(np.isnan(values), -np.inf, values)
            rows[self.composed, route] = rows[np.lexsort((np.arange(len(u)), u, known))[-1], route]
        best = rows[self.composed]
        _, first, inverse = np.unique(best, axis=0, return_index=True, return_inverse=True)
        self._kinds = first[inverse.reshape(-1)]
        if self.descent is not None:
            self.descent.kinds = self._kinds
        self.positions = freeze_array(x)
        self.evaluate = np.arange(len(x)) == self.composed
        self.restarted = np.zeros(len(x), bool)

    def _moving_particles(self, iteration: int) -> np.ndarray:
        """Return [N] bool: the particles that move in an iteration."""
        return self.moving

    def _descending_particles(self) -> list[int]:
        """Return the particles that descend before the next iteration, in ascending order."""
        moving = [int(i) for i in np.flatnonzero(self._moving_particles(self.iteration + 1))]
        if self.descent is None or self.most_descending is None:
            return moving
        u = self.personal_utilities
        able = [i for i in moving if not self.descent.rests(i) and not np.isnan(u[i])]
        return sorted(sorted(able, key=lambda i: -u[i])[: self.most_descending])

    def _mutated_particles(self) -> np.ndarray:
        """Return [N] bool: particles displaced by a descent whose loss is not the utility."""
        if self._displacements is None or not self._offer.black_box:
            return np.zeros(len(self.positions), bool)
        return np.abs(self._displacements).max(axis=1) > 0

    def _moving_share(self) -> float:
        """Return the share of the swarm that moves per iteration: the unit of patience."""
        return 1.0

    @property
    def damped_experts(self) -> list[int]:
        """Indices of the experts with a huge update, see `damp_huge_updates`; after `start`."""
        return np.flatnonzero(self._damping[: len(self._damping) // self.groups] < 1).tolist()

    def _starting_positions(self, experts: int, count: int, damping: np.ndarray) -> np.ndarray:
        """Return [N, G x K]: the experts, uniform soups, `starts`, then crossover children."""
        crossover = self.crossover_maximum, self.crossover_parents
        rows = random_streams.initial_population(experts, count, self.seed, *crossover, self.groups)
        for row, scale in zip(rows[experts : experts + self.soups], SOUP_SCALES, strict=False):
            row[:] = np.tile(scale * damping / damping.sum(), self.groups)
        for row, start in zip(rows[experts + self.soups :], self.starts or [], strict=False):
            row[:] = np.tile(start, self.groups)
        return rows

    def _starting_velocities(self) -> np.ndarray:
        x = self.positions
        if self.starting_velocity != "random":  # "best" is set after the first utilities
            return np.zeros_like(x)
        partner = [
            random_streams.sample_other(
                i, len(x), random_streams.counter_rng(self.seed, 0, i, random_streams.PARTNER)
            )
            for i in range(len(x))
        ]
        return x[partner] - x

    def _move_particles(self) -> None:
        """v <- w_v v + w_p (p - x) + w_g (g - x) + w_w (x - g_w) [+ w_d d / l]; x <- x + l v."""
        self.restarted = self._stray_particles()
        self.cooling = np.where(self.restarted, self.restart_cool_down, self.cooling)
        x, v = self._apply_restarts(self.restarted)
        # Particles that were never measured are neither attracted nor repelled.
        p = np.where(np.isnan(self.personal_utilities)[:, None], x, self.personal_positions)
        g = x if self.best_position is None else self.best_position
        g_w = x if self.worst_position is None else self.worst_position
        w_v, w_p, w_g, w_w = self._draw_weights()
        v = self._damping * (w_v * v + w_p * (p - x) + w_g * (g - x) + w_w * (x - g_w))
        if self.descent is not None and self._displacements is not None:
            v = v + self.descent.weight * self._displacements / self.current_step_length
        self.velocities = freeze_array(v)
        moved = (x + self.current_step_length * v).reshape(len(x), len(self._kinds), -1)
        self.positions = freeze_array(moved[:, self._kinds].reshape(x.shape))

    def _apply_restarts(self, strays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and velocities with the strays [N] at rest at their personal bests."""
        mask = strays[:, None]
        x = np.where(mask, self.personal_positions, self.positions)
        return x, np.where(mask, 0.0, self.velocities)

    def _stray_particles(self) -> np.ndarray:
        """Return [N] bool: particles that return to their personal best before they move."""
        unit = self.patience if self.restart_unit == "fraction" else 1
        stale = self.stale + (self.stale_count == "including")
        ready = (stale >= self.restart_patience * unit) & (self.cooling == 0)
        return self.restart & ready & ~np.isnan(self.personal_utilities)

    def _draw_weights(self) -> np.ndarray:
        """Return r * phi over their sum, [4, N, G x K] in the order v, p, g, w.

        Equal within a group.
        """
        phi = np.array([self.inertia, self.cognitive, self.social, self.repel])
        r = np.ones((len(self.evaluate), 4, self.groups))
        if self.weight_randomness:
            each = [
                self._particle_rng(i, random_streams.WEIGHTS).random(r.shape[1:])
                for i in range(len(r))
            ]
            r = 1.0 - np.array(each)  # (0, 1], so that the sum cannot vanish
        weights = r * phi[:, None]
        # All four weights may be 0 if only a descent moves the particles.
        total = weights.sum(axis=1, keepdims=True)
        weights = (weights / np.where(total == 0, 1.0, total)).swapaxes(0, 1)
        return weights.repeat(self.positions.shape[1] // self.groups, axis=2)

    def _evaluation_mask(self) -> np.ndarray:
        """Return [N] bool: the particles to evaluate; the others move all the same."""
        count = len(self.evaluate)
        if self._particle_rng(0, random_streams.DROP_ITERATION).random() < self.drop_iteration:
            return np.zeros(count, bool)
        if self.drop_particle == 0:
            return np.ones(count, bool)
        chance = [
            self._particle_rng(i, random_streams.DROP_PARTICLE).random() for i in range(count)
        ]
        return np.array(chance) >= self.drop_particle

    def _particle_rng(self, particle: int, purpose: int) -> np.random.Generator:
        return random_streams.counter_rng(self.seed, self.iteration, particle, purpose)

    def _update_personal_bests(self, u: np.ndarray, stopped: np.ndarray) -> None:
        measured = np.isfinite(u)
        better = measured & ~(u <= self.personal_utilities)  # also true if there was none yet (NaN)
        self.personal_utilities = freeze_array(np.where(better, u, self.personal_utilities))
        x = np.where(better[:, None], self.positions, self.personal_positions)
        self.personal_positions = freeze_array(x)
        counts = (
            (measured | stopped | self.count_skipped)
            & self._moving_particles(self.iteration)
            & (self.iteration > self._last_start)
        )
        self.stale = np.where(better, 0, self.stale + counts)
        self.cooling = np.maximum(self.cooling - counts, 0)

    def _update_swarm_bests(self, u: np.ndarray, stopped: np.ndarray) -> None:
        """Update global best and worst over all measurements; the first of ties counts."""
        measured = bool(np.isfinite(u).any())
        counts = self.iteration > 0 and bool(measured or stopped.any() or self.count_skipped)
        self.swarm_counted += counts
        self.swarm_stale += counts
        if not measured:
            return
        high, low = np.where(np.isfinite(u), u, -np.inf), np.where(np.isfinite(u), u, np.inf)
        if self.best_utility is None or high.max() > self.best_utility:
            self.best_utility, self.swarm_stale = float(high.max()), 0
            self.best_position = freeze_array(self.positions[high.argmax()].copy())
        if self.worst_utility is None or low.min() < self.worst_utility:
            tied = np.flatnonzero(low == low.min())
            # The original always takes the first of a tie at the start, whatever it does later.
            chosen = tied[-1] if self.worst_tie == "last" and self.iteration else tied[0]
            self.worst_utility = float(low.min())
            self.worst_position = freeze_array(self.positions[chosen].copy())


@dataclass(kw_only=True, eq=False)
class GradientDescent(ParticleSwarm):
    """Gradient descent through the mixing coefficients, with a single particle.

    The best of the experts and of the uniform soups moves by its descent alone, until no evaluation
    has been better for `patience` iterations. The options are those of the swarm.
    """

    NAME: ClassVar[str] = "gradient"

    particles: int | None = None
    max_iterations: int = 20
    patience: int = 4
    inertia: float = 0.0
    cognitive: float = 0.0
    social: float = 0.0
    repel: float = 0.0
    restart: bool = False
    starting_velocity: Literal["random", "zero", "best"] = "zero"
    soups: int = 1
    active: int | Literal["auto"] | None = 1
    descent: Descent | None = field(default_factory=partial(Descent, required=True))


def freeze_array(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@dataclass(kw_only=True, eq=False)
class AsynchronousSwarm(ParticleSwarm):
    """Asynchronous particle swarm: particles move in turn, `batch` at a time.

    A particle never waits for the rest of the swarm: it sees the best and the worst of all scores
    told before its own move (the asynchronous updates of Carlisle and Dozier, "An off-the-shelf
    PSO", 2001), so that an improvement influences the next move instead of the next iteration of
    the swarm.

    The result depends on the configuration, including `batch`, and the seed; never on the number of
    workers or their order of completion. The order of moves is fixed, as moving particles in order
    of completion would give different runs on different machines. The cost is that workers wait for
    the slowest of `batch` particles; use a batch that occupies all of them, such as job.particles
    times their number.

    Args:
        batch: Particles that move in an iteration; more than N are N, which is the plain swarm.
        max_iterations: Counts moves of a batch. Patience, restart_patience and step_length_factor
            still count iterations of the complete swarm, as in the plain one.

    Raises:
        UserError: An option is out of range; the message names the allowed values.
    """

    NAME: ClassVar[str] = "pso_async"

    batch: int = 5
    max_iterations: int = 200
    particles: int | None = 20
    soups: int = 0
    active: int | Literal["auto"] | None = None
    descent: Descent | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("batch", self.batch, ROWS, "it is the number of particles that move together")
        if self.drop_iteration:
            raise UserError(f"""optimizer.drop_iteration={self.drop_iteration}: must be 0, as only
                a few particles move in an iteration; use optimizer.drop_particle""")

    def _moving_particles(self, iteration: int) -> np.ndarray:
        count = len(self.evaluate)
        step = min(self.batch, count)
        indices = (step * (iteration - 1) + np.arange(step)) % count
        return np.isin(np.arange(count), indices) & self.moving

    def _moving_share(self) -> float:
        return min(1.0, self.batch / len(self.evaluate))
