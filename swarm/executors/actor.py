"""What lives on a node of a Ray cluster: a worker, opened with its first job."""

import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.executors import cluster, packing
from swarm.executors.jobs import Job, JobResult, format_failure
from swarm.executors.worker import Worker
from swarm.pool import Pool


class RayWorker:
    """A worker that is opened once and then answers jobs; Ray starts it again when it dies.

    Args:
        device: Where its model lives; Ray shows it only the GPU that is its own.
        threads: CPU threads.
        home: The driver's folder, from which the paths of the configuration are read.
    """

    def __init__(self, device: str, threads: int, home: str) -> None:
        self._device, self._threads = device, threads
        self._worker: Worker | None = None
        if os.path.isdir(home):
            os.chdir(home)

    def ready(self) -> int:
        """The process number, once there is a process."""
        return os.getpid()

    def run(self, job: Job, stored: list[Any]) -> JobResult | str:
        """What the job came to, or the error: one line for people, then the traceback.

        Args:
            job: What to do.
            stored: References to the recipe of the worker and, if they travel, to the packed
                experts. They come with every job, as the actor may have been started again.
        """
        try:
            if self._worker is None:
                self._worker = self._open_worker(*cluster.import_ray().get(stored))
            return self._worker.run(job)
        except UserError as error:
            return str(error.args[0])
        except Exception as error:
            return f"{format_failure(job, error)}\n{traceback.format_exc()}"

    def _open_worker(self, worker: Worker, packed: packing.PackedExperts | None = None) -> Worker:
        import torch

        torch.set_num_threads(self._threads)
        if packed is None:
            worker.open(self._device)
            return worker
        assert isinstance(worker.pool, Pool)
        # Once the experts are in memory their files are not needed; nothing stays on the node.
        with tempfile.TemporaryDirectory(prefix="model-swarms-") as folder:
            worker.pool = packing.unpack_experts(packed, Path(folder), worker.pool)
            worker.open(self._device)
        return worker
