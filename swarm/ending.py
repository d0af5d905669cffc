"""What a search still asks when it is over, for its verdict; whatever was asked is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.evaluation import as_rows, as_scores, data_split
from swarm.files import digest
from swarm.front import Front
from swarm.record import Place, Record
from swarm.tasks import Score, Task, plain

FINALISTS = 10
"""Of the swarm's personal bests, so many are judged by the task's own measure at most."""

Ask = Callable[[Sequence[Sequence[float]], str, Sequence[int]], list[list[Score]]]
"""Scores positions on some places of a split."""


@dataclass
class Ending:
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

    record: Record
    task: Task
    ask: Ask
    ask_again: Ask
    begin: Callable[[str, int], None]
    searched: Sequence[int]
    kept: Sequence[int]
    by_kept: bool = False
    _dev: dict[Place, list[Score]] = field(default_factory=dict)

    @property
    def plain(self) -> Task:
        """The task by its own measure, whatever signal was searched on."""
        return plain(self.task)

    def choose(self) -> tuple[Place, Place]:
        """Best initial expert and best found; with a signal of its own, by the task's measure.

        Among equals the signal decides. Where there are constraints, what meets them (or misses
        them by the least) comes first. With `by_kept`, the best found is the finalist that is best
        on the items that the search did not see. The choice is kept in the record's state.
        """
        own, front = self.record.state["own"], self.front
        bound = front is not None and bool(front.constraints)
        choosing = bound or self.by_kept or self.plain is not self.task
        if choosing and "chosen" not in self.record.state:
            experts = [(0, i) for i in range(own)]
            finalists = self.record.personal_bests(FINALISTS)
            if bound and front is not None:
                finalists += [front.points[n] for n in front.spread(FINALISTS)]
            if self.by_kept:
                before = max(experts, key=self._rank)
                after = self._race([*finalists, *self._best_recipe(finalists)])
            elif front is not None and self.plain is self.task:
                before, after = front.best(own), front.best()
            else:
                found = [*experts, *finalists]
                before, after = (max(places, key=self._rank) for places in (experts, found))
            self.record.state["chosen"] = {"starting": list(before), "ending": list(after)}
            self.record.save()
        return self.record.best(rows=own), self.record.best()

    def _best_recipe(self, finalists: Sequence[Place]) -> list[Place]:
        """The best static position of the first round that is no expert and no finalist."""
        experts = len(self.record.state["experts"])
        count = len(self.record.rounds[0]["positions"])
        recipes = [(0, i) for i in range(experts, count) if self.record.utility((0, i)) is not None]
        best = sorted(recipes, key=lambda place: -(self.record.utility(place) or 0.0))[:1]
        return [place for place in best if place not in finalists]

    def _race(self, finalists: Sequence[Place]) -> Place:
        """The best finalist on the kept items, by successive halving (Jamieson and Talwalkar, 2016,
        arXiv 1502.07943): after each third of the items the better half is left.

        A task with parts needs items of each, so its finalists are asked all items. Among equals
        the one that the search found better.
        """
        live = sorted(finalists, key=self._rank, reverse=True)
        scores: dict[Place, list[Score]] = {place: [] for place in live}
        order = sorted(self.kept, key=lambda place: digest(["kept", place]))
        third = len(order) if hasattr(self.task, "parts") else -(-len(order) // 3)
        for start in range(0, len(order), third):
            for place in live:
                position, items = self.record.position(place), order[start : start + third]
                scores[place] += self._asked("confirm", position, "judged", items)
            live.sort(key=lambda place: -self.plain.utility(scores[place]))
            live = live[: -(-len(live) // 2)]
        return live[0]

    def _rank(self, place: Place) -> tuple[float, float, float]:
        signal = self.record.utility(place)
        below = sum(max(0.0, bound - value) for bound, value in self.constrained(place).values())
        return -below, self.utility(place), float("-inf") if signal is None else signal

    @property
    def front(self) -> Front | None:
        """The front by what was searched on; `None` for a task without parts."""
        return Front.of(self.record.state)

    def constrained(self, place: Place) -> dict[str, tuple[float, float]]:
        """Of each constrained part its bound and its value on the searched part of dev."""
        front = self.front
        if front is None or not front.bounds:
            return {}
        values = self.plain.parts(self.dev(place))  # type: ignore[attr-defined]
        bounds = dict(front.bounds)
        if front.base is not None and self.plain is not self.task:
            # Only `base` bounds there are with another signal: the base by the task's own measure.
            base = self.plain.parts(self.dev(front.base))  # type: ignore[attr-defined]
            bounds = {name: base[name] for name in bounds}
        return {name: (bound, values[name]) for name, bound in bounds.items()}

    def utility(self, place: Place) -> float:
        """On the searched part of dev."""
        return self.plain.utility(self.dev(place))

    def finalists(self, most: int) -> list[Place]:
        """The best personal bests, the best first; at most one a particle."""
        if self.plain is self.task:
            return self.record.personal_bests(most)
        places = self.record.personal_bests(FINALISTS)
        return sorted(places, key=self._rank, reverse=True)[:most]

    def dev(self, place: Place) -> list[Score]:
        """What a particle of a round comes to on the searched part of dev."""
        if place not in self._dev:
            self._dev[place] = self._find_dev(place)
        return self._dev[place]

    def _find_dev(self, place: Place) -> list[Score]:
        if self.plain is self.task:
            return as_scores(self.record.answers(*place))
        scores = as_scores(self.record.answers(*place))
        if all("correct" in score.measures for score in scores):
            return [Score(s.measures["correct"], s.answer, s.text, s.part) for s in scores]
        return self._asked("judged", self.record.position(place), "judged", self.searched)

    def confirm(self, place: Place) -> list[Score]:
        """On the part of dev that the search did not see."""
        return self._asked("confirm", self.record.position(place), "judged", self.kept)

    def again(self, place: Place) -> list[Score]:
        """On the searched part of dev once more, in other batches."""
        position = self.record.position(place)
        return self._asked("again", position, "judged", self.searched, self.ask_again)

    def test(self, place: Place) -> list[Score]:
        """On the test split."""
        return self.position_on_test(self.record.position(place))

    def position_on_dev(self, position: Sequence[float]) -> list[Score]:
        """A position that the search may never have seen, on the searched part of dev."""
        return self._asked("judged", position, "judged", self.searched)

    def position_on_test(
        self, position: Sequence[float], places: Sequence[int] | None = None
    ) -> list[Score]:
        """A position on the test split, or on some places of it."""
        every = range(len(self.task.items("test")))
        return self._asked("test", position, "test", every if places is None else places)

    def _asked(
        self,
        kind: str,
        position: Sequence[float],
        split: str,
        places: Sequence[int],
        ask: Ask | None = None,
    ) -> list[Score]:
        """One position's scores, from the record if they are there."""
        items = [self.task.items(data_split(split))[place] for place in places]
        name = digest([dict(item) for item in items])
        rows = self.record.kept_answers(kind, position, name)
        if rows is None:
            self.begin(kind, len(items))
            rows = as_rows(items, (ask or self.ask)([position], split, places)[0])
            self.record.keep_answers(kind, position, name, rows)
        return as_scores(rows)
