"""A worker loads base, pool and task once and then scores job after job."""

import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.engine.base import Engine, Gradient
from swarm.engine.base_model import BaseModel
from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Example, Request, Usage
from swarm.optimizers.gradient import Descent
from swarm.pool.pool import ExpertPool
from swarm.tasks.base import Candidate, Item, Score, Task, TaskRun, first_round

if TYPE_CHECKING:
    from swarm.pool.learned import LearnedAdapter


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

LOSS, DESCENT, SAMPLE = "loss", "descent", "sample"
"""Splits of a job on dev items with another result than scores of greedy answers: the loss of gold
answers, gradient steps, and scored texts drawn at temperature 1."""


@dataclass(frozen=True, slots=True)
class Job:
    """Positions to be scored on items; self-contained, so that it may be run again.

    Attributes:
        number: Its index in the list of jobs of one `map`.
        positions: P vectors of K mixing coefficients.
        split: "dev", scored by the task's signal; "test", and "judged", the items of dev, scored by
            the task's metric (see `resolve_split`); LOSS, DESCENT, SAMPLE, at a single
            position; those of EMBED_SPLITS, without any.
        items: Indices in the split; a text is drawn for each occurrence in SAMPLE.
        names: Names of the positions in errors; optional.
        learned: The file of each position's learned adapter, or ""; empty if none has one.
        seed: Of the texts of SAMPLE, and of a new adapter.
        experts: Names of the experts that the positions mix; empty is the whole pool.
        owners: Index of the position that answers each item; empty if each answers all.
    """

    number: int
    positions: tuple[tuple[float, ...], ...]
    split: str
    items: tuple[int, ...]
    names: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    seed: int = 0
    experts: tuple[str, ...] = ()
    owners: tuple[int, ...] = ()

    def items_by_position(self) -> list[tuple[int, ...]]:
        """Return the items that each position answers."""
        count = len(self.positions)
        if not self.owners:
            return [self.items] * count
        pairs = list(zip(self.items, self.owners, strict=True))
        return [tuple(item for item, owner in pairs if owner == i) for i in range(count)]


@dataclass(frozen=True, slots=True)
class DescentJob(Job):
    """The gradient steps of a particle from its position [R * G * K] on items, see `Descent.run`.

    Attributes:
        descent: Of the particle alone.
        particle: Its number.
        steps: Number of steps.
        routes: The route of each item; `None` for an item without any loss.
        candidates: The scored answers of each item; empty where the gold answer is all there is.
        spent: See `swarm.optimizers.gradient.Descent.run`.
        rank: Rank of the adapter that is learned; `None` for none. It continues with the latest of
            `learned`, also for the routes that have kept an older one.
    """

    descent: Descent = field(default_factory=Descent)
    particle: int = 0
    steps: int = 0
    routes: tuple[int | None, ...] = ()
    candidates: tuple[Sequence[Candidate], ...] = ()
    rank: int | None = None
    spent: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Descended:
    """Result of a `DescentJob`.

    Attributes:
        position: [R * G * K], the position reached.
        descent: After the steps.
        adapter: The adapter learned, as the content of its file; `None` if there is none.
        kept: The routes that kept their coefficients, and their adapter, of before.
        gradients, losses: Number of examples with a gradient, and of those with a loss alone.
    """

    position: np.ndarray
    descent: Descent
    adapter: bytes | None
    kept: Sequence[int]
    gradients: int
    losses: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job.

    Attributes:
        number: The job's number.
        scores: One list of scores per position, in the order of its items.
        prompts: Requests answered.
        tokens: Tokens read and generated.
        gradient: Of LOSS, which has no scores.
        descended: Of DESCENT, which has none either.
        states: Of EMBED_SPLITS; see `swarm.engine.base.Engine.embed_prompts`.
        names: Of the positions; see `Job`.
    """

    number: int
    scores: list[list[Score]]
    prompts: int
    tokens: int
    gradient: Gradient | None = None
    descended: Descended | None = None
    states: Mapping[int, np.ndarray] | None = None
    names: tuple[str, ...] = ()


def resolve_split(task: Task, split: str) -> tuple[Task, Sequence[Item]]:
    """Return the task to run for a job's split, and the items that its indices refer to."""
    if split not in ("judged", "test"):
        return task, task.items(data_split(split))
    return task.metric_task, task.items(data_split(split))


def data_split(split: str) -> str:
    """Return the data split ("dev", "test") of a job's split."""
    if split in ("judged", LOSS, DESCENT, SAMPLE):
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
        self._experts: tuple[str, ...] = ()

    def open(self, device: str, experts: tuple[str, ...] = ()) -> None:
        """Load base and task on `device`, once, and the experts of a job unless they are held."""
        if self.device is not None and experts == self._experts:
            return
        # A pool is pickled closed; opening it again reads a few headers.
        pool = self.pool.subset(experts) if experts else self.pool
        if self.device is None:
            self.engine.open(self.base, pool.open(self.base), device)
            self.task.open(device)
            self.device = device
        else:
            self.engine.set_pool(pool.open(self.base))
        self._experts = experts

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
            if isinstance(job, DescentJob):
                learner = ItemLearner(self.engine, task, items, job)
                if job.split == LOSS:
                    taught = [i for i, route in enumerate(job.routes) if route is not None]
                    loss = Gradient(math.nan, np.zeros(0))
                    if taught:
                        loss = learner.measure(positions[0], taught, slope=False)
                    return JobResult(job.number, [], len(items), 0, loss)
                ended = learner.descend()
                cost = learner.losses + learner.gradients
                return JobResult(job.number, [], cost, 0, descended=ended)
            if job.split == LOSS:
                examples = task.gold_examples(items)
                found = self.engine.compute_gradient(positions, examples, slope=False)
                return JobResult(job.number, [], len(items), 0, found)
            files = zip(job.positions, job.learned, strict=bool(job.learned))
            self.engine.learned = dict(files)
            plays = [task.run([every[i] for i in mine]) for mine in job.items_by_position()]
            heat = job.seed if job.split == SAMPLE else None
            scores = run_plays(plays, self.engine, positions, meter, heat)
            return JobResult(job.number, scores, meter.calls, meter.tokens, names=job.names)
        except NotFinite as error:
            names = dict(enumerate(job.names))
            raise UserError(f"{names.get(error.position) or 'a position'}: {error}") from None
        except Exception as error:
            scored = job.split not in (LOSS, DESCENT, *EMBED_SPLITS)
            if not isinstance(error, UserError) and scored:
                where = meter.position
                own = [every[i] for i in job.items_by_position()[where]]
                item = self._find_failing_item(task, positions[[where]], own)
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


class ItemLearner:
    """A position's model and dev items, for `Descent.run`: the `Learner` of a `DescentJob`.

    Attributes:
        losses, gradients: Number of examples so far with a loss alone, and with a gradient.
    """

    def __init__(self, engine: Engine, task: Task, items: Sequence[Item], job: DescentJob) -> None:
        self.engine, self.task, self.items, self.job = engine, task, items, job
        self.losses = self.gradients = 0
        self._examples: dict[int, Example] = {}
        self._adapter: LearnedAdapter | None = None
        self._older: dict[int | None, LearnedAdapter | None] = {}
        if job.rank:
            latest = max(job.learned, default="")
            self._adapter = engine.open_adapter(latest, job.rank, job.seed)
            self._adapter.train(job.descent.new_rate, job.descent.new_decay)
            self._older = {
                route: engine.open_adapter(file, job.rank, job.seed) if file else None
                for route, file in enumerate(job.learned)
                if file != latest
            }

    def descend(self) -> Descended:
        """Take the job's steps."""
        job, start = self.job, np.array(self.job.positions[0])
        descent = job.descent.extract(0)  # a copy: the job may be run again, or be read-only
        reached = descent.run(start, job.particle, job.routes, job.steps, self, job.spent)
        rows = [x.reshape(descent.routes, -1) for x in (start, reached)]
        kept = np.flatnonzero((rows[0] == rows[1]).all(axis=1)).tolist()
        adapter = self._adapter.encode() if self._adapter else None
        return Descended(reached, descent, adapter, kept, self.gradients, self.losses)

    def measure(self, position: np.ndarray, items: Sequence[int], slope: bool = True) -> Gradient:
        """See `swarm.optimizers.gradient.Learner`."""
        self.gradients += len(items) * slope
        self.losses += len(items) * (not slope)
        route = self.job.routes[items[0]]
        older = {} if slope else self._older
        examples = [self._example(number) for number in items]
        if self.job.split == DESCENT and not slope:
            examples = [replace(example, bounded=True) for example in examples]
        found = self.engine.compute_gradient(
            position.reshape(self.job.descent.routes, -1),
            examples,
            slope,
            [self.job.routes[number] or 0 for number in items],
            older.get(route, self._adapter),
        )
        return found.mean_over(len(items))

    def step(self, factor: float) -> None:
        """See `swarm.optimizers.gradient.Learner`."""
        self._older.clear()
        if self._adapter:
            self._adapter.step(factor)

    def _example(self, number: int) -> Example:
        if number not in self._examples:
            item, candidates = self.items[number], self.job.candidates
            (example,) = (
                [self.task.scored_example(item, candidates[number])]
                if candidates and candidates[number]
                else self.task.gold_examples([item])
            )
            self._examples[number] = example
        return self._examples[number]


def run_tasks_lockstep(
    task: Task,
    engine: Engine,
    positions: np.ndarray,
    items: Sequence[Item],
    meter: JobUsage,
    seed: int | None = None,
) -> list[list[Score]]:
    """Run the task once per position in lockstep: each round's requests are answered together.

    Args:
        positions: [P, K] mixing coefficients.
        seed: Of texts drawn at temperature 1; `None` is greedy.

    Returns:
        One list of scores per position, in the order of the items.
    """
    return run_plays([task.run(items) for _ in positions], engine, positions, meter, seed)


def run_plays(
    plays: Sequence[TaskRun],
    engine: Engine,
    positions: np.ndarray,
    meter: JobUsage,
    seed: int | None = None,
) -> list[list[Score]]:
    """Run what `Task.run` returned for each of P positions [P, K]; see `run_tasks_lockstep`."""
    scores: dict[int, list[Score]] = {}
    answers: dict[int, list[Completion] | None] = dict.fromkeys(range(len(plays)))
    while answers:
        requests: dict[int, list[Request]] = {}
        for number, answer in answers.items():
            meter.position = number
            try:
                # A generator's first `send` has to be None.
                asked = plays[number].send(answer)  # type: ignore[arg-type]
                if seed is not None:
                    asked = [
                        replace(one, temperature=1.0, seed=seed, sample=i)
                        for i, one in enumerate(asked)
                    ]
                requests[number] = asked
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
