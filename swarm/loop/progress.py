"""The numbers of a running search: what is done, how quickly, and how long it still takes."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from swarm.executors import JobResult

RECENT_ITERATIONS = 5
"""Number of last iterations from which the remaining time is estimated."""


class SearchProgress:
    """Progress numbers of a running search.

    Args:
        max_iterations: Maximum number of iterations.
        budget: Maximum cost on dev in prompt-equivalents; `None` is no limit.
        clock: Returns the time in seconds.
        limit: Maximum duration with the test, in seconds; `None` is no limit.

    Attributes:
        activity: Description of the current evaluation.
        iteration: The current iteration, or the last one.
        done, total: Items of the current evaluation, counted for every position or gradient step.
        began: When the current evaluation began, by the clock.
        final_items: Number of items to evaluate after the search, at most.
        utilities: [particles][iterations], `None` where none was measured.
        lowest: The lowest utility so far.
        best: The highest utility so far; `gain` is its improvement over the previous one,
            `best_iteration` the iteration that found it.
        prompts_scored: Number of prompts scored; `saved` counts prompts saved, by cause.
        spent: Cost on dev so far, in prompt-equivalents; a gradient counts as three.
        seconds: Duration of the iterations so far, as recorded for `limit`.
        writing: Description of the current write; empty if none.
    """

    def __init__(
        self,
        max_iterations: int,
        clock: Callable[[], float] = time.monotonic,
        budget: int | None = None,
        limit: float | None = None,
    ) -> None:
        self.max_iterations, self.budget, self._clock = max_iterations, budget, clock
        self.limit, self.seconds = limit, 0.0
        self.activity = "starting"
        self.iteration = 0
        self.done = self.total = 0
        self.utilities: list[list[float | None]] = []
        self.best: float | None = None
        self.lowest: float | None = None
        self.gain = 0.0
        self.best_iteration = 0
        self.prompts_scored = 0
        self.saved = {"racing": 0, "known": 0, "shared": 0}
        self.writing = ""
        self.prompts = self.tokens = 0
        self.spent = 0
        self.final_items = 0
        self._current_cost = 0
        # Seconds and prompt-equivalents of each iteration of this process.
        self._paces: list[tuple[float, int]] = []
        self._items_to_come = 0
        self._seconds_per_item: float | None = None
        self._iteration_began: float | None = None
        self.began = self._clock()

    def start_evaluation(
        self, activity: str, iteration: int, positions: int, items: int, to_come: int = 0
    ) -> None:
        """Start an evaluation of this many positions on this many items.

        Args:
            activity: Description; it begins with "iteration" until the last iteration is over.
            to_come: Number of items to evaluate after the last iteration and this evaluation.
        """
        self.began = self._clock()  # first, as a thread may print at any time
        self.activity, self.iteration = activity, iteration
        self.done, self.total = 0, positions * items
        self.prompts = self.tokens = 0
        self._items_to_come = to_come
        if self._iteration_began is None:
            self._iteration_began = self.began

    def add_job_result(self, result: JobResult) -> None:
        """Count a finished job."""
        scored = sum(len(scores) for scores in result.scores)
        self.done += result.prompts if result.gradient else scored
        self.total = max(self.total, self.done)
        self._current_cost += result.prompts * (
            3 if result.gradient is not None and result.gradient.slope.any() else 1
        )
        self.prompts += result.prompts
        self.tokens += result.tokens
        if scored:
            self._seconds_per_item = self.elapsed_seconds / self.done

    def end_iteration(self, entry: Mapping[str, Any]) -> None:
        """Count a finished iteration and its duration.

        Args:
            entry: The iteration's entry in the record.
        """
        now, before = self._clock(), self.spent
        self.add_iteration(entry)
        began = self.began if self._iteration_began is None else self._iteration_began
        if self.spent > before:  # an iteration that evaluates nothing has no pace
            self._paces.append((now - began, self.spent - before))
        self._iteration_began, self._current_cost = now, 0
        self.total = self.done  # racing may have ended it early

    def add_iteration(self, entry: Mapping[str, Any]) -> None:
        """Count an iteration of the record, of this process or an earlier one."""
        number = len(self.utilities[0]) if self.utilities else 0
        self.utilities = self.utilities or [[] for _ in entry["utilities"]]
        for mine, utility in zip(self.utilities, entry["utilities"], strict=True):
            mine.append(utility)
        known = [u for u in entry["utilities"] if u is not None]
        highest = max(known, default=None)
        self.lowest = min((u for u in (self.lowest, *known) if u is not None), default=None)
        if highest is not None and (self.best is None or highest > self.best):
            self.gain = 0.0 if self.best is None else highest - self.best
            self.best, self.best_iteration = highest, number
        put, shared = entry.get("prompts_scored", 0), entry.get("prompts_shared", 0)
        scored = sum(count or 0 for count in entry.get("items_scored", []))
        self.prompts_scored += put - shared
        self.seconds += entry.get("seconds", 0.0)
        self.spent += put + entry.get("losses_computed", 0) + 3 * entry.get("gradients_computed", 0)
        self.saved["racing"] += entry.get("prompts_saved", 0)
        self.saved["known"] += max(0, scored - put)
        self.saved["shared"] += shared

    @property
    def latest_utilities(self) -> list[float | None]:
        """Utility of every particle in the last iteration."""
        return [mine[-1] for mine in self.utilities]

    @property
    def prompts_per_second(self) -> float:
        """Prompts per second in the current evaluation; 0 if there was nothing to evaluate."""
        return self.prompts / self.elapsed_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens read and generated per second in the current evaluation."""
        return self.tokens / self.elapsed_seconds

    def seconds_left(self) -> float | None:
        """Return the seconds left, from the last iterations' pace; `None` if unknown.

        During the search: until the last iteration, or until the budget is spent, whichever is
        sooner, and then for `final_items`; at most until `limit`. Afterwards: until the end of this
        evaluation and of those announced with it.
        """
        here = self.evaluation_seconds_left()
        if not self.searching:
            here = self.estimate_seconds(self.total) if here is None else here
            return (
                None if here is None else here + (self.estimate_seconds(self._items_to_come) or 0)
            )
        bounds = [self._seconds_of_iterations(here), self._seconds_of_budget()]
        left = min((one for one in bounds if one is not None), default=None)
        if left is not None:
            left += self.estimate_seconds(self.final_items) or 0
        if self.limit is None:
            return left
        limit = max(0.0, self.limit - self.seconds - self._iteration_seconds())
        return limit if left is None else min(left, limit)

    def estimate_seconds(self, items: int) -> float | None:
        """Return the seconds for this many items, by the latest evaluation; `None` if unknown."""
        return None if self._seconds_per_item is None else items * self._seconds_per_item

    @property
    def searching(self) -> bool:
        """Whether the current evaluation belongs to an iteration."""
        return self.activity.startswith("iteration")

    def _seconds_of_iterations(self, here: float | None) -> float | None:
        """Return the seconds until the maximum number of iterations is reached."""
        to_come = max(0, self.max_iterations - self.iteration)
        if not self._paces:
            return None if here is None else here + to_come * (self.elapsed_seconds + here)
        recent = [seconds for seconds, _ in self._recent_paces()]
        mean = sum(recent) / len(recent)
        if self.utilities and len(self.utilities[0]) > self.iteration:
            return to_come * mean
        return to_come * mean + max(0.0 if here is None else here, mean - self._iteration_seconds())

    def _seconds_of_budget(self) -> float | None:
        """Return the seconds until the budget is spent."""
        if self.budget is None:
            return None
        recent = self._recent_paces()
        # The current iteration counts, too: the first one with gradients has another pace.
        cost = sum(one for _, one in recent) + self._current_cost
        if not cost:
            return None
        seconds = sum(one for one, _ in recent) + self._iteration_seconds()
        return max(0, self.budget - self.spent - self._current_cost) * seconds / cost

    def _recent_paces(self) -> list[tuple[float, int]]:
        """Return the last iterations' paces; the first includes the start of the workers."""
        recent = self._paces[-RECENT_ITERATIONS:]
        return recent[1:] or recent

    def _iteration_seconds(self) -> float:
        """Return the seconds since the current iteration began."""
        return 0.0 if self._iteration_began is None else self._clock() - self._iteration_began

    @property
    def share(self) -> float:
        """Share of the search that is done: the largest of iterations, budget and time limit."""
        if not self.searching:
            return float(self.iteration > 0)
        iterations = len(self.utilities[0]) / (self.max_iterations + 1) if self.utilities else 0.0
        time = self.seconds / self.limit if self.limit else 0.0
        return min(1.0, max(iterations, self.budget_share or 0.0, time))

    @property
    def budget_share(self) -> float | None:
        """Share of the budget that is spent; `None` without one."""
        if self.budget is None:
            return None
        return min(1.0, (self.spent + self._current_cost) / self.budget)

    def to_status(self) -> dict[str, Any]:
        """Return the status that `swarm.runs.lock.RunLock.update_status` writes to the folder."""
        seconds, budget = self.seconds_left(), self.budget_share
        return {
            "activity": self.activity,
            "iteration": self.iteration,
            "max_iterations": self.max_iterations,
            "done": self.done,
            "total": self.total,
            "share": round(self.share, 4),
            "budget_share": None if budget is None else round(budget, 4),
            "prompts_per_second": round(self.prompts_per_second, 2),
            "seconds_left": None if seconds is None else round(seconds),
            "best": self.best,
        }

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the current evaluation began."""
        return max(self._clock() - self.began, 1e-9)

    def evaluation_seconds_left(self) -> float | None:
        """Return the seconds that the current evaluation still takes."""
        if not self.done:
            return None
        return self.elapsed_seconds / self.done * max(0, self.total - self.done)
