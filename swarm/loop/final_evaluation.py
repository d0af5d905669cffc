"""The scores of a verdict: positions on dev, held-out items and test, by the task's own metric.

Everything scored after the search is stored in the record.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swarm._util.files import short_digest
from swarm.loop.evaluator import data_split, records_to_scores, scores_to_records
from swarm.merging.positions import group_by_route
from swarm.runs.folder import ParticleIndex, RunRecord
from swarm.runs.pareto_front import ParetoFront
from swarm.tasks.base import Score, Task

FINALIST_COUNT = 10
"""Maximum number of personal bests that are scored by the task's own metric."""

ScoreFn = Callable[[Sequence[Sequence[float]], str, Sequence[int]], list[list[Score]]]
"""Scores positions on some indices of a split."""


@dataclass
class FinalEvaluation:
    """The scores that a verdict rests on, by the task's own metric.

    Attributes:
        record: Record of a run whose search is over.
        task: The run's task.
        ask: Scores as the search did.
        ask_again: Scores in other batches than the search did.
        begin: Callback before each scoring, with its kind, its number of items, and the name of the
            model where it is on test.
        searched, held_out: Dev indices that the search saw, and held-out ones.
        without_gradient: Numbers of the searched items that no gradient used, if others were used.
        by_kept: Whether the held-out items decide among the finalists.
        item_routes: The route of each searched item; `None` without routes.
        routes: Number of routes.
    """

    record: RunRecord
    task: Task
    ask: ScoreFn
    ask_again: ScoreFn
    begin: Callable[[str, int, str], None]
    searched: Sequence[int]
    held_out: Sequence[int]
    without_gradient: Sequence[int] = ()
    by_kept: bool = False
    item_routes: np.ndarray | None = None
    routes: int = 1
    _dev: dict[ParticleIndex, list[Score]] = field(default_factory=dict)

    @property
    def metric_task(self) -> Task:
        """The task with its own metric, whatever signal was searched on."""
        return self.task.metric_task

    def choose_bests(self) -> tuple[ParticleIndex, ParticleIndex]:
        """Return the best initial expert and the best position, by the task's own metric.

        Ties are broken by the searched signal. With constraints, feasible positions (or those with
        the smallest violation) come first. With `by_kept`, the best position is the finalist that
        is best on the held-out items. Where the strongest start is better on items that no gradient
        used, it replaces the best position (`_keep_start`). The choice is stored in the record.
        """
        expert_count, front = self.record.state["own"], self.pareto_front
        bound = front is not None and bool(front.constraints)
        own_metric = self.metric_task is self.task
        choosing = bound or self.by_kept or not own_metric
        if "chosen" not in self.record.state:
            before, after = self.record.best_index(rows=expert_count), self.record.best_index()
            experts = [(0, i) for i in range(expert_count)]
            finalists = self.record.personal_bests(FINALIST_COUNT)
            if bound and front is not None:
                finalists += [
                    front.front_indices[n] for n in front.evenly_spaced_points(FINALIST_COUNT)
                ]
            if self.by_kept:
                before = max(experts, key=self._rank_key)
                after = self._race_finalists([*finalists, *self._best_static_merge(finalists)])
            elif choosing and front is not None and own_metric:
                before, after = front.best_index(expert_count), front.best_index()
            elif choosing:
                found = [*experts, *finalists]
                before, after = (max(indices, key=self._rank_key) for indices in (experts, found))
            after, kept = self._keep_start(before, after)
            if choosing or kept:
                self.record.state["chosen"] = {"starting": list(before), "ending": list(after)}
                self.record.state["kept_start"] = kept
                self.record.save_state()
        return self.record.best_index(rows=expert_count), self.record.best_index()

    def _keep_start(
        self, before: ParticleIndex, after: ParticleIndex
    ) -> tuple[ParticleIndex, list[str]]:
        """Replace a best found that is below the strongest start by that start, by route.

        The start is the best position of the first iteration on the searched items; where the
        search asked by another signal, the best initial expert, as the others would
        have to be scored again. The two are compared on the items that no gradient used
        (`without_gradient`; those of the race with `by_kept`), where the best found does not
        profit from having been trained on them. A Pareto front is left as it is.

        Returns:
            The best found or what replaces it, and the names of the routes that are the start's.
        """
        if after[0] == 0 or self.pareto_front is not None:
            return after, []
        first = self.record.iterations[0]["utilities"]
        starts = [(0, i) for i, utility in enumerate(first) if utility is not None]
        if self.metric_task is not self.task:
            starts = [before]
        routes, unused = self.item_routes, self.without_gradient or range(len(self.searched))
        if self.by_kept or routes is None:
            start = max(starts, key=self._rank_key)
            scores = self.holdout_scores if self.by_kept else self.dev_scores
            items = range(len(self.held_out)) if self.by_kept else unused
            if self._utility_on(scores(after), items) < self._utility_on(scores(start), items):
                return start, ["all"]
            return after, []
        kept: dict[int, ParticleIndex] = {}
        rows = np.reshape(self.record.position_at(after), (self.routes, -1))
        # Routes with equal coefficients are one kind.
        kinds = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        for kind in np.unique(kinds[routes]).tolist():
            mine = np.flatnonzero(kinds[routes] == kind).tolist()
            known = {index: self._utility_on(self.dev_scores(index), mine) for index in starts}
            start = max(starts, key=lambda index: (known[index], self._rank_key(index)))
            items = [index for index in unused if index in mine]
            values = [self._utility_on(self.dev_scores(index), items) for index in (after, start)]
            if items and values[0] < values[1]:
                kept |= dict.fromkeys(np.flatnonzero(kinds == kind).tolist(), start)
        names = list(group_by_route(self.record.state["groups"]))
        return self._compose_routes(after, kept), [names[route] for route in sorted(kept)]

    def _utility_on(self, scores: Sequence[Score], items: Iterable[int]) -> float:
        """Return the utility of some of the scores; of a part of a mixture, their mean."""
        some = [scores[index] for index in items]
        if self.item_routes is None and not self.task.tasks:
            return self.metric_task.utility(some)
        return float(np.mean([score.value for score in some])) if some else 0.0

    def _compose_routes(
        self, after: ParticleIndex, kept: Mapping[int, ParticleIndex]
    ) -> ParticleIndex:
        """Return the index of a position with other coefficients on some routes.

        A new position is recorded as one more round: all its answers are known, as an answer
        depends on the coefficients of its route alone.
        """
        position = np.reshape(self.record.position_at(after), (self.routes, -1))
        for route, start in kept.items():
            position[route] = np.reshape(self.record.position_at(start), position.shape)[route]
        row = position.reshape(-1).tolist()
        for number, entry in enumerate(self.record.iterations):
            for i, one in enumerate(entry["positions"]):
                if one == row and entry["utilities"][i] is not None:
                    return number, i
        assert self.item_routes is not None
        answers = {one: self.record.load_iteration_answers(*one) for one in {after, *kept.values()}}
        rows = [answers[kept.get(r, after)][i] for i, r in enumerate(self.item_routes.tolist())]
        particle = after[1]
        positions = np.array(self.record.iterations[-1]["positions"])
        positions[particle] = row
        utilities = np.full(len(positions), np.nan)
        utilities[particle] = self.task.utility(records_to_scores(rows))
        scored = [len(rows) if i == particle else None for i in range(len(positions))]
        facts = {"items_scored": scored, "prompts_scored": 0, "prompts_saved": 0}
        facts["after_search"] = True
        self.record.add_iteration(
            positions, utilities, {particle: rows}, self.record.state["optimizer"], facts
        )
        return len(self.record.iterations) - 1, particle

    def _best_static_merge(self, finalists: Sequence[ParticleIndex]) -> list[ParticleIndex]:
        """Return the best static merge of the first iteration, if it is not a finalist."""
        experts = len(self.record.state["experts"])
        count = len(self.record.iterations[0]["positions"])
        recipes = [
            (0, i) for i in range(experts, count) if self.record.utility_at((0, i)) is not None
        ]
        best = sorted(recipes, key=lambda index: -(self.record.utility_at(index) or 0.0))[:1]
        return [index for index in best if index not in finalists]

    def _race_finalists(self, finalists: Sequence[ParticleIndex]) -> ParticleIndex:
        """Return the best finalist on the held-out items, by successive halving.

        The better half survives each third of the items (Jamieson and Talwalkar, 2016, arXiv
        1502.07943). A task with parts needs items of each, so its finalists are scored on all
        items. Ties are broken by the result of the search.
        """
        live = sorted(finalists, key=self._rank_key, reverse=True)
        scores: dict[ParticleIndex, list[Score]] = {index: [] for index in live}
        order = sorted(self.held_out, key=lambda index: short_digest(["kept", index]))
        third = len(order) if self.task.tasks else -(-len(order) // 3)
        for start in range(0, len(order), third):
            for index in live:
                position, items = self.record.position_at(index), order[start : start + third]
                scores[index] += self._load_or_score("confirm", position, "judged", items)
            live.sort(key=lambda index: -self.metric_task.utility(scores[index]))
            live = live[: -(-len(live) // 2)]
        return live[0]

    def _rank_key(self, index: ParticleIndex) -> tuple[float, float, float]:
        signal = self.record.utility_at(index)
        below = sum(
            max(0.0, bound - value) for bound, value in self.constraint_values(index).values()
        )
        return -below, self.search_utility(index), float("-inf") if signal is None else signal

    @property
    def pareto_front(self) -> ParetoFront | None:
        """The Pareto front by the objectives of the search; `None` for a task without parts."""
        return ParetoFront.from_state(self.record.state)

    def constraint_values(self, index: ParticleIndex) -> dict[str, tuple[float, float]]:
        """Return each constrained part's bound and its value on the searched part of dev."""
        front = self.pareto_front
        if front is None or not front.constraint_bounds:
            return {}
        values = self.metric_task.subtask_utilities(self.dev_scores(index))  # type: ignore[attr-defined]
        bounds = dict(front.constraint_bounds)
        if front.base_index is not None and self.metric_task is not self.task:
            # Another signal allows only `base` bounds: compute the base by the task's own metric.
            base = self.metric_task.subtask_utilities(self.dev_scores(front.base_index))  # type: ignore[attr-defined]
            bounds = {name: base[name] for name in bounds}
        return {name: (bound, values[name]) for name, bound in bounds.items()}

    def search_utility(self, index: ParticleIndex) -> float:
        """Return the utility on the searched part of dev."""
        return self.metric_task.utility(self.dev_scores(index))

    def best_finalists(self, limit: int) -> list[ParticleIndex]:
        """Return the best personal bests, best first, at most one per particle."""
        if self.metric_task is self.task:
            return self.record.personal_bests(limit)
        indices = self.record.personal_bests(FINALIST_COUNT)
        return sorted(indices, key=self._rank_key, reverse=True)[:limit]

    def dev_scores(self, index: ParticleIndex) -> list[Score]:
        """Return the scores of a particle on the searched part of dev."""
        if index not in self._dev:
            self._dev[index] = self._load_dev_scores(index)
        return self._dev[index]

    def searched_scores(self, index: ParticleIndex) -> list[Score]:
        """Return the scores of a particle as the search measured them."""
        return records_to_scores(self.record.load_iteration_answers(*index))

    def _load_dev_scores(self, index: ParticleIndex) -> list[Score]:
        scores = self.searched_scores(index)
        if self.metric_task is self.task:
            return scores
        if all("correct" in score.measures for score in scores):
            return [replace(s, value=s.measures["correct"], measures={}) for s in scores]
        return self._load_or_score(
            "judged", self.record.position_at(index), "judged", self.searched
        )

    def holdout_scores(self, index: ParticleIndex) -> list[Score]:
        """Return the scores on the part of dev that the search did not see."""
        return self._load_or_score(
            "confirm", self.record.position_at(index), "judged", self.held_out
        )

    def repeat_dev_scores(self, index: ParticleIndex) -> list[Score]:
        """Score the searched part of dev once more, in other batches."""
        position = self.record.position_at(index)
        return self._load_or_score("again", position, "judged", self.searched, self.ask_again)

    def test_scores(self, index: ParticleIndex, name: str = "model") -> list[Score]:
        """Return the scores on the test split; `name` is that of the model, for messages."""
        return self.score_position_on_test(self.record.position_at(index), name=name)

    def score_position_on_dev(self, position: Sequence[float]) -> list[Score]:
        """Score a position, possibly new to the search, on the searched part of dev.

        The search's own answers count where it has evaluated the position: in another batch they
        may differ by rounding, and one position would have two numbers.
        """
        for number, entry in enumerate(self.record.iterations):
            for i, (row, utility) in enumerate(
                zip(entry["positions"], entry["utilities"], strict=True)
            ):
                if utility is not None and row == list(position):
                    return self.dev_scores((number, i))
        return self._load_or_score("judged", position, "judged", self.searched)

    def score_position_on_test(
        self,
        position: Sequence[float],
        indices: Sequence[int] | None = None,
        name: str = "model",
    ) -> list[Score]:
        """Score a position on the test split, or on some indices of it.

        Indices of a split that was scored as a whole are taken from there, for the reason given in
        `score_position_on_dev`.

        Args:
            name: Name of the model, for messages.
        """
        items = self.task.items("test")
        if indices is None:
            return self._load_or_score("test", position, "test", range(len(items)), name=name)
        whole = self.record.load_answers(
            "test", position, short_digest([dict(item) for item in items])
        )
        if whole is None:
            return self._load_or_score("test", position, "test", indices, name=name)
        return [records_to_scores(whole)[i] for i in indices]

    def _load_or_score(
        self,
        kind: str,
        position: Sequence[float],
        split: str,
        indices: Sequence[int],
        ask: ScoreFn | None = None,
        name: str = "",
    ) -> list[Score]:
        """Return one position's scores, from the record if they are stored there."""
        items = [self.task.items(data_split(split))[index] for index in indices]
        digest = short_digest([dict(item) for item in items])
        rows = self.record.load_answers(kind, position, digest)
        if rows is None:
            self.begin(kind, len(items), name)
            rows = scores_to_records(items, (ask or self.ask)([position], split, indices)[0])
            self.record.save_answers(kind, position, digest, rows)
        return records_to_scores(rows)
