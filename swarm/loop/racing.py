"""Racing: a particle is stopped early once it cannot beat its personal best.

The idea is that of irace and F-race (Birattari et al., GECCO 2002): compare on the same items in
blocks and drop candidates that fall behind. Here each particle races only against its own personal
best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from swarm._util.settings import Positive, checked
from swarm.errors import UserError
from swarm.optimizers.base import Optimizer
from swarm.runs.folder import RunRecord
from swarm.tasks.base import Score, Task

DevScoreFn = Callable[[Sequence[Sequence[float]], Sequence[int]], list[list[Score]]]
"""Scores positions together on the dev items at the given indices, in their order."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The score to beat: a personal best's utility and its value on every dev item."""

    utility: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Result of racing the particles of one iteration.

    Attributes:
        scores: Of each evaluated particle, item index -> score, in file order.
        stopped: Evaluated particles that were stopped before their last item.
        prompts_scored: Number of prompts scored, counted per item and position; equal positions
            count once.
        saved: Number of prompts saved by stopping particles, counted alike.
    """

    scores: dict[int, dict[int, Score]]
    stopped: tuple[int, ...]
    prompts_scored: int
    saved: int


@checked("racing")
class Racing:
    """Stops particles early, between chunks of items and never in the first iteration.

    A stopped particle has no utility, so every personal and global best is scored on all items.

    - "off": never.
    - "exact": when its remaining items, all at their highest value, cannot lift it strictly above
      its personal best. No improvement is ever lost. Items are ordered hardest first: by their mean
      value over the swarm's personal bests, ties in file order.

    Args:
        rule: One of the above.
        chunk: Items between two looks; particles still in the race are scored together.
    """

    def __init__(self, rule: Literal["off", "exact"] = "off", chunk: Positive = 25) -> None:
        self.rule, self.chunk = rule, chunk
        self._highest = 1.0
        self._values: dict[tuple[int, int], tuple[float, ...]] = {}

    def check_raceable(self, task: Task, optimizer: Optimizer) -> None:
        """Check that this task and this (started) optimizer can be raced.

        Raises:
            UserError: The optimizer has no personal bests; the utility is not the mean of the
                items' values, or these have no highest value.
        """
        if self.rule == "off":
            return
        if not optimizer.can_race:
            raise UserError(
                f"racing={self.rule}: {type(optimizer).__name__} needs all utilities and has "
                "no personal bests to race against; use racing=off or optimizer=pso"
            )
        if task.tasks or task.highest is None:
            raise UserError(
                f"racing={self.rule}: the utility of task {task.name} is not the mean of item "
                "values with a known maximum; use racing=off"
            )
        self._highest = task.highest

    def find_incumbents(self, record: RunRecord) -> list[Incumbent | None]:
        """Return each particle's incumbent (None if it has none); empty if racing is off."""
        if self.rule == "off" or not record.iterations:
            return []
        found: list[Incumbent | None] = []
        for i in range(len(record.iterations[0]["positions"])):
            index = record.find_best(i)
            utility = record.utility_at(index)
            if utility is None:
                found.append(None)
                continue
            if index not in self._values:
                values = tuple(float(row["value"]) for row in record.load_answers(index))
                if abs(fmean(values) - utility) > 1e-9 or max(values) > self._highest:
                    raise UserError(
                        f"racing={self.rule}: the task's utility is not the mean of item values of "
                        f"at most {self._highest:g}; start a new run with racing=off"
                    )
                self._values[index] = values
            found.append(Incumbent(utility, self._values[index]))
        return found

    def race_particles(
        self,
        ask: DevScoreFn,
        positions: Mapping[int, Sequence[float] | np.ndarray],
        marks: Sequence[Incumbent | None],
        items: int,
    ) -> RaceResult:
        """Score particles on dev, chunk by chunk, until each is finished or stopped.

        Args:
            positions: Position [K] of each particle to be scored.
            marks: Incumbents of all particles, as returned by `find_incumbents`.
            items: Number of dev items.
        """
        keys, found = dict[int, tuple[float, ...]](), dict[int, dict[int, Score]]()
        for i, row in positions.items():
            keys[i], found[i] = tuple(map(float, row)), {}
        live, evaluated, order, chunk = list(positions), 0, list(range(items)), items
        racing = list(filter(None, marks))
        if racing:  # the hardest items first
            known = np.array([mark.values for mark in racing])
            order, chunk = np.argsort(known.mean(axis=0), kind="stable").tolist(), self.chunk
        for start in range(0, items, chunk):
            if racing:
                live = [i for i in live if not self._cannot_win(found[i], marks[i], items)]
            indices, asked = order[start : start + chunk], list(map(keys.__getitem__, live))
            evaluated += len(set(asked)) * len(indices)
            for i, scores in zip(live, ask(asked, indices) if live else (), strict=True):
                found[i].update(zip(indices, scores, strict=True))
        stopped = []
        for i, mine in found.items():
            found[i] = dict(sorted(mine.items()))
            if len(mine) < items:
                stopped.append(i)
        saved = len(set(keys.values())) * items - evaluated
        return RaceResult(found, tuple(stopped), evaluated, saved)

    def _cannot_win(self, scores: Mapping[int, Score], mark: Incumbent | None, items: int) -> bool:
        values = [score.value for score in scores.values()]
        return mark is not None and cannot_beat(values, items, self._highest, mark.utility)


def cannot_beat(values: Sequence[float], items: int, highest: float, best: float) -> bool:
    """Return whether the mean over all items stays at or below `best` whatever the rest scores.

    Exact in floating point too: `fmean` rounds once, so it never falls when a value rises.

    Args:
        values: Values of the items scored so far.
        items: Total number of items.
        highest: Highest value that an item can have.
    """
    return fmean([*values, *[highest] * (items - len(values))]) <= best
