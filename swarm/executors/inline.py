"""Run jobs in this process, one after the other."""

import logging
from collections.abc import Iterable, Iterator

from swarm.errors import UserError
from swarm.executors.worker import (
    Executor,
    Job,
    JobResult,
    Worker,
    check_devices,
    format_failure,
    group_gpus,
)

log = logging.getLogger(__name__)


class InlineExecutor(Executor):
    """A single worker in this process.

    Args:
        gpus: At most one CUDA device number; empty means the CPU.
    """

    def __init__(self, gpus: list[int] | None = None) -> None:
        self._gpus = check_devices(gpus)
        if len(self._gpus) > 1:
            raise UserError(
                f"gpus={self._gpus}: executor=inline uses one device; list one GPU, or use "
                "executor=processes for a worker on each"
            )
        self.on_gpu = bool(self._gpus)
        self._worker: Worker | None = None

    def open(self, worker: Worker) -> None:
        """See `swarm.executors.Executor`."""
        if worker.engine.first_devices and self._gpus:
            if self._gpus != [0]:
                raise UserError(
                    f"gpus={self._gpus}: this engine uses the first visible GPU; use "
                    "executor=processes, which makes one GPU visible to each worker"
                )
            group_gpus(self._gpus, worker.engine)
        self._worker = worker

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """See `swarm.executors.Executor`."""
        assert self._worker is not None, "the executor is not open"
        device = f"cuda:{self._gpus[0]}" if self._gpus else "cpu"
        for job in jobs:
            self._worker.open(device, job.experts)
            try:
                result = self._worker.run(job)
            except UserError:
                raise
            except Exception as error:
                log.exception("job %d failed", job.number)
                raise UserError(format_failure(job, error)) from None
            yield result

    def close(self) -> None:
        """Close the worker; its weights are freed with it."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None
