"""Every optimizer on bowls over experts, on equal numbers of evaluations.

Prints Markdown tables: the share of the best expert's squared distance to the optimum that the best
position, by the utilities that it was given, leaves (median). The first table has bowls whose
optimum sums to 1, the one of --free has bowls whose optimum sums to 1.5, of one group of modules
and of 60 that differ a little, with the interval of the median (a bootstrap over seeds).
Some minutes on one core: python benchmarks/optimizer_bowls.py [--free] [--seeds 12] [--only nes]
"""

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

CONF = Path(__file__).resolve().parents[1] / "conf"
EXPERTS, BUDGETS, NOISE = 10, (60, 220, 1020), 0.035
SHORT = {"bayes": 60}
"""Budgets beyond which an optimizer takes too long to think."""

NO_BOWLS = {"auto", "gradient", "nsga2"}
"""Optimizers that need gradients, several objectives, or a task to choose by."""

SUM, MANY = 1.5, 60
FREE = [
    *("pso", "pso optimizer.soups=0", "cmaes", "genome", "lorahub", "random", "recipes"),
    *(f"{name} optimizer.sum_to_one=false" for name in ("cmaes", "random")),
    "cmaes optimizer.separable=true optimizer.sum_to_one=false",
    "nes",
    "bayes optimizer.sum_to_one=false optimizer.batch=10",
]
CASES = ((1, 36), (1, 200), (MANY, 200), (MANY, 1000))
"""Groups and budgets."""

Draw = Callable[[np.random.Generator], np.ndarray]


def few(random: np.random.Generator) -> np.ndarray:
    return random.dirichlet(np.full(EXPERTS, 0.3))


def many(random: np.random.Generator) -> np.ndarray:
    return random.dirichlet(np.ones(EXPERTS))


def outside(random: np.random.Generator) -> np.ndarray:
    row = 0.4 * random.normal(size=EXPERTS)
    return row + (1 - row.sum()) / EXPERTS


def free(random: np.random.Generator, groups: int) -> np.ndarray:
    """[G x K]: 1.5 times a mixture, some of it below 0, and a deviation of each group."""
    mix = SUM * random.dirichlet(np.full(EXPERTS, 0.5)) + centred(
        0.15 * random.normal(size=EXPERTS)
    )
    own = centred(0.1 * random.normal(size=(groups, EXPERTS))) if groups > 1 else 0.0
    return np.ravel(mix + own)


def centred(rows: np.ndarray) -> np.ndarray:
    return rows - rows.mean(axis=-1, keepdims=True)


def distance(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    return ((rows - target) ** 2).sum(axis=-1)


@cache
def options(method: str) -> Any:
    name, *more = method.split()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("search", ["name=bowl", f"optimizer={name}", *more]).optimizer


def made(method: str, groups: int, budget: int) -> Any:
    optimizer = instantiate(options(method), max_iterations=2000)
    if hasattr(optimizer, "patience"):
        optimizer.patience = 2000
    if hasattr(optimizer, "divide"):
        divisions = {"global": [0] * groups, "kind": [i % 2 for i in range(groups)]}
        optimizer.divide(lambda name: divisions.get(name, [*range(groups)]), budget)
    return optimizer


def left(
    optimizer: Any, target: np.ndarray, seed: int, noise: float, budget: int, groups: int = 1
) -> float:
    """What the position of the best utility within the budget leaves."""
    corners = np.tile(np.eye(EXPERTS), groups)
    random, spent, highest, best = np.random.default_rng(seed), 0, -np.inf, corners[0]
    known: dict[bytes, float] = {}
    optimizer.start(EXPERTS, seed, groups)
    while optimizer.stop_reason() is None and spent < budget:
        rows = optimizer.ask()
        utilities = np.full(len(rows), np.nan)
        for i in np.flatnonzero(optimizer.evaluate):
            # As in a search: a position is evaluated once, and what the budget ends is not.
            if (key := rows[i].tobytes()) not in known and spent < budget:
                error = noise * random.normal()
                known[key] = -float(distance(rows[i], target)) / groups + error
                spent += 1
            utilities[i] = known.get(key, np.nan)
        if np.isfinite(utilities).any() and np.nanmax(utilities) > highest:
            highest, best = np.nanmax(utilities), rows[np.nanargmax(utilities)]
        optimizer.tell(utilities)
    return float(distance(best, target) / distance(corners, target).min())


def shares(
    method: str, draw: Draw, seeds: int, noise: float, budget: int, groups: int = 1
) -> list[float]:
    targets = [draw(np.random.default_rng(1000 + seed)) for seed in range(seeds)]
    return [
        left(made(method, groups, budget), target, seed, noise, budget, groups)
        for seed, target in enumerate(targets)
    ]


def summing_to_one(methods: list[str], seeds: int) -> None:
    print("optimizer | budget | few | many | outside | few, noise | many, noise | outside, noise")
    print("--- | ---" + " | ---" * 6)
    for budget in BUDGETS:
        for method in methods:
            if budget > SHORT.get(method, budget):
                continue
            found = [
                f"{np.median(shares(method, draw, seeds, noise, budget)):.2g}"
                for noise in (0.0, NOISE)
                for draw in (few, many, outside)
            ]
            print(" | ".join([method, str(budget), *found]), flush=True)


def too_slow(method: str, groups: int, budget: int) -> bool:
    """A Gaussian process of many positions, and the whole covariance of 600 dimensions."""
    whole = method.split()[0] in ("cmaes", "lorahub") and "separable" not in method
    return (groups > 1 and whole) or (method.startswith("bayes") and (groups > 1 or budget > 100))


def free_sums(methods: list[str], seeds: int) -> None:
    heads = [f"{groups} group{'s' * (groups > 1)}, {budget}" for groups, budget in CASES]
    print(" | ".join(["optimizer", *heads]))
    print("---" + " | ---" * len(heads))
    for method in methods:
        cells = []
        for groups, budget in CASES:
            if too_slow(method, groups, budget):
                cells.append("")
                continue
            found = np.array(
                shares(method, lambda r, g=groups: free(r, g), seeds, NOISE, budget, groups)
            )
            again = np.random.default_rng(0).choice(found, size=(2000, seeds))
            low, high = np.quantile(np.median(again, axis=1), (0.025, 0.975))
            cells.append(f"{np.median(found):.2f} [{low:.2f}, {high:.2f}]")
        print(" | ".join([method.replace("optimizer.", ""), *cells]), flush=True)


if __name__ == "__main__":
    names = sorted({path.stem for path in (CONF / "optimizer").glob("*.yaml")} - NO_BOWLS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--only", default="", help="names of methods, with commas")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else FREE if arguments.free else names
    (free_sums if arguments.free else summing_to_one)(chosen, arguments.seeds)
