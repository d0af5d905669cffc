"""Which devices there are, asked without starting CUDA in this process."""

from swarm.errors import UserError


def check_devices(gpus: list[int] | None) -> list[int]:
    """The GPU numbers as a list, each of them checked against what the machine has.

    Raises:
        UserError: Not whole numbers, named twice, or no such device.
    """
    if gpus is not None and not isinstance(gpus, list):
        raise UserError(f"gpus={gpus}: must be device numbers such as 0,1,2, or [] for the CPU", 2)
    asked = list(gpus or [])
    if any(not isinstance(g, int) or isinstance(g, bool) or g < 0 for g in asked):
        raise UserError(f"gpus={asked}: must be device numbers such as 0,1,2, or [] for the CPU", 2)
    if len(set(asked)) < len(asked):
        raise UserError(f"gpus={asked}: each device may be named once", 2)
    if not asked:
        return asked
    import torch

    count = torch.cuda.device_count()
    missing = [g for g in asked if g >= count]
    if missing:
        there = f"0 to {count - 1}" if count else "none on this machine"
        raise UserError(f"gpus={asked}: no CUDA device {missing[0]}; allowed: {there}, or gpus=[]")
    return asked
