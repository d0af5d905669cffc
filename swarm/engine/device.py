"""Which device a model goes to."""

import re

from swarm.errors import UserError


def choose_device(device: str | None) -> str:
    """The device that is asked for, or the first GPU, or the CPU where there is none.

    Raises:
        UserError: It is no device's name, or the machine has no such GPU.
    """
    validate_device(device)
    if device == "cpu":
        return device
    import torch

    count = torch.cuda.device_count()
    if device is None:
        return "cuda:0" if count else "cpu"
    number = int(device.partition(":")[2] or 0)
    if number >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "none on this machine"
        raise UserError(f"device={device}: no such GPU; allowed: {there}, cpu")
    return f"cuda:{number}"


def validate_device(device: str | None) -> str | None:
    """The device again, if it is one's name or `None`; whether it is there is not asked.

    Raises:
        UserError: It is no device's name.
    """
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise UserError(f"device={device}: must be null, cpu, cuda or e.g. cuda:1")
    return device
