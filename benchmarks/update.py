"""The step of the swarm: five disk merges a particle against arithmetic on coefficients.

    python benchmarks/update.py [--pool initial_experts] [--particles 20] [--repeats 3]

The reference procedure is re-created from its description (docs/decisions.md): for every particle,
p - x, g - x and x - w, then the velocity, then the position, each a weighted sum of adapters that
are read from safetensors files and written to one. The results are compared before anything is
timed. The coefficient step includes drawing its random numbers and the state that is saved.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from timing import Taken, interleaved, machine

from swarm.optimizers.pso import ParticleSwarm
from swarm.pool.pool import Pool

FILE = "adapter_model.safetensors"
WEIGHTS = (0.2, 0.3, 0.4, 0.05)


def merge(parts: list[tuple[float, Path]], target: Path) -> None:
    """Write a weighted sum of adapters, as files."""
    total = None
    for weight, folder in parts:
        tensors = load_file(folder / FILE)
        if total is None:
            total = {key: weight * value.float() for key, value in tensors.items()}
        else:
            for key, value in tensors.items():
                total[key] += weight * value.float()
    target.mkdir(parents=True, exist_ok=True)
    save_file(total, target / FILE)


def disk_step(home: Path, particles: int, step: float) -> None:
    """Move every particle by five merges on disk."""
    inertia, cognitive, social, repel = WEIGHTS
    for i in range(particles):
        own = home / f"particle_{i}"
        merge([(1.0, own / "best"), (-1.0, own / "now")], own / "p_x")
        merge([(1.0, home / "g"), (-1.0, own / "now")], own / "g_x")
        merge([(1.0, own / "now"), (-1.0, home / "w")], own / "x_w")
        merge(
            [
                (inertia, own / "velocity"),
                (cognitive, own / "p_x"),
                (social, own / "g_x"),
                (repel, own / "x_w"),
            ],
            own / "velocity",
        )
        merge([(1.0, own / "now"), (step, own / "velocity")], own / "now")


def coefficient_step(x: np.ndarray, v: np.ndarray, step: float) -> np.ndarray:
    """The same move of all particles, on rows of coefficients; best is the start, w the first."""
    inertia, cognitive, social, repel = WEIGHTS
    v = inertia * v + cognitive * (x - x) + social * (x[1] - x) + repel * (x - x[0])
    return x + step * v


def compare(pool: Pool, home: Path, particles: int) -> None:
    """Both ways give the same adapters, to float32 rounding."""
    x = np.eye(particles, len(pool.names))[:, : len(pool.names)]
    for i in range(particles):
        x[i] = np.eye(len(pool.names))[i % len(pool.names)]
    moved = coefficient_step(x, np.roll(x, 1, axis=0) - x, 0.5)
    disk_step(home, particles, 0.5)
    for i in range(particles):
        pool.save(moved[i], home / "check")
        ours, theirs = (load_file(f / FILE) for f in (home / "check", home / f"particle_{i}/now"))
        worst = max(float((ours[key] - theirs[key]).abs().max()) for key in ours)
        assert worst < 1e-5, f"particle {i} differs by {worst}"


def lay_out(pool: Pool, home: Path, particles: int) -> None:
    """The folders of the reference procedure at the start of an iteration."""
    experts = [pool.folder / pool.names[i % len(pool.names)] for i in range(particles)]
    for i, expert in enumerate(experts):
        own = home / f"particle_{i}"
        for name in ("now", "best"):
            merge([(1.0, expert)], own / name)
        merge([(1.0, experts[i - 1]), (-1.0, expert)], own / "velocity")
    merge([(1.0, experts[1])], home / "g")
    merge([(1.0, experts[0])], home / "w")


def swarm_steps(optimizer: ParticleSwarm, count: int) -> None:
    """`count` whole steps: tell, ask, and the state as text."""
    for _ in range(count):
        optimizer.tell(np.zeros(len(optimizer.positions)))
        optimizer.ask()
        json.dumps(optimizer.state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    pool = Pool(options.pool).open()
    home = Path(tempfile.mkdtemp())
    lay_out(pool, home, options.particles)
    compare(pool, home, options.particles)
    optimizer = ParticleSwarm(particles=options.particles, max_iterations=10**9, patience=10**9)
    optimizer.start(len(pool.names), 0)
    optimizer.ask()
    steps = 100
    found = interleaved(
        {
            "disk": lambda: disk_step(home, options.particles, 0.5),
            "coefficients": lambda: swarm_steps(optimizer, steps),
        },
        options.repeats,
    )
    shutil.rmtree(home)
    one = Taken(*(value / steps for value in found["coefficients"]))
    print(f"{machine()}; {options.particles} particles, {pool.size} weights each")
    print(f"five disk merges a particle: {found['disk']}")
    print(f"coefficient step with state: {one}")
    print(f"ratio: {found['disk'].wall / one.wall:.0f} wall, {found['disk'].cpu / one.cpu:.0f} CPU")


if __name__ == "__main__":
    main()
