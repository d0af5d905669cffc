"""Shared helpers of the benchmarks: interleaved repeats, medians, CPU time beside wall time."""

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Taken(NamedTuple):
    """Median seconds of several repeats; CPU seconds count child processes that have ended."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.3g} s ({self.cpu:.3g} CPU s)"


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have been waited for."""
    mine, theirs = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


def interleaved(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Taken]:
    """Run all ways in turn, `repeats` times; a warm-up of each is left to the caller."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            cpu, wall = cpu_seconds(), time.perf_counter()
            way()
            taken[name].append((time.perf_counter() - wall, cpu_seconds() - cpu))
    return {
        name: Taken(*(statistics.median(t[i] for t in times) for i in (0, 1)))
        for name, times in taken.items()
    }


def machine() -> str:
    """The machine, in a line."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    return f"{os.cpu_count()} cores of {model}, torch {torch.__version__}"
