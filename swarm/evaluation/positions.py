"""Positions of a pool as candidates, and the score of a mixture beside its neighbours."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swarm._util.threads import run_concurrently
from swarm.engine.base import Engine, ExpertPool
from swarm.engine.base_model import BaseModel, choose_device
from swarm.errors import UserError
from swarm.evaluation.base import JobUsage
from swarm.executors.worker import run_tasks_lockstep
from swarm.loop.evaluator import apply_scale, records_to_scores
from swarm.merging.positions import describe_position
from swarm.models.base import Completion, Request
from swarm.registry.registry import Roster
from swarm.runs.folder import ParticleIndex, RunFolder
from swarm.stats.significance import PairedTest
from swarm.tasks.base import Item, Score, Task, metric_task
from swarm.tasks.metrics import paired_gain, utility_with_interval


class PositionsCandidate:
    """Several positions [P, G * K] of one pool, one voter each; answered together on one base.

    Args:
        base: The model that the pool's experts belong to.
        pool: The experts.
        engine: An engine for this kind of pool.
    """

    def __init__(self, base: BaseModel, pool: ExpertPool, engine: Engine) -> None:
        self.base, self.pool, self.engine = base, pool, engine
        self.names: list[str] = []
        self._rows = np.zeros((0, 0))
        self._tokenizer: Any = None
        self._opened = False

    def build_positions(self) -> dict[str, np.ndarray]:
        """Return the positions of the open pool by name.

        Raises:
            UserError: The pool does not have a named expert.
        """
        raise NotImplementedError

    def check(self, task: Task) -> None:
        """See `Candidate.check`."""
        self.pool.open(self.base)
        rows = self.build_positions()
        self.names, self._rows = list(rows), np.stack(list(rows.values()))
        self.pool.check()
        self._tokenizer = self.engine.check(self.base, self.pool)

    def model_contexts(self) -> list[tuple[Any, float]]:
        """See `HasModelContexts`."""
        return [(self._tokenizer, self.engine.context)]

    def open(self, device: str) -> None:
        """See `Candidate.open`."""
        if not self._opened:
            self.engine.open(self.base, self.pool, device)
        self._opened = True

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """See `Candidate.score_items`."""
        return run_tasks_lockstep(task, self.engine, self._rows, items, meter)

    def fingerprint(self) -> str:
        """Return the fingerprints of the base and of the pool."""
        return f"{self.base.fingerprint()} {self.pool.fingerprint()}"

    def expert_index(self, name: object) -> int:
        """Return an expert's index in the open pool."""
        if name not in self.pool.names:
            have = ", ".join(self.pool.names)
            raise UserError(f"candidate: the pool has no expert {name!r}; it has: {have}")
        return self.pool.names.index(str(name))


class SingleExpertsCandidate(PositionsCandidate):
    """Unmodified experts of the pool.

    Args:
        base, pool, engine: See `PositionsCandidate`.
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
        """See `PositionsCandidate.build_positions`."""
        names = self.pool.names if self.requested_names is None else list(self.requested_names)
        unit = np.tile(np.eye(len(self.pool.names)), len(self.pool.groups))
        return {name: unit[self.expert_index(name)] for name in names}


class MixedPositionCandidate(PositionsCandidate):
    """One position by its coefficients.

    Args:
        base, pool, engine: See `PositionsCandidate`.
        coefficients: Of experts by name, the others' are 0; or a list of all G * K, group by group,
            as in rounds.jsonl and swarm.json of a run.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        engine: Engine,
        coefficients: Mapping[str, float] | Sequence[float] | None,
    ) -> None:
        super().__init__(base, pool, engine)
        if not coefficients:
            raise UserError(
                "candidate.coefficients is missing: give coefficients by expert, e.g. "
                "candidate.coefficients='{rooms: 0.5, logic: 0.5}'"
            )
        values = list(coefficients.values() if isinstance(coefficients, Mapping) else coefficients)
        if not all(type(c) in (int, float) and np.isfinite(c) for c in values):
            raise UserError(f"candidate.coefficients={values}: must be finite numbers")
        self.coefficients = coefficients

    def build_positions(self) -> dict[str, np.ndarray]:
        """See `PositionsCandidate.build_positions`."""
        count, groups = len(self.pool.names), len(self.pool.groups)
        if isinstance(self.coefficients, Mapping):
            row = np.zeros(count)
            for name, value in self.coefficients.items():
                row[self.expert_index(name)] = value
            return {"position": np.tile(row, groups)}
        if len(self.coefficients) != count * groups:
            raise UserError(
                f"candidate.coefficients: {len(self.coefficients)} numbers, and the pool has "
                f"{count} experts in {groups} groups: {count * groups} are needed"
            )
        return {"position": np.array(self.coefficients, dtype=np.float64)}


CHUNK_ITEMS = 8
"""Items scored between two checks for a stop; a question to the same models waits that long."""

SCORED_NOW = "scored now"

NEAREST_POSITIONS = 3
"""Number of a run's evaluated positions that are listed, the nearest to the mixture."""


class ScoredPosition(NamedTuple):
    """A position and its utility on the items of a scoring.

    Attributes:
        name: What it is, "mixture" for the scored one.
        words: Description of its composition.
        source: `SCORED_NOW`, or the run whose records the answers are from.
        utility, interval: Utility on its `items`, with its 95 % interval.
        items: Number of items.
        gain: Paired test of the mixture against it on these items; `None` for the mixture.
    """

    name: str
    words: str
    source: str
    utility: float
    interval: tuple[float, float]
    items: int
    gain: PairedTest | None


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


class MixtureScoring:
    """Scores a mixture and its neighbours on dev items; `run` does the work.

    The uniform soup and the expert with the largest coefficient are scored on the same items as the
    mixture. With a run, the task is the run's, and its nearest evaluated positions, its best expert
    and its best found are listed by the answers it has recorded to these items.

    Args:
        roster: Provider of the models.
        coefficients: Coefficients by expert.
        load_task: Returns the task; with a run, the one that it searched.
        items: Number of dev items; a task or a run with fewer gives all of its items.
        run: Folder of a run of the same pool in the delta space; `None` for none.

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
        run: Path | None = None,
    ) -> None:
        if items < 2:
            raise UserError("dev items: must be 2 or more")
        self._roster, self._coefficients = roster, dict(coefficients)
        self._load_task, self._count, self._run = load_task, items, run
        self.done = self.total = 0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop after the items in progress."""
        self._stopped.set()

    def run(self) -> list[ScoredPosition]:
        """Score; return the mixture first, then the others in descending order of utility.

        Raises:
            UserError: It was stopped, or the task, the run or the models do not fit.
        """
        run = RunFolder(self._run) if self._run else None
        task = self._load_task()
        items = self._run_items(run, task) if run else task.items("dev")[: self._count]
        metric_task(task).check_scale()
        positions = self._positions_to_score()
        blend = self._roster.blend
        scores = self._score_items(task, items, [blend(one) for one in positions.values()])
        found = [
            _summarize(
                task,
                name,
                describe_position(list(one), list(one.values())),
                SCORED_NOW,
                mine,
                scores[0],
            )
            for (name, one), mine in zip(positions.items(), scores, strict=True)
        ]
        if run:
            by_id = {item["id"]: score for item, score in zip(items, scores[0], strict=True)}
            found += self._recorded_positions(run, task, by_id)
        return [found[0], *sorted(found[1:], key=lambda one: -one.utility)]

    def _positions_to_score(self) -> dict[str, dict[str, float]]:
        """Return the positions by name, each different."""
        shares = self._coefficients
        nearest = max(shares, key=lambda name: shares[name])
        found = {"mixture": shares, "uniform soup": dict.fromkeys(shares, 1 / len(shares))}
        found["nearest expert"] = {name: float(name == nearest) for name in shares}
        return {
            name: one for name, one in found.items() if name == "mixture" or not _equal(one, shares)
        }

    def _run_items(self, run: RunFolder, task: Task) -> Sequence[Item]:
        """Return evenly spaced ones of the items that a run's best was scored on."""
        base = self._roster.local.base
        if run.identity.get("base weights") not in (None, base.fingerprint()):
            raise UserError(f"{run.name}: its base is not {base.path}, with which the experts mix")
        if run.scale:
            task.restore_scale(run.scale)
        answered = {row["id"] for row in run.load_answers(run.find_best())}
        known = [item for item in task.items("dev") if item["id"] in answered]
        if not known:
            raise UserError(f"{run.name}: its items are no longer those of the task's file")
        count = min(self._count, len(known))
        return [known[i] for i in np.linspace(0, len(known) - 1, count).round().astype(int)]

    def _score_items(
        self, task: Task, items: Sequence[Item], models: Sequence[Any]
    ) -> list[list[Score]]:
        """Return one list of scores per model, in the order of the items."""
        task.check()
        for model in models:
            model.check()
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
                mine += [apply_scale(task, score) for score in more]
            self.done += len(chunk)
        return scores

    def _recorded_positions(
        self, run: RunFolder, task: Task, mine: Mapping[Any, Score]
    ) -> Iterator[ScoredPosition]:
        """Yield the run's neighbours of the mixture, each different, by its recorded answers."""
        row = [self._coefficients.get(name, 0.0) for name in run.experts]
        best, expert = run.find_best(), run.best_expert()
        chosen: dict[ParticleIndex, str] = {best: "best found", expert: "best expert"}
        if np.array_equal(run.positions[best], run.positions[expert]):
            chosen = {best: "best found, an expert"}
        for index, distance in find_nearest(run, row, NEAREST_POSITIONS):
            chosen.setdefault(index, f"at distance {distance:.2f}")
        for index, name in chosen.items():
            rows = [one for one in run.load_answers(index) if one["id"] in mine]
            if rows:
                words = describe_position(run.experts, run.positions[index].tolist(), run.groups)
                scores = records_to_scores(rows)
                ours = [mine[one["id"]] for one in rows]
                yield _summarize(task, name, words, run.name, scores, ours)


def find_nearest(
    run: RunFolder, row: Sequence[float], count: int
) -> list[tuple[ParticleIndex, float]]:
    """Return the evaluated positions nearest to K coefficients, with their distances.

    The distance is the root of the mean over the groups of modules of the squared Euclidean one.
    Of equal positions the first is returned.
    """
    wanted = np.tile(np.asarray(row, dtype=float), len(run.groups))
    gaps = np.square(run.positions - wanted).sum(axis=2) / len(run.groups)
    distances = np.where(np.isfinite(run.utilities), np.sqrt(gaps), np.inf)
    found: list[tuple[ParticleIndex, float]] = []
    for flat in np.argsort(distances, axis=None, kind="stable"):
        t, i = (int(one) for one in np.unravel_index(flat, distances.shape))
        if len(found) == count or not math.isfinite(distances[t, i]):
            break
        if not any(np.array_equal(run.positions[t, i], run.positions[one]) for one, _ in found):
            found.append(((t, i), float(distances[t, i])))
    return found


def _summarize(
    task: Task,
    name: str,
    words: str,
    source: str,
    scores: Sequence[Score],
    ours: Sequence[Score],
) -> ScoredPosition:
    """Return a position's utility and, unless the scores are the mixture's own, the paired test."""
    found = utility_with_interval(task, scores)
    gain = None if scores is ours else paired_gain(task, ours, scores)
    interval = (found.low, found.high)
    return ScoredPosition(name, words, source, found.mean, interval, len(scores), gain)


def _equal(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return all(abs(share - other[name]) < 1e-9 for name, share in one.items())
