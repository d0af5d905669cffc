"""Run jobs in spawned worker processes, one per GPU; each opens once and requests job after job."""

import logging
import multiprocessing
import os
import signal
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Annotated, Any

from pydantic import Field

from swarm._util.settings import checked
from swarm.errors import UserError
from swarm.executors.worker import (
    MAX_DEATHS,
    Executor,
    Job,
    JobResult,
    Worker,
    check_devices,
    describe_job,
    format_failure,
    group_gpus,
    raise_failure,
    select_device,
)

log = logging.getLogger(__name__)

Thousand = Annotated[int, Field(ge=1, le=1000)]


def run_worker_process(
    pipe: Connection, worker: Worker, gpus: list[int], threads: int | None
) -> None:
    """Main function of a worker process: open once, then answer jobs until the pipe closes."""
    device = select_device(gpus, worker.engine)
    if is_model_sharded(worker):
        # Own process group: Ctrl-C in a terminal would end some of the processes that share a
        # model, and the others would wait for them.
        os.setpgrp()
    if threads:
        import torch

        torch.set_num_threads(threads)
    try:
        while True:
            job = pipe.recv()
            try:
                worker.open(device)
                pipe.send(worker.run(job))
            except UserError as error:
                pipe.send(error.args[0])
            except Exception as error:
                pipe.send(f"{format_failure(job, error)}\n{traceback.format_exc()}")
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        worker.close()


def is_model_sharded(worker: Worker) -> bool:
    """Return whether a model is sharded over processes that its engine starts."""
    return worker.engine.devices > 1


@dataclass(slots=True)
class WorkerSlot:
    """A slot for one worker process.

    Attributes:
        gpus: GPUs of its model; empty is the CPU.
        process, pipe: The current worker.
        job: The job in progress.
    """

    gpus: list[int]
    process: Any = None
    pipe: Any = None
    job: Job | None = None

    @property
    def device(self) -> str:
        """Name of the device, for messages."""
        return f"cuda:{','.join(map(str, self.gpus))}" if self.gpus else "cpu"


@checked("executor")
class ProcessExecutor(Executor):
    """A worker process on each GPU, or `workers` of them on the CPU.

    Args:
        gpus: CUDA device numbers; empty means the CPU.
        workers: Number of workers; `None` means one per GPU, or one.
        threads: CPU threads of each worker; `None` divides the cores among them.
    """

    def __init__(
        self, gpus: Any = None, workers: Thousand | None = None, threads: Thousand | None = None
    ) -> None:
        self._gpus = check_devices(gpus)
        self.on_gpu = bool(self._gpus)
        if self._gpus and workers not in (None, len(self._gpus)):
            raise UserError(
                f"executor.workers={workers} with gpus={self._gpus}: there is one worker per "
                "GPU; use executor.workers=null"
            )
        self._count = len(self._gpus) or workers or 1
        self._workers: list[WorkerSlot] = []
        share = max(1, (os.cpu_count() or 1) // self._count)
        self._threads = threads or (None if self._gpus else share)
        self._worker: Worker | None = None

    def open(self, worker: Worker) -> None:
        """See `swarm.executors.Executor`; the processes start with the first job."""
        self.close()
        groups = group_gpus(self._gpus, worker.engine) or [[] for _ in range(self._count)]
        self._workers = [WorkerSlot(group) for group in groups]
        self._worker = worker

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """See `swarm.executors.Executor`."""
        waiting = deque(jobs)
        deaths: Counter[int] = Counter()
        try:
            while waiting or any(worker.job for worker in self._workers):
                for worker in self._workers:
                    if waiting and worker.job is None:
                        self._assign_job(worker, waiting.popleft())
                yield from self._collect_results(waiting, deaths)
        finally:
            # Busy workers compute results that nothing will read.
            for worker in self._workers:
                if worker.job is not None:
                    self._stop_worker(worker)

    def _assign_job(self, worker: WorkerSlot, job: Job) -> None:
        if worker.process is None:
            # Spawned: a forked process cannot use CUDA once its parent has initialized it.
            context = multiprocessing.get_context("spawn")
            worker.pipe, theirs = context.Pipe()
            assert self._worker is not None, "the executor is not open"
            arguments = (theirs, self._worker, worker.gpus, self._threads)
            # A daemonic process may not start processes.
            daemon = not is_model_sharded(self._worker)
            worker.process = context.Process(
                target=run_worker_process, args=arguments, daemon=daemon
            )
            worker.process.start()
            # With no other copy of its end open, the pipe signals EOF when the worker dies.
            theirs.close()
        worker.job = job
        try:
            worker.pipe.send(job)
        except (BrokenPipeError, ConnectionResetError):
            log.warning("the worker on %s died before job %d", worker.device, job.number)

    def _collect_results(self, waiting: deque[Job], deaths: Counter[int]) -> Iterator[JobResult]:
        """Wait until a worker answers or dies, and yield its results."""
        busy = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]
            job = worker.job
            assert job is not None
            try:
                answer = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                deaths[job.number] += 1
                self._discard_worker(worker, job, deaths[job.number])
                waiting.appendleft(job)
                continue
            worker.job = None
            if isinstance(answer, str):
                raise_failure(answer, job, worker.device)
            yield answer

    def _discard_worker(self, worker: WorkerSlot, job: Job, deaths: int) -> None:
        """Discard a dead worker; its slot gets another with the next job."""
        worker.process.join(timeout=5)
        code = worker.process.exitcode
        self._stop_worker(worker)
        log.warning(
            "the worker on %s died (exit code %s); job %d is reassigned",
            worker.device,
            code,
            job.number,
        )
        if deaths >= MAX_DEATHS:
            raise UserError(
                f"{deaths} workers died on the same job ({describe_job(job)}), the last with exit "
                f"code {code}; it may need more memory than available: lower job.particles or "
                "engine.max_tokens"
            )

    def _stop_worker(self, worker: WorkerSlot) -> None:
        if worker.process is not None:
            if not worker.process.daemon:
                if worker.job is None:  # idle: let it end the processes that share its model
                    worker.pipe.close()
                    worker.process.join(timeout=10)
                with suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        worker.process = worker.pipe = worker.job = None

    def close(self) -> None:
        """Stop all workers."""
        for worker in self._workers:
            self._stop_worker(worker)
