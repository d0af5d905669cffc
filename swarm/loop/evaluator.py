"""Scores positions on a split: cuts the work into jobs, and never does the same work twice."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.errors import UserError
from swarm.executors import Executor, Job, JobResult
from swarm.executors.worker import data_split
from swarm.runs.run_folder import ParticleIndex, RunRecord, position_key
from swarm.runs.score_cache import ScoreCache
from swarm.tasks.base import HasScoreScale, Item, Score, Task

if TYPE_CHECKING:
    from swarm.engine.gradient import Gradient
    from swarm.optimizers.base import LossRequest

JobCallback = Callable[[JobResult], None]

PositionTuple = tuple[float, ...]
"""A position."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How the work is cut into jobs; never by how many workers there are.

    So the same search makes the same batches, and the same numbers, on one machine or on many.

    Args:
        particles: Positions in a job; `None` means all that are to be scored.
        items: Items in a job; `None` means all.
        examples: Examples of a minibatch in a job of a gradient; fewer than the minibatch divide it
            among workers.
    """

    particles: int | None = 5
    items: int | None = 50
    examples: int = 16

    def __post_init__(self) -> None:
        for key in ("particles", "items"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"job.{key}={value}: must be null or a whole number above 0")
        if type(self.examples) is not int or self.examples < 1:
            raise UserError(f"job.examples={self.examples}: must be a whole number above 0")

    def split_jobs(
        self, positions: Sequence[Sequence[float]], split: str, items: int | Sequence[int]
    ) -> list[Job]:
        """The jobs that score all positions on so many first items of a split, or on some places.

        The places of a job are in the order in which they are given.
        """
        chosen = range(items) if isinstance(items, int) else items
        wide, long = self.particles or len(positions), self.items or len(chosen)
        cut: list[Job] = []
        for first in range(0, len(positions), wide):
            block = tuple(tuple(float(c) for c in row) for row in positions[first : first + wide])
            for start in range(0, len(chosen), long):
                cut.append(Job(len(cut), block, split, tuple(chosen[start : start + long])))
        return cut


class Evaluator:
    """Scores positions with an executor's workers.

    Args:
        store: Answers of this and other searches; `None`: whatever is wanted is asked.

    Attributes:
        shared: How many prompts the store has saved so far.
        names: How an error calls a position.
    """

    def __init__(
        self, task: Task, executor: Executor, cut: Batching, store: ScoreCache | None = None
    ) -> None:
        self._task = task
        self._executor = executor
        self._cut = cut
        self._store = store
        self.shared = 0
        self.names: Mapping[PositionTuple, str] = {}

    def score_positions(
        self,
        positions: Sequence[Sequence[float]],
        split: str,
        watch: JobCallback | None = None,
        items: Sequence[int] | None = None,
    ) -> list[list[Score]]:
        """One score an item for each of the positions [P, K]; equal positions are played once.

        Args:
            split: "dev", "judged" or "test"; see `swarm.executors.worker.Job`.
            watch: Told of every job that is done.
            items: Different places in the split, scored in this order; `None` is all of them.
        """
        rows = [tuple(float(c) for c in row) for row in positions]
        chosen = range(len(self._task.items(data_split(split)))) if items is None else items
        found = self._load_shared_scores(dict.fromkeys(rows), split, chosen)
        if todo := [row for row in dict.fromkeys(rows) if row not in found]:
            found |= self._run_jobs(todo, split, chosen, watch)
        return [[apply_scale(self._task, score) for score in found[row]] for row in rows]

    def compute_gradients(
        self,
        wanted: Sequence["LossRequest"],
        places: Sequence[int],
        watch: JobCallback | None = None,
        iteration: int = 0,
    ) -> list["Gradient"]:
        """The mean loss over each one's dev items and, where it is wanted, its derivative.

        Args:
            places: In dev, of the items that are numbered in what is wanted.
            iteration: The one to come, for messages.

        Raises:
            UserError: A loss is not finite; the message names the particle.
        """
        size = self._cut.examples
        jobs: list[Job] = []
        owner: list[int] = []
        for number, one in enumerate(wanted):
            position = tuple(float(c) for c in one.position)
            split = "entropy" if one.entropy else "gradient" if one.slope else "loss"
            whose = "the position" if one.particle is None else f"particle {one.particle}"
            names = (f"{whose} in the descent of iteration {iteration}",)
            for start in range(0, len(one.items), size):
                items = tuple(places[i] for i in one.items[start : start + size])
                jobs.append(Job(len(jobs), (position,), split, items, names))
                owner.append(number)
        results = {}
        for result in self._executor.map(jobs):
            results[result.number] = result.gradient
            if watch:
                watch(result)
        # Summed in the jobs' order: the result does not depend on which worker was first.
        sums: dict[int, Gradient] = {}
        for job, number in enumerate(owner):
            mine = results[job]
            assert mine is not None
            sums[number] = sums[number] + mine if number in sums else mine
        return [sums[i].mean_over(len(one.items)) for i, one in enumerate(wanted)]

    def _load_shared_scores(
        self, rows: Iterable[PositionTuple], split: str, items: Sequence[int]
    ) -> dict[PositionTuple, list[Score]]:
        """What the store has of these positions."""
        if self._store is None:
            return {}
        kept = {row: self._store.load_scores(row, split, items) for row in rows}
        found = {row: scores for row, scores in kept.items() if scores is not None}
        self.shared += len(found) * len(items)
        return found

    def _run_jobs(
        self,
        rows: Sequence[PositionTuple],
        split: str,
        items: Sequence[int],
        watch: JobCallback | None,
    ) -> dict[PositionTuple, list[Score]]:
        """What the workers say of these different positions."""
        jobs = [
            replace(job, names=tuple(self.names.get(row, "") for row in job.positions))
            for job in self._cut.split_jobs(rows, split, items)
        ]
        scores: dict[PositionTuple, dict[int, Score]] = {row: {} for row in rows}
        for result in self._executor.map(jobs):
            job = jobs[result.number]
            for position, mine in zip(job.positions, result.scores, strict=True):
                scores[position].update(zip(job.items, mine, strict=True))
            if watch:
                watch(result)
        found = {row: [mine[item] for item in items] for row, mine in scores.items()}
        if self._store is not None:
            for row, mine in found.items():
                self._store.save_scores(row, split, items, mine)
        return found


def split_dev_holdout(
    items: Sequence[Item], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """The places of dev that a search sees, and those kept from it, drawn in each part.

    Args:
        share: Of the items that are kept, from 0 to below 1; each part keeps one at least.

    Raises:
        UserError: A part has no two items.
    """
    if not share:
        return list(range(len(items))), []
    parts: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        parts.setdefault(str(item.get("part", "")), []).append(place)
    kept: list[int] = []
    for number, places in enumerate(parts.values()):
        if len(places) < 2:
            raise UserError(f"confirm={share}: needs 2 or more dev items in each part of the task")
        draw = np.random.Generator(np.random.Philox(key=[seed, number]))
        count = min(len(places) - 1, max(1, round(share * len(places))))
        kept += [places[i] for i in draw.permutation(len(places))[:count]]
    return [place for place in range(len(items)) if place not in kept], sorted(kept)


def rows_to_evaluate(
    positions: np.ndarray, evaluate: np.ndarray, experts: int = 0, groups: int = 1
) -> list[int]:
    """The rows of an ask [N, G * K] to be scored: those that `evaluate` marks and the experts.

    Scale and verdict rest on the experts, so a search scores them first whatever the optimizer
    wants.

    Args:
        experts: K in the first round, later 0.
        groups: G; an expert has its 1 in each.

    Raises:
        UserError: The first `experts` rows are not the experts.
    """
    if experts and not np.array_equal(positions[:experts], np.tile(np.eye(experts), groups)):
        raise UserError(
            f"optimizer: its first ask has to begin with the {experts} experts, row k with a 1 in "
            "place k and else 0; mend its start or ask, or choose another optimizer"
        )
    return sorted({*range(experts), *np.flatnonzero(evaluate).tolist()})


def calibrate_scale(
    task: Task, scores: dict[int, dict[int, Score]], experts: int
) -> dict[str, Any] | None:
    """Set a task's scale by its experts, which are the first particles of a search.

    Args:
        scores: Of each particle that was scored in the first round, the experts among them, by
            item; put on the scale in place.
        experts: How many of the particles are experts.

    Returns:
        The scale, for the record; `None` where the task has none.
    """
    if not isinstance(task, HasScoreScale):
        return None
    scale = task.calibrate([s for i in range(experts) for s in scores[i].values()])
    for mine in scores.values():
        mine.update({place: task.apply_scale(score) for place, score in mine.items()})
    return dict(scale)


def apply_scale(task: Task, score: Score) -> Score:
    """The score on the task's scale, where it has one."""
    return task.apply_scale(score) if isinstance(task, HasScoreScale) else score


def scores_to_records(items: Sequence[Any], scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Scores as the record keeps them; a mixture's say which part they are of."""
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
    """The scores of a record's rows."""
    return [
        Score(r["value"], r["answer"], r["text"], r.get("part", ""), r.get("measures", {}))
        for r in rows
    ]


# The positions that a search has met: none of them is evaluated twice.


class EvaluatedPositions:
    """Where in a record each position was first scored on all its items."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._places: dict[str, ParticleIndex] = {}

    def __contains__(self, position: Sequence[float] | np.ndarray) -> bool:
        return position_key(position) in self._places

    def add_iteration(
        self,
        number: int,
        positions: Sequence[Sequence[float]],
        utilities: Sequence[float | None],
    ) -> None:
        """Take a round of the record."""
        for i, (row, utility) in enumerate(zip(positions, utilities, strict=True)):
            if utility is not None:
                self._places.setdefault(position_key(row), (number, i))

    def fill_known_scores(
        self, scores: dict[int, dict[int, Score]], positions: np.ndarray, wanted: Sequence[int]
    ) -> None:
        """Add, to the scores of a round's new particles, those of the wanted ones met before."""
        for i in wanted:
            if i not in scores:
                rows = self._record.load_iteration_answers(
                    *self._places[position_key(positions[i])]
                )
                scores[i] = dict(enumerate(records_to_scores(rows)))


# The most dev prompts that a search may cost, so that several can be compared.
#
# Gradients count too, in prompt-equivalents: see `swarm.runs.run_folder.RunRecord.count_prompts`.


class Budget:
    """Lets a search ask whole positions as long as their prompts fit.

    A position that the search has met before is free, and so is none that only another search has
    met. What is asked at the end (test, confirmation) is not counted.

    Args:
        prompts: The most; `None` is no limit.

    Raises:
        UserError: It is no number of prompts.
    """

    def __init__(self, prompts: int | None = None) -> None:
        if prompts is not None and (type(prompts) is not int or prompts < 1):
            raise UserError(
                f"budget={prompts!r}: must be null or a number of dev prompts, 1 or more"
            )
        self.prompts = prompts
        self._items = 0

    def check_experts_fit(self, experts: int, items: int) -> None:
        """Whether the experts fit.

        Args:
            experts: How many.
            items: Dev items that a position is asked.

        Raises:
            UserError: They do not.
        """
        self._items = items
        if self.prompts is not None and self.prompts < experts * items:
            raise UserError(
                f"budget={self.prompts}: the {experts} experts alone take {experts} x {items} dev "
                "prompts; give more, or lower task.dev_limit"
            )

    @property
    def max_positions(self) -> int:
        """How many positions there is room for, once `check` knows the items."""
        return (self.prompts or 0) // self._items

    def exhausted_reason(self, record: RunRecord) -> str | None:
        """Why the budget ends the search: no room for one more position; else `None`."""
        if not record.iterations or self._remaining_prompts(record) >= self._items:
            return None
        return f"{record.prompts_spent()} of a budget of {self.prompts} dev prompts asked"

    def allows_gradients(self, record: RunRecord, cost: int) -> bool:
        """Whether gradients of this cost leave room for the evaluation of a position."""
        return cost + self._items <= self._remaining_prompts(record)

    def affordable_rows(
        self,
        record: RunRecord,
        positions: np.ndarray,
        wanted: Sequence[int],
        known: EvaluatedPositions,
        spent: int = 0,
    ) -> list[int]:
        """Those of the wanted rows of an ask that there is room for, the first ones first.

        Args:
            known: Positions that were met before.
            spent: Prompt-equivalents of this round that are not in the record yet.
        """
        room = (self._remaining_prompts(record) - spent) // self._items
        new: set[str] = set()
        found = []
        for i in wanted:
            if positions[i] not in known:
                if len(new | {position_key(positions[i])}) > room:
                    continue
                new.add(position_key(positions[i]))
            found.append(i)
        return found

    def _remaining_prompts(self, record: RunRecord) -> float:
        if self.prompts is None:
            return math.inf
        return self.prompts - record.prompts_spent()
