"""Runs jobs on the workers of a Ray cluster, one a GPU on any number of machines."""

import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from swarm.engine import MultiGpuEngine
from swarm.errors import UserError
from swarm.executors import cluster, packing
from swarm.executors.actor import RayWorker
from swarm.executors.devices import check_devices
from swarm.executors.jobs import Job, JobResult, describe_job
from swarm.executors.processes import MAX_DEATHS
from swarm.executors.worker import Worker

log = logging.getLogger(__name__)

EXPERT_TRANSFERS = ("path", "store")

LOOK_S, MOST_SILENT = 5.0, 3
"""Seconds between two connections to the cluster's head, and how many may fail in a row. Ray itself
ends the whole process after 60 s without its head."""


@dataclass(slots=True)
class RayWorkerSlot:
    """A place for one actor.

    Attributes:
        number: Which.
        actor: The actor now in it; Ray starts it again when it dies.
        ref: What it owes: the result of its job, or, without a job, word that it is there.
        job: What it is busy with.
    """

    number: int
    actor: Any = None
    ref: Any = None
    job: Job | None = None


class RayExecutor:
    """A worker on each GPU of a Ray cluster, or `workers` of them.

    Args:
        gpus: CUDA device numbers of this machine, for a cluster that is started here.
        address: A running cluster, "auto", "host:port" or "ray://host:port"; `None` starts one.
        workers: How many; `None` means one a GPU, or on the CPU one a node.
        gpus_per_worker: 0 to 1; `None` is 1 where there are GPUs and else 0.
        cpus_per_worker: CPU slots that a worker takes.
        max_restarts: How often a worker that died is started again.
        threads: CPU threads of a worker; `None` is as many as its CPU slots.
        experts: "path": every node reads the pool from the same path; "store": it is sent once.
        wait_s: Seconds that workers may take to find a place.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self, gpus: list[int] | None = None, address: str | None = None,
        workers: int | None = None, gpus_per_worker: float | None = None,
        cpus_per_worker: float = 1, max_restarts: int = 10, threads: int | None = None,
        experts: str = "path", wait_s: float = 60,
    ) -> None:  # fmt: skip
        if address is not None and (gpus or not isinstance(address, str) or not address):
            raise UserError(
                f"gpus={gpus} with executor.address={address}: gpus are devices of this machine; "
                "on a cluster leave gpus=[] and choose executor.workers", 2,
            )  # fmt: skip
        _check_int("workers", workers, 1, none=True)
        _check_int("max_restarts", max_restarts, 0)
        _check_int("threads", threads, 1, none=True)
        _check_number("gpus_per_worker", gpus_per_worker if gpus_per_worker is not None else 0, 1)
        _check_number("cpus_per_worker", cpus_per_worker)
        _check_number("wait_s", wait_s)
        if experts not in EXPERT_TRANSFERS:
            raise UserError(f"executor.experts={experts}: must be one of {', '.join(EXPERT_TRANSFERS)}")
        self._gpus, self._address, self._count = check_devices(gpus), address, workers
        self._gpu_share, self._cpu_share = gpus_per_worker, cpus_per_worker
        self._max_restarts, self._wait_s = max_restarts, wait_s
        self._threads = threads or max(1, int(cpus_per_worker))
        self._experts = experts
        self._ours = False
        self._head, self._looked, self._silent = "", 0.0, 0
        self._seats: list[RayWorkerSlot] = []
        self._stored: list[Any] = []

    def open(self, worker: Worker) -> None:
        """See `swarm.executors.Executor`; joins the cluster and finds a place for every worker."""
        self.close()
        packed = packing.pack_experts(worker.pool) if self._experts == "store" else {}
        slots = self._count and self._count * self._cpu_share
        self._ours = cluster.connect_cluster(self._address, self._gpus, slots, packing.packed_size(packed))
        self._ray = cluster.import_ray()
        self._head, self._looked, self._silent = cluster.find_head(), time.monotonic(), 0
        share, count = self._plan_workers(worker)
        # Kept here, as an actor that is started again needs them again.
        self._stored = [self._ray.put(one) for one in (worker, packed) if one]
        self._arguments = ("cuda:0" if share else "cpu", self._threads, os.getcwd())
        self._kind = self._ray.remote(RayWorker).options(
            num_gpus=share, num_cpus=self._cpu_share, max_restarts=self._max_restarts,
            max_task_retries=0, scheduling_strategy="SPREAD",
        )  # fmt: skip
        self._asked = f"{count} workers of {share:g} GPU and {self._cpu_share:g} CPU each"
        self._seats = [RayWorkerSlot(number) for number in range(count)]
        self._start_workers()

    def _plan_workers(self, worker: Worker) -> tuple[float, int]:
        """The GPUs of a worker and the number of workers."""
        nodes = cluster.list_nodes()
        devices = [node.get("GPU", 0) for node in nodes]
        group = worker.engine.devices if isinstance(worker.engine, MultiGpuEngine) else 1
        share = (group if any(devices) else 0.0) if self._gpu_share is None else self._gpu_share
        if group > 1 and 0 < share < group:
            raise UserError(
                f"executor.gpus_per_worker={share:g} with engine.tensor_parallel_size={group}: "
                f"leave executor.gpus_per_worker=null, which is {group} then"
            )
        if share:
            room = sum(int(found / share + 1e-9) for found in devices)
        else:
            room = sum(node.get("CPU", 0) >= self._cpu_share for node in nodes)
        # At least one, so that what cannot be placed is said in one place.
        return share, self._count or max(1, room)

    def _start_workers(self) -> None:
        """Start an actor in every empty seat and wait until all of these are there."""
        fresh = [seat for seat in self._seats if seat.actor is None]
        for seat in fresh:
            seat.actor = self._kind.remote(*self._arguments)
            seat.ref = seat.actor.ready.remote()
        if not fresh:
            return
        refs = [seat.ref for seat in fresh]
        _, missing = self._ray.wait(refs, num_returns=len(refs), timeout=self._wait_s)
        if missing:
            self._raise_wait_timeout(len(missing))

    def _raise_wait_timeout(self, missing: int) -> None:
        raise UserError(
            f"executor=ray: {missing} workers found no place within {self._wait_s:g} s "
            f"(executor.wait_s): asked for {self._asked}; {cluster.describe_resources()}; "
            "lower executor.workers, executor.gpus_per_worker or executor.cpus_per_worker"
        )

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """See `swarm.executors.Executor`."""
        waiting = deque(jobs)
        deaths: Counter[int] = Counter()
        try:
            if waiting:
                self._start_workers()
            while waiting or any(seat.job for seat in self._seats):
                for seat in self._seats:
                    if waiting and seat.ref is None:
                        seat.job = waiting.popleft()
                        seat.ref = seat.actor.run.remote(seat.job, self._stored)
                yield from self._collect_results(waiting, deaths)
        finally:
            # Whoever is still busy works on what nobody waits for any more.
            for seat in self._seats:
                if seat.job is not None:
                    self._stop_worker(seat)

    def _collect_results(self, waiting: deque[Job], deaths: Counter[int]) -> Iterator[JobResult]:
        """Wait until one actor answers, is there or dies, and yield what came."""
        owing = {seat.ref: seat for seat in self._seats if seat.ref is not None}
        busy = any(seat.job for seat in self._seats)
        until = time.monotonic() + self._wait_s
        done: list[Any] = []
        while not done:
            self._look_for_head()
            left = LOOK_S if busy else min(LOOK_S, max(0.0, until - time.monotonic()))
            done, _ = self._ray.wait(list(owing), num_returns=1, timeout=left)
            if not done and not busy and time.monotonic() >= until:
                self._raise_wait_timeout(len(owing))
        seat = owing[done[0]]
        job, seat.job, seat.ref = seat.job, None, None
        try:
            answer = self._ray.get(done[0])
        except self._ray.exceptions.RayTaskError as error:
            words = " ".join(str(error.cause).split())
            log.error("worker %d failed:\n%s", seat.number, error)
            raise UserError(f"executor=ray: a worker failed: {words}") from None
        except self._ray.exceptions.RayError as error:
            self._await_restart(seat, job, deaths, error)
            if job is not None:
                waiting.appendleft(job)
            return
        if job is None:
            return
        if isinstance(answer, str):
            first, _, rest = answer.partition("\n")
            if rest:
                log.error("job %d failed on worker %d:\n%s", job.number, seat.number, rest)
            raise UserError(first)
        yield answer

    def _look_for_head(self) -> None:
        """See now and then that the process that manages the cluster is there.

        Raises:
            UserError: It has not been for a while.
        """
        if not self._head or time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self._silent = 0 if cluster.is_open(self._head) else self._silent + 1
        if self._silent >= MOST_SILENT:
            # Nothing of the cluster can be asked any more, not even to end.
            self._seats, self._stored = [], []
            raise UserError(
                f"executor=ray: Ray's own process gcs_server, at {self._head}, does not answer any "
                "more: it was ended, or the network to it; without it there is no cluster. Start "
                "the cluster anew, if it is not this search's own; the same command goes on"
            )

    def _why_none_is_left(self, error: Exception) -> str:
        """Why the last worker died, and is not started again."""
        with contextlib.suppress(Exception):  # Ray raises whatever comes where it has ended itself
            if not cluster.is_node_alive():
                return (
                    "Ray's own process raylet, which runs the workers of this machine, was ended "
                    "(by hand, or by the system where memory is short)"
                )
        said = " ".join(str(error).split())
        if "owner has died" in said or "node has died" in said:
            return f"Ray lost the machine of the last worker: {said[-200:]}"
        return (
            "the last worker died and may not be started again "
            f"(executor.max_restarts={self._max_restarts})"
        )

    def _await_restart(self, seat: RayWorkerSlot, job: Job | None, deaths: Counter[int], error: Exception) -> None:
        """Await the actor's next life, if Ray gives it one; the job goes to another."""
        log.info("worker %d: %s", seat.number, " ".join(str(error).split()))
        if job is not None:
            log.warning("worker %d died; job %d goes to another", seat.number, job.number)
        if job is not None:
            deaths[job.number] += 1
            if deaths[job.number] >= MAX_DEATHS:
                raise UserError(
                    f"{MAX_DEATHS} workers died on the same job ({describe_job(job)}); it may need "
                    "more memory than there is: lower job.particles or engine.max_tokens; log.txt "
                    "says how they died"
                )
        elif isinstance(error, self._ray.exceptions.ActorDiedError):
            self._seats.remove(seat)
            log.warning("worker %d is not started again; %d left", seat.number, len(self._seats))
            if not self._seats:
                why = self._why_none_is_left(error)
                raise UserError(f"executor=ray: {why}; log.txt says how; the same command goes on")
            return
        seat.ref = seat.actor.ready.remote()

    def _stop_worker(self, seat: RayWorkerSlot) -> None:
        if seat.actor is not None and self._ray.is_initialized():
            self._ray.kill(seat.actor)
        seat.actor = seat.ref = seat.job = None

    def close(self) -> None:
        """See `swarm.executors.Executor`; a cluster that was started here ends too."""
        for seat in self._seats:
            self._stop_worker(seat)
        self._seats, self._stored = [], []
        if self._ours:
            self._ours = False
            self._ray.shutdown()


def _check_int(key: str, value: Any, least: int, none: bool = False) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if none and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = "null or " if none else ""
        raise UserError(f"executor.{key}={value}: must be {allowed}a whole number, {least} or more")


def _check_number(key: str, value: Any, most: float = float("inf")) -> None:
    """Refuse what is not a number from 0 to `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise UserError(f"executor.{key}={value}: must be a number from 0 to {most:g}")
