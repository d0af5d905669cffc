"""Candidates: whatever answers the items of a task, with one voice or with several."""

from collections.abc import Callable, Sequence
from typing import Protocol

from swarm.executors.worker import JobUsage
from swarm.models.base import Completion, Request
from swarm.tasks.base import Item, Score, Task

__all__ = ["Candidate", "JobUsage", "run_task"]


class Candidate(Protocol):
    """One voice, or several of which each answers every item for itself.

    Attributes:
        names: Of the voices, in the order of their answers; there once it was checked.
    """

    names: list[str]

    def check(self, task: Task) -> None:
        """Look, quickly and before a model is loaded, for what will be needed.

        Raises:
            UserError: Something is missing or does not go together, or the task cannot be put to
                it.
        """
        ...

    def open(self, device: str) -> None:
        """Load what is needed on `device` ("cpu", "cuda:0", ...), once.

        Raises:
            UserError: The files do not make a model, or the device has no room for it.
        """
        ...

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """One list of scores a voice, in the order of the items; `meter` counts what is asked."""
        ...

    def fingerprint(self) -> str:
        """A text that changes with the weights, and with what was read from a run (the key `run`,
        by which evaluations are not told apart); empty where nobody can tell."""
        ...


def run_task(
    task: Task, items: Sequence[Item], ask: Callable[[list[Request]], list[Completion]]
) -> list[Score]:
    """Play a task to its end with whatever answers its requests; one score an item."""
    game = task.run(items)
    completions: list[Completion] | None = None
    while True:
        try:
            # The first `send` to a generator has to be None.
            requests = game.send(completions)  # type: ignore[arg-type]
        except StopIteration as end:
            found: list[Score] = end.value
            return found
        completions = ask(requests)
