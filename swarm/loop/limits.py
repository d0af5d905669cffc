"""What ends a search before its last iteration: a budget of prompts, and a limit of time."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from swarm.errors import UserError
from swarm.loop.evaluator import EvaluatedPositions
from swarm.runs.folder import RunRecord


class Budget:
    """Limits the number of dev prompts of a search, so that searches can be compared at equal cost.

    Only whole positions are scored, as long as their prompts fit. A position that this search has
    evaluated before is free; one known only from the shared cache is not. Prompts after the search
    (test, confirmation) are not counted. A gradient counts as three prompts.

    Args:
        prompts: Maximum number of prompts; `None` is no limit.
    """

    def __init__(self, prompts: int | None = None) -> None:
        self.prompts = prompts
        self.items = 0  # dev items that a position costs

    def check_experts_fit(self, experts: int, items: int) -> None:
        """Check that scoring the experts on this many dev items fits the budget.

        Raises:
            UserError: The experts do not fit.
        """
        self.items = items
        if self.prompts is not None and self.prompts < experts * items:
            raise UserError(
                f"budget={self.prompts}: the {experts} experts alone need {experts} x {items} "
                "dev prompts; raise it, or lower task.dev_limit"
            )

    def remaining_prompts(self, record: RunRecord) -> float:
        """Return the prompts left; infinity without a budget."""
        return math.inf if self.prompts is None else self.prompts - record.prompts_spent()

    def exhausted_reason(self, record: RunRecord) -> str | None:
        """Return why the budget ends the search (no room for another position), else `None`."""
        if not record.iterations or self.remaining_prompts(record) >= self.items:
            return None
        return f"{record.prompts_spent()} of a budget of {self.prompts} dev prompts used"

    def affordable_rows(
        self,
        record: RunRecord,
        positions: np.ndarray,
        wanted: Sequence[int],
        known: EvaluatedPositions,
        spent: int = 0,
    ) -> list[int]:
        """Return those of the wanted rows that fit the budget, in order.

        Args:
            known: Positions evaluated before; they are free.
            spent: Prompt-equivalents of this iteration that are not in the record yet.
        """
        affordable = (self.remaining_prompts(record) - spent) // self.items
        new: set[tuple[float, ...]] = set()
        found = []
        for i in wanted:
            row = tuple(positions[i].tolist())
            if row not in new and row not in known:
                if len(new) >= affordable:
                    continue
                new.add(row)
            found.append(i)
        return found


class TimeLimit:
    """Ends a search in time for the evaluations after it.

    Counts the seconds of each iteration in the record, thus of a resumed search as a whole. The
    first iteration always completes, and half of the time is the search's: evaluations that take
    longer than the other half exceed the limit.

    Args:
        minutes: Maximum duration of the search with its test; `None` is no limit, "auto" is 10
            without a budget.
        budget: The search's budget, see `Budget`.
    """

    AUTO = 10.0

    def __init__(
        self, minutes: float | Literal["auto"] | None = None, budget: int | None = None
    ) -> None:
        if minutes == "auto":
            minutes = self.AUTO if budget is None else None
        self.minutes = minutes
        self.seconds = None if minutes is None else 60 * minutes
        self._began, self.scoring = time.monotonic(), 0.0  # of it, the seconds of scoring

    def begin(self) -> None:
        """Begin to count the seconds of an iteration."""
        self._began, self.scoring = time.monotonic(), 0.0

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds since `begin` and those of scoring, and begin anew.

        Empty without a limit, so that such a record does not depend on the machine.
        """
        found = {"seconds": time.monotonic() - self._began, "scoring_seconds": self.scoring}
        self.begin()
        return found if self.minutes is not None else {}

    def exhausted_reason(self, record: RunRecord, final_items: int) -> str | None:
        """Return why the time ends the search, else `None`.

        Another iteration is assumed to take as long as the longest of the last three, without the
        first one, which evaluates the start.

        Args:
            final_items: Number of items to evaluate after the search.
        """
        entries = record.iterations
        if self.seconds is None or not entries:
            return None
        spent = sum(entry.get("seconds", 0.0) for entry in entries)
        following = max(entry.get("seconds", 0.0) for entry in (entries[1:] or entries)[-3:])
        scoring = sum(entry.get("scoring_seconds", 0.0) for entry in entries)
        asked = sum(e["prompts_scored"] - e.get("prompts_shared", 0) for e in entries)
        final = final_items * scoring / max(1, asked)
        if spent + following + min(final, self.seconds / 2) <= self.seconds:
            return None
        return f"time limit of {self.minutes:g} minutes; a larger minutes= continues"

    def was_raised(self, state: Mapping[str, Any]) -> bool:
        """Return whether the search of a state ended by a lower limit than this one."""
        before = state.get("minutes")
        return before is not None and (self.minutes is None or self.minutes > before)
