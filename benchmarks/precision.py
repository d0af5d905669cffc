"""Answers in float32, in bfloat16 products, with all of the model in bfloat16, and in int8.

    python benchmarks/precision.py [--items 200] [--positions 10] [--tasks skills]
        [--compared 10] [--verdict] [--out FILE]

At each of ten mixtures of the included experts all precisions answer the same items, one after the
other, so that the ratios are of interleaved times. Agreement is of the parsed answers with those of
float32, pair by pair; the rank correlation (Spearman) is of the mixtures' utilities. --verdict runs
two searches instead, in float32 and in bfloat16 with a verdict in float32, the second with the
budget that costs the same CPU seconds. Resumable: what is in FILE is not measured again.

int8 is not an option of the engine, and this file has the only implementation: weights per channel,
activations per token, oneDNN's product of int8 (`torch.ops.onednn.qlinear_pointwise`).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batching import default_base
from timing import cpu_seconds, machine
from torch import nn

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.loop.evaluator import answers_agree
from swarm.pool.pool import Pool
from swarm.stats.significance import wilson_interval
from swarm.tasks.base import Item, Score
from swarm.tasks.exact_match import ExactMatch

TASKS = {"skills": (12, "whole"), "nlgraph_mini": (4, "anchored")}
"""New tokens and parser, as in conf/task/."""

PRECISIONS = ("float32", "bfloat16", "all bfloat16", "int8")


class Int8Linear(nn.Module):
    """A product in int8: weights scaled per output channel, activations per token."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, self.bias = linear.weight, linear.bias
        self.scales = weight.abs().amax(1) / 127
        rounded = (weight / self.scales[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.zeros = torch.zeros(len(weight), dtype=torch.int32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out], float32."""
        scale = rows.abs().amax(-1, keepdim=True).mul_(1 / 127).clamp_(min=1e-12)
        out = torch.ops.onednn.qlinear_pointwise(
            (rows / scale).round_().to(torch.int8),
            *(1.0, 0, self.packed, self.scales, self.zeros),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        ).mul_(scale)
        return out if self.bias is None else out + self.bias


def open_engine(precision: str, base: BaseModel, pool: Pool) -> HFEngine:
    """Return an engine that answers in this precision."""
    engine = HFEngine()
    dtype = "bfloat16" if precision == "all bfloat16" else "float32"
    engine.open(replace(base, dtype=dtype), pool, "cpu")
    if precision == "bfloat16":
        engine.set_precision("bfloat16")
    if precision == "int8":
        engine.plan = "swap"
        model = engine._model
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, Int8Linear(module))
    return engine


def take_items(name: str, count: int) -> tuple[ExactMatch, list[Item]]:
    """Return a task and `count` of its items, evenly spaced over dev and then test."""
    new, parser = TASKS[name]
    task = ExactMatch(name, f"data/{name}.json", max_new_tokens=new, parser=parser)
    every = [*task.items("dev"), *task.items("test")]
    return task, [every[i] for i in np.linspace(0, len(every) - 1, count).astype(int)]


def measure(options: argparse.Namespace, done: dict[str, Any]) -> None:
    """Answer the items at all mixtures in all precisions, and store each position's numbers."""
    base = BaseModel(options.model) if options.model else default_base()
    pool = Pool(options.pool).open()
    mixtures = np.random.default_rng(7).dirichlet(np.full(len(pool.names), 0.7), options.positions)
    engines: dict[str, HFEngine] = {}
    for name in options.tasks.split(","):
        task, items = take_items(name, options.items)
        for number, mixture in enumerate(mixtures):
            key = f"{name} {options.items} {number}"
            if key in done:
                continue
            chosen = PRECISIONS if number < options.compared else PRECISIONS[:2]
            for precision in chosen:
                if precision not in engines:
                    engines[precision] = open_engine(precision, base, pool)
                    run_tasks_lockstep(
                        task, engines[precision], mixture[None], items[:2], JobUsage()
                    )
            row: dict[str, Any] = {}
            exact: list[Score] = []
            for precision in chosen:
                engine = engines[precision]
                cpu, wall = cpu_seconds(), time.perf_counter()
                (scores,) = run_tasks_lockstep(task, engine, mixture[None], items, JobUsage())
                exact = exact or scores
                row[precision] = {
                    "cpu": cpu_seconds() - cpu,
                    "wall": time.perf_counter() - wall,
                    "utility": task.utility(scores),
                    "agree": sum(map(answers_agree, scores, exact)),
                }
            done[key] = row
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(done, indent=1))
            print(key, {name: round(one["cpu"], 1) for name, one in row.items()}, flush=True)


def ranks(values: list[float]) -> np.ndarray:
    """Return ranks, the mean one for ties."""
    column = np.array(values)
    return np.array([(column < v).sum() + ((column == v).sum() + 1) / 2 for v in column])


def print_table(options: argparse.Namespace, done: Mapping[str, Any]) -> None:
    """Print one row per task and precision."""
    print(f"{machine()}; {torch.get_num_threads()} threads")
    print(
        "| task | precision | CPU s (wall s) | ratio, CPU | answers as in float32 | "
        "rank correlation |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in options.tasks.split(","):
        keys = [f"{name} {options.items} {n}" for n in range(options.positions)]
        rows = [done[key] for key in keys if key in done]
        for precision in PRECISIONS:
            both = [row for row in rows if precision in row]
            if not both:
                continue
            exact = ranks([row["float32"]["utility"] for row in both])
            mine = [row[precision] for row in both]
            cpu = float(np.median([one["cpu"] for one in mine]))
            wall = float(np.median([one["wall"] for one in mine]))
            ratio = float(
                np.median([row["float32"]["cpu"] / row[precision]["cpu"] for row in both])
            )
            answers = options.items * len(both)
            agree = sum(one["agree"] for one in mine)
            low, high = wilson_interval(np.array(agree / answers), answers)
            theirs = ranks([one["utility"] for one in mine])
            correlation = float(np.corrcoef(exact, theirs)[0, 1])
            print(
                f"| {name} | {precision} | {cpu:.1f} ({wall:.1f}) | {ratio:.2f} | "
                f"{agree / answers:.3f} [{low:.3f}, {high:.3f}] of {answers:,} | "
                f"{correlation:.2f} |"
            )


def run_search(options: argparse.Namespace, precision: str, budget: int) -> dict[str, Any]:
    """Run one search in a process of its own; return its metrics and CPU seconds."""
    home = options.out.parent / "precision_runs"
    name = f"{precision}_{budget}"
    words = ["task=skills", "optimizer=random"]
    words += [f"task.dev_limit={options.dev}", f"task.test_limit={options.test}"]
    words += [f"budget={budget}", "baselines=[]", "noise_floor=false", "ensemble=0"]
    words += [f"folder={home}", f"name={name}", f"engine.precision={precision}"]
    began, wall = cpu_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "swarm.search", *words], check=True)
    metrics = json.loads((home / name / "state.json").read_text())["metrics"]
    return {
        "budget": budget,
        "cpu": cpu_seconds() - began,
        "wall": time.perf_counter() - wall,
        "dev": metrics["ending_best_validation_utility"],
        "test": metrics["ending_best_single_test_accuracy"],
        "test_interval": metrics["ending_best_single_test_interval"],
        "precision": metrics.get("precision"),
    }


def compare_verdicts(options: argparse.Namespace, done: dict[str, Any]) -> None:
    """Search in float32, then in bfloat16 with more prompts, for the same CPU seconds."""
    for precision, budget in (("float32", options.budget), ("bfloat16", options.quick_budget)):
        key = f"verdict {precision} {budget}"
        if key not in done:
            done[key] = run_search(options, precision, budget)
            options.out.write_text(json.dumps(done, indent=1))
        one = done[key]
        low, high = one["test_interval"]
        print(
            f"| {precision} | {budget:,} | {one['cpu']:.0f} ({one['wall']:.0f}) | {one['dev']:.3f} "
            f"| {one['test']:.3f} [{low:.3f}, {high:.3f}] |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--positions", type=int, default=10)
    parser.add_argument("--compared", type=int, default=10, help="positions of the last two, too")
    parser.add_argument("--tasks", default="skills")
    parser.add_argument("--verdict", action="store_true")
    parser.add_argument("--budget", type=int, default=1080, help="dev prompts in float32")
    parser.add_argument("--quick-budget", type=int, default=1566, help="and in bfloat16")
    parser.add_argument("--dev", type=int, default=27)
    parser.add_argument("--test", type=int, default=90)
    parser.add_argument("--out", type=Path, default=Path("build/precision.json"))
    options = parser.parse_args()
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if options.verdict:
        compare_verdicts(options, done)
        return
    measure(options, done)
    print_table(options, done)


if __name__ == "__main__":
    main()
