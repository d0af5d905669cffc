"""Executors, which distribute jobs to workers; the results do not depend on the executor."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from swarm.executors.inline import InlineExecutor
from swarm.executors.processes import ProcessExecutor
from swarm.executors.worker import Job, JobResult, Worker, check_devices

__all__ = ["Executor", "Job", "JobResult", "Worker"]


class Executor(Protocol):
    """Runs jobs in any order and on any worker.

    Attributes:
        on_gpu: Whether the workers may have GPUs.
    """

    on_gpu: bool

    def open(self, worker: Worker) -> None:
        """Set the recipe of all workers; heavy work may wait until the first job.

        Raises:
            UserError: A device that does not exist.
        """
        ...

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """Run the jobs and yield each result when it is ready, in any order.

        Raises:
            UserError: A job failed; the one-line message names it.
        """
        ...

    def close(self) -> None:
        """Stop all workers."""
        ...


def choose_executor(gpus: list[int] | None = None) -> InlineExecutor | ProcessExecutor:
    """Return an inline executor for the CPU or one GPU, processes for several GPUs."""
    return ProcessExecutor(gpus) if len(check_devices(gpus)) > 1 else InlineExecutor(gpus)
