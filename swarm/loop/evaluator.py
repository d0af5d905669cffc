"""Scoring of positions on a split: the division into jobs, and the positions known already.

No position is scored twice: known scores are read from the record or from the shared cache.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from swarm._util.settings import Positive, checked
from swarm.errors import UserError
from swarm.executors import Executor, Job, JobResult
from swarm.executors.worker import (
    EMBED_SPLITS,
    SAMPLE,
    Descended,
    DescentJob,
    data_split,
)
from swarm.loop.score_cache import ScoreCache
from swarm.runs.folder import RunRecord
from swarm.runs.pareto_front import ParticleIndex
from swarm.tasks.base import Item, Score, Task

if TYPE_CHECKING:
    from swarm.engine.base import Gradient

PositionTuple = tuple[float, ...]
"""A position, as a hashable tuple of coefficients."""


@checked("job")
@dataclass(frozen=True)
class Batching:
    """Division of the work into jobs, independent of the number of workers.

    The same search therefore forms the same batches, with the same numerical results, on one
    machine or on many.

    Args:
        particles: Positions per job; `None` means all positions to be scored.
        items: Items per job; `None` means all.
    """

    particles: Positive | None = 5
    items: Positive | None = 50

    def split_jobs(
        self,
        positions: Sequence[Sequence[float]],
        split: str,
        items: int | Sequence[int],
        names: Mapping["PositionTuple", str] = MappingProxyType({}),
        learned: Mapping["PositionTuple", str] = MappingProxyType({}),
    ) -> list[Job]:
        """Return the jobs that score all positions on some items of a split.

        Args:
            items: Number of first items, or their indices; a job has its indices in this order.
            names: Names of positions in error messages.
            learned: Files of learned adapters by position.
        """
        chosen = range(items) if isinstance(items, int) else items
        wide, long = self.particles or len(positions), self.items or len(chosen)
        jobs: list[Job] = []
        for first in range(0, len(positions), wide):
            rows = np.asarray(positions[first : first + wide], dtype=float)
            block = tuple(map(tuple, rows.tolist()))
            named, files = ([of.get(row, "") for row in block] for of in (names, learned))
            own = tuple(files) if any(files) else ()
            for start in range(0, len(chosen), long):
                items = tuple(chosen[start : start + long])
                jobs.append(Job(len(jobs), block, split, items, tuple(named), own))
        return jobs

    def split_pairs(
        self,
        pairs: Sequence[tuple["PositionTuple", int]],
        split: str,
        names: Mapping["PositionTuple", str],
        learned: Mapping["PositionTuple", str],
        first_number: int,
    ) -> list[Job]:
        """Return the jobs that score each position on its own items, numbered from a number.

        A job has as many pairs of a position and an item as one that scores all positions on all
        items: different positions share batches.
        """
        size = len(pairs)
        if self.particles and self.items:
            size = self.particles * self.items
        jobs: list[Job] = []
        for start in range(0, len(pairs), max(1, size)):
            parts, items = zip(*pairs[start : start + size], strict=True)
            block = tuple(dict.fromkeys(parts))
            places = {part: place for place, part in enumerate(block)}
            named, files = (tuple(of.get(part, "") for part in block) for of in (names, learned))
            owners = tuple(places[part] for part in parts)
            number, own = first_number + len(jobs), files if any(files) else ()
            jobs.append(Job(number, block, split, items, named, own, owners=owners))
        return jobs


class Evaluator:
    """Scores positions with an executor's workers.

    Args:
        shared: Folder of a score cache of this and other searches; `None` disables it.

    Attributes:
        cache: That cache; `None` if there is none.
        shared: Number of prompts that the cache has saved so far.
        experts: Names of the experts in all jobs; empty is the workers' whole pool.
        names: Names of positions in error messages.
        learned: Files of the learned adapters of positions.
        on_job: Called with the result of each finished job.
    """

    def __init__(
        self, task: Task, executor: Executor, cut: Batching, shared: str | None = None
    ) -> None:
        self._task, self._executor, self._cut = task, executor, cut
        self.cache = None if shared is None else ScoreCache(shared)
        self.shared = 0
        self.experts: tuple[str, ...] = ()
        self.names: Mapping[PositionTuple, str] = {}
        self.learned: dict[PositionTuple, str] = {}
        self.on_job: Callable[[JobResult], None] = lambda result: None
        self.set_kinds()

    def set_kinds(
        self, item_kinds: Callable[[str], np.ndarray] | None = None, routes: int = 1
    ) -> None:
        """Set the kinds of prompts, for positions [R * G * K].

        Args:
            item_kinds: Returns the kind of each item of "dev" or "test"; `None` if there is one.
            routes: Number R of kinds.
        """
        self._item_kinds, self._routes = item_kinds, routes

    def score_positions(
        self,
        positions: Sequence[Sequence[float]],
        split: str,
        items: Sequence[int] | None = None,
    ) -> list[list[Score]]:
        """Return one score per item for each of the positions [P, R * G * K].

        An item is answered with the coefficients of its kind of prompt. Equal coefficients are
        scored once on an item.

        Args:
            split: "dev", "judged" or "test"; see `swarm.executors.worker.Job`.
            items: Distinct indices in the split, scored in this order; `None` means all.
        """
        chosen = range(len(self._task.items(data_split(split)))) if items is None else items
        kinds = dict.fromkeys(chosen, 0)
        if self._item_kinds is not None:
            all_kinds = self._item_kinds(data_split(split)).tolist()
            kinds = {index: all_kinds[index] for index in chosen}
        # Of each position its parts by kind; of each part the items that it answers.
        rows = [self._split_routes(position) for position in positions]
        wanted: dict[PositionTuple, dict[int, None]] = {}
        names: dict[PositionTuple, str] = {}
        for position, parts in zip(positions, rows, strict=True):
            name = self.names.get(tuple(map(float, position)), "")
            for index in chosen:
                wanted.setdefault(parts[kinds[index]], {})[index] = None
                names.setdefault(parts[kinds[index]], name)
        found: dict[PositionTuple, dict[int, Score]] = {}
        new: dict[PositionTuple, list[int]] = {}
        for part, mine in wanted.items():
            indices = [index for index in chosen if index in mine]
            # The cache knows positions by their coefficients alone.
            cached = self.cache if part not in self.learned else None
            kept = cached.load_scores(part, split, indices) if cached else None
            if kept is None:
                new[part] = indices
            else:
                found[part] = dict(zip(indices, kept, strict=True))
                self.shared += len(indices)
        whole = [part for part, own in new.items() if len(own) == len(chosen)]
        jobs = self._cut.split_jobs(whole, split, chosen, names, self.learned)
        partial = [(part, i) for part, own in new.items() if len(own) < len(chosen) for i in own]
        jobs += self._cut.split_pairs(partial, split, names, self.learned, len(jobs))
        for result in self._run_jobs(jobs):
            job = jobs[result.number]
            for part, own, scores in zip(
                job.positions, job.items_by_position(), result.scores, strict=True
            ):
                found.setdefault(part, {}).update(zip(own, scores, strict=True))
            self.on_job(result)
        if self.cache:
            for part, indices in new.items():
                if part not in self.learned:
                    scores = [found[part][index] for index in indices]
                    self.cache.save_scores(part, split, indices, scores)
        scale = self._task.apply_scale
        return [[scale(found[parts[kinds[i]]][i]) for i in chosen] for parts in rows]

    def _split_routes(self, position: Sequence[float] | np.ndarray) -> list[PositionTuple]:
        """Return the part [G * K] of a position for each of the R kinds."""
        parts = np.reshape(np.asarray(position, dtype=float), (self._routes, -1))
        return list(map(tuple, parts.tolist()))

    def embed_prompts(self, split: str, items: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the base's hidden states of the items' first prompts, [T, D] by layer.

        Args:
            split: "dev" or "test".
            items: T indices in the split.
        """
        name = next(one for one, data in EMBED_SPLITS.items() if data == split)
        jobs = self._cut.split_jobs([()], name, items)
        parts = [result.states or {} for result in self._collect(jobs)]
        return {layer: np.concatenate([one[layer] for one in parts]) for layer in parts[0]}

    def _run_jobs(self, jobs: Sequence[Job]) -> Iterator[JobResult]:
        named = [replace(job, experts=self.experts) for job in jobs]
        return self._executor.map(named) if jobs else iter(())

    def _collect(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Run the jobs, and return their results in the jobs' order."""
        found = {}
        for result in self._run_jobs(jobs):
            found[result.number] = result
            self.on_job(result)
        return [found[job.number] for job in jobs]

    def sample_texts(
        self, position: Sequence[float], items: Sequence[int], seed: int
    ) -> list[Score]:
        """Return the score of a text drawn at temperature 1 for each of the dev indices."""
        cut = self._cut.split_jobs([tuple(position)], "dev", items, self.names, self.learned)
        jobs = [replace(job, split=SAMPLE, seed=seed + job.number) for job in cut]
        scale = self._task.apply_scale
        return [scale(score) for result in self._collect(jobs) for score in result.scores[0]]

    def measure_losses(self, jobs: Sequence[DescentJob]) -> list["Gradient"]:
        """Return the mean loss of each job's items."""
        return [cast("Gradient", result.gradient) for result in self._collect(jobs)]

    def descend(self, jobs: Sequence[DescentJob]) -> list[Descended]:
        """Run descents, one worker each."""
        return [cast(Descended, result.descended) for result in self._collect(jobs)]


def split_dev_holdout(
    items: Sequence[Item], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Split the dev indices into those that a search sees and a random holdout of each part.

    Args:
        share: Share of held-out items, from 0 to below 1; at least one item per part is held out.

    Raises:
        UserError: A part has fewer than two items.
    """
    if not share:
        return list(range(len(items))), []
    parts: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        parts.setdefault(str(item.get("part", "")), []).append(index)
    kept: list[int] = []
    for number, indices in enumerate(parts.values()):
        if len(indices) < 2:
            raise UserError(f"confirm={share}: needs 2 or more dev items in each part of the task")
        draw = np.random.Generator(np.random.Philox(key=[seed, number]))
        count = min(len(indices) - 1, max(1, round(share * len(indices))))
        kept += [indices[i] for i in draw.permutation(len(indices))[:count]]
    return [index for index in range(len(items)) if index not in kept], sorted(kept)


MAX_COEFFICIENT = 1e6
"""Largest absolute coefficient; no model gives useful answers beyond it."""


def name_positions(
    positions: np.ndarray, iteration: int, experts: Sequence[str] = ()
) -> dict[PositionTuple, str]:
    """Return the name of each of the positions [N, G * K] for messages.

    Args:
        experts: Names of the experts, which are the first positions of iteration 0.

    Raises:
        UserError: A coefficient is not finite or exceeds `MAX_COEFFICIENT`.
    """
    found: dict[PositionTuple, str] = {}
    for i, row in enumerate(positions):
        name, worst = f"mixture {i} of round {iteration}", np.abs(row).max(initial=0.0)
        if not iteration and i < len(experts):
            name = experts[i]
        if not worst <= MAX_COEFFICIENT:  # nor if it is NaN
            raise UserError(
                f"{name}: a coefficient of {worst:.3g} exceeds the limit of "
                f"{MAX_COEFFICIENT:g}: the optimizer's steps are too long "
                "(optimizer.step_length, sigma or the like)"
            )
        found.setdefault(tuple(row.tolist()), name)
    return found


def rows_to_evaluate(
    positions: np.ndarray, evaluate: np.ndarray, experts: int = 0, groups: int = 1
) -> list[int]:
    """Return the rows of an ask [N, G * K] to score: those marked in `evaluate`, and the experts.

    Score scale and final verdict depend on the experts, so a search scores them first in any case.

    Args:
        experts: K in the first iteration, 0 later.
        groups: G; an expert has a 1 in each group.

    Raises:
        UserError: The first `experts` rows are not the experts.
    """
    if experts and not np.array_equal(positions[:experts], np.tile(np.eye(experts), groups)):
        raise UserError(
            f"optimizer: the first positions of ask must be the {experts} experts (row k is 1 "
            "at index k and 0 elsewhere); fix its start or ask, or choose another optimizer"
        )
    return sorted({*range(experts), *np.flatnonzero(evaluate).tolist()})


def calibrate_scale(
    task: Task, scores: dict[int, dict[int, Score]], experts: int
) -> dict[str, Any] | None:
    """Set a task's score scale from its experts, which are the first particles of a search.

    Args:
        scores: Scores by particle and item of all particles of the first iteration, including the
            experts; rescaled in place.
        experts: Number of experts.

    Returns:
        The scale, for the record; `None` if the task has none.
    """
    scale = task.calibrate([s for i in range(experts) for s in scores[i].values()])
    if scale is None:
        return None
    for mine in scores.values():
        mine.update({index: task.apply_scale(score) for index, score in mine.items()})
    return dict(scale)


def scores_to_records(items: Iterable[Any], scores: Iterable[Score]) -> list[dict[str, Any]]:
    """Convert scores to JSON records; a mixture's records include the part."""
    return [
        {
            "id": item["id"],
            "value": score.value,
            "answer": score.answer,
            "text": score.text,
            **({"part": score.part} if score.part else {}),
            **({"measures": dict(score.measures)} if score.measures else {}),
        }
        for item, score in zip(items, scores, strict=True)
    ]


def records_to_scores(rows: Sequence[dict[str, Any]]) -> list[Score]:
    """Convert JSON records back to scores."""
    return [
        Score(
            row["value"], row["answer"], row["text"], row.get("part", ""), row.get("measures", {})
        )
        for row in rows
    ]


class EvaluatedPositions:
    """Index of evaluated positions: where each was first fully scored, as (iteration, particle).

    A routed position is known if the coefficients of each route are: an answer depends on those of
    its route alone.

    Args:
        item_routes: Route of each searched dev item; `None` without routes.
        routes: Number of routes, some of which may have no item.
    """

    def __init__(
        self, record: RunRecord, item_routes: np.ndarray | None = None, routes: int = 1
    ) -> None:
        self._record, self._item_routes, self._routes = record, item_routes, routes
        self._used = [0] if item_routes is None else np.unique(item_routes).tolist()
        self._places: dict[tuple[int, PositionTuple], ParticleIndex] = {}

    def _keys(self, position: Sequence[float] | np.ndarray) -> list[tuple[int, PositionTuple]]:
        rows = np.reshape(np.asarray(position, dtype=float), (self._routes, -1)).tolist()
        return [(route, tuple(rows[route])) for route in self._used]

    def __contains__(self, position: Sequence[float] | np.ndarray) -> bool:
        return self._places.keys() >= set(self._keys(position))

    def add_iteration(
        self,
        number: int,
        positions: Sequence[Sequence[float]],
        utilities: Sequence[float | None],
    ) -> None:
        """Add an iteration of the record."""
        for i, (row, utility) in enumerate(zip(positions, utilities, strict=True)):
            for key in self._keys(row) if utility is not None else ():
                self._places.setdefault(key, (number, i))

    def load_scores(self, position: Sequence[float] | np.ndarray) -> dict[int, Score]:
        """Return the stored scores of a known position by item, in the order of the items."""
        mine: dict[int, Score] = {}
        for key in self._keys(position):
            scores = records_to_scores(self._record.load_answers(self._places[key]))
            for index, score in enumerate(scores):
                if self._item_routes is None or self._item_routes[index] == key[0]:
                    mine[index] = score
        return dict(sorted(mine.items()))


def mean_by_route(
    scores: Mapping[int, Sequence[Score]], item_routes: np.ndarray, routes: int, count: int
) -> np.ndarray:
    """Return the mean values [N, R] of N = `count` positions on the items of each route.

    Args:
        scores: Scores of all items by position; the others' values are NaN.
        item_routes: Route of each item; a route without items is NaN.
        routes: R.
    """
    found = np.full((count, routes), np.nan)
    for i, mine in scores.items():
        values = np.array([score.value for score in mine])
        for route in np.unique(item_routes).tolist():
            found[i, route] = values[item_routes == route].mean()
    return found
