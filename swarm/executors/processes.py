"""Run jobs on several workers, and in particular in spawned processes, one per GPU."""

import logging
import multiprocessing
import os
import signal
import traceback
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Annotated, Any

from pydantic import Field

from swarm._util.settings import checked
from swarm.errors import UserError
from swarm.executors.worker import (
    Executor,
    Job,
    JobResult,
    Worker,
    check_devices,
    describe_job,
    format_failure,
    group_gpus,
    select_device,
)

log = logging.getLogger(__name__)

Thousand = Annotated[int, Field(ge=1, le=1000)]

MAX_DEATHS = 3
"""Number of workers that may die on the same job before the run ends."""


@dataclass(slots=True)
class Slot:
    """A slot for one worker.

    Attributes:
        name: Name of the worker or of its device, for messages.
        gpus: GPUs of its model, if the executor chooses them.
        worker: The current process or actor; `None` before the first job and after a death.
        pipe: The pipe to a process.
        job: The job in progress.
        pending: What the executor waits for; `None` if the worker is idle.
    """

    name: str
    gpus: list[int] = field(default_factory=list)
    worker: Any = None
    pipe: Any = None
    job: Job | None = None
    pending: Any = None


class WorkerPool(Executor):
    """Several workers, each of which is given job after job; a dead one's job goes to another."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """See `swarm.executors.Executor`."""
        waiting = deque(jobs)
        deaths: Counter[int] = Counter()
        try:
            while waiting or any(slot.job for slot in self._slots):
                for slot in self._slots:
                    if waiting and slot.pending is None:
                        slot.job = waiting.popleft()
                        slot.pending = self._send(slot, slot.job)
                for slot, job, answer in self._receive():
                    slot.job = None
                    if isinstance(answer, JobResult):
                        yield answer
                    elif isinstance(answer, str):
                        # One line for the user, then perhaps a traceback.
                        first, _, rest = answer.partition("\n")
                        if rest:
                            log.error("job %d failed on %s:\n%s", job.number, slot.name, rest)
                        raise UserError(first)
                    else:
                        deaths[job.number] += 1
                        number, name = job.number, slot.name
                        log.warning("%s died (%s); job %d is reassigned", name, answer, number)
                        if deaths[job.number] >= MAX_DEATHS:
                            raise UserError(
                                f"{MAX_DEATHS} workers died on the same job ({describe_job(job)}), "
                                f"the last with {answer}; it may need more memory than available: "
                                "lower job.particles or engine.max_tokens"
                            )
                        waiting.appendleft(job)
        finally:
            # Busy workers compute results that nothing will read.
            for slot in self._slots:
                if slot.job is not None:
                    self._stop(slot)

    @abstractmethod
    def _send(self, slot: Slot, job: Job) -> Any:
        """Give a job to an idle worker, started if there is none, and return what to wait for."""

    @abstractmethod
    def _receive(self) -> Iterator[tuple[Slot, Job, JobResult | str | Exception]]:
        """Wait until a worker answers or dies; yield its slot, its job, and a result or what went
        wrong: in words if the job failed, an exception if the worker died.

        Sets `pending` of the slot anew.
        """

    @abstractmethod
    def _stop(self, slot: Slot) -> None:
        """End the worker of a slot, and empty the slot."""

    def close(self) -> None:
        """Stop all workers."""
        for slot in self._slots:
            self._stop(slot)


def run_worker_process(
    pipe: Connection, worker: Worker, gpus: list[int], threads: int | None
) -> None:
    """Main function of a worker process: open once, then answer jobs until the pipe closes."""
    device = select_device(gpus, worker.engine)
    if worker.engine.devices > 1:
        # Own process group: Ctrl-C in a terminal would end some of the processes that share a
        # model, and the others would wait for them.
        os.setpgrp()
    if threads:
        import torch

        torch.set_num_threads(threads)
    try:
        while True:
            job = pipe.recv()
            answer = answer_job(worker, job, device)
            try:
                pipe.send(answer)
            except BrokenPipeError:
                raise
            except Exception as error:  # such as an answer of a task that cannot be pickled
                pipe.send(f"{format_failure(job, error)}\n{traceback.format_exc()}")
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        worker.close()


def answer_job(worker: Worker, job: Job, device: str) -> JobResult | str:
    """Return a job's result, or the error: one line for the user, then the traceback."""
    try:
        worker.open(device, job.experts)
        return worker.run(job)
    except UserError as error:
        return str(error.args[0])
    except Exception as error:
        return f"{format_failure(job, error)}\n{traceback.format_exc()}"


@checked("executor")
class ProcessExecutor(WorkerPool):
    """A worker process on each GPU, or `workers` of them on the CPU.

    Args:
        gpus: CUDA device numbers; empty means the CPU.
        workers: Number of workers; `None` means one per GPU, or one.
        threads: CPU threads of each worker; `None` divides the cores among them.
    """

    def __init__(
        self, gpus: Any = None, workers: Thousand | None = None, threads: Thousand | None = None
    ) -> None:
        super().__init__()
        self._gpus = check_devices(gpus)
        self.on_gpu = bool(self._gpus)
        if self._gpus and workers not in (None, len(self._gpus)):
            raise UserError(
                f"executor.workers={workers} with gpus={self._gpus}: there is one worker per "
                "GPU; use executor.workers=null"
            )
        self._count = len(self._gpus) or workers or 1
        share = max(1, (os.cpu_count() or 1) // self._count)
        self._threads = threads or (None if self._gpus else share)
        self._worker: Worker | None = None

    def open(self, worker: Worker) -> None:
        """See `swarm.executors.Executor`; the processes start with the first job."""
        self.close()
        groups = group_gpus(self._gpus, worker.engine) or [[] for _ in range(self._count)]
        names = [f"cuda:{','.join(map(str, gpus))}" if gpus else "cpu" for gpus in groups]
        self._slots = [Slot(f"the worker on {n}", g) for n, g in zip(names, groups, strict=True)]
        self._worker = worker

    def _send(self, slot: Slot, job: Job) -> Any:
        if slot.worker is None:
            # Spawned: a forked process cannot use CUDA once its parent has initialized it.
            context = multiprocessing.get_context("spawn")
            slot.pipe, theirs = context.Pipe()
            assert self._worker is not None, "the executor is not open"
            arguments = (theirs, self._worker, slot.gpus, self._threads)
            # A daemonic process may not start processes, as those that share a model.
            daemon = self._worker.engine.devices == 1
            slot.worker = context.Process(target=run_worker_process, args=arguments, daemon=daemon)
            slot.worker.start()
            # With no other copy of its end open, the pipe signals EOF when the worker dies.
            theirs.close()
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: `_receive` notices
            slot.pipe.send(job)
        return slot.pipe

    def _receive(self) -> Iterator[tuple[Slot, Job, JobResult | str | Exception]]:
        busy = {slot.pending: (slot, slot.job) for slot in self._slots if slot.job is not None}
        for pipe in wait(list(busy)):
            slot, job = busy[pipe]  # type: ignore[index]
            try:
                answer = slot.pipe.recv()
                slot.pending = None
            except (EOFError, ConnectionResetError):
                slot.worker.join(timeout=5)
                answer = ChildProcessError(f"exit code {slot.worker.exitcode}")
                self._stop(slot)
            yield slot, job, answer

    def _stop(self, slot: Slot) -> None:
        process = slot.worker
        if process is not None:
            if not process.daemon:
                if slot.job is None:  # idle: let it end the processes that share its model
                    slot.pipe.close()
                    process.join(timeout=10)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            slot.pipe.close()
        slot.worker = slot.pipe = slot.job = slot.pending = None
