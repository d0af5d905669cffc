"""Run jobs on the workers of a Ray cluster, one per GPU on any number of machines.

The module connects to a cluster, or starts one, within a bounded time and without Ray's output; it
packs a pool's experts as one object for nodes without the pool's folder.
"""

import logging
import os
import socket
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from swarm._util.settings import Count, Number, Positive, Text, checked
from swarm.errors import UserError, install_command
from swarm.executors.processes import Slot, WorkerPool, answer_job
from swarm.executors.worker import Job, JobResult, Worker, check_devices
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
    """Import and return Ray; deferred until it is used."""
    # If a connection to raylet fails, Ray ends this process silently unless this pid is alive; by
    # default it takes the parent's, and a parent that is process 1, as after nohup, for a dead one.
    for name, value in {**RAY_ENVIRONMENT, "RAY_RAYLET_PID": str(os.getpid())}.items():
        os.environ.setdefault(name, value)
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
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if address is None:
        known = shown.split(",") if shown else None
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(known[g] if known else str(g) for g in gpus)
        how |= {
            "num_cpus": cpus and max(1, round(cpus)),
            "num_gpus": len(gpus),
            "object_store_memory": MIN_OBJECT_STORE + store,
            "include_dashboard": False,
        }
    elif address != "auto":
        check_reachable(address)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address or "local", **how)
    except Exception as error:  # Ray's and gRPC's errors have no common base.
        words = " ".join(str(error).split())[:300]
        where = f"executor.address={address}" if address else "a local Ray could not be started"
        raise UserError(f"{where}: {words or type(error).__name__}") from None
    finally:
        if shown is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = shown
        elif address is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
    return True


def check_reachable(address: str) -> None:
    """Check that a server listens at "host:port"; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise UserError(
            f"executor.address={address}: no Ray cluster responds ({error}); start one with "
            '`ray start --head` and give null for this machine alone, "auto", "host:port" or '
            '"ray://host:port"'
        ) from None


def list_nodes() -> list[dict[str, float]]:
    """Return the resources of every living node of the cluster."""
    return [dict(n["Resources"]) for n in import_ray().nodes() if n["Alive"]]


PackedExperts = dict[str, dict[str, np.ndarray]]
"""Folder -> file name -> its bytes; arrays, because Ray shares those instead of copying."""


def pack_experts(pool: ExpertPool) -> PackedExperts:
    """Return the files of an open pool, memory-mapped, so that they are read when they are sent."""
    if not isinstance(pool, Pool):
        raise UserError("executor.experts=store supports adapters only; use executor.experts=path")
    if pool.most is not None and pool.expert_count > pool.most:
        raise UserError(f"""executor.experts=store sends all {pool.expert_count} adapters at once,
            which the choice of pool.most={pool.most} avoids: use executor.experts=path, or
            pool.most=null""")
    return {
        name: {path.name: np.asarray(np.memmap(path, np.uint8, "r")) for path in files}
        for name, files in pool.parts().items()
    }


def unpack_learned(job: Job, files: Sequence[np.ndarray], folder: Path) -> Job:
    """Write the learned adapters of a job below `folder`, and return the job with these files."""
    local = {file: str(folder / Path(file).name) for file in sorted({*job.learned} - {""})}
    for path, data in zip(local.values(), files, strict=True):
        Path(path).write_bytes(data.data)
    return replace(job, learned=tuple(local.get(file, "") for file in job.learned))


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

    def run(self, job: Job, stored: list[Any], learned: list[Any]) -> JobResult | str:
        """Return the answer to a job; see `swarm.executors.processes.answer_job`.

        Args:
            job: The job to run.
            stored: References to the worker's recipe and, with experts="store", to the packed
                experts. They are sent with every job, as the actor may have been restarted.
            learned: References to the job's learned adapters, with experts="store".
        """
        # Files are not needed once they are in memory; nothing stays on the node.
        with tempfile.TemporaryDirectory(prefix="model-swarms-") as folder:
            if learned:
                job = unpack_learned(job, import_ray().get(learned), Path(folder))
            if self._worker is not None:
                return answer_job(self._worker, job, self._device)
            import torch

            torch.set_num_threads(self._threads)
            worker, *packed = import_ray().get(stored)
            if packed:
                worker.pool = unpack_experts(packed[0], Path(folder), worker.pool)
            answer = answer_job(worker, job, self._device)
        if worker.device is not None:
            self._worker = worker
        return answer


@checked("executor")
class RayExecutor(WorkerPool):
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
        super().__init__()
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
        self._stored: list[Any] = []
        self._learned: dict[str, Any] = {}

    def open(self, worker: Worker) -> None:
        """See `swarm.executors.Executor`; joins the cluster and schedules every worker."""
        self.close()
        packed = pack_experts(worker.pool) if self._experts == "store" else {}
        size = sum(len(data) for files in packed.values() for data in files.values())
        slots = self._count and self._count * self._cpu_share
        self._ours = connect_cluster(self._address, self._gpus, slots, size)
        self._ray = import_ray()
        self._share, count = self._plan_workers(worker)
        # Holding the references prevents their eviction: a restarted actor needs the objects again.
        self._stored = [self._ray.put(one) for one in (worker, packed) if one]
        self._slots = [Slot(f"worker {number}") for number in range(count)]
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
        kind = self._ray.remote(RayWorker).options(
            num_gpus=self._share,
            num_cpus=self._cpu_share,
            max_restarts=self._max_restarts,
            # The executor itself requeues a dead worker's job, and counts the deaths per job.
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        fresh = [slot for slot in self._slots if slot.worker is None]
        for slot in fresh:
            device = "cuda:0" if self._share else "cpu"
            slot.worker = kind.remote(device, self._threads, os.getcwd())
            slot.pending = slot.worker.ready.remote()
        refs = [slot.pending for slot in fresh]
        if refs:
            _, missing = self._ray.wait(refs, num_returns=len(refs), timeout=self._wait_s)
            self._check_scheduled(len(missing))

    def _check_scheduled(self, missing: int) -> None:
        if missing:
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            has = [f"{total.get(k, 0):g} {k} ({free.get(k, 0):g} free)" for k in ("GPU", "CPU")]
            raise UserError(
                f"executor=ray: {missing} workers could not be scheduled within {self._wait_s:g} s "
                f"(executor.wait_s): requested {len(self._slots)} workers of {self._share:g} GPU "
                f"and {self._cpu_share:g} CPU each; the cluster has {' and '.join(has)} on "
                f"{len(list_nodes())} nodes; lower executor.workers, executor.gpus_per_worker or "
                "executor.cpus_per_worker"
            )

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """See `swarm.executors.Executor`."""
        self._start_workers()
        self._learned = {}
        yield from super().map(jobs)

    def _send(self, slot: Slot, job: Job) -> Any:
        learned = sorted({*job.learned} - {""}) if self._experts == "store" else []
        for file in {*learned} - {*self._learned}:
            self._learned[file] = self._ray.put(np.fromfile(file, np.uint8))
        files = [self._learned[file] for file in learned]
        return slot.worker.run.remote(job, self._stored, files)

    def _receive(self) -> Iterator[tuple[Slot, Job, JobResult | str | Exception]]:
        # Also of workers without a job, which are being restarted.
        pending = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        timeout = None if any(slot.job for slot in self._slots) else self._wait_s
        finished, _ = self._ray.wait(list(pending), num_returns=1, timeout=timeout)
        self._check_scheduled(0 if finished else len(pending))
        slot = pending[finished[0]]
        job, slot.pending = slot.job, None
        try:
            answer = self._ray.get(finished[0])
        except self._ray.exceptions.RayTaskError as error:
            log.error("%s failed:\n%s", slot.name, error)
            words = " ".join(str(error.cause).split())
            raise UserError(f"executor=ray: a worker failed: {words}") from None
        except self._ray.exceptions.RayError as error:
            words = textwrap.shorten(str(error), 200)
            answer = ConnectionError(words)
            if job is None and isinstance(error, self._ray.exceptions.ActorDiedError):
                self._slots.remove(slot)
                log.warning("%s is not restarted; %d left", slot.name, len(self._slots))
                if not self._slots:
                    raise UserError(
                        "executor=ray: the last worker died, with its machine or after "
                        f"executor.max_restarts={self._max_restarts} restarts: {words}; rerun the "
                        "same command to resume"
                    ) from None
                return
            # Ready again once it has been restarted, if Ray allows that.
            slot.pending = slot.worker.ready.remote()
        if job is not None:
            yield slot, job, answer

    def _stop(self, slot: Slot) -> None:
        if slot.worker is not None and self._ray.is_initialized():
            self._ray.kill(slot.worker)
        slot.worker = slot.pending = slot.job = None

    def close(self) -> None:
        """See `swarm.executors.Executor`; also ends a cluster that was started here."""
        super().close()
        self._slots, self._stored = [], []
        if self._ours:
            self._ours = False
            self._ray.shutdown()
