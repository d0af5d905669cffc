"""An executor gives jobs to workers; whichever one it is, the same jobs give the same results."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from swarm.executors.jobs import Job, JobResult
from swarm.executors.worker import Worker

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
