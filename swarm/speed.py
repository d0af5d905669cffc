"""How fast the device at hand is: a GPU by its name, a CPU by trying it for half a second."""

import time
from collections.abc import Callable
from typing import Any

from swarm.cost import H200, DeviceSpec
from swarm.engine.plan import available_memory_bytes

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

MEASURED_SHARE = (H200.flops / 989e12, H200.bandwidth / 4.8e12)
"""What an H200 reaches of its sheet, and here every GPU."""

FLOPS_PER_CYCLE = 2048
"""16-bit operations a multiprocessor and cycle, Ampere's, for a GPU that is not in the table."""

FLOAT32_SLOWDOWN = 15
"""How much slower than bfloat16 a GPU multiplies float32: an H200 does 67 and 989 TFLOP/s."""

CPU_SHARE = 0.7
"""Of a CPU's matmul speed that a whole forward reaches; tried on SmolLM2, see docs/scaling.md."""

CPU_LAUNCH_SECONDS = 5e-4
"""A layer, for what runs in Python and on one core."""

MAX_MATMUL_SIDE = 4096
"""Side of the matrix that is tried; larger ones are no faster."""

BENCHMARK_SECONDS = 0.4
"""For each of the two."""


def gpu_spec(number: int, size: int) -> DeviceSpec:
    """What is known of a CUDA device, for weights of `size` bytes; its memory is what is free.

    Imports torch and opens the device.
    """
    import torch

    properties = torch.cuda.get_device_properties(number)
    flops, bandwidth = find_data_sheet(properties.name) or _estimate_speeds(properties)
    slower = FLOAT32_SLOWDOWN if size == 4 else 1
    free = torch.cuda.mem_get_info(number)[0]
    return DeviceSpec(properties.name, flops * MEASURED_SHARE[0] / slower, bandwidth * MEASURED_SHARE[1], free)


def find_data_sheet(name: str) -> tuple[float, float] | None:
    """The data sheet's operations and bytes a second of a GPU, if it is in the table."""
    words = name.upper().replace("-", " ").split()
    for known, speeds in DATA_SHEETS.items():
        if set(known.split()) <= set(words):
            return speeds
    return None


def _estimate_speeds(properties: Any) -> tuple[float, float]:
    """Of a GPU that is not in the table; torch gives clocks in kHz, and not in every version."""
    clock = getattr(properties, "clock_rate", 1_500_000) * 1e3
    memory_clock = getattr(properties, "memory_clock_rate", 5_000_000) * 1e3
    width = getattr(properties, "memory_bus_width", 256) / 8
    return properties.multi_processor_count * clock * FLOPS_PER_CYCLE, 2 * memory_clock * width


def measure_cpu(inputs: int, outputs: int, size: int, workers: int = 1) -> DeviceSpec:
    """This machine's processor, measured on a matmul of the model's own shape and on a copy.

    Imports torch. What else runs meanwhile is in the result, as it would be in a search.

    Args:
        inputs, outputs: The shape of the model's largest linear layer.
        size: Bytes of a weight.
        workers: Among how many the cores are shared.
    """
    import torch

    dtype = torch.float32 if size == 4 else torch.bfloat16
    inputs, outputs = min(inputs, MAX_MATMUL_SIDE), min(outputs, MAX_MATMUL_SIDE)
    # Few processors are quick in 16 bits; those that are not would be tried for minutes.
    count = 1024 if size == 4 else 32
    rows, weight = torch.randn(count, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    many = torch.zeros(1 << 24)
    copy = torch.empty_like(many)
    with torch.inference_mode():
        matmuls = _calls_per_second(lambda: torch.nn.functional.linear(rows, weight))
        copies = _calls_per_second(lambda: copy.copy_(many))
    flops = 2 * count * inputs * outputs * matmuls
    name = f"CPU, {torch.get_num_threads()} threads"
    return DeviceSpec(name, flops / workers, 8 * len(many) * copies / workers,
                  available_memory_bytes() // workers, CPU_SHARE, CPU_LAUNCH_SECONDS)  # fmt: skip


def _calls_per_second(act: Callable[[], Any]) -> float:
    """How often it is done a second, the first time not counted."""
    act()
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < BENCHMARK_SECONDS:
        act()
        count += 1
    return count / spent
