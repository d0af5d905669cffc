"""An executor gives jobs to workers; whichever one it is, the same jobs give the same results."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from swarm.executors.devices import check_devices
from swarm.executors.inline import InlineExecutor
from swarm.executors.processes import ProcessExecutor
from swarm.executors.worker import Job, JobResult, Worker

__all__ = ["Executor", "Job", "JobResult", "Worker"]


class Executor(Protocol):
    """Runs jobs, in whatever order and place."""

    def open(self, worker: Worker) -> None:
        """Take the recipe every worker is made from; heavy work may wait until the first job.

        Raises:
            UserError: A device that does not exist.
        """
        ...

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """Run the jobs and yield each result as it comes, in any order.

        Raises:
            UserError: A job failed; one line that says which.
        """
        ...

    def close(self) -> None:
        """End all workers."""
        ...


# Chooses an executor by the devices named.


def choose_executor(gpus: list[int] | None = None) -> InlineExecutor | ProcessExecutor:
    """In this process for the CPU or one GPU, a process a GPU for more."""
    return ProcessExecutor(gpus) if len(check_devices(gpus)) > 1 else InlineExecutor(gpus)
