"""The gradient term: what a particle learns from, its rate, groups and routes, on bowls."""

import json
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swarm.optimizers.base import LossRequest, SearchResources
from swarm.optimizers.gradient import Descent
from swarm.optimizers.swarm import GradientDescent, MemeticSwarm


def finish(course: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
    """Answer what a generator yields to its end; return its value."""
    try:
        wanted = next(course)
        while True:
            wanted = course.send(answer(wanted))
    except StopIteration as end:
        return end.value


def slopes(wanted: Sequence[LossRequest], slope: Callable[[np.ndarray], np.ndarray]) -> list[Any]:
    return [SimpleNamespace(loss=0.0, slope=slope(one.position)) for one in wanted]


def answers(wanted: Sequence[LossRequest]) -> list[Any]:
    """Of a bowl around (1, 0, 0, 0)."""
    found = []
    for one in wanted:
        apart = one.position - np.eye(4)[0]
        found.append(SimpleNamespace(loss=float(apart @ apart), slope=2 * apart))
    return found


def test_a_particle_never_learns_from_what_it_holds_out() -> None:
    descent = Descent(steps=12, batch=5, holdout=0.25)
    descent.start(3, 1, 4, seed=0)
    course = descent.descend(np.full((3, 4), 0.25), [0, 1, 2], 20)
    learnt: list[set[int]] = [set(), set(), set()]
    wanted = next(course)
    while wanted[0].slope:
        for mine, one in zip(learnt, wanted, strict=True):
            mine.update(one.items)
        wanted = course.send(answers(wanted))
    held = [set(one.items) for one in wanted[:3]]
    assert [len(one) for one in held] == [5, 5, 5] and len(set.union(*held)) == 15
    for mine, kept in zip(learnt, held, strict=True):
        assert mine | kept == set(range(20)) and not mine & kept
    assert not wanted[0].slope and len(wanted) == 3
    assert descent.items_without_gradient(20) == (), "each item is learnt by some particle"
    descent.count[:] = [0, 7, 0]
    assert set(descent.items_without_gradient(20)) == held[1]


def test_where_the_held_out_loss_rises_a_particle_halves_its_rate_and_then_rests() -> None:
    descent = Descent(steps=2, batch=5, holdout=0.5)
    descent.start(1, 1, 4, seed=0)
    x = np.full((1, 4), 0.25)
    losses, factors = [0.5, 0.6, 0.4, 0.4, 0.4, 0.4], [1.0, 0.5, 0.5, 0.25, 0.125, 0.0625]
    for loss, factor in zip(losses, factors, strict=True):

        def answer(wanted: Sequence[LossRequest], loss: float = loss) -> list[Any]:
            said = answers(wanted)
            if not wanted[0].slope:
                said[0].loss = loss
            return said

        moved = finish(descent.descend(x, [0], 10), answer)
        assert not np.array_equal(moved, x)
        x = moved
        assert descent.rate_factor[0] == factor
    np.testing.assert_array_equal(finish(descent.descend(x, [0], 10), answers), x)


def test_a_descent_learns_groups_apart() -> None:
    """Two groups whose optima differ, from a start between them."""
    optimum = np.array([1.0, 0.0, 0.0, 1.0])
    descent = Descent(steps=60, batch=4, holdout=0.0, fine_rate=1.0, rate=0.05)
    descent.start(1, 2, 2, seed=0)
    course = descent.descend(np.full((1, 4), 0.5), [0], 8)
    found = finish(course, lambda wanted: slopes(wanted, lambda x: 2 * (x - optimum)))[0]
    np.testing.assert_allclose(found, optimum, atol=0.1)


@pytest.mark.parametrize(("items", "alike"), [(59, True), (60, False)])
def test_routes_that_begin_alike_learn_as_one_from_few_items(items: int, alike: bool) -> None:
    """Three routes, of which the first two have one start and different optima."""
    optimum = np.array([1.0, 0.0, 0.0, 1.0, 0.25, 0.75])
    descent = Descent(steps=80, batch=4, holdout=0.0, rate=0.05, warmup=0, route_pull=0.0)
    descent.start(1, 3, 2, seed=0, routes=3)
    course = descent.descend(np.array([[0.8, 0.2, 0.8, 0.2, 0.0, 1.0]]), [0], items)
    found = finish(course, lambda wanted: slopes(wanted, lambda x: 2 * (x - optimum)))[0]
    first, second, third = found.reshape(3, 2)
    assert np.array_equal(first, second) == alike
    np.testing.assert_allclose(first, [0.5, 0.5] if alike else [1.0, 0.0], atol=0.1)
    np.testing.assert_allclose(third, [0.25, 0.75], atol=0.1)


@pytest.mark.parametrize(
    ("routes", "starts", "items", "distance"),
    [(2, 2, 39, 9.0), (2, 2, 40, 60.5), (10, 2, 30, 9.0), (10, 2, 50, 60.5), (10, 1, 9, 60.5)],
)
def test_different_routes_with_few_items_stay_near_their_start(
    routes: int, starts: int, items: int, distance: float
) -> None:
    """A slope that never ends: each step is the rate, and with few items .1 of the way back.

    After many steps the way back of 10 rates is a step; after it, 9 are left. Without it 80 steps
    end, by the mean of the last half, 60.5 rates away. The rate is by the number of starts.
    """
    descent = Descent(steps=80, batch=4, holdout=0.0, rate=0.1, warmup=0)
    descent.start(1, routes, 2, seed=0, routes=routes)
    start = np.tile(np.eye(2)[:starts], (routes // starts, 1)).reshape(1, -1)
    course = descent.descend(start, [0], items)
    moved = start - finish(course, lambda wanted: slopes(wanted, np.ones_like))
    np.testing.assert_allclose(moved, distance * 0.1 / np.sqrt(starts), rtol=0.02)


def test_a_descent_that_does_not_raise_the_utility_ends() -> None:
    """The loss of reference texts has its optimum elsewhere: the mutants' rates halve to rest."""
    swarm = MemeticSwarm(particles=20, patience=100)
    swarm.set_resources(SearchResources(gradients=True, positions=1000, black_box=True))
    swarm.start(10, 0)
    spent = []

    def away(wanted: Sequence[LossRequest]) -> list[Any]:
        spent[-1] += len(wanted)
        return slopes(wanted, lambda x: 2 * (x - 3.0))

    for _ in range(40):
        spent.append(0)
        finish(swarm.descend(80), away)
        swarm.tell(np.where(swarm.evaluate, -((swarm.ask() - 0.1) ** 2).sum(axis=1), np.nan))
        assert swarm.mutated.sum() <= 4 and swarm.moving.all()
    assert spent[0] == 0 and spent[1] > 0 and spent[-1] == 0
    rates = swarm.descent.rate_factor
    assert (rates[swarm.personal_utilities > -np.inf] <= 1 / 16).all()


def test_a_huge_expert_counts_less_in_soups_and_steps() -> None:
    def moved(norms: list[float] | None) -> tuple[np.ndarray, np.ndarray]:
        """The soup, and the lengths of the first step, of two groups of four experts."""
        swarm = GradientDescent(descent=Descent(steps=1, rate=0.6, holdout=0))
        known = None if norms is None else lambda: norms
        swarm.set_resources(SearchResources(True, norms=known))
        swarm.start(4, seed=0, groups=2)
        slope = np.array([1.0, -2.0, 3.0, 4.0] * 2)
        course = swarm.descent.descend(np.zeros((1, 8)), [0], 20)
        reached = finish(course, lambda wanted: slopes(wanted, lambda x: slope))
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


def test_dropout_leaves_other_coefficients_out_in_each_step() -> None:
    def positions(dropout: float) -> np.ndarray:
        descent, found = Descent(dropout=dropout, steps=4, rate=1e-9, holdout=0), []
        descent.start(1, 40, 5, seed=0)

        def answer(wanted: Sequence[LossRequest]) -> list[Any]:
            found.append(wanted[0].position)
            return slopes(wanted, np.ones_like)

        finish(descent.descend(np.ones((1, 200)), [0], 20), answer)
        return np.array(found)

    assert positions(0.0) == pytest.approx(np.ones((4, 200)))
    found = positions(0.2)
    left_out = found == 0
    assert (found == positions(0.2)).all() and found[~left_out] == pytest.approx(1.25)
    assert ((left_out.mean(axis=1) > 0.1) & (left_out.mean(axis=1) < 0.3)).all()
    assert len(np.unique(left_out, axis=0)) == 4
