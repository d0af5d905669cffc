"""Which of the three ways of answering many particles suits the work at hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STACK_BELOW_CPU = 20
"""Requests a particle below which a CPU gains by stacking; from benchmarks/batching.py."""

STACK_BELOW_GPU = 150
"""Rows a particle that saturate a GPU on their own: about 184 on an H200 in bfloat16, the ratio of
790 TFLOP/s to 4.3 TB/s; fewer leave it reading weights."""

BATCH_CPU, BATCH_GPU = 4096, 65536
"""Padded tokens in a batch, where `engine.max_tokens` does not say."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What the choice depends on, besides the work.

    Attributes:
        gpu: Whether the model is on a GPU.
        exact_merge: Whether weights are float32, so that a small update survives being added.
        copy_bytes: Size of a copy of the adapted weights.
        free_bytes: Memory left on the device.
    """

    gpu: bool
    exact_merge: bool
    copy_bytes: int
    free_bytes: int


def choose_plan(particles: int, rows: int, facts: DeviceProfile) -> tuple[str, str]:
    """The plan for `particles` positions with `rows` requests each, and why, in words.

    Merging gives the base's own speed to one particle at a time, but in bfloat16 it rounds the
    update away: of one that is 1 % of the weight's norm, bfloat16's 8 bits leave an error of 17 %,
    unmerged 0.2 % (tests/test_plan.py). Stacking reads the base weights once for all particles.
    """
    enough = STACK_BELOW_GPU if facts.gpu else STACK_BELOW_CPU
    if particles > 1 and rows < enough:
        return "stacked", f"{rows} requests a particle leave the device idle, below {enough}"
    if not facts.exact_merge:
        return "swap", "the weights are not float32 and merging would round the update away"
    if facts.copy_bytes > facts.free_bytes:
        return "swap", "a copy of the adapted weights does not fit in the memory left"
    if particles == 1:
        return "merged", "a single particle runs as fast as the base alone"
    return "merged", f"{rows} requests a particle, enough to run as fast as the base alone"


def profile_device(model: Any, device: str, shapes: Sequence[Sequence[int]]) -> DeviceProfile:
    """What `choose` needs to know of a model whose linear layers of these shapes are adapted."""
    import torch

    gpu = device != "cpu"
    free = torch.cuda.mem_get_info(device)[0] if gpu else available_memory_bytes()
    size = sum(rows * columns for rows, columns in shapes) * model.dtype.itemsize
    return DeviceProfile(gpu, model.dtype == torch.float32, size, free)


def available_memory_bytes() -> int:
    """Bytes of main memory that are free or can be freed; a large number where nobody knows."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 60
    found = {name: int(rest.split()[0]) for name, _, rest in (row.partition(":") for row in lines)}
    return found.get("MemAvailable", 1 << 50) * 1024
