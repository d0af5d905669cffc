"""Positions of a pool as candidates, and the score of a mixture beside its neighbours."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from swarm._util.settings import FiniteNumber, checked
from swarm._util.threads import run_concurrently
from swarm.engine.base import Engine
from swarm.engine.base_model import BaseModel, choose_device
from swarm.errors import UserError
from swarm.evaluation.base import Candidate, JobUsage
from swarm.executors.worker import run_tasks_lockstep
from swarm.merging.positions import describe_position
from swarm.models.base import Completion, Request
from swarm.pool.pool import ExpertPool
from swarm.registry.registry import Roster
from swarm.stats.significance import PairedTest
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.metrics import paired_gain, utility_with_interval


class PoolCandidate(Candidate):
    """Voters that one engine answers for, with the experts of a pool on one resident base.

    Args:
        base: The model that the pool's experts belong to.
        pool: The experts.
        engine: An engine for this kind of pool.
    """

    def __init__(self, base: BaseModel, pool: ExpertPool, engine: Any) -> None:
        self.base, self.pool, self.engine = base, pool, engine
        self.names: list[str] = []
        self._tokenizer: Any = None
        self._opened = False

    def check(self, task: Task) -> None:
        self.pool.check()
        self._tokenizer = self.engine.check(self.base, self.pool)

    def model_contexts(self) -> list[tuple[Any, float]]:
        return [(self._tokenizer, self.engine.context)]

    def open(self, device: str) -> None:
        if not self._opened:
            self.engine.open(self.base, self.pool, device)
        self._opened = True

    def fingerprint(self) -> str:
        """Return the fingerprints of the base and of the pool."""
        return f"{self.base.fingerprint()} {self.pool.fingerprint()}"


class PositionsCandidate(PoolCandidate):
    """Several positions [P, G * K] of one pool, one voter each; answered together on one base.

    Args:
        base, pool, engine: See `PoolCandidate`.
    """

    @abstractmethod
    def build_positions(self) -> dict[str, np.ndarray]:
        """Return the positions of the open pool by name.

        Raises:
            UserError: The pool does not have a named expert.
        """

    def check(self, task: Task) -> None:
        self.pool.open(self.base)
        rows = self.build_positions()
        self.names, self._rows = list(rows), np.stack(list(rows.values()))
        super().check(task)

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        return run_tasks_lockstep(task, self.engine, self._rows, items, meter)

    def expert_index(self, name: str) -> int:
        """Return an expert's index in the open pool."""
        if name not in self.pool.names:
            have = ", ".join(self.pool.names)
            raise UserError(f"candidate: the pool has no expert {name!r}; it has: {have}")
        return self.pool.names.index(name)


@checked("candidate")
class SingleExpertsCandidate(PositionsCandidate):
    """Unmodified experts of the pool.

    Args:
        base, pool, engine: See `PoolCandidate`.
        names: Of one, or of several; `None` is all of the pool.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        engine: Engine,
        names: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(base, pool, engine)
        self.requested_names = [names] if isinstance(names, str) else names

    def build_positions(self) -> dict[str, np.ndarray]:
        names = self.pool.names if self.requested_names is None else self.requested_names
        unit = np.tile(np.eye(len(self.pool.names)), len(self.pool.groups))
        return {name: unit[self.expert_index(name)] for name in names}


@checked("candidate")
class MixedPositionCandidate(PositionsCandidate):
    """One position by its coefficients.

    Args:
        base, pool, engine: See `PoolCandidate`.
        coefficients: Of experts by name, the others' are 0; or a list of all G * K, group by group,
            as in rounds.jsonl and swarm.json of a run.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        engine: Engine,
        coefficients: Mapping[str, FiniteNumber] | Sequence[FiniteNumber],
    ) -> None:
        super().__init__(base, pool, engine)
        if not coefficients:
            raise UserError("candidate.coefficients is empty; give {EXPERT: NUMBER, ...}")
        self.coefficients = coefficients

    def build_positions(self) -> dict[str, np.ndarray]:
        count, groups = len(self.pool.names), len(self.pool.groups)
        if isinstance(self.coefficients, Mapping):
            row = np.zeros(count)
            for name, value in self.coefficients.items():
                row[self.expert_index(name)] = value
            return {"position": np.tile(row, groups)}
        if len(self.coefficients) != count * groups:
            raise UserError(f"""candidate.coefficients: {len(self.coefficients)} numbers, and the
                pool has {count} experts in {groups} groups: {count * groups} are needed""")
        return {"position": np.array(self.coefficients, dtype=np.float64)}


CHUNK_ITEMS = 8
"""Items scored between two checks for a stop; a question to the same models waits that long."""


class ScoredPosition(NamedTuple):
    """A position and its utility on the items of a scoring.

    Attributes:
        name: What it is, "mixture" for the scored one.
        words: Description of its composition.
        utility, interval: Utility on its `items`, with its 95 % interval.
        items: Number of items.
        gain: Paired test of the mixture against it on these items; `None` for the mixture.
    """

    name: str
    words: str
    utility: float
    interval: tuple[float, float]
    items: int
    gain: PairedTest | None


class MixtureScoring:
    """Scores a mixture, the uniform soup and the expert with the largest coefficient on dev items.

    Args:
        roster: Provider of the models.
        coefficients: Coefficients by expert.
        load_task: Returns the task.
        items: Number of dev items; a task with fewer gives all of its items.

    Attributes:
        done, total: Number of items scored, and in total; a total of 0 while a model is loaded.

    Raises:
        UserError: Fewer than 2 items.
    """

    def __init__(
        self,
        roster: Roster,
        coefficients: Mapping[str, float],
        load_task: Callable[[], Task],
        items: int,
    ) -> None:
        if items < 2:
            raise UserError("dev items: must be 2 or more")
        self._roster, self._coefficients = roster, dict(coefficients)
        self._load_task, self._count = load_task, items
        self.done = self.total = 0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop after the items in progress."""
        self._stopped.set()

    def run(self) -> list[ScoredPosition]:
        """Score; return the mixture first, then the others in descending order of utility.

        Raises:
            UserError: It was stopped, or the task or the models do not fit.
        """
        task = self._load_task()
        items = task.items("dev")[: self._count]
        task.metric_task.check_scale()
        shares = self._coefficients
        nearest = max(shares, key=lambda name: shares[name])
        positions = {"mixture": shares}
        for name, one in (
            ("mean of all", dict.fromkeys(shares, 1 / len(shares))),
            ("nearest expert", {expert: float(expert == nearest) for expert in shares}),
        ):
            if any(abs(one[expert] - shares[expert]) > 1e-9 for expert in shares):
                positions[name] = one
        models = [self._roster.blend(one) for one in positions.values()]
        scores = self._score_items(task, items, models)
        found = []
        for (name, one), mine in zip(positions.items(), scores, strict=True):
            known = utility_with_interval(task, mine)
            gain = None if mine is scores[0] else paired_gain(task, scores[0], mine)
            words = describe_position(list(one), list(one.values()))
            interval = (known.low, known.high)
            found.append(ScoredPosition(name, words, known.mean, interval, len(mine), gain))
        return [found[0], *sorted(found[1:], key=lambda one: -one.utility)]

    def _score_items(
        self, task: Task, items: Sequence[Item], models: Sequence[Any]
    ) -> list[list[Score]]:
        """Return one list of scores per model, in the order of the items."""
        for one in (task, *models):
            one.check()
        task.open(choose_device(self._roster.device))
        for model in models:
            model.open()
        self.total = len(items)
        rows = np.arange(len(models))[:, None]
        engine: Any = _RosterEngine(models)
        scores: list[list[Score]] = [[] for _ in models]
        while self.done < self.total:
            if self._stopped.is_set():
                raise UserError(f"stopped after {self.done} of {self.total} items")
            chunk = items[self.done : self.done + CHUNK_ITEMS]
            found = run_tasks_lockstep(task, engine, rows, chunk, JobUsage())
            for mine, more in zip(scores, found, strict=True):
                mine += [task.apply_scale(score) for score in more]
            self.done += len(chunk)
        return scores


class _RosterEngine:
    """Local models as an engine of positions [P, 1], the indices of the models."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer the requests of all models together; they share their batches."""
        chosen = [self._models[int(index)] for index in positions[:, 0]]
        calls = [partial(one.generate, row) for one, row in zip(chosen, requests, strict=True)]
        found = dict(run_concurrently(calls, name="swarm-scoring"))
        return [found[number] for number in range(len(calls))]
