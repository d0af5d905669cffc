"""The most dev prompts that a search may cost, so that several can be compared.

Gradients count too, in prompt-equivalents: see `swarm.record.Record.prompts`.
"""

import math
from collections.abc import Sequence

import numpy as np

from swarm.errors import UserError
from swarm.known import EvaluatedPositions
from swarm.record import RunRecord, position_key


class Budget:
    """Lets a search ask whole positions as long as their prompts fit.

    A position that the search has met before is free, and so is none that only another search has
    met. What is asked at the end (test, confirmation) is not counted.

    Args:
        prompts: The most; `None` is no limit.

    Raises:
        UserError: It is no number of prompts.
    """

    def __init__(self, prompts: int | None = None) -> None:
        if prompts is not None and (type(prompts) is not int or prompts < 1):
            raise UserError(
                f"budget={prompts!r}: must be null or a number of dev prompts, 1 or more"
            )
        self.prompts = prompts
        self._items = 0

    def check_experts_fit(self, experts: int, items: int) -> None:
        """Whether the experts fit.

        Args:
            experts: How many.
            items: Dev items that a position is asked.

        Raises:
            UserError: They do not.
        """
        self._items = items
        if self.prompts is not None and self.prompts < experts * items:
            raise UserError(
                f"budget={self.prompts}: the {experts} experts alone take {experts} x {items} dev "
                "prompts; give more, or lower task.dev_limit"
            )

    @property
    def max_positions(self) -> int:
        """How many positions there is room for, once `check` knows the items."""
        return (self.prompts or 0) // self._items

    def exhausted_reason(self, record: RunRecord) -> str | None:
        """Why the budget ends the search: no room for one more position; else `None`."""
        if not record.iterations or self._remaining_prompts(record) >= self._items:
            return None
        return f"{record.prompts_spent()} of a budget of {self.prompts} dev prompts asked"

    def allows_gradients(self, record: RunRecord, cost: int) -> bool:
        """Whether gradients of this cost leave room for the evaluation of a position."""
        return cost + self._items <= self._remaining_prompts(record)

    def affordable_rows(
        self,
        record: RunRecord,
        positions: np.ndarray,
        wanted: Sequence[int],
        known: EvaluatedPositions,
        spent: int = 0,
    ) -> list[int]:
        """Those of the wanted rows of an ask that there is room for, the first ones first.

        Args:
            known: Positions that were met before.
            spent: Prompt-equivalents of this round that are not in the record yet.
        """
        room = (self._remaining_prompts(record) - spent) // self._items
        new: set[str] = set()
        found = []
        for i in wanted:
            if positions[i] not in known:
                if len(new | {position_key(positions[i])}) > room:
                    continue
                new.add(position_key(positions[i]))
            found.append(i)
        return found

    def _remaining_prompts(self, record: RunRecord) -> float:
        if self.prompts is None:
            return math.inf
        return self.prompts - record.prompts_spent()
