"""Executors, which distribute jobs to workers; the results do not depend on the executor."""

from swarm.executors.inline import InlineExecutor
from swarm.executors.processes import ProcessExecutor
from swarm.executors.worker import Executor, Job, JobResult, Worker, check_devices

__all__ = ["Executor", "Job", "JobResult", "Worker"]


def choose_executor(gpus: list[int] | None = None) -> Executor:
    """Return an inline executor for the CPU or one GPU, processes for several GPUs."""
    return ProcessExecutor(gpus) if len(check_devices(gpus)) > 1 else InlineExecutor(gpus)
