"""Gradients of a position: prompts that share lines of a batch, against one padded row each.

    python benchmarks/gradient.py [--tasks skills,nlgraph_mini] [--batch 8] [--steps 5]

Minibatches of a task's dev items, at a position with coefficients for each of the task's domains.
Losses and derivatives of both ways are compared first; repeats are interleaved.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from batching import compose_part, default_base
from timing import interleaved, machine

from swarm.engine.base_model import BaseModel
from swarm.engine.gradient import (
    Gradient,
    TokenizedExample,
    batch_examples,
    compute_loss_and_gradient,
)
from swarm.engine.hf import HFEngine
from swarm.pool.pool import Pool
from swarm.tasks.metrics import item_domain


def compute(
    engine: HFEngine,
    position: np.ndarray,
    batches: Sequence[Sequence[TokenizedExample]],
    fill: bool,
    slope: bool,
) -> list[Gradient]:
    """Return the loss and, with `slope`, the derivative of each minibatch."""
    model, stack = engine._model, engine._mixer
    cut = partial(batch_examples, pad=0, budget=engine._budget, packed=fill)
    return [compute_loss_and_gradient(model, stack, position, cut(rows), slope) for rows in batches]


def measure(name: str, base: BaseModel, options: argparse.Namespace) -> None:
    """Print the row of a task."""
    task = compose_part(f"task={name}")
    items = task.items("dev")
    random = np.random.default_rng(0)
    domains = sorted({item_domain(item) for item in items})
    count = len(domains)
    pool = Pool(options.pool, space="delta").open()
    engine = HFEngine()
    engine.open(base, pool, options.device)
    assert engine._packs_choices
    batches = []
    for _ in range(options.steps):
        chosen = random.choice(len(items), options.batch, replace=False)
        rows = [
            engine._tokenize_example(one) for one in task.gold_examples([items[i] for i in chosen])
        ]
        for row, index in zip(rows, chosen, strict=True):
            row.route = domains.index(item_domain(items[index]))
        batches.append(rows)
    position = random.normal(0, 0.4, (count, len(pool.names)))
    work = partial(compute, engine, position, batches)
    for one, other in zip(work(True, True), work(False, True), strict=True):
        assert abs(one.loss - other.loss) < 0.02 * other.loss
        assert np.abs(one.slope - other.slope).max() < 0.05 * np.abs(other.slope).max()
    ways = {
        "padded": partial(work, False, True),
        "lines": partial(work, True, True),
        "padded loss": partial(work, False, False),
        "lines loss": partial(work, True, False),
    }
    taken = interleaved(ways, options.repeats)
    real, padded, lines = (
        sum(size(batch) for rows in batches for batch in batch_examples(rows, 0, 4096, fill))
        for fill, size in (
            (True, lambda batch: int((batch.rows >= 0).sum())),
            (False, lambda batch: batch.ids.size),
            (True, lambda batch: batch.ids.size),
        )
    )
    each = options.steps * options.batch
    cells = [
        name,
        count,
        f"{real / each:.1f}",
        f"{padded / real:.2f}, {lines / real:.2f}",
        *(f"{1e3 * taken[way].cpu / each:.0f}" for way in ways),
        f"{taken['padded'].wall / taken['lines'].wall:.2f}, "
        f"{taken['padded'].cpu / taken['lines'].cpu:.2f}",
        f"{taken['padded loss'].cpu / taken['lines loss'].cpu:.2f}",
        f"{taken['lines'].cpu / taken['lines loss'].cpu:.2f}",
    ]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder or hub id; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tasks", default="skills,nlgraph_mini")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    base = BaseModel(options.model) if options.model else default_base()
    base = replace(base, dtype=options.dtype)
    print(f"{machine()}, {base.dtype}; {options.steps} minibatches of {options.batch} examples")
    print("CPU ms of an example; ratios of padded rows to lines, wall and CPU\n")
    print(
        "| task | routes | tokens | computed for each, padded and lines | gradient, padded | lines "
        "| loss, padded | lines | gradient, ratio | loss, ratio | gradient / loss |"
    )
    print("| --- " * 11 + "|")
    for name in options.tasks.split(","):
        measure(name, base, options)


if __name__ == "__main__":
    main()
