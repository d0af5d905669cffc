"""The particle swarm of Model Swarms (arXiv 2410.11163) on rows of mixing coefficients."""

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from swarm.errors import UserError
from swarm.optimizers import random_streams
from swarm.optimizers.base import (
    AT_LEAST_ONE,
    COUNT,
    MAX_VALUE,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    ROWS,
    SHARE,
    STEP,
    SWITCH,
    LossGradient,
    LossRequest,
    Rule,
    SearchResources,
    check_choice,
    check_number,
    check_particles,
    check_pool_size,
    check_saved_state,
)
from swarm.optimizers.gradient import Descent, damp_huge_updates

SOUP_COUNT: Rule = (int, lambda value: 0 <= value <= 5, "an integer from 0 to 5")

NUMBERS: dict[str, tuple[Rule, str]] = {
    "inertia": (NOT_NEGATIVE, "the paper tried 0.1, 0.2 and 0.3"),
    "cognitive": (NOT_NEGATIVE, "the paper tried 0.1 to 0.5"),
    "social": (NOT_NEGATIVE, "the paper tried 0.2 to 0.6"),
    "repel": (NOT_NEGATIVE, "the paper tried 0.01, 0.05 and 0.1; 0 switches it off"),
    "weight_randomness": (SWITCH, "false takes all factors r as 1"),
    "step_length": (STEP, "the paper tried 0.5 to 1.0"),
    "step_length_factor": (SHARE, "1 keeps the step as it is; the paper's is 0.95"),
    "minimum_step_length": (NOT_NEGATIVE, "0 means no floor"),
    "patience": (AT_LEAST_ONE, "to disable it, raise it above optimizer.max_iterations"),
    "max_iterations": (AT_LEAST_ONE, "the paper's is 50"),
    "restart": (SWITCH, "false never restarts a particle"),
    "restart_patience": (POSITIVE, "the paper's is 5 iterations; optimizer.restart=false is off"),
    "restart_cool_down": (COUNT, "0 lets a particle restart every iteration"),
    "crossover_maximum": (POSITIVE, "1 is the paper's, 2 the original code's"),
    "drop_iteration": (PROBABILITY, "it is the probability to skip an iteration's evaluation"),
    "drop_particle": (PROBABILITY, "it is the probability to skip a particle's evaluation"),
    "count_skipped": (SWITCH, "true is as in the original code"),
    "soups": (SOUP_COUNT, "0 is the paper's"),
}
WORDS = {
    "starting_velocity": ("random", "zero", "best"),
    "stale_count": ("after", "including"),
    "restart_unit": ("iterations", "fraction"),
    "crossover_parents": ("experts", "everyone"),
    "worst_tie": ("first", "last"),
}


@dataclass(kw_only=True, eq=False)
class ParticleSwarmOptions:
    """The options of Model Swarms, with the paper's symbols.

    docs/pso.md compares them with its code.

    Args:
        particles: N; None is one per expert and soup, without crossover children.
        inertia: phi_v, of the current velocity; only the ratios of this and the next three matter.
        cognitive: phi_p, towards the personal best.
        social: phi_g, towards the best of the swarm.
        repel: phi_w, away from the worst of the swarm.
        weight_randomness: Each coefficient times its own r ~ U(0, 1), per particle and iteration.
        step_length: lambda of the first iteration.
        step_length_factor: phi_lambda, by which it shrinks once per iteration.
        minimum_step_length: Lower bound of the step length.
        starting_velocity: Towards a `random` other particle, `zero`, towards the `best` of all.
        patience: c, stale iterations of the swarm after which it ends.
        max_iterations: K; the evaluation of the start is not one of them.
        stale_count: Iterations `after` a best are stale, or that of the best too (`including`).
        restart: Stray particles return to their personal best and lose their velocity.
        restart_patience: c_r, stale iterations of a particle that make it a stray.
        restart_unit: Unit of `restart_patience`: `iterations`, or a `fraction` of patience.
        restart_cool_down: Evaluated iterations that must pass before it may restart again.
        crossover_maximum: A child is t * a + (1 - t) * b with t ~ U(0, this).
        crossover_parents: Parents are the `experts` only, or `everyone`, including children.
        worst_tie: Which of equally bad particles of one iteration is the worst, `first` or `last`.
        drop_iteration: Drop-K, the probability that nothing is evaluated in an iteration.
        drop_particle: Drop-N, the probability that a particle is not evaluated in an iteration.
        count_skipped: Skipped evaluations count as stale, for the swarm and the particle.
        soups: Number of particles after the experts that start as uniform soups, with coefficients
            that sum to 1.5, 1, 2, .5 and 3; sums are free from then on. 0 is the paper.
        starts: Further positions to start from, after the soups: K coefficients each, in the order
            of the pool's experts, the same in all groups. None is none.
        active: Number of particles that move and are evaluated, the best after the first iteration
            (with a gradient term by the loss of some items, else by utility); the others do not
            move. None is all of them. "auto" is all of them without a gradient term, and with it
            one for each `ACTIVE_POSITIONS` that the budget allows after the first iteration, at
            most four.
        descent: The gradient term of the velocity; None is none, as in the paper.

    Raises:
        UserError: An option is out of range; the message names the allowed values.
    """

    particles: int | None = None
    inertia: float = 0.2
    cognitive: float = 0.3
    social: float = 0.4
    repel: float = 0.05
    weight_randomness: bool = True
    step_length: float = 0.5
    step_length_factor: float = 0.95
    minimum_step_length: float = 0.1
    starting_velocity: Literal["random", "zero", "best"] = "random"
    patience: int = 10
    max_iterations: int = 50
    stale_count: Literal["after", "including"] = "after"
    restart: bool = True
    restart_patience: float = 5
    restart_unit: Literal["iterations", "fraction"] = "iterations"
    restart_cool_down: int = 5
    crossover_maximum: float = 1.0
    crossover_parents: Literal["experts", "everyone"] = "experts"
    worst_tie: Literal["first", "last"] = "first"
    drop_iteration: float = 0.0
    drop_particle: float = 0.0
    count_skipped: bool = False
    soups: int = 1
    starts: list[list[float]] | None = None
    active: int | Literal["auto"] | None = "auto"
    descent: Descent | None = field(default_factory=Descent)

    def __post_init__(self) -> None:
        _check_options(self)


def _check_options(options: ParticleSwarmOptions) -> None:
    for name, (rule, advice) in NUMBERS.items():
        check_number(name, getattr(options, name), rule, advice)
    check_particles(options.particles, 2, "null is one per expert")
    for name, allowed in WORDS.items():
        check_choice(name, getattr(options, name), allowed)
    if options.minimum_step_length > options.step_length:
        raise UserError(f"""optimizer.minimum_step_length={options.minimum_step_length}: must be at
            most optimizer.step_length={options.step_length}, lower it or raise the other""")
    if options.active not in (None, "auto"):
        check_number("active", options.active, AT_LEAST_ONE, "null lets all particles move")
    if not _are_positions(options.starts):
        raise UserError(f"""optimizer.starts={options.starts!r:.60}: must be null or a list of
            positions, each a list of one finite number per expert, e.g. [[0.5,0.5,0]]""")
    if options.descent is not None and not isinstance(options.descent, Descent):
        raise UserError(f"""optimizer.descent={options.descent}: must be null, or have the keys of
            the gradient term, e.g. optimizer.descent.steps=20""")
    still = not (options.inertia or options.cognitive or options.social or options.repel)
    if still and options.descent is None:
        raise UserError("""optimizer.inertia=0, cognitive=0, social=0, repel=0: must not all be 0,
            as no particle would move; raise one of them""")


def _are_positions(starts: Any) -> bool:
    """Return whether `starts` is None, or lists of finite numbers."""
    if starts is None:
        return True
    return isinstance(starts, list) and all(
        isinstance(row, list) and row and all(_is_finite(one) for one in row) for row in starts
    )


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= MAX_VALUE


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
        least = experts + self.soups + len(starts)
        count = least if self.particles is None else self.particles
        if starts and count < least:
            raise UserError(f"""optimizer.particles={count}: must be at least {least}, for
                {experts} experts, {self.soups} soups and {len(starts)} starts; null is that""")
        self.seed, self.groups, self.iteration, self.has_utilities = int(seed), groups, 0, False
        self.current_step_length = float(self.step_length)
        self.swarm_stale = self.swarm_counted = 0
        norms = self._offer.norms if self.soups or self.descent is not None else None
        damping = np.ones(experts) if norms is None else damp_huge_updates(norms())
        self._damping = np.tile(damping, groups)
        x = self._starting_positions(experts, count, damping)
        if self.descent is not None:
            self.descent.start(count, groups, experts, self.seed, damping)
        self._displacements: np.ndarray | None = None
        self.mutated = np.zeros(count, bool)
        self.moving = np.ones(count, bool)
        self.positions = self.personal_positions = freeze_array(x)
        self.velocities = freeze_array(self._starting_velocities())
        self.evaluate, self.restarted = np.ones(count, bool), np.zeros(count, bool)
        self.personal_utilities = freeze_array(np.full(count, np.nan))
        self.stale, self.cooling = np.zeros(count, int), np.zeros(count, int)
        self.best_position = self.worst_position = None
        self.best_utility = self.worst_utility = None

    def ask(self) -> np.ndarray:
        """Return positions [N, G x K]; after a `tell`, one restart-and-move step further."""
        if self.has_utilities:
            self.iteration, self.has_utilities = self.iteration + 1, False
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
        if self.descent is None or not self.has_utilities:
            return
        by_loss = self.iteration == 0 and not self._offer.black_box
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
        if self.iteration == 0:
            rank = np.argsort(np.where(np.isnan(u), np.inf, -u), kind="stable")
            self.moving = np.isin(np.arange(len(u)), rank[: self.most_active])
        if self.iteration:
            decayed = self.current_step_length * self.step_length_factor ** self._moving_share()
            self.current_step_length = float(max(decayed, self.minimum_step_length))
        elif self.starting_velocity == "best" and self.best_position is not None:
            self.velocities = freeze_array(self.best_position - self.positions)
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
        self._damping = np.array(state.get("damping", np.ones(self.positions.shape[1])))
        if self.descent is not None:
            self.descent.step_scales = self._damping[: self.positions.shape[1] // self.groups]
            self.descent.load_state_dict(state["descent"], self.groups, self.seed)
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
        self.positions = freeze_array(x + self.current_step_length * v)

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
            & (self.iteration > 0)
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
