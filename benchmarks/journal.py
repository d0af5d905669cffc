"""Cost of a search without its models, by the number of finished iterations.

    python benchmarks/journal.py [--iterations 1000] [--particles 20] [--optimizer pso]

Runs a whole search on disk whose answers are computed by a formula (no model is loaded), and
compares the first tenth of the iterations with the last tenth: CPU time of the process, and the
bytes of all its write calls. A saved best is its coefficients without weights, so that the size of
an adapter does not hide what the record costs. `--seconds` adds time to every evaluation, as a
model would take it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from batching import default_base
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from iteration import items
from timing import cpu_seconds, machine

from swarm._util.files import conf_folder, write_json
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.executors import Job, JobResult, Worker
from swarm.loop.evaluator import Batching
from swarm.loop.run import Run
from swarm.pool.pool import Pool
from swarm.tasks.base import Item, Score
from swarm.tasks.multiple_choice import MultipleChoice
from swarm.trackers.base import NullTracker


class Made(MultipleChoice):
    """The benchmark's own questions."""

    def __init__(self, count: int) -> None:
        super().__init__("benchmark")
        self._items = items(count, "short")

    def items(self, split: str) -> list[Item]:
        """See `swarm.tasks.base.Task`."""
        return self._items


class Notes(Pool):
    """A pool whose saved bests are coefficients alone."""

    def save(self, position: Sequence[float], folder: Path, facts: Any = None) -> None:
        """Write swarm.json."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "swarm.json", {"coefficients": list(position), **(facts or {})})


class Formula:
    """An executor whose answers follow from the position; notes time and bytes at every call."""

    on_gpu = False

    def __init__(self, experts: int, seconds: float) -> None:
        self.goal = np.random.default_rng(0).dirichlet(np.full(experts, 0.3))
        self.seconds = seconds
        self.marks: list[tuple[float, int]] = []

    def open(self, worker: Worker) -> None:
        """Nothing has to be opened."""

    def map(self, jobs: Iterable[Job]) -> Iterator[JobResult]:
        """Answer right with a chance that falls with the distance from the goal."""
        self.marks.append((cpu_seconds(), written()))
        time.sleep(self.seconds)
        for job in jobs:
            draw = np.random.default_rng(abs(hash((job.positions, job.items))))
            scores = []
            for row in job.positions:
                chance = 0.8 * np.exp(-((np.array(row) - self.goal) ** 2).sum())
                right = (draw.random(len(job.items)) < chance).astype(float).tolist()
                scores.append([Score(value, "A", "The answer is A.") for value in right])
            yield JobResult(job.number, scores, len(job.positions) * len(job.items), 0)

    def close(self) -> None:
        """Nothing was opened."""


def written() -> int:
    """Bytes of this process's write calls so far."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["wchar"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--optimizer", default="pso")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--items", type=int, default=20, help="dev items")
    parser.add_argument("--seconds", type=float, default=0.0, help="of an evaluation")
    options = parser.parse_args()
    keys = ["name=made", f"optimizer={options.optimizer}"]
    keys += [f"optimizer.max_iterations={options.iterations}"]
    if options.optimizer == "pso":
        keys += [f"optimizer.patience={options.iterations}", "optimizer.descent=null"]
        keys += [f"optimizer.particles={options.particles}", "optimizer.active=null"]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        optimizer = instantiate(compose("search", keys).optimizer)
    base = BaseModel(options.model) if options.model else default_base()
    pool = Notes(options.pool)
    formula = Formula(len(Pool(options.pool).open().names), options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            "made",
            Made(options.items),
            base,
            pool,
            optimizer,
            HFEngine(),
            formula,
            NullTracker(),
            Batching(),
            test=False,
            ensemble=0,
            folder=folder,
            noise_floor=False,
        )
        began, wrote, wall = cpu_seconds(), written(), time.monotonic()
        run.search(show=False)
        took, wrote, wall = cpu_seconds() - began, written() - wrote, time.monotonic() - wall
        rounds = len(run.record.iterations)
    tenth = max(1, rounds // 10)
    steps = np.diff(np.array(formula.marks[: rounds + 1]), axis=0)
    particles = len(run.record.iterations[0]["positions"])
    what = f"{rounds} rounds of {particles} particles, {len(pool.names)} experts"
    print(f"{machine()}; {optimizer.__class__.__name__}, {what}")
    print("| iterations | CPU ms an iteration, median | mean | KB written an iteration, mean |")
    print("| --- | --- | --- | --- |")
    for name, part in (("first tenth", steps[1 : tenth + 1]), ("last tenth", steps[-tenth:])):
        cpu, size = part[:, 0] * 1000, part[:, 1] / 1000
        print(f"| {name} | {statistics.median(cpu):.1f} | {cpu.mean():.1f} | {size.mean():.1f} |")
    ratio = steps[-tenth:, 0].mean() / steps[1 : tenth + 1, 0].mean()
    print(
        f"ratio of the means of CPU time {ratio:.2f}; in all {took:.1f} CPU s, {wall:.1f} s, "
        f"{wrote / 1e6:.1f} MB written"
    )


if __name__ == "__main__":
    main()
