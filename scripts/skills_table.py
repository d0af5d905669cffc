"""What the base, each shipped expert and static mixtures come to on task=skills, by domain.

    python scripts/skills_table.py [--dtype bfloat16] [--items 900] [ROW ...]

Rows: base, the experts' names, and the mixtures `uniform factor` (1/K of each A and B apart),
`uniform delta` (1/K of each product) and `0.3 delta` (0.3 of each product, task arithmetic).
"""

import argparse
import logging
from collections import defaultdict

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from swarm._util.files import conf_folder
from swarm.engine.hf import HFEngine
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.pool.pool import Pool

MIXTURES = ("uniform factor", "uniform delta", "0.3 delta")


def position_of(row: str, names: list[str]) -> np.ndarray:
    """The coefficients of a row of the table, [K]."""
    if row in names or row == "base":
        return np.array([float(name == row) for name in names])
    return np.full(len(names), 0.3 if row.startswith("0.3") else 1 / len(names))


def main() -> None:
    """Print the table, a line at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="default: all")
    parser.add_argument("--dtype", default="auto", help="of the base: auto, float32, bfloat16")
    parser.add_argument("--items", type=int, help="number of test items; default: all")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        task = instantiate(compose("task/skills").task, _convert_="all")
        model = compose("model/smollm2", overrides=[f"model.dtype={options.dtype}"])
        base = instantiate(model.model)
    items = task.items("test")[: options.items]
    domains = sorted({item["domain"] for item in items})
    engines = {}
    for space in ("factor", "delta"):
        pool = Pool("initial_experts", space=space).open()
        engines[space] = HFEngine()
        engines[space].open(base, pool, options.device)
    names = list(pool.names)
    print(f"| n = {len(items)} | {' | '.join(domains)} | mean |", flush=True)
    print(f"| --- |{' --- |' * (len(domains) + 1)}")
    for row in options.rows or ["base", *names, *MIXTURES]:
        engine = engines["delta" if row.endswith("delta") else "factor"]
        (scores,) = run_tasks_lockstep(
            task, engine, position_of(row, names)[None], items, JobUsage()
        )
        values = defaultdict(list)
        for item, score in zip(items, scores, strict=True):
            values[item["domain"]].append(score.value)
        means = [f"{np.mean(values[domain]):.2f}" for domain in domains]
        mean = np.mean([score.value for score in scores])
        print(f"| {row} | {' | '.join(means)} | {mean:.3f} |", flush=True)


if __name__ == "__main__":
    main()
