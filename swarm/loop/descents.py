"""What a search learns from, and with: gradient steps between two iterations.

A position may have an adapter of its own beside its coefficients, learned in the same steps
(`swarm.pool.learned`); its file is in the folder adapters/ of the run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarm.executors.worker import DESCENT, LOSS, DescentJob
from swarm.loop.evaluator import Evaluator, records_to_scores, scores_to_records
from swarm.optimizers.base import (
    GRADIENT_COST,
    DescentPlan,
    DescentRequest,
    LossRequest,
)
from swarm.pool.pool import ExpertPool
from swarm.runs.folder import LEARNED_FOLDER, RunRecord
from swarm.tasks.base import Candidate, Item, Score, Task

MIN_KIND_ITEMS = 16
"""Minimum number of dev items of a kind of prompt that moves its coefficients, one of several.

With ten items of each of nine kinds (skills) three searches raised dev from .73 to .87, .89 and .91
and had .75, .71 and .60 on test, for .69 at the start; with forty of each of two (nlgraph_mini) one
had .74 for .53.
"""


def choose_signal(wanted: str, task: Task) -> tuple[str | None, str]:
    """Return what teaches a task, "gold" or "scores", and why nothing does.

    "auto" is "gold" where right answers are known, else "scores"; reference texts are no answers
    whose score is known.

    Returns:
        The signal and "", or `None` and the reason.
    """
    missing = {"gold": task.gold_error, "scores": task.scores_error}
    names = ["gold", "scores"] if wanted == "auto" else [wanted]
    if wanted == "auto" and task.black_box:
        names = ["scores", "gold"]
    found = next((name for name in names if missing[name] is None), None)
    return found, "" if found else str(missing[names[0]])


class CandidatePool:
    """The distinct answers to each dev item, with their scores, in the order of their arrival.

    Args:
        task: Its items are those that the search sees.
        items: Their dev items.
    """

    def __init__(self, task: Task, items: Sequence[Item]) -> None:
        self._task, self._items = task, [task.resolve(item) for item in items]
        self._known = [dict[tuple[str, bool], float]() for _ in items]

    def add(self, scores: Iterable[tuple[int, Score]]) -> None:
        """Add answers by the number of their item; of an equal text the first score counts."""
        for number, score in scores:
            task, item = self._items[number]
            part = task.scored_part(item, score.text)
            # An empty text counts where it ends, as a model can fall into it.
            if any(part):
                self._known[number].setdefault(part, self._task.apply_scale(score).value)

    def is_solved(self, number: int) -> bool:
        """Return whether an answer with the highest score is known."""
        return self._items[number][0].highest in self._known[number].values()

    def choose(self, limit: int) -> list[Sequence[Candidate]]:
        """Return the best answer to each item and the latest others, at most `limit`.

        Where answers are right or wrong, only the right ones. None where all known ones have the
        same score, unless that is the highest.
        """
        values: dict[int, set[float]] = {}
        for (task, _), known in zip(self._items, self._known, strict=True):
            values.setdefault(id(task), {task.lowest}).update(known.values())
        # Right or wrong: two values at most, which are the bounds where both are known.
        graded = {
            id(task)
            for task, _ in self._items
            if len(values[id(task)] | {task.highest} - {None}) > 2
        }
        return [
            self._choose(i, limit, id(self._items[i][0]) in graded) for i in range(len(self._items))
        ]

    def _choose(self, number: int, limit: int, graded: bool) -> Sequence[Candidate]:
        known = self._known[number]
        low, high = min(known.values(), default=0.0), max(known.values(), default=0.0)
        if low == high:
            low = high - 1.0 if self.is_solved(number) else high
        latest = [(part, value) for part, value in reversed(known.items()) if low < high]
        if not graded:
            latest = [pair for pair in latest if pair[1] > low]
        best = sorted(latest, key=lambda pair: -pair[1])[:1]
        chosen = [*best, *(pair for pair in latest if pair not in best)][:limit]
        return [Candidate(*part, (value - low) / (high - low)) for part, value in chosen]


@dataclass
class Descents:
    """Answers an optimizer's requests for gradients, within the budget.

    Attributes:
        evaluator, record, pool, task: Those of the search.
        searched: Dev indices of the items that the search sees.
        routes: Returns the route of each of them.
        signal: See `choose_signal`.
        seed: Of drawn texts and new adapters.
        budget: Prompt-equivalents for all iterations after the first; `None` without a limit.
        candidates: The scored answers so far.
        counts: Examples of this iteration: "losses" are prompts that are only read or answered.
        samples: Scored texts drawn in this iteration, by particle, with the number of their item.
        files: Files of learned adapters in this iteration, of each route, by particle.
    """

    evaluator: Evaluator
    record: RunRecord
    pool: ExpertPool
    task: Task
    searched: Sequence[int]
    routes: Callable[[], Sequence[int]]
    signal: str
    seed: int
    budget: int | None
    candidates: CandidatePool = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    samples: dict[int, list[tuple[int, Score]]] = field(default_factory=dict)
    files: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dev = self.task.items("dev")
        self._items = [dev[index] for index in self.searched]
        self.candidates = CandidatePool(self.task, self._items)

    def describe(self) -> str:
        """Describe what teaches, in a line."""
        if self.signal == "scores":
            return "it also trains, on the scores of its own answers"
        kind = "reference" if self.task.black_box else "gold"
        return f"it also trains, on the {kind} answers of the dev items"

    def restore(self) -> None:
        """Read the candidates of a resumed search."""
        if self.signal == "gold":
            return
        numbers = {item["id"]: number for number, item in enumerate(self._items)}
        for number, entry in enumerate(self.record.iterations):
            stored = self.record.load_iteration_answers(number)
            particles = len(entry["positions"])
            # As they arrived: the drawn texts before the answers.
            for i in sorted(stored, key=lambda i: (i < particles, i)):
                rows = stored[i]
                scores = records_to_scores(rows)
                self.candidates.add(
                    (numbers[row["id"]], score) for row, score in zip(rows, scores, strict=True)
                )

    def begin(self) -> None:
        """Begin an iteration."""
        self.counts, self.samples, self.files = Counter(), {}, {}

    @property
    def cost(self) -> int:
        """Prompt-equivalents of this iteration."""
        return self.counts["losses"] + GRADIENT_COST * self.counts["gradients"]

    def answer(self, number: int, wanted: Sequence[Any], left: float) -> list[Any]:
        """Answer requests before an iteration.

        Args:
            number: Number of the iteration.
            left: Prompt-equivalents that may be spent.

        Returns:
            An answer each; nothing if the budget does not allow it.
        """
        if isinstance(wanted[0], LossRequest):
            return self._measure(wanted) if sum(len(one.items) for one in wanted) <= left else []
        return self._descend(number, wanted, left)

    def _choose_candidates(self, limit: int) -> tuple[list[Sequence[Candidate]], list[int | None]]:
        """Return the candidates of each item, and its route; `None` where nothing teaches it."""
        chosen = self.candidates.choose(limit) if self.signal == "scores" else []
        teaches = [bool(mine) for mine in chosen] or [True] * len(self.searched)
        self.counts["untaught"] = teaches.count(False)
        routes = self.routes()
        sizes = Counter(routes)
        if len(sizes) > 1:
            teaches = [
                t and sizes[r] >= MIN_KIND_ITEMS for r, t in zip(routes, teaches, strict=True)
            ]
        return chosen, [r if t else None for r, t in zip(routes, teaches, strict=True)]

    def _measure(self, wanted: Sequence[LossRequest]) -> list[Any]:
        """Measure losses of positions."""
        chosen, routes = self._choose_candidates(wanted[0].descent.candidates)
        jobs = [
            DescentJob(
                i,
                (tuple(one.position.tolist()),),
                LOSS,
                tuple(self.searched[number] for number in one.items),
                ("a position before the first descent",),
                descent=one.descent,
                routes=tuple(routes[number] for number in one.items),
                candidates=tuple(chosen[number] for number in one.items if chosen),
            )
            for i, one in enumerate(wanted)
        ]
        self.counts["losses"] += sum(len(job.items) for job in jobs)
        return self.evaluator.measure_losses(jobs)

    def _descend(self, number: int, wanted: Sequence[DescentRequest], left: float) -> list[Any]:
        """Run the descents of some particles; none if the budget allows no step of each."""
        descent, items = wanted[0].descent, len(self.searched)
        unsolved = list[int]()
        if self.signal == "scores":
            unsolved = [i for i in range(items) if not self.candidates.is_solved(i)]
        drawn = descent.samples * len(unsolved)
        plan = DescentPlan(len(wanted), 1, descent.batch, round(descent.holdout * items), drawn)
        affordable = (left - plan.forwards) // (GRADIENT_COST * plan.gradients)
        steps = int(min(descent.steps_by(self.signal == "scores"), affordable))
        if steps < 1:
            return []
        for one in wanted if drawn else ():
            self._draw_texts(number, one, unsolved * descent.samples)
        chosen, routes = self._choose_candidates(descent.candidates)
        spent = (0.0, 0.0)
        if self.budget:
            first = max(0.0, 1 - (left - plan.forwards) / self.budget)
            spent = first, first + steps * GRADIENT_COST * plan.gradients / self.budget
        jobs = [
            DescentJob(
                i,
                (tuple(one.position.tolist()),),
                DESCENT,
                tuple(self.searched),
                (f"mixture {one.particle} in the training of round {number}",),
                tuple(self._files_of(one.position)),
                self.seed,
                descent=one.descent,
                particle=one.particle,
                steps=steps,
                routes=tuple(routes),
                candidates=tuple(chosen),
                rank=self.pool.new_adapter,  # type: ignore[arg-type]
                spent=spent,
            )
            for i, one in enumerate(wanted)
        ]
        ended = self.evaluator.descend(jobs)
        for job, answer in zip(jobs, ended, strict=True):
            self.counts.update(losses=answer.losses, gradients=answer.gradients)
            if answer.adapter is not None and len(answer.kept) < self.pool.routes:
                file = self.record.write_learned(number, job.particle, answer.adapter)
                files = [file] * self.pool.routes
                for route in answer.kept:
                    files[route] = job.learned[route]
                self.files[job.particle] = files
        return ended

    def _draw_texts(self, number: int, one: DescentRequest, items: Sequence[int]) -> None:
        """Draw and score a text of a position for each of the items, as further candidates."""
        seed = self.seed + 1000 * number + one.particle
        routes, drawn = self.routes(), list[tuple[int, Score]]()
        for route, part in enumerate(self.pool.split_routes(one.position.tolist())):
            mine = [i for i in items if routes[i] == route]
            indices = [self.searched[i] for i in mine]
            texts = self.evaluator.sample_texts(part, indices, seed) if mine else []
            drawn += zip(mine, texts, strict=True)
        self.samples[one.particle] = drawn
        self.candidates.add(drawn)
        self.counts["losses"] += len(drawn)

    def _files_of(self, position: np.ndarray) -> list[str]:
        """Return the file of the learned adapter of each route of a position, or ""."""
        parts = self.pool.split_routes(position.tolist())
        return [self.evaluator.learned.get(tuple(part), "") for part in parts]

    def assign(self, before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
        """Give the new positions their adapters: those just learned, else those of before.

        Args:
            before, after: Positions [N, R * G * K] that the new ones go on from, and the new ones.

        Returns:
            Facts of the iteration: the counts, and the files by particle.
        """
        facts: dict[str, Any] = {f"{n}_computed": self.counts[n] for n in ("losses", "gradients")}
        if self.counts["untaught"]:
            facts["untaught"] = self.counts["untaught"]
        learned = {}
        for i, position in enumerate(after):
            files = self.files.get(i) or self._files_of(before[i])
            if any(files) and (i in self.files or (position != before[i]).any()):
                learned[str(i)] = [file and f"{LEARNED_FOLDER}/{Path(file).name}" for file in files]
                parts = self.pool.split_routes(position.tolist())
                pairs = zip(map(tuple, parts), files, strict=True)
                known = {} if i in self.files else self.evaluator.learned
                self.evaluator.learned |= {p: file for p, file in pairs if file and p not in known}
        return facts | ({"learned": learned} if learned else {})

    def records(self, particles: int) -> dict[int, list[dict[str, Any]]]:
        """Return the answers to store of the drawn texts, from index N = `particles` on.

        They are beyond the particles, so that nothing takes them for a position's answers.
        """
        return {
            particles + i: scores_to_records(
                (self._items[number] for number, _ in drawn), (score for _, score in drawn)
            )
            for i, drawn in self.samples.items()
        }
