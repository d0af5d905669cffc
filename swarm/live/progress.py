"""How far a search is: what a live view shows of it, and what its folder says."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm.executors import JobResult

RECENT_ITERATIONS = 5
"""So many last iterations say how long the next ones take."""


class SearchProgress:
    """The numbers of a running search.

    Args:
        most: The most iterations that may come.
        clock: Gives the seconds.

    Attributes:
        what: The evaluation at hand, in words.
        iteration: The one at hand, or the last.
        done, total: Items of the evaluation at hand, counted for every position.
        utilities: [particles][iterations], `None` where none was measured.
        lowest: The lowest utility so far.
        best: The highest utility so far; `gain` what it has over the one before, `bettered` the
            iteration that found it.
        asked: Prompts that were put; `saved` by what others were not.
        writing: What is being written; empty if nothing.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self.what = "starting"
        self.iteration = 0
        self.done = self.total = 0
        self.utilities: list[list[float | None]] = []
        self.best: float | None = None
        self.lowest: float | None = None
        self.gain = 0.0
        self.bettered = 0
        self.asked = 0
        self.saved = {"racing": 0, "known": 0, "shared": 0}
        self.writing = ""
        self.prompts = self.tokens = 0
        self._seconds: list[float] = []
        self._began = self._clock()

    def start_evaluation(self, what: str, iteration: int, positions: int, items: int) -> None:
        """An evaluation of so many positions on so many items begins."""
        self.what, self.iteration = what, iteration
        self.done, self.total = 0, positions * items
        self.prompts = self.tokens = 0
        self._began = self._clock()

    def add_job_result(self, result: JobResult) -> None:
        """A job is done."""
        scored = sum(len(scores) for scores in result.scores)
        self.done += result.prompts if result.gradient else scored
        self.prompts += result.prompts
        self.tokens += result.tokens

    def end_iteration(self, entry: Mapping[str, Any]) -> None:
        """An iteration is over.

        Args:
            entry: Its round, as the record keeps it.
        """
        self._seconds.append(self._clock() - self._began)
        self.add_iteration(entry)

    def add_iteration(self, entry: Mapping[str, Any]) -> None:
        """Count a round of the record, of this process or of one before it."""
        number = len(self.utilities[0]) if self.utilities else 0
        self.utilities = self.utilities or [[] for _ in entry["utilities"]]
        for mine, utility in zip(self.utilities, entry["utilities"], strict=True):
            mine.append(utility)
        known = [u for u in entry["utilities"] if u is not None]
        highest = max(known, default=None)
        self.lowest = min((u for u in (self.lowest, *known) if u is not None), default=None)
        if highest is not None and (self.best is None or highest > self.best):
            self.gain = 0.0 if self.best is None else highest - self.best
            self.best, self.bettered = highest, number
        put, shared = entry.get("prompts_asked", 0), entry.get("prompts_shared", 0)
        scored = sum(count or 0 for count in entry.get("items_scored", []))
        self.asked += put - shared
        self.saved["racing"] += entry.get("prompts_saved", 0)
        self.saved["known"] += max(0, scored - put)
        self.saved["shared"] += shared

    @property
    def latest_utilities(self) -> list[float | None]:
        """Every particle's utility in the last iteration."""
        return [mine[-1] for mine in self.utilities]

    @property
    def prompts_per_second(self) -> float:
        """Of the evaluation at hand; 0 if nothing had to be evaluated."""
        return self.prompts / self._elapsed_seconds()

    @property
    def tokens_per_second(self) -> float:
        """Read and generated, in the evaluation at hand."""
        return self.tokens / self._elapsed_seconds()

    def seconds_left(self) -> float | None:
        """At most, by the pace of the last iterations; `None` while nothing is known of it.

        An evaluation after the last iteration counts by its own pace. What follows it does not.
        """
        here = self._evaluation_seconds_left()
        if not self.what.startswith("iteration"):
            return here
        if not self._seconds:
            if here is None:
                return None
            return here + (self.most - self.iteration) * (self._elapsed_seconds() + here)
        recent: Sequence[float] = self._seconds[-RECENT_ITERATIONS:]
        # The first has the start of the workers in it.
        mean = sum(recent[1:] or recent) / len(recent[1:] or recent)
        over = len(self.utilities[0]) > self.iteration if self.utilities else False
        rest = max(0, self.most - self.iteration) * mean
        return rest if over else rest + (max(0.0, mean - self._elapsed_seconds()) if here is None else here)

    def to_status(self) -> dict[str, Any]:
        """The numbers that `swarm.running.Hold.say` puts into the folder."""
        left = self.seconds_left()
        return {
            "what": self.what, "iteration": self.iteration, "most": self.most, "done": self.done,
            "total": self.total, "prompts_per_second": round(self.prompts_per_second, 2),
            "seconds_left": None if left is None else round(left), "best": self.best,
        }  # fmt: skip

    def _elapsed_seconds(self) -> float:
        return max(self._clock() - self._began, 1e-9)

    def _evaluation_seconds_left(self) -> float | None:
        """Seconds that the evaluation at hand still takes."""
        if not self.done:
            return None
        return self._elapsed_seconds() / self.done * max(0, self.total - self.done)
