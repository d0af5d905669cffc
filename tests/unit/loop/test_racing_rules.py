"""Racing: its rule against direct computation, and what an optimizer makes of it."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from swarm.errors import UserError
from swarm.loop.racing import Incumbent, Racing, cannot_beat
from swarm.optimizers.random_search import RandomSearch
from swarm.optimizers.swarm import MemeticSwarm
from swarm.tasks.base import Score
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice


class Table:
    """Answers from a matrix [particles, items] and counts what was asked."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.asked, self.calls = values, 0, []  # type: ignore[var-annotated]

    def __call__(
        self, positions: Sequence[Sequence[float]], items: Sequence[int]
    ) -> list[list[Score]]:
        self.calls.append((len(positions), list(items)))
        self.asked += len(positions) * len(items)
        return [[Score(float(self.values[int(p[0]), i]), None) for i in items] for p in positions]


def race(racing: Racing, new: np.ndarray, old: np.ndarray) -> Any:
    marks = [Incumbent(float(row.mean()), tuple(row.tolist())) for row in old]
    table = Table(new)
    rows = {i: [float(i)] for i in range(len(new))}
    return racing.race_particles(table, rows, marks, new.shape[1]), table


def started() -> MemeticSwarm:
    swarm = MemeticSwarm(particles=6, repel=0.3)
    swarm.start(4, 0)
    return swarm


def test_what_cannot_be_raced() -> None:
    parts = Mixture("both", {"a": MultipleChoice("nlgraph"), "b": ExactMatch("gsm8k")})
    Racing().check_raceable(parts, RandomSearch())
    with pytest.raises(UserError, match="not the mean"):
        Racing("exact").check_raceable(parts, started())
    with pytest.raises(UserError, match="no personal bests"):
        Racing("exact").check_raceable(MultipleChoice("nlgraph"), RandomSearch())
    reward = ExactMatch("gsm8k")
    reward.highest = None
    with pytest.raises(UserError, match="maximum"):
        Racing("exact").check_raceable(reward, started())


def test_the_bound_is_the_best_of_all_completions() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        items, highest = int(random.integers(1, 9)), float(random.choice([1.0, 10.0, 0.1]))
        values = (highest * random.integers(0, 2, random.integers(0, items + 1))).tolist()
        left = items - len(values)
        ends = product((0.0, highest), repeat=left)
        best = highest * random.integers(0, items + 1) / items
        means = [sum([*values, *end]) / items for end in ends]
        near = min(abs(mean - best) for mean in means) < 1e-9
        if not near:
            assert cannot_beat(values, items, highest, best) == all(m <= best for m in means)


def test_the_bound_counts_a_tie_as_no_improvement() -> None:
    task = MultipleChoice("t")
    for items in range(1, 200):
        for right in range(items + 1):
            scores = [Score(1.0, "A")] * right + [Score(0.0, "B")] * (items - right)
            best = task.utility(scores)
            assert cannot_beat([0.0] * (items - right), items, 1.0, best)
            assert right == items or not cannot_beat([0.0] * (items - right - 1), items, 1.0, best)


def test_the_live_are_asked_together_the_hardest_items_first() -> None:
    random = np.random.default_rng(2)
    old = (random.random((5, 20)) < np.linspace(0.9, 0.1, 20)).astype(float)
    new = old.copy()
    new[3, old[3] == 0] = 1.0
    found, table = race(Racing("exact", chunk=4), new, old)
    means = old.mean(axis=0)
    order = sorted(range(20), key=lambda i: (means[i], i))
    assert [items for _, items in table.calls] == [order[i : i + 4] for i in range(0, 20, 4)]
    assert [count for count, _ in table.calls] == sorted((c for c, _ in table.calls), reverse=True)
    assert set(found.scores) - set(found.stopped) == {3} and found.stopped == (0, 1, 2, 4)
    assert found.prompts_scored == table.asked and found.prompts_scored + found.saved == 100
    assert [s.value for s in found.scores[3].values()] == new[3].tolist(), "in the file's order"


def test_a_perfect_best_is_not_challenged_and_no_best_is_not_raced() -> None:
    racing, new = Racing("exact", chunk=4), np.zeros((2, 8))
    marks = [Incumbent(1.0, (1.0,) * 8), None]
    found = racing.race_particles(Table(new), {0: [0.0], 1: [1.0]}, marks, 8)
    assert found.stopped == (0,) and found.scores[0] == {} and len(found.scores[1]) == 8
    # Equal positions are counted once.
    marks = [Incumbent(0.5, (0.0, 1.0) * 4), Incumbent(0.0, (0.0,) * 8)]
    new = np.array([[0.0] * 7 + [1.0]])
    found = racing.race_particles(Table(new), {0: [0.0], 1: [0.0]}, marks, 8)
    assert found.stopped == (0,) and (found.prompts_scored, found.saved) == (8, 0)


def test_the_optimizer_counts_a_stopped_particle_as_stale() -> None:
    swarm, other = started(), started()
    first = np.array([0.3, 0.2, 0.4, 0.1, 0.2, 0.3])
    nan = np.nan
    for each in (swarm, other):
        each.ask()
        with pytest.raises(ValueError, match="stopped"):  # in the first iteration, none is
            each.tell(np.full(6, nan), np.ones(6, bool))
        each.tell(first)
        each.ask()
        with pytest.raises(ValueError, match="stopped"):  # with a utility, it is not
            each.tell(np.full(6, 0.5), np.ones(6, bool))
    swarm.tell(np.array([nan, nan, nan, nan, nan, 0.5]), np.arange(6) < 5)
    other.tell(np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.5]))
    assert swarm.stale.tolist() == other.stale.tolist() == [1, 1, 1, 1, 1, 0]
    assert (swarm.best_utility, swarm.worst_utility, other.worst_utility) == (0.5, 0.1, 0.0)
    for each in (swarm, other):
        each.ask()
    swarm.tell(np.full(6, nan), np.ones(6, bool))
    other.tell(np.full(6, 0.05))
    assert (swarm.swarm_stale, swarm.swarm_counted) == (other.swarm_stale, other.swarm_counted)
