"""Chooses an executor by the devices named."""

from swarm.executors.devices import check_devices
from swarm.executors.inline import InlineExecutor
from swarm.executors.processes import ProcessExecutor


def choose_executor(gpus: list[int] | None = None) -> InlineExecutor | ProcessExecutor:
    """In this process for the CPU or one GPU, a process a GPU for more."""
    return ProcessExecutor(gpus) if len(check_devices(gpus)) > 1 else InlineExecutor(gpus)
