"""Chooses an executor by the devices named."""

from swarm.executors.devices import check_devices
from swarm.executors.inline import Inline
from swarm.executors.processes import Processes


def auto(gpus: list[int] | None = None) -> Inline | Processes:
    """In this process for the CPU or one GPU, a process a GPU for more."""
    return Processes(gpus) if len(check_devices(gpus)) > 1 else Inline(gpus)
