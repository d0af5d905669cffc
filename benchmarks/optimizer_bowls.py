"""Every optimizer on bowls over experts, on equal numbers of evaluations.

    python benchmarks/optimizer_bowls.py [--repeats 12] [--only nes,cmaes]

A cell is the share of the best expert's squared distance to the optimum that the best position, by
the utilities that it was given, leaves; the repeats are seeds. Optima sum to 1: a mixture of few
experts, of many, or outside of all mixtures; with and without noise. Minutes on one core. An
optimizer may have options: --only "cmaes,cmaes optimizer.sum_to_one=false".
"""

import argparse
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import frame
import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

CONF = Path(__file__).resolve().parents[1] / "conf"
EXPERTS, NOISE = 10, 0.035
NO_BOWLS = {"auto", "gradient", "nsga2"}
"""Optimizers that need gradients, several objectives, or a task to choose by."""

SLOW = {"bayes": 60}
"""Budgets beyond which an optimizer takes too long to think."""

BOWLS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "few": lambda random: random.dirichlet(np.full(EXPERTS, 0.3)),
    "many": lambda random: random.dirichlet(np.ones(EXPERTS)),
    "outside": lambda random: 1 / EXPERTS + centred(0.4 * random.normal(size=EXPERTS)),
}
"""What draws the optimum of a bowl, [K]."""


def centred(row: np.ndarray) -> np.ndarray:
    return row - row.mean()


def distance(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    return ((rows - target) ** 2).sum(axis=-1)


@cache
def options_of(method: str) -> Any:
    name, *more = method.split()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("search", ["name=bowl", f"optimizer={name}", *more]).optimizer


def left(method: str, bowl: str, seed: int, noise: float, budget: int) -> float:
    """Return what the position of the best utility within the budget leaves."""
    optimizer = instantiate(options_of(method), max_iterations=2000)
    if hasattr(optimizer, "patience"):
        optimizer.patience = 2000
    if hasattr(optimizer, "divide"):
        optimizer.divide(lambda name: [0], budget)
    target = BOWLS[bowl](np.random.default_rng(1000 + seed))
    corners = np.eye(EXPERTS)
    random, spent, highest, best = np.random.default_rng(seed), 0, -np.inf, corners[0]
    known: dict[bytes, float] = {}
    optimizer.start(EXPERTS, seed, 1)
    while optimizer.stop_reason() is None and spent < budget:
        rows = optimizer.ask()
        utilities = np.full(len(rows), np.nan)
        for i in np.flatnonzero(optimizer.evaluate):
            # As in a search: a position is evaluated once, and what the budget ends is not.
            if (key := rows[i].tobytes()) not in known and spent < budget:
                known[key] = -float(distance(rows[i], target)) + noise * random.normal()
                spent += 1
            utilities[i] = known.get(key, np.nan)
        if np.isfinite(utilities).any() and np.nanmax(utilities) > highest:
            highest, best = np.nanmax(utilities), rows[np.nanargmax(utilities)]
        optimizer.tell(utilities)
    return float(distance(best, target) / distance(corners, target).min())


def measure(options: argparse.Namespace) -> Iterator[frame.Row]:
    """Yield a row for each budget and optimizer."""
    names = sorted({path.stem for path in (CONF / "optimizer").glob("*.yaml")} - NO_BOWLS)
    methods = options.only.split(",") if options.only else names
    for budget, method in product((60, 220, 1020), methods):
        if budget > SLOW.get(method.split()[0], budget):
            continue
        yield {"optimizer": method.replace("optimizer.", ""), "budget": budget} | {
            f"{bowl}{', noise' if noise else ''}": [
                left(method, bowl, seed, noise, budget) for seed in range(options.repeats)
            ]
            for noise, bowl in product((0.0, NOISE), BOWLS)
        }


if __name__ == "__main__":
    parser = frame.parser(__doc__, repeats=12)
    parser.add_argument("--only", default="", help="names of methods, with commas")
    frame.run(parser.parse_args(), measure)
