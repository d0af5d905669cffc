"""The protocol of candidates: one or several voters, each of which answers all items of a task."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from swarm.executors.worker import JobUsage
from swarm.models.base import Completion, Request
from swarm.tasks.base import Item, Score, Task

__all__ = ["Candidate", "HasModelContexts", "JobUsage", "run_task"]


class Candidate(Protocol):
    """One voter, or several of which each answers every item.

    Attributes:
        names: Names of the voters, in the order of their answers; set by `check`.
    """

    names: list[str]

    def check(self, task: Task) -> None:
        """Check quickly, before a model is loaded, that all requirements are met.

        Raises:
            UserError: Something is missing or inconsistent, or the candidate does not support the
                task.
        """
        ...

    def open(self, device: str) -> None:
        """Load what is needed on `device` ("cpu", "cuda:0", ...), once.

        Raises:
            UserError: The files do not contain a model, or the device is out of memory.
        """
        ...

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """Return one list of scores per voter, in the items' order; `meter` counts requests."""
        ...

    def fingerprint(self) -> str:
        """Return a text that changes with the weights and data read from a run; "" if unknown.

        The key `run` itself is not part of an evaluation's identity.
        """
        ...


@runtime_checkable
class HasModelContexts(Protocol):
    """A candidate of models with a known context, into which the task's prompts have to fit.

    One that answers dev items whatever the split has an attribute `reads_dev` that is true.
    """

    def model_contexts(self) -> Sequence[tuple[Any, float]]:
        """Return the tokenizer and the context in tokens of each model; valid after `check`."""
        ...


def run_task(
    task: Task, items: Sequence[Item], ask: Callable[[list[Request]], list[Completion]]
) -> list[Score]:
    """Run a task to its end with a function that answers its requests; one score per item."""
    game = task.run(items)
    completions: list[Completion] | None = None
    while True:
        try:
            # A generator's first `send` has to be None.
            requests = game.send(completions)  # type: ignore[arg-type]
        except StopIteration as end:
            found: list[Score] = end.value
            return found
        completions = ask(requests)
