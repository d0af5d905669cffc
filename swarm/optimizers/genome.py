"""The genetic search of GENOME+ (Zhang et al. 2025, arXiv 2503.01155) on mixing coefficients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm._util.settings import Number, Share, checked
from swarm.optimizers.base import OPTIMIZER_STREAM, Fraction, Optimizer
from swarm.optimizers.random_streams import initial_population

SELECTION_STREAM = OPTIMIZER_STREAM + 1
"""Purpose id of selection's random stream, separate from that of the offspring."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class Genome(Optimizer):
    """A population with succession, crossover, mutation and selection; two asks are a generation.

    An odd ask is succession: all members but the elite move, as in the particle swarm, towards
    their personal and the population's best and away from the worst, and are scored at their new
    positions. An even ask is the offspring: of N // 2 pairs, each with the probability `crossover`,
    a child between its parents; then, of every member and child with the probability `mutation`, a
    mutant. Selection retains N of members and offspring: the elite, and others by roulette.

    Options are those of the authors' code. Intentional deviations:

    - All operators act on coefficients. The paper adds noise to the weights themselves; here it is
      noise on coefficients that sums to 0 in each group, so that no mutant leaves the span of the
      experts.
    - Probabilities and shares are by rank instead of score, as scores may be negative or all equal.
    - A member that moved is scored anew (the code returns its old score), its personal best is a
      copy (there it moves along), random factors are drawn for each member, group and iteration
      (there once per run), the step shrinks once per generation, at least one member is elite, and
      the elite does not move in succession either, since otherwise the best member found would be
      lost.
    - A member whose evaluation failed does not move, and failed offspring are dropped.
    - The population starts with the experts and N - K children of two of them.

    State: `members` [N, G x K] with their `utilities` and `velocities`, personal bests in
    `own_positions` and `own_utilities`, and the best and the worst ever in `extremes` [2, G x K]
    and `extreme_utilities`.

    Args:
        crossover: Probability of a pair to have a child.
        mutation: Probability of a member or child to have a mutant.
        gene: Probability of each coefficient of a mutant to change; at least one does.
        sigma: Standard deviation of that change.
        elite: Share of best members that do not move in succession and always survive selection.
        succession: If False, every ask is offspring (GENOME without the plus).
        inertia: Weight of the current velocity.
        cognitive: Weight of the direction to the personal best.
        social: Weight of the direction to the best.
        repel: Weight of the direction away from the worst.
        step_length: Step length of succession in the first generation.
        step_length_factor: Factor of the step length per generation.
    """

    NAME: ClassVar[str] = "genome"
    STATE = (
        *Optimizer.STATE,
        *("members", "utilities", "velocities", "own_positions", "own_utilities"),
        *("extremes", "extreme_utilities"),
    )

    crossover: Share = 0.8
    mutation: Share = 0.3
    gene: Share = 0.1
    sigma: Number = 0.05
    elite: Share = 0.1
    succession: bool = True
    inertia: Number = 0.2
    cognitive: Number = 0.2
    social: Number = 0.2
    repel: Number = 0.1
    step_length: Number = 0.5
    step_length_factor: Fraction = 0.95

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        rows = initial_population(experts, count, self.seed, groups=self.groups)
        self.members = self.own_positions = rows
        self.utilities = self.own_utilities = np.full(count, np.nan)
        self.velocities = np.zeros_like(rows)
        self.extremes, self.extreme_utilities = np.zeros_like(rows[:2]), np.full(2, np.nan)
        return rows

    def _propose_positions(self) -> np.ndarray:
        return self._succession_positions() if self._is_succession() else self._breed_offspring()

    def _is_succession(self) -> bool:
        return self.succession and self.iteration % 2 == 1

    def _proposal_rows(self, count: int) -> np.ndarray:
        if not self._is_succession():
            return super()._proposal_rows(count)
        ranked = np.argsort(-rank_fitness(self.utilities), kind="stable")
        return np.sort(ranked[self._elite_count(len(ranked)) :])

    def _elite_count(self, size: int) -> int:
        """Return the size of the elite among `size`; at least one, and never all members."""
        return min(max(1, round(self.elite * size)), len(self.members) - 1)

    def _succession_positions(self) -> np.ndarray:
        """Return the new positions of all members but the elite, [M, G x K]."""
        x, known = self.members, ~np.isnan(self.extreme_utilities)
        best, worst = (
            row if is_known else x for row, is_known in zip(self.extremes, known, strict=True)
        )
        phi = np.array([self.inertia, self.cognitive, self.social, self.repel])
        r = 1.0 - self._iteration_rng().random((len(x), 4, self.groups))  # (0, 1]
        weights = phi[:, None] * r
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        w_v, w_p, w_g, w_w = weights.swapaxes(0, 1).repeat(self.experts, axis=2)
        v = w_v * self.velocities + w_p * (self.own_positions - x)
        self.velocities = v + w_g * (best - x) + w_w * (x - worst)
        step = self.step_length * self.step_length_factor ** ((self.iteration - 1) // 2)
        return (x + step * self.velocities)[self._proposal_rows(len(x))]

    def _breed_offspring(self) -> np.ndarray:
        """Return at most N offspring, [M, G x K]: children first, then mutants."""
        draw, (count, genes) = self._iteration_rng(), self.members.shape
        ranks, rows = rank_fitness(self.utilities), [*self.members]
        for _ in range(count // 2):
            if draw.random() < self.crossover:
                a, b = draw.choice(count, size=2, replace=False, p=ranks / ranks.sum())
                share = ranks[a] / (ranks[a] + ranks[b])
                rows.append(share * self.members[a] + (1 - share) * self.members[b])
        for row in list(rows):
            if draw.random() < self.mutation:
                changed = np.arange(genes) == draw.integers(genes)
                changed = changed | (draw.random(genes) < self.gene)
                noise = np.where(changed, draw.normal(scale=self.sigma, size=genes), 0.0)
                means = noise.reshape(self.groups, -1).mean(axis=1)
                rows.append(row + noise - means.repeat(self.experts))
        return np.reshape(rows[count : 2 * count], (-1, genes))

    def _update_state(self, utilities: np.ndarray) -> None:
        measured = np.isfinite(utilities)
        if measured.any():
            indices = [np.nanargmax(utilities), np.nanargmin(utilities)]
            current, sign = utilities[indices], np.array([1, -1])
            new = ~(sign * current <= sign * self.extreme_utilities)
            self.extremes = np.where(new[:, None], self.positions[indices], self.extremes)
            self.extreme_utilities = np.where(new, current, self.extreme_utilities)
        if self.iteration and not self._is_succession():
            self._select_survivors(utilities[measured], self.positions[measured])
            return
        # Members move to their scored positions; unmeasured ones do not move.
        moved = measured[:, None]
        self.members = np.where(moved, self.positions, self.members)
        self.velocities = np.where(moved, self.velocities, 0.0)
        self.utilities = np.where(measured, utilities, self.utilities)
        better = measured & ~(utilities <= self.own_utilities)
        self.own_positions = np.where(better[:, None], self.positions, self.own_positions)
        self.own_utilities = np.where(better, utilities, self.own_utilities)

    def _select_survivors(self, utilities: np.ndarray, children: np.ndarray) -> None:
        """Select N of members and offspring: the elite, then a roulette without replacement."""
        everyone, count = np.append(self.utilities, utilities), len(self.members)
        ranks = rank_fitness(everyone)
        order = np.argsort(-ranks, kind="stable")
        elite = self._elite_count(len(order))
        rest = order[elite:]
        chances = ranks[rest] / ranks[rest].sum()
        draw = self._iteration_rng(SELECTION_STREAM)
        drawn = draw.choice(rest, size=count - elite, replace=False, p=chances)
        kept = np.append(order[:elite], drawn)
        self.members = np.vstack([self.members, children])[kept]
        self.velocities = np.vstack([self.velocities, 0 * children])[kept]
        self.own_positions = np.vstack([self.own_positions, children])[kept]
        self.utilities = everyone[kept]
        self.own_utilities = np.append(self.own_utilities, utilities)[kept]


def rank_fitness(utilities: np.ndarray) -> np.ndarray:
    """Return weights [N] by rank: 1 for the worst and the unmeasured, at most N for the best.

    Ties share the mean of their ranks.
    """
    below = (utilities[None, :] < utilities[:, None]).sum(axis=1)
    equal = (utilities[None, :] == utilities[:, None]).sum(axis=1)
    return 1.0 + below + np.maximum(equal - 1, 0) / 2
