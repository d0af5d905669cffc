"""Batches of texts of like lengths, halved where the device has no memory for them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from swarm.errors import UserError

T = TypeVar("T")


class TextBatcher:
    """Puts texts through a model in batches of at most so many padded tokens.

    Args:
        budget: The most padded tokens in a batch; halved, and remembered, when the device runs out
            of memory.
        who: The model and its device, for the message when one text alone does not fit.
    """

    def __init__(self, budget: int, who: str) -> None:
        self.budget = budget
        self.who = who

    def run(self, lengths: Sequence[int], answer: Callable[[list[int]], Sequence[T]]) -> list[T]:
        """What `answer` gives for each text, in order.

        The longest are asked first, so that a batch that does not fit shows at once.

        Args:
            lengths: Tokens of each text.
            answer: Given places of texts, gives one result for each.

        Raises:
            UserError: The device has no memory for the longest text alone.
        """
        import torch

        waiting = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        found: dict[int, T] = {}
        while waiting:
            tokens = max(1, lengths[waiting[0]])
            chosen = waiting[: max(1, self.budget // tokens)]
            try:
                found.update(zip(chosen, answer(chosen), strict=True))
            except torch.OutOfMemoryError:
                self._halve_budget(len(chosen), tokens)
                continue
            waiting = waiting[len(chosen) :]
        return [found[i] for i in range(len(lengths))]

    def _halve_budget(self, rows: int, tokens: int) -> None:
        import torch

        torch.cuda.empty_cache()
        if rows == 1:
            raise UserError(
                f"out of memory: no room for {tokens} tokens of one text in {self.who}; give it a "
                "device of its own with task.scorer.device"
            )
        self.budget = rows * tokens // 2
