"""A worker loads base, pool and task once and then scores job after job."""

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from swarm.engine.base import Engine, Gradient
from swarm.engine.base_model import BaseModel
from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Request, Usage
from swarm.pool.pool import ExpertPool
from swarm.tasks.base import Item, Score, Task, first_round


def check_devices(gpus: Any) -> list[int]:
    """Return the GPU numbers as a list, each checked against the machine's devices.

    Raises:
        UserError: Not integers, repeated, or no such device.
    """
    devices = [] if gpus is None else gpus
    if (
        not isinstance(devices, list)
        or any(type(g) is not int or g < 0 for g in devices)
        or len(set(devices)) < len(devices)
    ):
        raise UserError(
            f"gpus={gpus}: must be device numbers such as 0,1,2, each once, or [] for the CPU", 2
        )
    if devices:
        import torch

        count = torch.cuda.device_count()
        if missing := [g for g in devices if g >= count]:
            there = f"0 to {count - 1}" if count else "none on this machine"
            raise UserError(
                f"gpus={devices}: no CUDA device {missing[0]}; allowed: {there}, or gpus=[]"
            )
    return devices


def group_gpus(gpus: list[int], engine: Engine) -> list[list[int]]:
    """Return the GPUs of each worker.

    Raises:
        UserError: The engine takes more than one, and some would be left over.
    """
    size = engine.devices
    if len(gpus) % size:
        raise UserError(
            f"gpus={gpus} with engine.tensor_parallel_size={size}: each worker uses {size}; "
            f"list {size} GPUs, or a multiple of it"
        )
    return [gpus[start : start + size] for start in range(0, len(gpus), size)]


def select_device(gpus: Sequence[int], engine: Engine) -> str:
    """Return the device of this worker process with these GPUs; empty is the CPU.

    For an engine that takes the first visible devices, CUDA_VISIBLE_DEVICES is restricted
    permanently.
    """
    if not gpus:
        return "cpu"
    if not engine.first_devices:
        return f"cuda:{gpus[0]}"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = shown.split(",") if shown else [str(number) for number in range(max(gpus) + 1)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in gpus)
    return "cuda:0"


class Executor:
    """Runs jobs in any order and on any worker; the results do not depend on it.

    Attributes:
        on_gpu: Whether the workers may have GPUs.
    """

    on_gpu = False

    @abstractmethod
    def open(self, worker: "Worker") -> None:
        """Set the recipe of all workers; heavy work may wait until the first job."""

    @abstractmethod
    def map(self, jobs: Iterable["Job"]) -> Iterator["JobResult"]:
        """Run the jobs and yield each result when it is ready, in any order.

        Raises:
            UserError: A job failed; the one-line message names it.
        """

    def close(self) -> None:
        """Stop all workers."""


EMBED_SPLITS = {"embed": "dev", "embed_test": "test"}
"""Splits of a job for hidden states of items' prompts instead of scores, and their data split."""

GRADIENT_SPLITS = ("loss", "gradient", "entropy")
"""Splits of a job for gradients instead of scores.

"loss" is the loss of gold answers, "gradient" also its derivative, "entropy" the entropy of answers
and its derivative.
"""


@dataclass(frozen=True, slots=True)
class Job:
    """Positions to be scored on items; self-contained, so that it may be run again.

    Attributes:
        number: Its index in the list of jobs of one `map`.
        positions: P vectors of K mixing coefficients.
        split: "dev", scored by the task's signal; "test", and "judged", the items of dev, scored by
            the task's metric (see `resolve_split`). Those of GRADIENT_SPLITS are of items of dev,
            at a single position. Those of EMBED_SPLITS have no position.
        items: Indices in the split.
        names: Names of the positions in errors; optional.
        routes: Of a gradient with several kinds of prompts: for each item the index of the position
            that answers it.
    """

    number: int
    positions: tuple[tuple[float, ...], ...]
    split: str
    items: tuple[int, ...]
    names: tuple[str, ...] = ()
    routes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job.

    Attributes:
        number: The job's number.
        scores: One list of scores per position, in the order of the job's items.
        prompts: Requests answered.
        tokens: Tokens read and generated.
        gradient: For a split of GRADIENT_SPLITS, which has no scores.
        states: For a split of EMBED_SPLITS; see `swarm.engine.base.Engine.embed_prompts`.
    """

    number: int
    scores: list[list[Score]]
    prompts: int
    tokens: int
    gradient: Gradient | None = None
    states: Mapping[int, np.ndarray] | None = None


def resolve_split(task: Task, split: str) -> tuple[Task, Sequence[Item]]:
    """Return the task to run for a job's split, and the items that its indices refer to."""
    if split == "dev":
        return task, task.items("dev")
    return task.metric_task, task.items(data_split(split))


def data_split(split: str) -> str:
    """Return the data split ("dev", "test") of a job's split."""
    if split in ("judged", *GRADIENT_SPLITS):
        return "dev"
    return EMBED_SPLITS.get(split, split)


def describe_job(job: Job) -> str:
    """Describe a job, for messages."""
    first, last = job.items[0], job.items[-1]
    return f"job {job.number}: {len(job.positions)} positions, {job.split} items {first} to {last}"


def format_failure(job: Job, error: Exception) -> str:
    """Format an unexpected error in one line, with the item that a worker has identified."""
    words = " ".join(str(error).split())
    where = ", ".join([*getattr(error, "__notes__", []), describe_job(job)])
    return f"{type(error).__name__}: {words} ({where}); the traceback is in log.txt"


@dataclass(slots=True)
class JobUsage(Usage):
    """Usage of an engine's completions, and the index of the position that is being run."""

    position: int = 0


class Worker:
    """The recipe of a worker: cheap to construct and to send; `open` does the heavy work.

    Attributes:
        device: The device on which it is open; `None` if it is not.
    """

    def __init__(self, base: BaseModel, pool: ExpertPool, task: Task, engine: Engine) -> None:
        self.base, self.pool, self.task, self.engine = base, pool, task, engine
        self.device: str | None = None

    def open(self, device: str) -> None:
        """Load everything on `device`, once."""
        if self.device is None:
            # A pool is pickled closed; opening it again reads a few headers.
            self.engine.open(self.base, self.pool.open(self.base), device)
            self.task.open(device)
            self.device = device

    def close(self) -> None:
        """Release what `open` acquired."""
        if self.device is not None:
            self.engine.close()
        self.device = None

    def run(self, job: Job) -> JobResult:
        """Score the job's positions on its items.

        An unexpected error is reraised with a note that names the item that caused it.
        """
        task, every = resolve_split(self.task, job.split)
        items, meter = [every[i] for i in job.items], JobUsage()
        positions = np.array(job.positions, dtype=np.float64)
        try:
            if job.split in EMBED_SPLITS:
                prompts = [first_round(task, [item])[0].prompt for item in items]
                states = self.engine.embed_prompts(prompts)
                return JobResult(job.number, [], len(items), 0, states=states)
            if job.split in GRADIENT_SPLITS:
                examples = task.gold_examples(items)
                if job.split == "entropy":
                    examples = [replace(example, unlabelled=True) for example in examples]
                slope = job.split != "loss"
                found = self.engine.compute_gradient(positions, examples, slope, job.routes)
                return JobResult(job.number, [], len(items), 0, found)
            scores = run_tasks_lockstep(task, self.engine, positions, items, meter)
            return JobResult(job.number, scores, meter.calls, meter.tokens)
        except NotFinite as error:
            names = dict(enumerate(job.names))
            raise UserError(f"{names.get(error.position) or 'a position'}: {error}") from None
        except Exception as error:
            scored = job.split not in (*GRADIENT_SPLITS, *EMBED_SPLITS)
            if not isinstance(error, UserError) and scored:
                item = self._find_failing_item(task, positions[[meter.position]], items)
                if item is not None:
                    error.add_note(f"item {item['id']}")
            raise

    def _find_failing_item(
        self, task: Task, position: np.ndarray, items: Sequence[Item]
    ) -> Item | None:
        """Return the first item that fails alone; `None` if none or each does.

        Runs one position [1, K], at which the job failed, on items up to the first that fails and
        the first that does not, because a scorer of texts may be slow or cost money.
        """
        failed, passed = None, len(items) == 1
        for item in items:
            try:
                run_tasks_lockstep(task, self.engine, position, [item], JobUsage())
                passed = True
            except Exception:
                failed = failed or item
            if failed and passed:
                return failed
        return None


def run_tasks_lockstep(
    task: Task, engine: Engine, positions: np.ndarray, items: Sequence[Item], meter: JobUsage
) -> list[list[Score]]:
    """Run the task once per position in lockstep: each round's requests are answered together.

    Args:
        positions: [P, K] mixing coefficients.

    Returns:
        One list of scores per position, in the order of the items.
    """
    plays = [task.run(items) for _ in positions]
    scores: dict[int, list[Score]] = {}
    answers: dict[int, list[Completion] | None] = dict.fromkeys(range(len(plays)))
    while answers:
        requests: dict[int, list[Request]] = {}
        for number, answer in answers.items():
            meter.position = number
            try:
                # A generator's first `send` has to be None.
                requests[number] = plays[number].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                scores[number] = end.value
        live = list(requests)
        try:
            generated = engine.generate(positions[live], list(requests.values())) if live else []
        except NotFinite as error:
            raise NotFinite(live[error.position], error.quantity) from None
        answers = dict(zip(live, generated, strict=True))
        for completions in generated:
            meter.add(*completions)
    return [scores[number] for number in range(len(plays))]
