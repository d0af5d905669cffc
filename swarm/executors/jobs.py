"""What goes to a worker and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.tasks import Item, Score, Task, metric_task

if TYPE_CHECKING:
    from swarm.engine.gradient import Gradient

GRADIENT_SPLITS = ("loss", "gradient", "entropy")
"""Splits of a job that asks for the loss of gold answers, for its derivative too, or for the
entropy of answers and its derivative."""


@dataclass(frozen=True, slots=True)
class Job:
    """Some positions to be scored on some items; holds all it needs, so it may be run again.

    Attributes:
        number: Its place in the list of jobs of one `map`.
        positions: P vectors of K mixing coefficients.
        split: "dev", played by the task's signal; "test", and "judged", the items of dev, played
            by the task's own measure (see `played`). Those of LOSSES are of items of dev, at a
            single position.
        items: Places in the split.
        names: How an error calls the positions; may be left out.
    """

    number: int
    positions: tuple[tuple[float, ...], ...]
    split: str
    items: tuple[int, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job came to.

    Attributes:
        number: The job's.
        scores: One list of scores a position, in the order of the job's items.
        prompts: Requests answered.
        tokens: Tokens read and generated.
        gradient: Of a job of a split of LOSSES, which has no scores.
    """

    number: int
    scores: list[list[Score]]
    prompts: int
    tokens: int
    gradient: "Gradient | None" = None


def resolve_split(task: Task, split: str) -> tuple[Task, Sequence[Item]]:
    """What is played for a job's split, and the items that its places are of."""
    if split == "dev":
        return task, task.items("dev")
    return metric_task(task), task.items(data_split(split))


def data_split(split: str) -> str:
    """The split whose items a job's split names."""
    return "dev" if split in ("judged", *GRADIENT_SPLITS) else split


def describe_job(job: Job) -> str:
    """A job in words."""
    first, last = job.items[0], job.items[-1]
    return f"job {job.number}: {len(job.positions)} positions, {job.split} items {first} to {last}"


def format_failure(job: Job, error: Exception) -> str:
    """An unexpected error in one line, with the item it came of where a worker found one."""
    words = " ".join(str(error).split())
    where = ", ".join([*getattr(error, "__notes__", []), describe_job(job)])
    return f"{type(error).__name__}: {words} ({where}); the traceback is in log.txt"
