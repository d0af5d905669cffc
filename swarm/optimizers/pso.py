"""The particle swarm of Model Swarms (Feng et al. 2025, arXiv 2410.11163) on mixing coefficients.

A particle i is a model x_i with a velocity v_i, both [G x K] coefficients over the experts. Symbols
are the paper's: p_i is the best position of particle i so far, g and g_w are the best and the worst
of the swarm, f is the utility on dev items.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from swarm._util.settings import Count, Number, Positive, PositiveNumber, Share, checked
from swarm.errors import UserError
from swarm.optimizers import random_streams
from swarm.optimizers.base import Fraction, Optimizer, Particles, freeze_array


class Deviations(NamedTuple):
    """Where the authors' code (github.com/BunsenFeng/model_swarm) differs from their paper."""

    best_is_stale: bool = False
    """An iteration with a new best counts as stale: a best at t ends the search one sooner."""
    patience_is_share: bool = False
    """c_r is a share of c instead of a number of iterations."""
    children_are_parents: bool = False
    """Crossover also picks earlier children, instead of experts alone."""
    last_is_worst: bool = False
    """Of equally bad particles the last one is g_w, except in the first iteration."""
    skipped_is_stale: bool = False
    """Skipped evaluations count as stale, for the swarm and the particle."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class ParticleSwarm(Optimizer):
    """Particles attracted to their personal best and the swarm's best, repelled from its worst.

    Every step is a combination of positions: in each group positions sum to 1, velocities to 0.

    Args:
        particles: N; None is one per expert, without crossover children.
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
        restart: Stray particles return to their personal best and lose their velocity.
        restart_patience: c_r, stale iterations of a particle that make it a stray.
        restart_cool_down: Evaluated iterations that must pass before it may restart again.
        crossover_maximum: A child is t * a + (1 - t) * b with t ~ U(0, this).
        drop_iteration: Drop-K, the probability that nothing is evaluated in an iteration.
        drop_particle: Drop-N, the probability that a particle is not evaluated in an iteration.
        reference_code: All `Deviations` of the authors' code.

    Attributes:
        velocities: [N, G x K].
        restarted: [N] bool, the particles that the last step returned to their personal best.
        personal_positions: p, [N, G x K].
        personal_utilities: f(p), [N]; NaN if none was measured yet.
        best_position, best_utility: g and f(g); None if none was measured yet.
        worst_position, worst_utility: g_w and f(g_w).
    """

    NAME: ClassVar[str] = "pso"
    STATE = (
        *Optimizer.STATE,
        *("velocities", "restarted", "personal_positions", "personal_utilities", "stale"),
        *("cooling", "current_step_length", "swarm_stale", "swarm_counted"),
        *("best_position", "best_utility", "worst_position", "worst_utility"),
    )
    can_race: ClassVar[bool] = True

    particles: Particles | None = None
    inertia: Number = 0.2
    cognitive: Number = 0.3
    social: Number = 0.4
    repel: Number = 0.05
    weight_randomness: bool = True
    step_length: Annotated[float, Field(gt=0, le=100)] = 0.5
    step_length_factor: Fraction = 0.95
    minimum_step_length: Number = 0.1
    starting_velocity: Literal["random", "zero", "best"] = "random"
    patience: Positive = 10
    max_iterations: Positive = 50
    restart: bool = True
    restart_patience: PositiveNumber = 5
    restart_cool_down: Count = 5
    crossover_maximum: PositiveNumber = 1.0
    drop_iteration: Share = 0.0
    drop_particle: Share = 0.0
    reference_code: bool = False

    def __post_init__(self) -> None:
        if self.minimum_step_length > self.step_length:
            raise UserError(f"""optimizer.minimum_step_length={self.minimum_step_length}: must be at
                most optimizer.step_length={self.step_length}, lower it or raise the other""")
        if not self._can_move():
            raise UserError("""optimizer.inertia=0, cognitive=0, social=0, repel=0: must not all be
                0, as no particle would move""")
        self.deviations = Deviations(*[self.reference_code] * len(Deviations._fields))

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        super().start(experts, seed, groups)
        count = len(self.positions)
        self.current_step_length = float(self.step_length)
        self.swarm_stale = self.swarm_counted = 0
        self.velocities = self._starting_velocities()
        self.restarted = np.zeros(count, bool)
        self.personal_positions = self.positions
        self.personal_utilities = np.full(count, np.nan)
        self.stale, self.cooling = np.zeros(count, int), np.zeros(count, int)
        self.best_position: np.ndarray | None = None
        self.worst_position: np.ndarray | None = None
        self.best_utility: float | None = None
        self.worst_utility: float | None = None

    def tell(
        self,
        utilities: np.ndarray,
        stopped: np.ndarray | None = None,
        objectives: np.ndarray | None = None,
    ) -> None:
        """See `Optimizer.tell`; stopped particles count as stale, and are never g_w."""
        u = np.asarray(utilities, dtype=np.float64)
        short = np.zeros(len(self.evaluate), bool) if stopped is None else np.asarray(stopped)
        if short.any() and (short & (np.isfinite(u) | np.isnan(self.personal_utilities))).any():
            raise ValueError("a stopped particle needs a personal best")
        self.stopped = short
        super().tell(u)

    def stop_reason(self) -> str | None:
        """Return why the search has ended: c stale iterations of the swarm, or K iterations."""
        stale = self.swarm_stale
        if self.deviations.best_is_stale:
            # The code compares the last c entries of a history that contains the best itself, once
            # the history is longer than c: one stale iteration less, except for a start never
            # beaten.
            stale += self.swarm_counted > stale
        if stale >= self.patience:
            return f"no new global best in {self.swarm_stale} iterations"
        return super().stop_reason()

    @property
    def last_start(self) -> int:
        """The last iteration of the start, from which the step length shrinks."""
        return 0

    def _can_move(self) -> bool:
        return any((self.inertia, self.cognitive, self.social, self.repel))

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        """Populate: every expert is a particle, children of two experts fill up."""
        parents = self.deviations.children_are_parents
        return random_streams.initial_population(
            experts, count, self.seed, self.crossover_maximum, parents, self.groups
        )

    def origins(self, before: np.ndarray) -> np.ndarray:
        return np.where(self.restarted[:, None], self.personal_positions, before)

    def _starting_velocities(self) -> np.ndarray:
        """v_i = x_j - x_i with a random j, so that particles start towards each other."""
        x = self.positions
        if self.starting_velocity != "random":  # "best" is set after the first utilities
            return np.zeros_like(x)
        draws = [self._iteration_rng(random_streams.PARTNER, i) for i in range(len(x))]
        partner = [random_streams.sample_other(i, len(x), draw) for i, draw in enumerate(draws)]
        return np.asarray(x[partner] - x)

    def _advance(self) -> None:
        """Restart the strays, then x <- x + lambda v."""
        self.restarted = self._stray_particles()
        self.cooling = np.where(self.restarted, self.restart_cool_down, self.cooling)
        x, v = self._apply_restarts(self.restarted)
        self.velocities = self._update_velocities(x, v)
        self.positions = freeze_array(x + self.current_step_length * self.velocities)
        self.evaluate = self._evaluation_mask()

    def _update_velocities(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """v <- (r_v phi_v v + r_p phi_p (p - x) + r_g phi_g (g - x) + r_w phi_w (x - g_w)) / C.

        C is the sum of the four r phi (equation 1 of the paper).
        """
        # Particles that were never measured are neither attracted nor repelled.
        p = np.where(np.isnan(self.personal_utilities)[:, None], x, self.personal_positions)
        g = x if self.best_position is None else self.best_position
        g_w = x if self.worst_position is None else self.worst_position
        w_v, w_p, w_g, w_w = self._draw_weights()
        return np.asarray(w_v * v + w_p * (p - x) + w_g * (g - x) + w_w * (x - g_w))

    def _draw_weights(self) -> np.ndarray:
        """Return r phi / C, [4, N, G x K] in the order v, p, g, w; equal within a group."""
        phi = np.array([self.inertia, self.cognitive, self.social, self.repel])
        r = np.ones((len(self.evaluate), 4, self.groups))
        if self.weight_randomness:
            draws = [self._iteration_rng(random_streams.WEIGHTS, i) for i in range(len(r))]
            r = 1.0 - np.array([draw.random(r.shape[1:]) for draw in draws])  # (0, 1]: C is not 0
        weights = r * phi[:, None]
        total = weights.sum(axis=1, keepdims=True)
        # All phi may be 0 in a subclass whose particles move by other terms.
        weights = (weights / np.where(total == 0, 1.0, total)).swapaxes(0, 1)
        return weights.repeat(self.positions.shape[1] // self.groups, axis=2)

    def _stray_particles(self) -> np.ndarray:
        """Return [N] bool: particles with c_r stale iterations that are not cooling down."""
        unit = self.patience if self.deviations.patience_is_share else 1
        stale = self.stale + self.deviations.best_is_stale
        ready = (stale >= self.restart_patience * unit) & (self.cooling == 0)
        return np.asarray(self.restart & ready & ~np.isnan(self.personal_utilities))

    def _apply_restarts(self, strays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return x and v with the strays [N] at rest at their personal bests: x = p, v = 0."""
        mask = strays[:, None]
        x = np.where(mask, self.personal_positions, self.positions)
        return x, np.where(mask, 0.0, self.velocities)

    def _evaluation_mask(self) -> np.ndarray:
        """Return [N] bool: the particles to evaluate (drop-K, drop-N); the others move too."""
        count = len(self.evaluate)
        if self._iteration_rng(random_streams.DROP_ITERATION).random() < self.drop_iteration:
            return np.zeros(count, bool)
        if self.drop_particle == 0:
            return np.ones(count, bool)
        draws = [self._iteration_rng(random_streams.DROP_PARTICLE, i) for i in range(count)]
        return np.array([draw.random() for draw in draws]) >= self.drop_particle

    def _update_state(self, utilities: np.ndarray) -> None:
        self._update_personal_bests(utilities)
        self._update_swarm_bests(utilities)
        if self.iteration > self.last_start:  # lambda <- max(lambda phi_lambda, minimum)
            shorter = self.current_step_length * self.step_length_factor
            self.current_step_length = float(max(shorter, self.minimum_step_length))
        elif self.starting_velocity == "best" and self.best_position is not None:
            self.velocities = self.best_position - self.positions

    def _update_personal_bests(self, u: np.ndarray) -> None:
        """p <- x and f(p) <- f(x) where f(x) > f(p)."""
        better = np.isfinite(u) & ~(u <= self.personal_utilities)  # true if f(p) is NaN
        self.personal_utilities = np.where(better, u, self.personal_utilities)
        self.personal_positions = np.where(better[:, None], self.positions, self.personal_positions)
        counts = (
            np.isfinite(u) | self.stopped | self.deviations.skipped_is_stale
        ) & self._counts_stale()
        self.stale = np.where(better, 0, self.stale + counts)
        self.cooling = np.maximum(self.cooling - counts, 0)

    def _counts_stale(self) -> np.ndarray | bool:
        """Return which particles' evaluations count for their patience."""
        return self.iteration > self.last_start

    def _update_swarm_bests(self, u: np.ndarray) -> None:
        """Update g and g_w over all measurements; the first of ties counts."""
        known = np.isfinite(u)
        counts = self.iteration > 0 and bool(
            known.any() or self.stopped.any() or self.deviations.skipped_is_stale
        )
        self.swarm_counted += counts
        self.swarm_stale += counts
        if not known.any():
            return
        high, low = np.where(known, u, -np.inf), np.where(known, u, np.inf)
        if self.best_utility is None or high.max() > self.best_utility:
            self.best_utility, self.swarm_stale = float(high.max()), 0
            self.best_position = self.positions[high.argmax()].copy()
        if self.worst_utility is None or low.min() < self.worst_utility:
            tied = np.flatnonzero(low == low.min())
            last = self.deviations.last_is_worst and self.iteration > 0
            self.worst_utility = float(low.min())
            self.worst_position = self.positions[tied[-1 if last else 0]].copy()
