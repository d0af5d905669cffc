"""Prints bfloat16 or float32: in which type this CPU multiplies sooner."""

import time

import torch

from swarm.engine.cpu_product import multiply


def quicker_dtype() -> str:
    """Return the type.

    Measured in a tenth of a second on one thread, at the size of a small model's layer. The
    instructions do not show it: some CPUs have those of bfloat16 and are quicker in float32.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    least = {"float32": float("inf"), "bfloat16": float("inf")}
    pairs = {
        name: [torch.ones(size, dtype=getattr(torch, name)) for size in ((540, 576), (1536, 576))]
        for name in least
    }
    began, rounds = time.perf_counter(), 0
    # The first products of a process are slow: at least one more, also where it exceeds the time.
    while rounds < 2 or time.perf_counter() - began < 0.1:
        for name, (rows, weight) in pairs.items():
            start = time.perf_counter()
            multiply(rows, weight)
            least[name] = min(least[name], time.perf_counter() - start)
        rounds += 1
    torch.set_num_threads(threads)
    return min(least, key=lambda name: least[name])


if __name__ == "__main__":
    print(quicker_dtype())
