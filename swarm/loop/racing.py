"""Racing: a particle is asked no more items once it cannot, or hardly can, beat its own best.

The idea is that of irace and F-race (Birattari et al., GECCO 2002): compare on the same items in
blocks and drop who falls behind. Here everybody races against the own personal best alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Protocol

import numpy as np

from swarm.errors import UserError
from swarm.optimizers.base import MultiObjectiveOptimizer, Optimizer, SupportsEarlyStopping
from swarm.optimizers.random_streams import counter_rng
from swarm.runs.run_folder import RunRecord
from swarm.tasks.base import Score, Task

RACING_RULES = ("off", "exact", "z")

ITEM_ORDER_STREAM = 1_000_000
"""Purpose of the draw of an item order; far from those of any optimizer, which share the seed."""


class DevScoreFn(Protocol):
    """Scores positions together on the dev items at some places."""

    def __call__(
        self, positions: Sequence[Sequence[float]], *, items: Sequence[int]
    ) -> list[list[Score]]:
        """One score an item for each position, in the order of the places."""
        ...


@dataclass(frozen=True, slots=True)
class Incumbent:
    """What a particle has to beat: its personal best's utility and value on every dev item."""

    utility: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RaceResult:
    """What came of the particles of one iteration.

    Attributes:
        scores: Of each particle that was evaluated, place of the item -> score, in file order.
        stopped: Those of them that were not asked all items.
        asked: Prompts put, counted as items a position; equal positions are asked once.
        saved: Prompts that were not put because a particle was stopped, counted alike.
    """

    scores: dict[int, dict[int, Score]]
    stopped: tuple[int, ...]
    asked: int
    saved: int

    def complete_scores(self) -> dict[int, list[Score]]:
        """The scores of the particles that were asked all items; of no other is a utility known."""
        return {i: list(s.values()) for i, s in self.scores.items() if i not in self.stopped}

    def to_record(self, particles: int) -> dict[str, Any]:
        """What the record keeps of it; `items_scored` is None for who was not evaluated."""
        scored = [len(self.scores[i]) if i in self.scores else None for i in range(particles)]
        return {
            "items_scored": scored,
            "prompts_asked": self.asked,
            "prompts_saved": self.saved,
        }


class Racing:
    """When to stop a particle; it is stopped between chunks of items, never in the first round.

    A stopped particle has no utility, so every personal and global best is scored on all items.

    - "off": never.
    - "exact": when its remaining items, all at their highest value, cannot lift it strictly above
      its personal best. No improvement is ever lost. The items come hardest first: in the order
      of their mean value over the swarm's personal bests, of equal ones the first in the file.
    - "z": when a one-sided paired z-test on the items asked so far says that on all dev items it
      would be worse than its personal best. The items come in an order drawn anew each iteration.
      The normal approximation is rough below about 25 items; an improvement can be lost.

    Args:
        rule: As above.
        level: With "z", the chance, at most, that a particle just as good as its personal best
            is stopped in an iteration, over all looks: Bonferroni's correction divides it by their
            number. Above 0, below .5.
        chunk: Items asked between two looks; the particles still in the race are asked together.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(self, rule: str = "off", level: float = 0.05, chunk: int = 25) -> None:
        if rule is False:
            rule = "off"  # what YAML makes of the bare word
        if rule not in RACING_RULES:
            raise UserError(f"racing.rule={rule}: must be one of {', '.join(RACING_RULES)}")
        if not isinstance(level, float) or not 0 < level < 0.5:
            raise UserError(f"racing.level={level}: must be a number above 0 and below 0.5")
        if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
            raise UserError(f"racing.chunk={chunk}: must be a whole number above 0")
        self.rule, self.level, self.chunk = rule, level, chunk
        self._highest = 1.0
        self._values: dict[tuple[int, int], tuple[float, ...]] = {}

    def check_raceable(self, task: Task, optimizer: Optimizer) -> None:
        """Whether this task and this optimizer, started, can be raced.

        Raises:
            UserError: The optimizer has no personal bests; the utility is not the mean of the
                items' values; with "exact", these have no highest value.
        """
        if self.rule == "off":
            return
        if not isinstance(optimizer, SupportsEarlyStopping):
            raise UserError(
                f"racing={self.rule}: {type(optimizer).__name__} has no personal bests to race "
                "against, it needs every utility; use racing=off or optimizer=pso"
            )
        highest = getattr(task, "highest", None)
        if hasattr(task, "subtask_utilities") or (self.rule == "exact" and highest is None):
            raise UserError(
                f"racing={self.rule}: the utility of task {task.name} is not the mean of item "
                f"values{' with a highest one' * (self.rule == 'exact')}; use racing=off"
            )
        self._highest = highest if highest is not None else math.inf

    def find_incumbents(self, record: RunRecord) -> list[Incumbent | None]:
        """Of each particle what it has to beat, None if nothing; none at all if nobody races."""
        if self.rule == "off" or not record.iterations:
            return []
        found: list[Incumbent | None] = []
        for i in range(len(record.iterations[0]["positions"])):
            place = record.best_index(i)
            utility = record.utility_at(place)
            if utility is not None and place not in self._values:
                values = tuple(float(row["value"]) for row in record.load_iteration_answers(*place))
                self._check_mean_utility(values, utility)
                self._values[place] = values
            found.append(None if utility is None else Incumbent(utility, self._values[place]))
        return found

    def race_particles(
        self,
        ask: DevScoreFn,
        positions: Mapping[int, Sequence[float]],
        marks: Sequence[Incumbent | None],
        items: int,
        seed: int,
        iteration: int,
    ) -> RaceResult:
        """Score particles on dev, chunk by chunk, as long as each is worth it.

        Args:
            positions: [K] of each particle that is to be scored.
            marks: As `marks` gives them, of all particles.
            items: How many there are.
        """
        racing = any(mark is not None for mark in marks)
        order = self.item_order(marks, items, seed, iteration) if racing else list(range(items))
        chunk = self.chunk if racing else items
        found: dict[int, dict[int, Score]] = {i: {} for i in positions}
        live, asked = list(positions), 0
        for start in range(0, items, chunk):
            if racing:
                live = [i for i in live if not self._should_stop(found[i], marks[i], items)]
            places = order[start : start + chunk]
            rows = [positions[i] for i in live]
            asked += _count_distinct(rows) * len(places)
            for i, scores in zip(live, ask(rows, items=places) if rows else [], strict=True):
                found[i].update(zip(places, scores, strict=True))
        return RaceResult(
            {i: dict(sorted(scores.items())) for i, scores in found.items()},
            tuple(i for i, scores in found.items() if len(scores) < items),
            asked,
            _count_distinct(list(positions.values())) * items - asked,
        )

    def item_order(
        self, marks: Sequence[Incumbent | None], items: int, seed: int, iteration: int
    ) -> list[int]:
        """The order in which every particle of an iteration meets the items."""
        if self.rule == "z":
            draw = counter_rng(seed, iteration, 0, ITEM_ORDER_STREAM)
            return [int(place) for place in draw.permutation(items)]
        known = np.array([mark.values for mark in marks if mark is not None])
        return [int(place) for place in np.argsort(known.mean(axis=0), kind="stable")]

    def _check_mean_utility(self, values: Sequence[float], utility: float) -> None:
        """A task that promises less than it looks like is found out by its first answers."""
        if abs(fmean(values) - utility) > 1e-9 or max(values) > self._highest:
            raise UserError(
                f"racing={self.rule}: the task's utility is not the mean of item values of at most "
                f"{self._highest:g}; begin another run with racing=off"
            )

    def _should_stop(self, scores: Mapping[int, Score], mark: Incumbent | None, items: int) -> bool:
        if mark is None:
            return False
        values = [score.value for score in scores.values()]
        if self.rule == "exact":
            return cannot_beat(values, items, self._highest, mark.utility)
        looks = max(1, (items - 1) // self.chunk)
        gains = [s.value - mark.values[place] for place, s in scores.items()]
        return is_significantly_worse(gains, items, self.level / looks)


def cannot_beat(values: Sequence[float], items: int, highest: float, best: float) -> bool:
    """Whether the mean over all items stays at or below `best`, whatever the items left give.

    Exact in floating point too: `fmean` rounds once, so it never falls when a value rises.

    Args:
        values: Of the items asked so far.
        items: How many there are in all.
        highest: The highest value that an item can have.
    """
    return fmean([*values, *[highest] * (items - len(values))]) <= best


def is_significantly_worse(gains: Sequence[float], items: int, level: float) -> bool:
    """Whether the mean gain over all items is below 0, by a one-sided paired z-test.

    The items asked are a random part of the dev items, and the question is about these alone: the
    error shrinks to 0 as the last one is asked (finite population correction; Cochran, Sampling
    Techniques, 1977, section 2.6).

    Args:
        gains: New value less old value of each item asked; at least 2 for an answer.
        items: How many there are in all.
        level: Of the test.
    """
    asked = len(gains)
    if asked < 2:
        return False
    variance = float(np.var(gains, ddof=1)) / asked * (1 - asked / items)
    return fmean(gains) < NormalDist().inv_cdf(level) * math.sqrt(variance)


def tell_optimizer(
    optimizer: Optimizer,
    utilities: np.ndarray,
    stopped: Sequence[int],
    objectives: np.ndarray | None = None,
) -> None:
    """Tell an optimizer the utilities [N], and what else it can take.

    Args:
        stopped: Particles that were stopped.
        objectives: [N, M]; `None` where the task has no parts, or nothing was measured.
    """
    if isinstance(optimizer, MultiObjectiveOptimizer):
        optimizer.tell(utilities, objectives)
    elif stopped and isinstance(optimizer, SupportsEarlyStopping):
        optimizer.tell(utilities, np.isin(np.arange(len(utilities)), stopped))
    else:
        optimizer.tell(utilities)


def _count_distinct(rows: Sequence[Sequence[float]]) -> int:
    return len({tuple(float(c) for c in row) for row in rows})
