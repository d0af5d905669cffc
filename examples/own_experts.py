"""Experts of your own: a folder of PEFT LoRA adapters of one base model, and their best mixture.

Here they are three of those that ship and a mixture of two of them, which is an expert like any
other once it is saved. Your folder and base are arguments:

    python examples/own_experts.py
    python examples/own_experts.py my_experts my_base_model
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from swarm.api import Pool, Result, evaluate, search


def filled(folder: Path, pool: str = "initial_experts", names: tuple[str, ...] = ()) -> Path:
    """Create a folder with some experts of a pool and a mixture of the first two.

    An existing folder is used if this example created it, and refused otherwise.
    """
    mixture = folder / "half_and_half"
    if folder.exists() and not (mixture / "adapter_config.json").is_file():
        sys.exit(f"{folder} was not created by this example; name it to use it unchanged")
    if folder.exists():
        return folder
    chosen = Pool(pool, names or ("rooms", "roads", "arithmetic")).open()
    for name in chosen.names:
        shutil.copytree(chosen.folder / name, folder / name)
    first, second = chosen.names[:2]
    chosen.save({first: 0.5, second: 0.5}, mixture)
    return folder


def main(experts: str | Path = "my_experts", model: str | Path = "smollm2", **keys: Any) -> Result:
    pool = Pool(experts).open()
    print(f"{len(pool.names)} experts of rank {pool.rank}: {', '.join(pool.names)}")
    settings = {
        "task": "nlgraph_mini",
        "optimizer": {"particles": 6, "max_iterations": 3},
        "overrides": {"task.dev_limit": 30, "task.test_limit": 40},
        "ensemble": 0,
        **keys,
    }
    found = search(pool=pool, model=model, **settings)
    print(found)
    for name, share in found.best.coefficients.items():
        print(f"  {share:+.2f} {name}")
    limited = evaluate(found, settings["task"], "dev", overrides=settings["overrides"])
    print(
        f"best found on dev again: {limited.utility:.3f}, 95 % interval "
        f"{limited.interval[0]:.3f} to {limited.interval[1]:.3f}"
    )
    return found


if __name__ == "__main__":
    main(*sys.argv[1:] or [filled(Path("my_experts"))])
