"""Static recipes (soups, task arithmetic): as start of searches with free sums, or on their own.

Recipes need no search; their positions are scored as any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from swarm._util.settings import Positive, PositiveNumber, checked
from swarm.errors import UserError
from swarm.optimizers import random_streams
from swarm.optimizers.base import CoefficientBounds, Optimizer, Particles

SCALES = (1.0, 1.5, 0.5, 2.0)
"""Factors of a recipe, the most promising first, so that a list may be cut at its end."""

FEW_SCALES = (1.0, 1.5)
"""Default factors of optimizers with free sums."""

DEFAULT_LAMBDAS = (0.3,)
"""Lambda of task arithmetic; scaled, it covers 0.15 to 0.6."""

BEST_COUNTS = (2, 3)
"""Sizes of the soups of the best experts."""

Scales = Sequence[PositiveNumber]

Recipes = Sequence[tuple[str, np.ndarray]]
"""Labels and coefficients [K]."""

StartPositions = tuple[list[str], np.ndarray]
"""Labels [M] and positions [M, G x K]."""


def static_start_positions(
    experts: int,
    groups: int = 1,
    scales: Sequence[float] = SCALES,
    lambdas: Sequence[float] = DEFAULT_LAMBDAS,
    among: int | None = None,
) -> StartPositions:
    """Return recipes that need no utility, times each scale, with equal coefficients in all groups.

    They are the uniform soup (Wortsman et al. 2022, arXiv 2203.05482), 1/K of every expert, and
    task arithmetic (Ilharco et al. 2023, arXiv 2212.04089), lambda of every expert. In the delta
    space a scale s multiplies the update of the weights by s; in the factor space by s squared. A
    duplicate coefficient vector is listed once, by its first label.

    Args:
        experts: K.
        groups: G.
        scales: Factors, in the order of the positions.
        lambdas: Factors of task arithmetic.
        among: Number of first rows of the pool that are merged; None is all of them.

    Returns:
        Labels [M] and positions [M, G x K], all recipes at the first scale first.
    """
    return _scale_merges(_fixed_recipes(experts, lambdas, among), scales, groups, experts)


def _fixed_recipes(experts: int, lambdas: Sequence[float], among: int | None) -> Recipes:
    ones = _sum_of(range(among or experts), experts)
    arithmetic = [(f"task arithmetic {factor:g}", factor * ones) for factor in lambdas]
    return [(UNIFORM, ones / ones.sum()), *arithmetic]


def _sum_of(members: Sequence[int] | np.ndarray, experts: int) -> np.ndarray:
    return np.bincount(members, minlength=experts).astype(np.float64)


def utility_start_positions(
    utilities: np.ndarray,
    experts: int,
    groups: int = 1,
    scales: Sequence[float] = SCALES,
    best: Sequence[int] = BEST_COUNTS,
    among: int | None = None,
) -> StartPositions:
    """Return recipes that need the utilities of the experts, as `static_start_positions` does.

    They are the weighted soup (`weighted_soup`) and the means of the best m experts, which are the
    positions that a greedy soup would visit if it accepted every expert.

    Args:
        utilities: [K] of the experts alone; NaN for unmeasured experts, which are not merged.
        best: The values of m; one that includes all experts is the uniform soup and is omitted.
        experts, groups, scales, among: See `static_start_positions`.

    Returns:
        Labels [M] and positions [M, G x K]; none if no expert was measured.
    """
    scores = np.asarray(utilities, dtype=np.float64)[: among or experts]
    order = np.argsort(-scores, kind="stable")[: np.isfinite(scores).sum()]  # NaN comes last
    recipes = [(WEIGHTED, weighted_soup(scores, experts))] if len(order) else []
    for count in best:
        if count < len(order):
            recipes.append((f"mean of the best {count}", _sum_of(order[:count], experts) / count))
    return _scale_merges(recipes, scales, groups, experts)


def count_static_merges(experts: int) -> int:
    """Return the number of static merges of this many experts, at `FEW_SCALES`."""
    by_utility = utility_start_positions(np.arange(experts), experts, scales=FEW_SCALES)
    return len(static_start_positions(experts, scales=FEW_SCALES)[0]) + len(by_utility[0])


def weighted_soup(utilities: np.ndarray, experts: int) -> np.ndarray:
    """Return weights [K] in proportion to the utility above the lowest; they sum to 1.

    An expert without a utility has the weight 0; if all utilities are equal, so are the weights.

    Args:
        utilities: Of the first experts; the others have the weight 0.
    """
    known = np.isfinite(utilities)
    above = np.where(known, utilities - np.nanmin(utilities), 0.0)
    weights = above if above.any() else known.astype(np.float64)
    return np.pad(weights / weights.sum(), (0, experts - len(weights)))


def _scale_merges(
    recipes: Recipes, scales: Sequence[float], groups: int, experts: int
) -> StartPositions:
    found: dict[tuple[float, ...], tuple[str, np.ndarray]] = {}
    for scale in scales:
        for label, mix in recipes:
            name = label if scale == 1 else f"{label} x {scale:g}"
            # Round, so that 1.5 / 5 and 0.3 are one position.
            key = tuple(np.round(scale * mix, 12).tolist())
            found.setdefault(key, (name, scale * mix))
    rows = np.array([row for _, row in found.values()]).reshape(len(found), experts)
    return [name for name, _ in found.values()], np.tile(rows, groups)


@dataclass(kw_only=True, eq=False)
class WarmStartOptimizer(Optimizer):
    """Evaluates the experts and, if there are scales, static recipes before its own proposals.

    The first ask has the K experts and the static recipes that fit into N rows, later asks the rest
    of them and the recipes of the experts' utilities (`static_start_positions`,
    `utility_start_positions`). `best_start` [G x K] is the best position of these, from which a
    subclass continues with `_propose_after_start`. Remaining rows of the first ask are random
    mixtures, scaled too. Without scales the first ask is `_initial_positions` of the subclass.

    All measured positions are stored, `rows` [M, G x K], with their `utilities` [M]; the first
    `start_count` are those of the start.

    Args:
        sum_to_one: Positions sum to 1 in each group; false frees the sums.
        start_scales: Factors of the recipes; None is 1 and 1.5 with free sums, else none.
    """

    STATE = (*Optimizer.STATE, "rows", "utilities", "start_count", "expert_utilities")

    sum_to_one: bool = True
    start_scales: Scales | None = None

    def __post_init__(self) -> None:
        if self.start_scales and self.sum_to_one:
            raise UserError(f"""optimizer.start_scales={[*self.start_scales]}: scaled recipes do not
                sum to 1; set optimizer.sum_to_one=false, or start_scales=null""")

    @property
    def active_scales(self) -> Sequence[float]:
        """The factors that apply; empty if the search does not start with recipes."""
        if self.start_scales is None:
            return () if self.sum_to_one else FEW_SCALES
        return self.start_scales

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        self.expert_utilities, self.start_count = np.full(experts, np.nan), 0
        self.rows, self.utilities = np.empty((0, groups * experts)), np.empty(0)
        super().start(experts, seed, groups)

    def _dimensions(self, experts: int) -> int:
        return self.groups * (experts - self.sum_to_one)

    def _bounds(self, low: float, high: float) -> CoefficientBounds:
        return CoefficientBounds(self.experts, low, high, self.sum_to_one, self.groups)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        if not self.active_scales:
            return self._initial_positions(experts, count)
        known = random_streams.expert_positions(experts, self.groups)
        static = static_start_positions(experts, self.groups, self.active_scales)[1]
        rows, draw = np.vstack([known, static])[:count], self._iteration_rng()
        more = random_streams.sample_mixtures(draw, count - len(rows), experts, self.groups)
        return np.vstack([rows, draw.choice(self.active_scales, size=(len(more), 1)) * more])

    def _propose_positions(self) -> np.ndarray:
        rows = self._start_positions()
        return rows if len(rows) else self._propose_after_start()

    def _update_state(self, utilities: np.ndarray) -> None:
        if self.iteration == 0:
            self.expert_utilities = utilities[: self.experts].copy()
        measured = np.isfinite(utilities)
        self.rows = np.vstack([self.rows, self.positions[measured]])
        self.utilities = np.append(self.utilities, utilities[measured])
        if self.is_starting:
            self.start_count = len(self.rows)

    def _restore_state(self) -> None:
        # An empty list loses the row length in JSON.
        self.rows = self.rows.reshape(-1, self.positions.shape[1])

    @property
    def is_starting(self) -> bool:
        """True if the last ask belongs to the start, distinct from the subclass's proposals."""
        recipes = bool(self.active_scales)
        return recipes and (self.iteration == 0 or len(self._start_positions()) > 0)

    @property
    def best_start(self) -> np.ndarray:
        """The best position of the start, [G x K]; the uniform soup if none was measured."""
        if not self.start_count:
            return np.full(self.groups * self.experts, 1 / self.experts)
        return np.asarray(self.rows[np.argmax(self.utilities[: self.start_count])])

    def _start_positions(self) -> np.ndarray:
        """Return the recipes of this iteration, the second or a later one, [M, G x K]."""
        count, common = len(self.evaluate), (self.experts, self.groups, self.active_scales)
        static = static_start_positions(*common)[1]
        learnt = utility_start_positions(self.expert_utilities, *common)[1]
        first = min(count - self.experts, len(static)) + (self.iteration - 1) * count
        return np.vstack([static, learnt])[first : first + count]

    def _initial_positions(self, experts: int, count: int) -> np.ndarray:
        """Return the first ask without recipes, [N, G x K], the experts first."""
        return random_streams.initial_population(experts, count, self.seed, groups=self.groups)

    def _propose_after_start(self) -> np.ndarray:
        """Return at most N rows to evaluate next, [M, G x K]; called once the start is finished."""
        raise NotImplementedError


EXPERT, UNIFORM, WEIGHTED, GREEDY = "expert", "mean of all", "weighted mean", "greedy mean"


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class StaticMerges(Optimizer):
    """Scores the experts, then static recipes of them, and ends.

    - Best single: the experts themselves; all K rows of the pool are scored.
    - Uniform soup: the mean (Wortsman et al. 2022, arXiv 2203.05482).
    - Weighted soup: weights in proportion to the utility above the lowest, w_j = (u_j - min u) /
      sum_i (u_i - min u); the uniform soup if all are equal.
    - Greedy soup (as above, recipe 1): the mean of the best expert and of each that, in the order
      of their utilities, does not lower the utility of the mean; one position per ask.
    - Task arithmetic (Ilharco et al. 2023, arXiv 2212.04089): lambda times the sum of all.

    All groups of modules have the same coefficients. Nothing is random. A failed evaluation is not
    repeated: an expert without a utility is in neither the weighted nor the greedy soup, and a mean
    without one is no gain.

    `rows` [M, G x K] is everything asked, in this order, `labels` [M] their names, `utilities` [M]
    their utilities, NaN if failed; those of the last ask are missing until `tell`.

    Args:
        particles: N; None is the experts and all recipes known before anything is scored.
        lambdas: Factors of task arithmetic.
        among: Number of first rows of the pool to merge, as base and synthetic rows
            come after the experts; None is all.
    """

    NAME: ClassVar[str] = "recipes"
    STATE = (*Optimizer.STATE, "rows", "utilities", "labels")

    particles: Particles | None = None
    max_iterations: Positive = 100
    lambdas: Scales = (0.2, 0.3, 0.5)
    among: Annotated[int, Field(ge=2)] | None = None

    def stop_reason(self) -> str | None:
        """Return why the search has ended: all recipes, or the iterations, are finished."""
        if self.has_utilities and not self._plan_merges():
            made = len(self._greedy_soup()[0])
            known = self.among or self.experts
            return f"every recipe is scored; the greedy mean took {made} of {known}"
        return super().stop_reason()

    def _population_size(self, experts: int) -> int:
        return experts + 1 + len(self.lambdas)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        if self.among is not None and self.among > experts:
            raise UserError(f"""optimizer.among={self.among}: the pool has {experts} rows; allowed:
                2 to {experts}, or null for all""")
        self.utilities = np.empty(0)
        self.labels = [EXPERT] * experts
        self.rows = random_streams.expert_positions(experts, self.groups)
        self._add_merges(count - experts)
        self.evaluate[len(self.rows) :] = False
        idle = np.repeat(self.rows[:1], count - len(self.rows), axis=0)
        return np.vstack([self.rows, idle])

    def _propose_positions(self) -> np.ndarray:
        known = len(self.rows)
        self._add_merges(len(self.positions))
        return self.rows[known:]

    def _update_state(self, utilities: np.ndarray) -> None:
        self.utilities = np.append(self.utilities, utilities[self.evaluate])

    def _add_merges(self, most: int) -> None:
        for label, mix in self._plan_merges()[:most]:
            self.labels = [*self.labels, label]
            self.rows = np.vstack([self.rows, np.tile(mix, self.groups)])

    def _plan_merges(self) -> list[tuple[str, np.ndarray]]:
        """Return labels and coefficients [K] of the next recipes, without those already asked."""
        plan = [*_fixed_recipes(self.experts, self.lambdas, self.among)]
        scores = self.utilities[: self.among or self.experts]
        if np.isfinite(scores).any():
            plan.append((WEIGHTED, weighted_soup(scores, self.experts)))
        plan = [one for one in plan if one[0] not in self.labels]
        soup, candidate = self._greedy_soup()
        if candidate is not None:
            members = _sum_of([*soup, candidate], self.experts)
            plan.insert(0, (GREEDY, members / members.sum()))
        return plan

    def _greedy_soup(self) -> tuple[list[int], int | None]:
        """Return the members of the greedy soup so far, and the next expert to try, if any."""
        scores = self.utilities[: self.among or self.experts]
        order = [int(j) for j in np.argsort(-scores, kind="stable") if np.isfinite(scores[j])]
        asked = zip(self.labels, self.utilities, strict=False)
        tried = iter(utility for label, utility in asked if label == GREEDY)
        soup = order[:1]
        best = scores[soup[0]] if soup else np.nan
        for candidate in order[1:]:
            utility = next(tried, None)
            if utility is None:
                return soup, candidate
            if utility >= best:
                soup, best = [*soup, candidate], utility
        return soup, None
