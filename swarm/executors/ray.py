"""Run jobs on the workers of a Ray cluster, one per GPU on any number of machines.

The module connects to a cluster, or starts one, within a bounded time and without Ray's output; it
packs a pool's experts as one object for nodes without the pool's folder.
"""

import logging
import os
import socket
import tempfile
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from swarm._util.settings import Count, Number, Positive, Text, checked
from swarm.errors import UserError, install_command
from swarm.executors.worker import (
    MAX_DEATHS,
    Executor,
    Job,
    JobResult,
    Worker,
    check_devices,
    describe_job,
    format_failure,
    raise_failure,
)
from swarm.pool.pool import ExpertPool, Pool

log = logging.getLogger(__name__)

MIN_OBJECT_STORE = 100 * 2**20
"""Bytes of object store of a started cluster besides the experts; jobs are kilobytes."""

CONNECT_TIMEOUT_S = 10.0
"""Timeout of a connection to a cluster's port."""

RAY_ENVIRONMENT = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Settings that suppress Ray's output in the terminal; the user's values take precedence."""


def import_ray() -> Any:
    """Import and return Ray; deferred until it is used.

    Raises:
        UserError: It is not installed.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # If a connection to raylet fails, Ray ends this process silently unless this pid is alive; by
    # default it takes the parent's, and a parent that is process 1, as after nohup, for a dead one.
    os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
    try:
        import ray
    except ImportError:
        raise UserError(f"executor=ray needs Ray: {install_command('ray')}") from None
    return ray


def connect_cluster(
    address: str | None, gpus: Sequence[int], cpus: float | None, store: int
) -> bool:
    """Join the cluster at `address`, or start one on this machine; True if `close` should leave it.

    Args:
        address: "auto", "host:port", "ray://host:port"; `None` starts a cluster.
        gpus: The device numbers that a started cluster may use.
        cpus: The CPU slots of a started cluster; `None` is one per core.
        store: Bytes that will be put into the object store of a started cluster.

    Raises:
        UserError: There is no cluster at the address, or it cannot be joined.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    where = f"executor.address={address}"
    try:
        if address is None:
            where = "a local Ray could not be started"
            with limit_visible_gpus(gpus):
                ray.init(
                    "local",
                    num_cpus=cpus and max(1, round(cpus)),
                    num_gpus=len(gpus),
                    object_store_memory=MIN_OBJECT_STORE + store,
                    include_dashboard=False,
                    **quiet,
                )
        else:
            check_reachable(address)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(address, **quiet)
    except UserError:
        raise
    except Exception as error:  # Ray's and gRPC's errors have no common base.
        words = " ".join(str(error).split())[:300]
        raise UserError(f"{where}: {words or type(error).__name__}") from None
    return True


def check_reachable(address: str) -> None:
    """Check that a server listens at an address; Ray itself would retry for minutes.

    Raises:
        UserError: There is none, or the address is invalid.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f'executor.address={address}: must be null, "auto", "host:port" or "ray://host:port"'
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"executor.address={address}: no Ray cluster responds ({error}); start one with "
            "`ray start --head`, or use executor.address=null for this machine alone"
        ) from None


@contextmanager
def limit_visible_gpus(gpus: Sequence[int]) -> Iterator[None]:
    """Restrict a cluster that is started inside the block to these devices."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    known = before.split(",") if before else None
    os.environ[name] = ",".join(known[g] if known else str(g) for g in gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def list_nodes() -> list[dict[str, float]]:
    """Return the resources of every living node of the cluster."""
    return [dict(n["Resources"]) for n in import_ray().nodes() if n["Alive"]]


def describe_resources() -> str:
    """Describe the cluster's resources."""
    ray = import_ray()
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{total.get(k, 0):g} {k} ({free.get(k, 0):g} free)" for k in ("GPU", "CPU")]
    return f"the cluster has {' and '.join(parts)} on {len(list_nodes())} nodes"


PackedExperts = dict[str, dict[str, np.ndarray]]
"""Folder -> file name -> its bytes; arrays, because Ray shares those instead of copying."""


def pack_experts(pool: ExpertPool) -> PackedExperts:
    """Return the files of an open pool, memory-mapped, so that they are read when they are sent.

    Raises:
        UserError: Its experts are full models.
    """
    if not isinstance(pool, Pool):
        raise UserError("executor.experts=store supports adapters only; use executor.experts=path")
    return {
        name: {path.name: np.asarray(np.memmap(path, np.uint8, "r")) for path in files}
        for name, files in pool.parts().items()
    }


def unpack_experts(pack: PackedExperts, folder: Path, pool: Pool) -> Pool:
    """Write the files below `folder`, and return the same pool with these files, closed."""
    for name, files in pack.items():
        (folder / name).mkdir(parents=True)
        for file, data in files.items():
            (folder / name / file).write_bytes(data.data)
    return pool.with_folder(folder)


class RayWorker:
    """A Ray actor with a worker that is opened with its first job; Ray restarts it when it dies.

    Args:
        device: Device of its model; Ray shows it only its own GPU.
        threads: CPU threads.
        folder: The driver's folder, to which the configuration's paths are relative.
    """

    def __init__(self, device: str, threads: int, folder: str) -> None:
        self._device, self._threads = device, threads
        self._worker: Worker | None = None
        if os.path.isdir(folder):
            os.chdir(folder)

    def ready(self) -> int:
        """Return the process id, once there is a process."""
        return os.getpid()

    def run(self, job: Job, stored: list[Any]) -> JobResult | str:
        """Return the job's result, or the error: one line for the user, then the traceback.

        Args:
            job: The job to run.
            stored: References to the worker's recipe and, with experts="store", to the packed
                experts. They are sent with every job, as the actor may have been restarted.
        """
        try:
            if self._worker is None:
                self._worker = self._open_worker(*import_ray().get(stored))
            return self._worker.run(job)
        except UserError as error:
            return str(error.args[0])
        except Exception as error:
            return f"{format_failure(job, error)}\n{traceback.format_exc()}"

    def _open_worker(self, worker: Worker, packed: PackedExperts | None = None) -> Worker:
        import torch

        torch.set_num_threads(self._threads)
        if packed is None:
            worker.open(self._device)
            return worker
        assert isinstance(worker.pool, Pool)
        # The files are not needed once the experts are in memory; nothing stays on the node.
        with tempfile.TemporaryDirectory(prefix="model-swarms-") as folder:
            worker.pool = unpack_experts(packed, Path(folder), worker.pool)
            worker.open(self._device)
        return worker


@dataclass(slots=True)
class RayWorkerSlot:
    """A slot for one actor.

    Attributes:
        number: Number of the slot.
        actor: The current actor; Ray restarts it when it dies.
        ref: Pending reference: the result of its job, or, without a job, of `ready`.
        job: The job in progress.
    """

    number: int
    actor: Any = None
    ref: Any = None
    job: Job | None = None


@checked("executor")
class RayExecutor(Executor):
    """A worker on each GPU of a Ray cluster, or `workers` of them.

    Args:
        gpus: CUDA device numbers of this machine, for a cluster that is started here.
        address: A running cluster, "auto", "host:port" or "ray://host:port"; `None` starts one.
        workers: Number of workers; `None` means one per GPU, or on the CPU one per node.
        gpus_per_worker: 0 to 1; `None` is 1 if there are GPUs and else 0.
        cpus_per_worker: CPU slots that a worker takes.
        max_restarts: Maximum number of restarts of a dead worker.
        threads: CPU threads of a worker; `None` is as many as its CPU slots.
        experts: "path": every node reads the pool from the same path; "store": it is sent once.
        wait_s: Timeout in seconds for scheduling the workers.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        gpus: Any = None,
        address: Text | None = None,
        workers: Positive | None = None,
        gpus_per_worker: Annotated[float, Field(ge=0, le=1)] | None = None,
        cpus_per_worker: Number = 1,
        max_restarts: Count = 10,
        threads: Positive | None = None,
        experts: Literal["path", "store"] = "path",
        wait_s: Number = 60,
    ) -> None:
        if address is not None and gpus:
            raise UserError(
                f"gpus={gpus} with executor.address={address}: gpus are devices of this "
                "machine; on a cluster set gpus=[] and executor.workers",
                2,
            )
        self._gpus, self._address, self._count = check_devices(gpus), address, workers
        self._gpu_share, self._cpu_share = gpus_per_worker, cpus_per_worker
        # Whether the nodes of a cluster have GPUs is not known before it is joined.
        self.on_gpu = bool(self._gpus or (address if gpus_per_worker is None else gpus_per_worker))
        self._max_restarts, self._wait_s = max_restarts, wait_s
        self._threads = threads or max(1, int(cpus_per_worker))
        self._experts = experts
        self._ours = False
        self._workers: list[RayWorkerSlot] = []
        self._stored: list[Any] = []

    def open(self, worker: Worker) -> None:
        """See `swarm.executors.Executor`; joins the cluster and schedules every worker."""
        self.close()
        packed = pack_experts(worker.pool) if self._experts == "store" else {}
        size = sum(len(data) for files in packed.values() for data in files.values())
        slots = self._count and self._count * self._cpu_share
        self._ours = connect_cluster(self._address, self._gpus, slots, size)
        self._ray = import_ray()
        share, count = self._plan_workers(worker)
        # Holding the references prevents their eviction: a restarted actor needs the objects again.
        self._stored = [self._ray.put(one) for one in (worker, packed) if one]
        self._arguments = ("cuda:0" if share else "cpu", self._threads, os.getcwd())
        self._kind = self._ray.remote(RayWorker).options(
            num_gpus=share,
            num_cpus=self._cpu_share,
            max_restarts=self._max_restarts,
            # This executor itself requeues a dead worker's job, and counts the deaths per job.
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._requested = f"{count} workers of {share:g} GPU and {self._cpu_share:g} CPU each"
        self._workers = [RayWorkerSlot(number) for number in range(count)]
        self._start_workers()

    def _plan_workers(self, worker: Worker) -> tuple[float, int]:
        """Return the GPUs per worker and the number of workers."""
        nodes = list_nodes()
        devices, group = [node.get("GPU", 0) for node in nodes], worker.engine.devices
        share = (group if any(devices) else 0.0) if self._gpu_share is None else self._gpu_share
        if group > 1 and 0 < share < group:
            raise UserError(
                f"executor.gpus_per_worker={share:g} with engine.tensor_parallel_size={group}: "
                f"use executor.gpus_per_worker=null, which then is {group}"
            )
        if share:
            capacity = sum(int(found / share + 1e-9) for found in devices)
        else:
            capacity = sum(node.get("CPU", 0) >= self._cpu_share for node in nodes)
        # At least one, so that `_start_workers` reports that nothing can be scheduled.
        return share, self._count or max(1, capacity)

    def _start_workers(self) -> None:
        """Start an actor in every empty slot and wait until all of them are ready."""
        fresh = [worker for worker in self._workers if worker.actor is None]
        for worker in fresh:
            worker.actor = self._kind.remote(*self._arguments)
            worker.ref = worker.actor.ready.remote()
        refs = [worker.ref for worker in fresh]
        if refs and (
            missing := self._ray.wait(refs, num_returns=len(refs), timeout=self._wait_s)[1]
        ):
            self._raise_wait_timeout(len(missing))

    def _raise_wait_timeout(self, missing: int) -> None:
        raise UserError(
            f"executor=ray: {missing} workers could not be scheduled within {self._wait_s:g} s "
            f"(executor.wait_s): requested {self._requested}; {describe_resources()}; "
            "lower executor.workers, executor.gpus_per_worker or executor.cpus_per_worker"
        )

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """See `swarm.executors.Executor`."""
        waiting = deque(jobs)
        deaths: Counter[int] = Counter()
        try:
            if waiting:
                self._start_workers()
            while waiting or any(worker.job for worker in self._workers):
                for worker in self._workers:
                    if waiting and worker.ref is None:
                        worker.job = waiting.popleft()
                        worker.ref = worker.actor.run.remote(worker.job, self._stored)
                yield from self._collect_results(waiting, deaths)
        finally:
            # Busy workers compute results that nothing will read.
            for worker in self._workers:
                if worker.job is not None:
                    self._stop_worker(worker)

    def _collect_results(self, waiting: deque[Job], deaths: Counter[int]) -> Iterator[JobResult]:
        """Wait until one actor answers, is ready or dies, and yield its results."""
        owing = {worker.ref: worker for worker in self._workers if worker.ref is not None}
        busy = any(worker.job for worker in self._workers)
        timeout = None if busy else self._wait_s
        finished, _ = self._ray.wait(list(owing), num_returns=1, timeout=timeout)
        if not finished:
            self._raise_wait_timeout(len(owing))
        worker = owing[finished[0]]
        job, worker.job, worker.ref = worker.job, None, None
        try:
            answer = self._ray.get(finished[0])
        except self._ray.exceptions.RayTaskError as error:
            words = " ".join(str(error.cause).split())
            log.error("worker %d failed:\n%s", worker.number, error)
            raise UserError(f"executor=ray: a worker failed: {words}") from None
        except self._ray.exceptions.RayError as error:
            self._await_restart(worker, job, deaths, error)
            if job is not None:
                waiting.appendleft(job)
            return
        if job is None:
            return
        if isinstance(answer, str):
            raise_failure(answer, job, f"worker {worker.number}")
        yield answer

    def _await_restart(
        self, worker: RayWorkerSlot, job: Job | None, deaths: Counter[int], error: Exception
    ) -> None:
        """Await the actor's restart, if Ray allows one; the job is given to another worker."""
        words = " ".join(str(error).split())
        log.info("worker %d: %s", worker.number, words)
        if job is not None:
            log.warning("worker %d died; job %d is reassigned", worker.number, job.number)
            deaths[job.number] += 1
            if deaths[job.number] >= MAX_DEATHS:
                raise UserError(
                    f"{MAX_DEATHS} workers died on the same job ({describe_job(job)}); it may "
                    "need more memory than available: lower job.particles or "
                    "engine.max_tokens; log.txt has the details"
                )
        elif isinstance(error, self._ray.exceptions.ActorDiedError):
            self._workers.remove(worker)
            log.warning("worker %d is not restarted; %d left", worker.number, len(self._workers))
            if not self._workers:
                raise UserError(
                    "executor=ray: the last worker died, with its machine or after "
                    f"executor.max_restarts={self._max_restarts} restarts: {words[-200:]}; log.txt "
                    "has the details; rerun the same command to resume"
                )
            return
        worker.ref = worker.actor.ready.remote()

    def _stop_worker(self, worker: RayWorkerSlot) -> None:
        if worker.actor is not None and self._ray.is_initialized():
            self._ray.kill(worker.actor)
        worker.actor = worker.ref = worker.job = None

    def close(self) -> None:
        """See `swarm.executors.Executor`; also ends a cluster that was started here."""
        for worker in self._workers:
            self._stop_worker(worker)
        self._workers, self._stored = [], []
        if self._ours:
            self._ours = False
            self._ray.shutdown()
