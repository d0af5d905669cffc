"""PSO-Merging (Zhang, Zhang and Feng 2025, arXiv 2508.19839) on mixing coefficients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm._util.settings import Number, Positive, checked
from swarm.optimizers.base import Optimizer, Particles
from swarm.optimizers.random_streams import initial_population


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class PSOMerging(Optimizer):
    """Global-best PSO whose first swarm is the experts, their sparsified copies and the base.

    Each particle follows v = w v + c1 r1 (p - x) + c2 r2 (g - x) and x = x + v, with its personal
    best p and the swarm's best g. The search is linear in the first swarm, so the state contains
    coefficients instead of models. The sums of the coefficients are free.

    Sparsified experts are rows of the pool (`pool.sparse_rows=0.8`), because no sum of experts
    equals one; `pool.space=delta` makes a position a sum of task vectors, as in the paper.
    `experiment=pso_merging` sets both. Without these rows the first swarm is the experts and the
    base.

    Sources: the abstract for the first swarm, and the public reviews of its submission to ICLR 2026
    for the constants (w = 0.2, c1 = c2 = 2, drop rate 0.8), for the 2 N + 1 particles and for the
    steps (5 with Llama and Mistral, 50 with Flan-T5). Neither the full paper nor its code was
    available. Choices made here, as these sources leave them open:

    - The initial velocity is 0.
    - r1 and r2 ~ U(0, 1) are drawn per particle, iteration and group, not per weight: a draw per
      weight leaves the span of the pool.
    - There is no limit on velocities or coefficients.
    - A particle that did not move is not scored again.
    - Particles beyond the rows of the pool and the base are crossover children of two rows.

    Args:
        particles: N; None is the rows of the pool and the base.
        inertia: w.
        cognitive: c1, towards the personal best.
        social: c2, towards the best of the swarm.
        base: Whether the base model, with all coefficients 0, is a particle. Set it to False if
            `pool.base_row` makes it one.
    """

    NAME: ClassVar[str] = "pso_merging"
    STATE = (*Optimizer.STATE, "velocities", "own_positions", "own_utilities")

    particles: Particles | None = None
    max_iterations: Positive = 5
    inertia: Number = 0.2
    cognitive: Number = 2.0
    social: Number = 2.0
    base: bool = True

    def _population_size(self, experts: int) -> int:
        return experts + self.base

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        rows = initial_population(experts, count, self.seed, groups=self.groups)
        if self.base:
            rows[experts : experts + 1] = 0.0
        self.velocities, self.own_positions = np.zeros_like(rows), rows
        self.own_utilities = np.full(count, np.nan)
        return rows

    def _propose_positions(self) -> np.ndarray:
        x = best = self.positions
        if not np.isnan(self.own_utilities).all():
            best = self.own_positions[np.nanargmax(self.own_utilities)]
        r = self._iteration_rng().random((2, len(x), self.groups)).repeat(self.experts, axis=2)
        personal = np.where(np.isnan(self.own_utilities)[:, None], x, self.own_positions)
        pull = self.cognitive * r[0] * (personal - x) + self.social * r[1] * (best - x)
        self.velocities = self.inertia * self.velocities + pull
        return (x + self.velocities)[self._proposal_rows(len(x))]

    def _proposal_rows(self, count: int) -> np.ndarray:
        moved = self.velocities.any(axis=1)
        return np.flatnonzero(moved | np.isnan(self.own_utilities))

    def _update_state(self, utilities: np.ndarray) -> None:
        better = np.isfinite(utilities) & ~(utilities <= self.own_utilities)
        self.own_positions = np.where(better[:, None], self.positions, self.own_positions)
        self.own_utilities = np.where(better, utilities, self.own_utilities)
