"""The gradient term: what a particle learns from, its rate, groups and routes, on bowls."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from swarm.optimizers.base import SearchResources
from swarm.optimizers.gradient import Descent
from swarm.optimizers.swarm import GradientDescent, MemeticSwarm


@dataclass(frozen=True)
class Loss:
    loss: float
    slope: np.ndarray


@dataclass
class Course:
    """A learner with this slope; it keeps which items it was asked for, and its adapter's steps."""

    slope: Callable[[np.ndarray], np.ndarray]
    loss: Callable[[np.ndarray], float] = lambda x: float(x @ x)
    learnt: set[int] = field(default_factory=set)
    held: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def measure(self, position: np.ndarray, items: Sequence[int], slope: bool = True) -> Loss:
        if slope:
            self.learnt |= set(items)
        else:
            self.held.append(tuple(items))
        return Loss(self.loss(position), self.slope(position))

    def step(self, factor: float) -> None:
        self.steps.append(factor)


def bowl(optimum: Sequence[float]) -> Course:
    return Course(lambda x: 2 * (x - optimum), lambda x: float(((x - optimum) ** 2).sum()))


def test_a_particle_never_learns_from_what_it_holds_out() -> None:
    descent, held = Descent(steps=12, batch=5, holdout=0.25), list[set[int]]()
    descent.start(3, 1, 4, seed=0)
    for particle in range(3):
        course, mine = bowl(np.eye(4)[0]), descent.extract(particle)
        mine.run(np.full(4, 0.25), particle, [0] * 20, 12, course)
        before, after = course.held
        assert before == after and len(before) == 5
        assert course.learnt | set(before) == set(range(20)) and not course.learnt & set(before)
        held.append(set(before))
        assert descent.count[particle] == 0
        descent.absorb(particle, mine)
        assert descent.count[particle] == 12
    assert len(set.union(*held)) == 15
    assert descent.items_without_gradient(20) == (), "each item is learnt by some particle"
    descent.count[:] = [0, 7, 0]
    assert set(descent.items_without_gradient(20)) == held[1]


def test_items_that_teach_nothing_are_left_out() -> None:
    descent, course = Descent(steps=8, batch=4, holdout=0.0), bowl(np.eye(4)[0])
    descent.start(1, 1, 4, seed=0)
    descent.run(np.zeros(4), 0, [0, None] * 10, 8, course)
    assert course.learnt == set(range(0, 20, 2))
    start = np.full(4, 0.3)
    assert (descent.run(start, 0, [None] * 20, 8, course) == start).all()
    assert len(course.steps) == 8, "nothing moves where nothing teaches"


def test_where_the_held_out_loss_does_not_fall_a_particle_halves_its_rate_and_then_rests() -> None:
    descent = Descent(steps=30, batch=5, holdout=0.5, rate=0.01)
    descent.start(1, 1, 4, seed=0)
    uphill = Course(lambda x: -2 * x)
    downhill = Course(lambda x: 2 * x)
    for course, factor in ((downhill, 1.0), (uphill, 0.5), (downhill, 0.5), (uphill, 0.25)):
        descent.run(np.full(4, 0.5), 0, [0] * 10, 30, course)
        assert descent.rate_factor[0] == factor and not descent.rests(0)
    for _ in range(2):
        descent.run(np.full(4, 0.5), 0, [0] * 10, 30, uphill)
    assert descent.rests(0)


def test_a_learned_adapter_follows_the_rate() -> None:
    descent, course = Descent(steps=4, warmup=3, holdout=0.0), bowl(np.eye(4)[0])
    descent.start(1, 1, 4, seed=0)
    descent.rate_factor[0] = 0.5
    descent.run(np.zeros(4), 0, [0] * 20, 4, course)
    assert course.steps == [0.125, 0.25, 0.375, 0.5]


def test_a_descent_learns_groups_apart() -> None:
    """Two groups whose optima differ, from a start between them."""
    optimum = np.array([1.0, 0.0, 0.0, 1.0])
    descent = Descent(steps=60, batch=4, holdout=0.0, fine_rate=1.0, rate=0.05)
    descent.start(1, 2, 2, seed=0)
    found = descent.run(np.full(4, 0.5), 0, [0] * 8, 60, bowl(optimum))
    np.testing.assert_allclose(found, optimum, atol=0.1)


def test_a_route_whose_held_out_loss_rises_keeps_its_coefficients() -> None:
    """Three routes, each with its optimum; of the second the held-out items say otherwise."""
    optimum = np.array([1.0, 0.0, 0.0, 1.0, 0.25, 0.75])
    descent = Descent(steps=80, batch=4, rate=0.05, warmup=0)
    descent.start(1, 3, 2, seed=0, routes=3)
    routes = [0, 1, 2] * 20
    course = bowl(optimum)
    measure = course.measure

    def measured(position: np.ndarray, items: Sequence[int], slope: bool = True) -> Loss:
        found = measure(position, items, slope)
        second = not slope and all(routes[item] == 1 for item in items)
        return Loss(-found.loss, found.slope) if second else found

    course.measure = measured  # type: ignore[method-assign]
    start = np.array([0.8, 0.2, 0.5, 0.5, 0.0, 1.0])
    found = descent.run(start, 0, routes, 80, course)
    np.testing.assert_allclose(found, [1.0, 0.0, 0.5, 0.5, 0.25, 0.75], atol=0.1)
    assert (found[2:4] == start[2:4]).all() and descent.rate_factor[0] == 1.0


def test_a_route_that_nothing_teaches_stays_where_it_is() -> None:
    """Two groups a route, whose mean and deviations would be rounded; with held-out items too."""
    for holdout in (0.0, 0.25):
        descent, course = Descent(steps=8, batch=4, holdout=holdout), bowl(np.full(8, 0.5))
        descent.start(1, 4, 2, seed=0, routes=2)
        start = np.array([0.1, 0.7, 0.3, 0.2, 0.9, 0.3, 0.35, 0.15])
        found = descent.run(start, 0, [0, None] * 10, 8, course)
        assert (found[4:] == start[4:]).all() and (found[:4] != start[:4]).any()


def test_a_huge_expert_counts_less_in_soups_and_steps() -> None:
    def moved(norms: list[float] | None) -> tuple[np.ndarray, np.ndarray]:
        """The soup, and the lengths of the first step, of two groups of four experts."""
        swarm = GradientDescent(descent=Descent(steps=1, rate=0.6, holdout=0))
        known = None if norms is None else lambda: norms
        swarm.set_resources(SearchResources(True, norms=known))
        swarm.start(4, seed=0, groups=2)
        slope = np.array([1.0, -2.0, 3.0, 4.0] * 2)
        reached = swarm.descent.run(np.zeros(8), 0, [0] * 20, 1, Course(lambda x: slope))
        return swarm.positions[4].reshape(2, 4), np.abs(reached.reshape(2, 4))

    soup, steps = moved(None)
    assert (soup == 0.375).all() and (steps > 0).all()
    # Up to four times the median nothing changes, to the bit; two updates have no usual norm.
    for usual in ([13.0, 20.0, 60.0, 25.0], [13.0, 0.0, 0.0, 0.0], [0.3, 0.0, 0.0, 12.0]):
        found = moved(usual)
        assert (found[0] == soup).all() and (found[1] == steps).all()
    found = moved([10.0, 400.0, 10.0, 80.0])  # the median is 45
    assert found[1] == pytest.approx(steps * [1, 0.2025, 1, 1])
    assert found[0] == pytest.approx(1.5 / 3.2025 * np.array([[1, 0.2025, 1, 1]] * 2))


def test_the_swarm_hardly_moves_along_a_huge_expert() -> None:
    def moves(norms: list[float]) -> np.ndarray:
        swarm = MemeticSwarm(weight_randomness=False)
        swarm.set_resources(SearchResources(norms=lambda: norms))
        swarm.start(4, seed=0, groups=2)
        first = swarm.ask()
        state = json.loads(json.dumps(swarm.state_dict()))
        resumed = MemeticSwarm(weight_randomness=False)
        resumed.load_state_dict(state)
        for one in (swarm, resumed):
            one.tell(np.array([0.2, 0.0, 0.3, 0.1, 0.25]))
        last = swarm.ask()
        assert (resumed.ask() == last).all()
        return np.abs(last - first)[:4].reshape(8, 4)

    plain, found = moves([1.0, 1.0, 1.0, 1.0]), moves([1.0, 40.0, 1.0, 1.0])
    assert found[:, 1].max() < 0.05 * plain[:, 1].max()
    assert found[:, [0, 2, 3]] == pytest.approx(plain[:, [0, 2, 3]], rel=0.5)
