"""How fast the device at hand is: a GPU by its name, a CPU by trying it for half a second."""

import time
from collections.abc import Callable
from typing import Any

from swarm.cost import H200, Device
from swarm.engine.plan import available_memory

DATA_SHEETS = {
    "B200": (2250e12, 8.0e12),
    "H200": (989e12, 4.8e12),
    "H100 PCIE": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 1.94e12),
    "L40S": (362e12, 0.864e12),
    "L4": (121e12, 0.3e12),
    "A10": (125e12, 0.6e12),
    "RTX 4090": (165e12, 1.008e12),
    "RTX 3090": (71e12, 0.936e12),
    "V100": (125e12, 0.9e12),
    "T4": (65e12, 0.32e12),
}
"""Part of a name -> 16-bit operations (without sparsity) and bytes a second, of the makers' data
sheets; the first that fits counts."""

REACHED = (H200.flops / 989e12, H200.bandwidth / 4.8e12)
"""What an H200 reaches of its sheet, and here every GPU."""

PER_CORE = 2048
"""16-bit operations a multiprocessor and cycle, Ampere's, for a GPU that is not in the table."""

FLOAT32_SLOWER = 15
"""How much slower than bfloat16 a GPU multiplies float32: an H200 does 67 and 989 TFLOP/s."""

CPU_SHARE = 0.7
"""Of a CPU's matmul speed that a whole forward reaches; tried on SmolLM2, see docs/scaling.md."""

CPU_LAUNCH_SECONDS = 5e-4
"""A layer, for what runs in Python and on one core."""

LARGEST = 4096
"""Side of the matrix that is tried; larger ones are no faster."""

TRY_SECONDS = 0.4
"""For each of the two."""


def gpu(number: int, size: int) -> Device:
    """What is known of a CUDA device, for weights of `size` bytes; its memory is what is free.

    Imports torch and opens the device.
    """
    import torch

    properties = torch.cuda.get_device_properties(number)
    flops, bandwidth = by_name(properties.name) or _by_parts(properties)
    slower = FLOAT32_SLOWER if size == 4 else 1
    free = torch.cuda.mem_get_info(number)[0]
    return Device(properties.name, flops * REACHED[0] / slower, bandwidth * REACHED[1], free)


def by_name(name: str) -> tuple[float, float] | None:
    """The data sheet's operations and bytes a second of a GPU, if it is in the table."""
    words = name.upper().replace("-", " ").split()
    for known, speeds in DATA_SHEETS.items():
        if set(known.split()) <= set(words):
            return speeds
    return None


def _by_parts(properties: Any) -> tuple[float, float]:
    """Of a GPU that is not in the table; torch gives clocks in kHz, and not in every version."""
    clock = getattr(properties, "clock_rate", 1_500_000) * 1e3
    memory_clock = getattr(properties, "memory_clock_rate", 5_000_000) * 1e3
    width = getattr(properties, "memory_bus_width", 256) / 8
    return properties.multi_processor_count * clock * PER_CORE, 2 * memory_clock * width


def cpu(inputs: int, outputs: int, size: int, workers: int = 1) -> Device:
    """This machine's processor, measured on a matmul of the model's own shape and on a copy.

    Imports torch. What else runs meanwhile is in the result, as it would be in a search.

    Args:
        inputs, outputs: The shape of the model's largest linear layer.
        size: Bytes of a weight.
        workers: Among how many the cores are shared.
    """
    import torch

    dtype = torch.float32 if size == 4 else torch.bfloat16
    inputs, outputs = min(inputs, LARGEST), min(outputs, LARGEST)
    # Few processors are quick in 16 bits; those that are not would be tried for minutes.
    count = 1024 if size == 4 else 32
    rows, weight = torch.randn(count, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    many = torch.zeros(1 << 24)
    copy = torch.empty_like(many)
    with torch.inference_mode():
        matmuls = _a_second(lambda: torch.nn.functional.linear(rows, weight))
        copies = _a_second(lambda: copy.copy_(many))
    flops = 2 * count * inputs * outputs * matmuls
    name = f"CPU, {torch.get_num_threads()} threads"
    return Device(name, flops / workers, 8 * len(many) * copies / workers,
                  available_memory() // workers, CPU_SHARE, CPU_LAUNCH_SECONDS)  # fmt: skip


def _a_second(act: Callable[[], Any]) -> float:
    """How often it is done a second, the first time not counted."""
    act()
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < TRY_SECONDS:
        act()
        count += 1
    return count / spent
