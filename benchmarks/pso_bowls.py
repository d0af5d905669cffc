"""Effect of the swarm's coefficients and step length on bowls; the swarm against random search.

Prints the tables of docs/pso.md; three minutes on one core: python benchmarks/pso_bowls.py
"""

from collections.abc import Callable
from itertools import product

import numpy as np

from swarm.optimizers.pso import ParticleSwarm

EXPERTS, EYE = 10, np.eye(10)
RANGES = {
    "inertia": (0.1, 0.2, 0.3),
    "cognitive": (0.1, 0.2, 0.3, 0.4, 0.5),
    "social": (0.2, 0.3, 0.4, 0.5, 0.6),
    "repel": (0.01, 0.05, 0.1),
    "step_length": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
}


def inside(random: np.random.Generator, concentration: float = 1.0) -> np.ndarray:
    return random.dirichlet(np.full(EXPERTS, concentration))


def outside(random: np.random.Generator) -> np.ndarray:
    row = 0.4 * random.normal(size=EXPERTS)
    return row + (1 - row.sum()) / EXPERTS


def distance(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    return ((rows - target) ** 2).sum(axis=-1)


def left(target: np.ndarray, seed: int, noise: float = 0.0, **options: float) -> tuple[float, int]:
    """Share of the best expert's squared distance that the search left, and its evaluations."""
    random = np.random.default_rng(1000 + seed)
    swarm, spent = ParticleSwarm(**options), 0
    swarm.start(EXPERTS, seed)
    while swarm.stop_reason() is None:
        rows = swarm.ask()
        spent += len(rows)
        swarm.tell(-distance(rows, target) + noise * random.normal(size=len(rows)))
    return float(distance(swarm.best_position, target) / distance(EYE, target).min()), spent


def sweep() -> None:
    settings = list(product(*RANGES.values()))
    shares = np.empty((len(settings), 2))
    for row, setting in enumerate(settings):
        options = dict(zip(RANGES, setting, strict=True))
        for column, draw in enumerate((inside, outside)):
            targets = [draw(np.random.default_rng(seed)) for seed in range(6)]
            each = [left(t, seed, 0.035, **options)[0] for seed, t in enumerate(targets)]
            shares[row, column] = np.mean(each)
    mean = np.sqrt(shares.prod(axis=1))
    own = tuple(getattr(ParticleSwarm(), name) for name in RANGES)
    rank = 1 + int((mean < mean[settings.index(own)]).sum())
    print(f"defaults: rank {rank} of {len(settings)}")
    for index, (name, values) in enumerate(RANGES.items()):
        for value in values:
            chosen = [setting[index] == value for setting in settings]
            print(name, value, "left inside, outside:", shares[chosen].mean(axis=0).round(3))


def against_random(name: str, draw: Callable[[np.random.Generator], np.ndarray]) -> None:
    won = 0
    for seed in range(20):
        random = np.random.default_rng(50 + seed)
        target = draw(random)
        share, spent = left(target, seed)
        rows = random.dirichlet(np.ones(EXPERTS), size=spent)
        won += share * distance(EYE, target).min() < distance(rows, target).min()
    print(f"nearer than random search, optimum {name}: {won} of 20 seeds")


if __name__ == "__main__":
    against_random("of few experts", lambda random: inside(random, 0.3))
    against_random("uniform in the simplex", inside)
    against_random("outside", outside)
    sweep()
