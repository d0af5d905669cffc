"""Available devices, detected without initializing CUDA in this process."""

import os
from collections.abc import Sequence

from swarm.engine.base import Engine, MultiGpuEngine
from swarm.errors import UserError


def check_devices(gpus: list[int] | None) -> list[int]:
    """Return the GPU numbers as a list, each checked against the machine's devices.

    Raises:
        UserError: Not integers, repeated, or no such device.
    """
    if gpus is not None and not isinstance(gpus, list):
        raise UserError(f"gpus={gpus}: must be device numbers such as 0,1,2, or [] for the CPU", 2)
    devices = list(gpus or [])
    if any(not isinstance(g, int) or isinstance(g, bool) or g < 0 for g in devices):
        raise UserError(
            f"gpus={devices}: must be device numbers such as 0,1,2, or [] for the CPU", 2
        )
    if len(set(devices)) < len(devices):
        raise UserError(f"gpus={devices}: each device may be listed once", 2)
    if not devices:
        return devices
    import torch

    count = torch.cuda.device_count()
    missing = [g for g in devices if g >= count]
    if missing:
        there = f"0 to {count - 1}" if count else "none on this machine"
        raise UserError(
            f"gpus={devices}: no CUDA device {missing[0]}; allowed: {there}, or gpus=[]"
        )
    return devices


def group_gpus(gpus: list[int], engine: Engine) -> list[list[int]]:
    """Return the GPUs of each worker.

    Raises:
        UserError: The engine takes more than one, and some would be left over.
    """
    size = engine.devices if isinstance(engine, MultiGpuEngine) else 1
    if len(gpus) % size:
        raise UserError(
            f"gpus={gpus} with engine.tensor_parallel_size={size}: each worker uses {size}; "
            f"list {size} GPUs, or a multiple of it"
        )
    return [gpus[start : start + size] for start in range(0, len(gpus), size)]


def select_device(gpus: Sequence[int], engine: Engine) -> str:
    """Return the device of this worker process with these GPUs; empty is the CPU.

    For an engine that takes the first visible devices, CUDA_VISIBLE_DEVICES is restricted
    permanently.
    """
    if not gpus:
        return "cpu"
    if not isinstance(engine, MultiGpuEngine):
        return f"cuda:{gpus[0]}"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = shown.split(",") if shown else [str(number) for number in range(max(gpus) + 1)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in gpus)
    return "cuda:0"
