"""Several workers: real processes on this machine, and the schedule simulated up to eight.

    python benchmarks/workers.py [--items 20] [--repeats 2]

Real: the same jobs on one and on two processes with a CPU thread each, workers warm. Simulated:
jobs of a fixed cost pulled by 1 to 8 workers, against particles bound to workers in equal blocks,
as the reference procedure does.
"""

import argparse
import math

import numpy as np
from batching import default_base
from iteration import items
from timing import interleaved, machine

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.executors import Worker
from swarm.executors.processes import ProcessExecutor
from swarm.loop.evaluator import Batching
from swarm.pool.pool import Pool
from swarm.tasks.base import Item
from swarm.tasks.multiple_choice import MultipleChoice


class Made(MultipleChoice):
    """The benchmark's own questions."""

    def __init__(self, count: int) -> None:
        super().__init__("benchmark")
        self.count = count

    def items(self, split: str) -> list[Item]:
        return items(self.count)


def simulate(particles: int, shards: int, workers: int) -> tuple[float, float]:
    """Efficiency of pulling particle-and-shard jobs, and of binding particles to workers."""
    jobs = particles * shards
    pulled = jobs / (workers * math.ceil(jobs / workers))
    bound = particles / (workers * math.ceil(particles / workers))
    return pulled, bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    base = BaseModel(options.model) if options.model else default_base()
    pool = Pool(options.pool).open()
    jobs = Batching(particles=1).split_jobs(np.eye(len(pool.names))[:4], "dev", options.items)
    ways, answers, opened = {}, {}, []
    for count in (1, 2):
        executor = ProcessExecutor(workers=count, threads=1)
        executor.open(Worker(base, pool, Made(options.items), HFEngine("swap")))
        opened.append(executor)
        answers[count] = {r.number: r for r in executor.map(jobs)}
        ways[f"{count} processes"] = lambda executor=executor: list(executor.map(jobs))
    assert answers[1] == answers[2]
    found = interleaved(ways, options.repeats)
    for executor in opened:
        executor.close()
    one, two = (found[f"{count} processes"].wall for count in (1, 2))
    print(f"{machine()}; {len(jobs)} jobs of {options.items} items, one thread a worker")
    print(f"1 process: {one:.3g} s; 2 processes: {two:.3g} s; efficiency {one / two / 2:.2f}")
    print("| workers | pulled jobs (20 particles x 4 shards) | particles bound to workers |")
    print("| --- | --- | --- |")
    for workers in range(1, 9):
        pulled, bound = simulate(20, 4, workers)
        print(f"| {workers} | {pulled:.2f} | {bound:.2f} |")


if __name__ == "__main__":
    main()
