"""Candidates of an evaluation: one or several voters, each of which answers all items of a task."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm.executors.worker import JobUsage as JobUsage
from swarm.models.base import Completion, Request
from swarm.tasks.base import Item, Score, Task


class Candidate(ABC):
    """One voter, or several of which each answers every item.

    Attributes:
        names: Names of the voters, in the order of their answers; set by `check`.
        reads_dev: Whether dev items are answered too, whatever the split.
        scale: Scale of a task's values, measured by the search that the candidate comes from.
        rivals: Description of the other voters, if the first one is compared with them.
    """

    names: list[str]
    reads_dev: bool = False
    scale: Mapping[str, Any] | None = None
    rivals = ""

    @abstractmethod
    def check(self, task: Task) -> None:
        """Check quickly, before a model is loaded, that all requirements are met.

        Raises:
            UserError: Something is missing or inconsistent, or the candidate does not support the
                task.
        """

    def model_contexts(self) -> Sequence[tuple[Any, float]]:
        """Return the tokenizer and the context in tokens of each known model; after `check`."""
        return ()

    @abstractmethod
    def open(self, device: str) -> None:
        """Load what is needed on `device` ("cpu", "cuda:0", ...), once.

        Raises:
            UserError: The files do not contain a model, or the device is out of memory.
        """

    @abstractmethod
    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """Return one list of scores per voter, in the items' order; `meter` counts requests."""

    def usage_per_voter(self) -> Sequence[Mapping[str, Any]]:
        """Return "calls", "tokens" and "cost" of each voter's answers; empty if unknown."""
        return ()

    def fingerprint(self) -> str:
        """Return a text that changes with the weights; "" if unknown."""
        return ""


def run_task(
    task: Task, items: Sequence[Item], ask: Callable[[list[Request]], list[Completion]]
) -> list[Score]:
    """Run a task to its end with a function that answers its requests; one score per item."""
    game = task.run(items)
    try:
        requests = next(game)
        while True:
            requests = game.send(ask(requests))
    except StopIteration as end:
        found: list[Score] = end.value
        return found
