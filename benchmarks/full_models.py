"""Full models as experts: memory of a search over them, and time per position.

python benchmarks/full_models.py [--model FOLDER] [--models 3] [--positions 3]

The experts are the model and copies of it with noise, made on this disk and removed again. Memory
is what Linux calls the resident set, mapped pages of files included, above what the process held
with its libraries imported; its peak (VmHWM) is set back through /proc/self/clear_refs before each
line.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from batching import default_base
from timing import Taken, cpu_seconds, machine

from swarm.engine.base_model import BaseModel
from swarm.engine.full.engine import FullWeightsEngine
from swarm.engine.full.pool import FullModelPool
from swarm.models.base import Request

MEGABYTE = 10**6


def make(base: str, folder: str, seed: int) -> None:
    """Write a copy of a model with noise of 1 % of each tensor's own spread."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    torch.manual_seed(seed)
    for file in Path(folder).glob("*.safetensors"):
        noisy = {
            name: weight + 0.01 * weight.float().std() * torch.randn_like(weight)
            for name, weight in load_file(file).items()
        }
        save_file(noisy, file, metadata={"format": "pt"})


def status(key: str) -> float:
    """A line of /proc/self/status, in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / MEGABYTE
    raise SystemExit("memory is measured on Linux only")


def measured(act: Callable[[], object]) -> tuple[float, Taken]:
    """The peak of the resident set in megabytes, and the time it took."""
    Path("/proc/self/clear_refs").write_text("5")
    wall, cpu = time.perf_counter(), cpu_seconds()
    act()
    return status("VmHWM"), Taken(time.perf_counter() - wall, cpu_seconds() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder; default: SmolLM2")
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--positions", type=int, default=3)
    options = parser.parse_args()
    home = (BaseModel(options.model) if options.model else default_base()).resolve()
    with tempfile.TemporaryDirectory(prefix="full-models-") as scratch:
        folders = [home, *(f"{scratch}/copy_{seed}" for seed in range(1, options.models))]
        for seed, folder in enumerate(folders[1:]):
            # In a process of its own, so that memory it leaves free is not counted as this one's.
            process = get_context("spawn").Process(target=make, args=(home, folder, seed))
            process.start()
            process.join()
        report(FullModelPool(folders), options.positions, f"{scratch}/saved")


def report(pool: FullModelPool, count: int, target: str) -> None:
    """Measure and print."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    base, engine = BaseModel(pool.models[0]), FullWeightsEngine()
    held = status("VmRSS")
    sizes = [sum(f.stat().st_size for f in Path(m).glob("*.safetensors")) for m in pool.models]
    load = measured(lambda: engine.open(base, pool, "cpu"))
    weights = [p.numel() * p.itemsize for p in engine._model.parameters()]
    model, resident = sum(weights), status("VmRSS")
    drawn = np.random.default_rng(1).dirichlet(np.ones(len(pool.names)), count)
    asked = [Request("Question: is 3 + 4 = 7?\nAnswer:", 1)]
    engine.generate(drawn[-1:], [asked])
    again = measured(lambda: engine.generate(drawn[-1:], [asked]))
    search = measured(lambda: [engine.generate(row[None], [asked]) for row in drawn])
    saved = measured(lambda: pool.save(drawn[-1], target))
    print(machine())
    print(
        f"{len(pool.names)} models of {model / MEGABYTE:.0f} MB in memory, the largest tensor "
        f"{max(weights) / MEGABYTE:.0f} MB; {sum(sizes) / MEGABYTE:.0f} MB on disk"
    )
    print("| | peak, MB above the libraries | wall | CPU |\n|---|---|---|---|")
    each = Taken(*(value / count for value in search[1]))
    for what, peak, taken in (
        (f"load the base (then {resident - held:.0f} MB)", *load),
        ("a position and a prompt", search[0], each),
        ("the same position again and a prompt", *again),
        ("save a position", *saved),
    ):
        print(f"| {what} | {peak - held:.0f} | {taken.wall:.3g} s | {taken.cpu:.3g} s |")


if __name__ == "__main__":
    main()
