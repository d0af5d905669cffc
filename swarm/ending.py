"""What a search still asks when it is over, for its verdict; whatever was asked is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.evaluation import scores_to_records, records_to_scores, data_split
from swarm.files import short_digest
from swarm.front import ParetoFront
from swarm.record import ParticleIndex, RunRecord
from swarm.tasks import Score, Task, metric_task

FINALIST_COUNT = 10
"""Of the swarm's personal bests, so many are judged by the task's own measure at most."""

ScoreFn = Callable[[Sequence[Sequence[float]], str, Sequence[int]], list[list[Score]]]
"""Scores positions on some places of a split."""


@dataclass
class FinalEvaluation:
    """The answers that a verdict rests on, by the task's own measure.

    Attributes:
        record: A run whose search is over.
        task: Its task.
        ask: Scores as the search did.
        ask_again: Scores in other batches than the search did.
        begin: Told of what is asked next: in a word, and how many items.
        searched, kept: The places of dev that the search saw, and those it did not.
        by_kept: Whether the kept ones choose among the finalists.
    """

    record: RunRecord
    task: Task
    ask: ScoreFn
    ask_again: ScoreFn
    begin: Callable[[str, int], None]
    searched: Sequence[int]
    kept: Sequence[int]
    by_kept: bool = False
    _dev: dict[ParticleIndex, list[Score]] = field(default_factory=dict)

    @property
    def metric_task(self) -> Task:
        """The task by its own measure, whatever signal was searched on."""
        return metric_task(self.task)

    def choose_bests(self) -> tuple[ParticleIndex, ParticleIndex]:
        """Best initial expert and best found; with a signal of its own, by the task's measure.

        Among equals the signal decides. Where there are constraints, what meets them (or misses
        them by the least) comes first. With `by_kept`, the best found is the finalist that is best
        on the items that the search did not see. The choice is kept in the record's state.
        """
        own, front = self.record.state["own"], self.pareto_front
        bound = front is not None and bool(front.constraints)
        choosing = bound or self.by_kept or self.metric_task is not self.task
        if choosing and "chosen" not in self.record.state:
            experts = [(0, i) for i in range(own)]
            finalists = self.record.personal_bests(FINALIST_COUNT)
            if bound and front is not None:
                finalists += [front.front_indices[n] for n in front.evenly_spaced_points(FINALIST_COUNT)]
            if self.by_kept:
                before = max(experts, key=self._rank_key)
                after = self._race_finalists([*finalists, *self._best_static_merge(finalists)])
            elif front is not None and self.metric_task is self.task:
                before, after = front.best_index(own), front.best_index()
            else:
                found = [*experts, *finalists]
                before, after = (max(places, key=self._rank_key) for places in (experts, found))
            self.record.state["chosen"] = {"starting": list(before), "ending": list(after)}
            self.record.save_state()
        return self.record.best_index(rows=own), self.record.best_index()

    def _best_static_merge(self, finalists: Sequence[ParticleIndex]) -> list[ParticleIndex]:
        """The best static position of the first round that is no expert and no finalist."""
        experts = len(self.record.state["experts"])
        count = len(self.record.iterations[0]["positions"])
        recipes = [(0, i) for i in range(experts, count) if self.record.utility_at((0, i)) is not None]
        best = sorted(recipes, key=lambda place: -(self.record.utility_at(place) or 0.0))[:1]
        return [place for place in best if place not in finalists]

    def _race_finalists(self, finalists: Sequence[ParticleIndex]) -> ParticleIndex:
        """The best finalist on the kept items, by successive halving (Jamieson and Talwalkar, 2016,
        arXiv 1502.07943): after each third of the items the better half is left.

        A task with parts needs items of each, so its finalists are asked all items. Among equals
        the one that the search found better.
        """
        live = sorted(finalists, key=self._rank_key, reverse=True)
        scores: dict[ParticleIndex, list[Score]] = {place: [] for place in live}
        order = sorted(self.kept, key=lambda place: short_digest(["kept", place]))
        third = len(order) if hasattr(self.task, "subtask_utilities") else -(-len(order) // 3)
        for start in range(0, len(order), third):
            for place in live:
                position, items = self.record.position_at(place), order[start : start + third]
                scores[place] += self._load_or_score("confirm", position, "judged", items)
            live.sort(key=lambda place: -self.metric_task.utility(scores[place]))
            live = live[: -(-len(live) // 2)]
        return live[0]

    def _rank_key(self, place: ParticleIndex) -> tuple[float, float, float]:
        signal = self.record.utility_at(place)
        below = sum(max(0.0, bound - value) for bound, value in self.constraint_values(place).values())
        return -below, self.search_utility(place), float("-inf") if signal is None else signal

    @property
    def pareto_front(self) -> ParetoFront | None:
        """The front by what was searched on; `None` for a task without parts."""
        return ParetoFront.from_state(self.record.state)

    def constraint_values(self, place: ParticleIndex) -> dict[str, tuple[float, float]]:
        """Of each constrained part its bound and its value on the searched part of dev."""
        front = self.pareto_front
        if front is None or not front.constraint_bounds:
            return {}
        values = self.metric_task.subtask_utilities(self.dev_scores(place))  # type: ignore[attr-defined]
        bounds = dict(front.constraint_bounds)
        if front.base_index is not None and self.metric_task is not self.task:
            # Only `base` bounds there are with another signal: the base by the task's own measure.
            base = self.metric_task.subtask_utilities(self.dev_scores(front.base_index))  # type: ignore[attr-defined]
            bounds = {name: base[name] for name in bounds}
        return {name: (bound, values[name]) for name, bound in bounds.items()}

    def search_utility(self, place: ParticleIndex) -> float:
        """On the searched part of dev."""
        return self.metric_task.utility(self.dev_scores(place))

    def best_finalists(self, most: int) -> list[ParticleIndex]:
        """The best personal bests, the best first; at most one a particle."""
        if self.metric_task is self.task:
            return self.record.personal_bests(most)
        places = self.record.personal_bests(FINALIST_COUNT)
        return sorted(places, key=self._rank_key, reverse=True)[:most]

    def dev_scores(self, place: ParticleIndex) -> list[Score]:
        """What a particle of a round comes to on the searched part of dev."""
        if place not in self._dev:
            self._dev[place] = self._load_dev_scores(place)
        return self._dev[place]

    def _load_dev_scores(self, place: ParticleIndex) -> list[Score]:
        if self.metric_task is self.task:
            return records_to_scores(self.record.load_iteration_answers(*place))
        scores = records_to_scores(self.record.load_iteration_answers(*place))
        if all("correct" in score.measures for score in scores):
            return [Score(s.measures["correct"], s.answer, s.text, s.part) for s in scores]
        return self._load_or_score("judged", self.record.position_at(place), "judged", self.searched)

    def holdout_scores(self, place: ParticleIndex) -> list[Score]:
        """On the part of dev that the search did not see."""
        return self._load_or_score("confirm", self.record.position_at(place), "judged", self.kept)

    def repeat_dev_scores(self, place: ParticleIndex) -> list[Score]:
        """On the searched part of dev once more, in other batches."""
        position = self.record.position_at(place)
        return self._load_or_score("again", position, "judged", self.searched, self.ask_again)

    def test_scores(self, place: ParticleIndex) -> list[Score]:
        """On the test split."""
        return self.score_position_on_test(self.record.position_at(place))

    def score_position_on_dev(self, position: Sequence[float]) -> list[Score]:
        """A position that the search may never have seen, on the searched part of dev."""
        return self._load_or_score("judged", position, "judged", self.searched)

    def score_position_on_test(
        self, position: Sequence[float], places: Sequence[int] | None = None
    ) -> list[Score]:
        """A position on the test split, or on some places of it."""
        every = range(len(self.task.items("test")))
        return self._load_or_score("test", position, "test", every if places is None else places)

    def _load_or_score(
        self,
        kind: str,
        position: Sequence[float],
        split: str,
        places: Sequence[int],
        ask: ScoreFn | None = None,
    ) -> list[Score]:
        """One position's scores, from the record if they are there."""
        items = [self.task.items(data_split(split))[place] for place in places]
        name = short_digest([dict(item) for item in items])
        rows = self.record.load_answers(kind, position, name)
        if rows is None:
            self.begin(kind, len(items))
            rows = scores_to_records(items, (ask or self.ask)([position], split, places)[0])
            self.record.save_answers(kind, position, name, rows)
        return records_to_scores(rows)
