"""Cost of a search on H200-like GPUs, computed from shapes, not measured (docs/scaling.md).

    python benchmarks/plan.py                                  # the table of three bases
    python benchmarks/plan.py path/or/folder --rank 16 --particles 20 --gpus 1 4
    python benchmarks/plan.py --scale                          # 1 to 1,024 GPUs, simulated

`--scale` is a discrete-event simulation of whole searches. Positions, racing, the division into
jobs and their distribution to free workers are those of the package (`ParticleSwarm`, `Racing`,
`Batching`, `ProcessExecutor`); the answers follow a formula, and a job's seconds are those of
`swarm.loop.cost_model` plus the all-reduces of a tensor-parallel group. Efficiency is the GPU time
of one worker with the best of all job sizes, divided by that of all GPUs, idle ones included.
"""

import argparse
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

import numpy as np

from swarm._util.cli import one_line_errors
from swarm.engine.hf import BATCH_GPU
from swarm.errors import UserError
from swarm.executors.processes import ProcessExecutor, WorkerSlot
from swarm.executors.worker import Job, JobResult, Worker
from swarm.loop import cost_model
from swarm.loop.cost_model import (
    GIB,
    H200,
    DeviceSpec,
    ModelShape,
    SearchWorkload,
    read_model_shape,
)
from swarm.loop.dry_run import choose_auto_plan, format_amount, format_duration
from swarm.loop.evaluator import Batching, rows_to_evaluate
from swarm.loop.racing import Incumbent, Racing, tell_optimizer
from swarm.optimizers.pso import ParticleSwarm
from swarm.tasks.base import Score


def config(kind: str, *sizes: int, tied: bool = False) -> dict[str, object]:
    """A config.json's public facts, in the order of NAMES."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    return {"model_type": kind, "tie_word_embeddings": tied, **dict(zip(names, sizes, strict=True))}


# https://huggingface.co/NAME/blob/main/config.json
BASES = {
    "Qwen/Qwen2.5-0.5B": config("qwen2", 896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen/Qwen2.5-7B": config("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "meta-llama/Llama-3.1-70B": config("llama", 8192, 80, 64, 8, 28672, 128256),
}
COLUMNS = (
    "base",
    "weights",
    "a LoRA",
    "experts, particles",
    "cache a token",
    "rows that fit",
    "GPUs",
    "workers",
    "a round, of it writing",
    "the search",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", help="a config.json or a folder with one")
    for name, value, words in (
        ("rank", 16, "of the LoRA experts"),
        ("experts", 10, "K"),
        ("particles", 20, "N"),
        ("iterations", 50, "maximum, without the evaluation of the initial particles"),
        ("items", 200, "of the dev split"),
        ("prompt", 150, "tokens"),
        ("new", 10, "tokens at most"),
        ("job-particles", 5, "positions in a job"),
        ("job-items", 50, "items in a job"),
        ("max-tokens", BATCH_GPU, "padded tokens in a batch"),
        ("memory", H200.memory // GIB, "GiB of a GPU"),
        ("flops", H200.flops, "FLOP/s of a large matmul"),
        ("bandwidth", H200.bandwidth, "bytes per second that a copy reads and writes"),
    ):
        parser.add_argument(
            f"--{name}", type=type(value), default=value, help=f"{words} (%(default)s)"
        )
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8], help="(%(default)s)")
    parser.add_argument("--targets", nargs="+", help="linear layers with a LoRA; default: all")
    parser.add_argument("--scale", action="store_true", help="simulate 1 to 1,024 GPUs")
    return parser.parse_args()


def search(model: ModelShape, asked: argparse.Namespace, device: DeviceSpec) -> SearchWorkload:
    targets = asked.targets or tuple(model.layer_shapes)
    made = SearchWorkload(
        experts=asked.experts,
        adapter=model.adapter_weights(asked.rank, targets),
        adapted=model.adapted_weights(targets),
        particles=asked.particles,
        rounds=asked.iterations + 1,
        items=asked.items,
        prompt=asked.prompt,
        longest=asked.prompt,
        new=asked.new,
        job_particles=min(asked.job_particles, asked.particles),
        job_items=min(asked.job_items, asked.items),
        max_tokens=asked.max_tokens,
        slots=True,
    )
    return replace(made, plan=choose_auto_plan(made, model, device, True)[0])


def rows(name: str, model: ModelShape, asked: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A row for each number of GPUs; a model that one cannot hold is split, as if for nothing."""
    device = DeviceSpec("GPU", asked.flops, asked.bandwidth, asked.memory * GIB)
    wanted = search(model, asked, device)
    parts = cost_model.estimate_memory(model, wanted)
    needed = 1
    while needed < cost_model.count_devices_needed(model, wanted, device):
        needed *= 2  # attention heads are split in equal parts
    worker = device.scale_by(needed)
    wanted = cost_model.fit_cache(wanted, model, worker)
    for gpus in asked.gpus:
        workers, times = gpus // needed, ("does not fit", "")
        if workers:
            spent = cost_model.estimate_total_seconds(
                model, wanted, worker, workers, wanted.particles, wanted.items
            )
            reading, writing = cost_model.estimate_job_seconds(
                model, wanted, worker, wanted.job_particles, wanted.job_items
            )
            share = writing / (reading + writing)
            times = (
                f"{format_duration(spent)}, {share:.0%}",
                format_duration(spent * wanted.rounds),
            )
        yield (
            name.rpartition("/")[2],
            format_amount(parts["weights"], "B"),
            format_amount(wanted.adapter),
            f"{format_amount(parts['basis'], 'B')}, {format_amount(parts['particles'], 'B')}",
            f"{model.kv_cache_width * 2 / 1024:.0f} KiB",
            f"{cost_model.count_rows_that_fit(model, wanted, worker):,}",
            str(gpus),
            f"{workers} of {needed}" if workers else f"needs {needed}",
            *times,
        )


# Simulation of 1 to 1,024 GPUs

SCALED = {
    "meta-llama/Llama-3.2-1B": config("llama", 2048, 16, 32, 8, 8192, 128256, tied=True),
    "Qwen/Qwen2.5-7B": BASES["Qwen/Qwen2.5-7B"],
    "Qwen/Qwen2.5-32B": config("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "meta-llama/Llama-3.1-70B": BASES["meta-llama/Llama-3.1-70B"],
}
COUNTS = tuple(2**power for power in range(11))
SHOWN = (1, 8, 64, 256, 1024)
"""Numbers of GPUs that are simulated, and those that are columns of the table."""

GROUPS = (1, 2, 4, 8)
"""GPUs that share a model; at most the eight of a node, which NVLink connects."""

CUTS = ((5, 50), (2, 50), (1, 50), (1, 25), (1, 10))
"""Sizes of a job that are compared: job.particles, job.items."""

RULES = {
    "off": ("off", 25),
    "off, assigned": ("off", 25),
    "exact": ("exact", 25),
    "z": ("z", 25),
    "z, chunk 100": ("z", 100),
}
"""Rows of the table, with their racing rule and chunk; "assigned" gives each worker an equal share
of the jobs before any is run, in all others a free worker takes the next one."""

VLLM_PREFILL_SHARE = 0.7
"""Share of the matmul speed that a prefill in vLLM reaches, all in all; an assumption."""

VLLM_LAUNCH = 1e-4
"""Minimum seconds per layer of a forward in vLLM with CUDA graphs; an assumption.

gpt-fast reaches 9.3 ms a token, 0.29 ms for each of 32 layers, after its CUDA graphs, most of it
memory traffic (pytorch.org/blog/accelerating-generative-ai-2).
"""

LINK = 0.8 * 450e9
"""Bytes per second and direction of a GPU in an all-reduce: 80 % (an assumption) of an H200's
900 GB/s of NVLink in both directions (its data sheet)."""

ALLREDUCE_SECONDS = 15e-6
"""Latency of an all-reduce within a node; an assumption."""

DRIVER_SECONDS = 0.055
"""CPU seconds of the driver per iteration of 20 positions and 200 items, without the answers;
measured: benchmarks/journal.py --items 200."""

ASSIGN_SECONDS, RESULT_SECONDS, WAIT_SECONDS = 15e-6, 800e-6, 1e-6
"""Driver's seconds to send a job, to receive 250 scores, and to wait, per worker; measured on a
pipe between two processes."""

SPREAD = 0.1
"""Standard deviation of the logarithm of a job's seconds at the same size; an assumption."""

STRIDE = 5
"""One in so many iterations is simulated, and counted as often."""


def answer_items(experts: int, items: int, seed: int) -> Callable[..., list[list[Score]]]:
    """Return a stand-in for a model: whether a position is right on each dev item.

    Positions near a goal are right on more items; an item's difficulty is the same for all
    positions, and an expert has its own strengths, so that similar positions answer alike.
    """
    draw = np.random.default_rng(seed)
    goal, difficulty = draw.dirichlet(np.full(experts, 0.3)), draw.normal(size=items)
    strengths = draw.normal(size=(experts, items))

    def ask(positions: Sequence[Sequence[float]], *, items: Sequence[int]) -> list[list[Score]]:
        scores = []
        for row in np.array(positions):
            noise = np.random.default_rng(np.abs(row * 1e6).astype(int)).normal(
                size=len(difficulty)
            )
            skill = -0.3 - 0.5 * ((row - goal) ** 2).sum()
            right = skill + 0.5 * row @ strengths + 0.5 * noise > difficulty
            scores.append([Score(float(right[item]), None) for item in items])
        return scores

    return ask


@cache
def record_calls(
    rule: str, chunk: int, particles: int, experts: int, items: int, rounds: int
) -> list[list[tuple[int, int]]]:
    """Return how many positions and items a search scores, call by call of each iteration.

    Racing calls the workers once per chunk of items; each call waits for the one before.
    """
    swarm = ParticleSwarm(
        particles=particles, soups=0, descent=None, patience=rounds, max_iterations=rounds - 1
    )
    swarm.start(experts, 0)
    racing, answer = Racing(rule, chunk=chunk), answer_items(experts, items, 0)
    marks: list[Incumbent | None] = [None] * particles
    calls: list[list[tuple[int, int]]] = []
    for number in range(rounds):
        positions = swarm.ask()
        calls.append([])

        def ask(
            rows: Sequence[Sequence[float]], *, items: Sequence[int], number: int = number
        ) -> list[list[Score]]:
            distinct = {tuple(map(float, row)) for row in rows}
            calls[number].append((len(distinct), len(items)))
            return answer(rows, items=items)

        wanted = rows_to_evaluate(positions, swarm.evaluate, 0 if number else experts)
        known = marks if number and rule != "off" else []
        raced = racing.race_particles(
            ask, {i: positions[i] for i in wanted}, known, items, 0, number
        )
        utilities = np.full(particles, np.nan)
        for i, scores in raced.complete_scores().items():
            values = tuple(score.value for score in scores)
            utilities[i] = np.mean(values)
            mark = marks[i]
            if mark is None or utilities[i] > mark.utility:
                marks[i] = Incumbent(float(utilities[i]), values)
        tell_optimizer(swarm, utilities, raced.stopped)
    return calls


class SimulatedExecutor(ProcessExecutor):
    """A process executor whose workers take simulated seconds; `clock` is the driver's time.

    Args:
        workers: Number of workers.
        seconds: Returns the seconds of a job.
    """

    def __init__(self, workers: int, seconds: Callable[[Job], float]) -> None:
        super().__init__()
        self._workers = [WorkerSlot([]) for _ in range(workers)]
        self._seconds = seconds
        self._ends: list[tuple[float, int, WorkerSlot]] = []
        self.clock = 0.0

    def open(self, worker: Worker) -> None:
        """Nothing has to be opened."""

    def _assign_job(self, worker: WorkerSlot, job: Job) -> None:
        self.clock += ASSIGN_SECONDS
        worker.job = job
        heapq.heappush(self._ends, (self.clock + self._seconds(job), job.number, worker))

    def _collect_results(self, waiting: deque[Job], deaths: Counter[int]) -> Iterator[JobResult]:
        end, _, worker = heapq.heappop(self._ends)
        job, worker.job = worker.job, None
        assert job is not None
        prompts = len(job.positions) * len(job.items)
        self.clock = max(self.clock, end) + RESULT_SECONDS * prompts / 250
        self.clock += WAIT_SECONDS * len(self._workers)
        yield JobResult(job.number, [], prompts, 0)


@dataclass(frozen=True)
class Layout:
    """Division of a search: GPUs per model, positions and items per job."""

    group: int
    particles: int
    items: int


class Simulation:
    """Searches of one base on devices of one kind, with vLLM.

    Args:
        model: The base's shape.
        search: The work; its job sizes are replaced by those of a layout.
        device: One GPU.
    """

    def __init__(self, model: ModelShape, search: SearchWorkload, device: DeviceSpec) -> None:
        self.model = model
        self.search = replace(search, plan="stacked", cache_tokens=None)
        self.device = replace(
            device, share=VLLM_PREFILL_SHARE, launch=VLLM_LAUNCH, passes=0, graph=None
        )
        needed = cost_model.count_devices_needed(model, self.search, device)
        self.groups = tuple(group for group in GROUPS if group >= needed)
        if not self.groups:
            raise UserError(f"the model needs {needed} GPUs, and a node has {GROUPS[-1]}")
        self._known: dict[tuple[Layout, int, int], float] = {}

    def job_seconds(self, layout: Layout, positions: int, items: int) -> float:
        """Return the seconds of a job, without random variation."""
        key = (layout, positions, items)
        if key not in self._known:
            cut = replace(self.search, job_particles=layout.particles, job_items=layout.items)
            worker = self.device.scale_by(layout.group)
            spent = cost_model.estimate_job_seconds(self.model, cut, worker, positions, items)
            self._known[key] = sum(spent) + self._allreduce_seconds(
                cut, layout.group, positions, items
            )
        return self._known[key]

    def _allreduce_seconds(
        self, cut: SearchWorkload, group: int, positions: int, items: int
    ) -> float:
        """Return the seconds of a job's all-reduces: two per layer and forward (arXiv 1909.08053).

        Each GPU of a ring sends and receives 2 (n - 1) / n of the hidden states.
        """
        if group == 1:
            return 0.0
        together, each = cut.batch_shape(positions, items)
        batches = ceil(positions / together) * ceil(items / each)
        rows = positions * items
        size = self.model.hidden * cut.item_bytes * 2 * (group - 1) / group
        tokens = rows * (cut.prompt + max(0, cut.new - 1))
        count = batches * max(1, cut.new)
        return 2 * self.model.layers * (count * ALLREDUCE_SECONDS + tokens * size / LINK)

    def run(self, rule: str, layout: Layout, workers: int) -> float:
        """Return the seconds of a search."""
        total = 0.0
        for number, factor, jobs in self._list_jobs(rule, layout):
            draw = np.random.default_rng(number)
            clock = DRIVER_SECONDS
            for call in jobs:
                varied = draw.lognormal(-(SPREAD**2) / 2, SPREAD, len(call))
                seconds = varied * [self._seconds_of(layout, job) for job in call]
                if rule == "off, assigned":
                    shares = np.array_split(seconds, workers)
                    clock += max(share.sum() for share in shares) + RESULT_SECONDS * len(call)
                    continue
                # A worker beyond the number of jobs gets none.
                executor = SimulatedExecutor(
                    min(workers, len(call)), lambda job, known=seconds: known[job.number]
                )
                for _ in executor.map(call):
                    pass
                clock += executor.clock
            total += factor * clock
        return total

    def bound(self, rule: str, layout: Layout, workers: int) -> float:
        """Return a lower bound of `run` without random variation."""
        total = 0.0
        for _, factor, jobs in self._list_jobs(rule, layout):
            for call in jobs:
                seconds = [self._seconds_of(layout, job) for job in call]
                total += factor * max(sum(seconds) / workers, max(seconds))
        return total

    def best(self, rule: str, gpus: int) -> tuple[float, Layout] | None:
        """Return the seconds of the fastest layout on this many GPUs; `None` if none fits."""
        layouts = [Layout(g, *cut) for g in self.groups if g <= gpus for cut in CUTS]
        bounds = {one: self.bound(rule, one, gpus // one.group) for one in layouts}
        found: tuple[float, Layout] | None = None
        for one in sorted(layouts, key=lambda one: bounds[one]):
            # Random variation makes a search slower, or faster by far less than a tenth.
            if found and 0.9 * bounds[one] > found[0]:
                break
            seconds = self.run(rule, one, gpus // one.group)
            if not found or seconds < found[0]:
                found = seconds, one
        return found

    def count_prompts(self, rule: str) -> int:
        """Return the prompts of a search."""
        return sum(rows * items for calls in self._calls(rule) for rows, items in calls)

    def _calls(self, rule: str) -> list[list[tuple[int, int]]]:
        one = self.search
        return record_calls(*RULES[rule], one.particles, one.experts, one.items, one.rounds)

    def _seconds_of(self, layout: Layout, job: Job) -> float:
        return self.job_seconds(layout, len(job.positions), len(job.items))

    def _list_jobs(self, rule: str, layout: Layout) -> Iterator[tuple[int, int, list[list[Job]]]]:
        """Yield the simulated iterations, how many each stands for, and the jobs of each call."""
        calls, rounds = self._calls(rule), self.search.rounds
        cut = Batching(layout.particles, layout.items)
        for number in (0, *range(1, rounds, STRIDE)):
            factor = min(STRIDE, rounds - number) if number else 1
            jobs = [cut.split_jobs([[0.0]] * rows, "dev", items) for rows, items in calls[number]]
            yield number, factor, [call for call in jobs if call]


def show_scale(names: Iterable[str], asked: argparse.Namespace) -> None:
    """Print efficiency and time by number of GPUs, then the cost of a search in GPU hours."""
    device = DeviceSpec("GPU", asked.flops, asked.bandwidth, asked.memory * GIB)
    head = ["base", "racing", "prompts", "one worker", *(f"{n:,}" for n in SHOWN), "most at .9"]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for name in names:
        model = read_model_shape(SCALED.get(name, name))
        simulation = Simulation(model, search(model, asked, device), device)
        for rule in RULES:
            cells = describe_scale(simulation, rule)
            print(f"| {name.rpartition('/')[2]} | {rule} | {' | '.join(cells)} |", flush=True)
    news = (asked.new, 20 * asked.new)
    columns = [f"{new} new tokens, racing {rule}" for new in news for rule in ("off", "z")]
    print(
        f"\n| base | GPUs of a worker | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 2)}"
    )
    for name in names:
        model = read_model_shape(SCALED.get(name, name))
        cells = []
        for new in news:
            one = argparse.Namespace(**{**vars(asked), "new": new})
            simulation = Simulation(model, search(model, one, device), device)
            group = simulation.groups[0]
            for rule in ("off", "z"):
                best = simulation.best(rule, group)
                assert best is not None
                cells.append(f"{group * best[0] / 3600:.3g}")
        print(f"| {name.rpartition('/')[2]} | {group} | {' | '.join(cells)} |", flush=True)


def describe_scale(simulation: Simulation, rule: str) -> list[str]:
    """Return the cells of a row: prompts, one worker's time, and efficiencies."""
    found = {n: simulation.best(rule, n) for n in COUNTS}
    known = {n: best for n, best in found.items() if best}
    first = min(known)
    alone = "off" if rule == "off, assigned" else rule
    # Jobs assigned in advance are compared with one worker, too, for which it is no difference.
    reference = simulation.best(alone, first)
    assert reference is not None
    shares = {n: first * reference[0] / (n * best[0]) for n, best in known.items()}
    most = max((n for n, share in shares.items() if share >= 0.9), default=first)
    seconds, layout = known[most]
    cut = f"{layout.group} a model, jobs of {layout.particles} x {layout.items}"
    return [
        f"{simulation.count_prompts(rule):,}",
        format_duration(reference[0]),
        *(f"{shares[n]:.2f}" if n in shares else "" for n in SHOWN),
        f"{most:,}: {format_duration(seconds)} ({cut})",
    ]


def main() -> None:
    asked = arguments()
    if asked.scale:
        print("Computed, not measured.\n")
        with one_line_errors():
            show_scale([asked.config] if asked.config else SCALED, asked)
        return
    with one_line_errors():
        models = (
            {asked.config: read_model_shape(asked.config)}
            if asked.config
            else {name: read_model_shape(config) for name, config in BASES.items()}
        )
        table = [row for name, model in models.items() for row in rows(name, model, asked)]
    print("Computed, not measured.\n")
    for row in (COLUMNS, ("---",) * len(COLUMNS), *table):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
