"""The particle swarm against the textbook on explicit vectors, and each of its options."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from swarm.errors import UserError
from swarm.optimizers import random_streams
from swarm.optimizers.swarm import MemeticSwarm

CONF = Path(__file__).parents[3] / "conf"
CODE: dict[str, Any] = OmegaConf.to_container(
    OmegaConf.load(CONF / "experiment" / "reference_code.yaml").optimizer
)
PAPER: dict[str, Any] = OmegaConf.to_container(
    OmegaConf.load(CONF / "experiment" / "paper.yaml").optimizer
)


class Textbook:
    """Model Swarms on G x D weights, one particle at a time, with full histories.

    An expert is [G, D]: each group of weights has random factors of its own.
    """

    def __init__(self, vectors: np.ndarray, seed: int, options: dict[str, Any]) -> None:
        self.seed, self.o, self.iteration = seed, options, 0
        self.x = [row.copy() for row in vectors]
        for i in range(len(vectors), options["particles"]):
            draw = random_streams.counter_rng(seed, 0, i, random_streams.CROSSOVER)
            pool = i if options["reference_code"] else len(vectors)
            a = int(draw.integers(pool))
            b = int(draw.integers(pool - 1))
            b = b + 1 if b >= a else b
            t = draw.random((vectors.shape[1], 1)) * options["crossover_maximum"]
            self.x.append(t * self.x[a] + (1 - t) * self.x[b])
        self.v = [self._partner(i) - row for i, row in enumerate(self.x)]
        self.p = list(self.x)
        self.step = options["step_length"]
        self.restarts = [-100] * len(self.x)

    def _partner(self, i: int) -> np.ndarray:
        j = int(
            random_streams.counter_rng(self.seed, 0, i, random_streams.PARTNER).integers(
                len(self.x) - 1
            )
        )
        return self.x[j + 1 if j >= i else j]

    def first(self, u: list[float]) -> None:
        self.history = [[each] for each in u]
        self.g_history = [max(u)]
        self.g, self.w, self.w_utility = self.x[u.index(max(u))], self.x[u.index(min(u))], min(u)

    def move(self) -> None:
        self.iteration += 1
        for i, history in enumerate(self.history):
            since = len(history) - history.index(max(history))  # counts the best itself
            if self.o["restart_cool_down"] == 0:
                stray = since >= self.o["restart_patience"] * self.o["patience"]
            else:
                waited = self.iteration - self.restarts[i]
                stray = since - 1 >= self.o["restart_patience"]
                stray = stray and waited >= self.o["restart_cool_down"]
            if stray:
                self.restarts[i], self.x[i], self.v[i] = self.iteration, self.p[i], 0 * self.x[i]
            draw = random_streams.counter_rng(self.seed, self.iteration, i, random_streams.WEIGHTS)
            r = 1 - draw.random((4, len(self.x[i]), 1))
            w = [r[0] * self.o["inertia"], r[1] * self.o["cognitive"]]
            w += [r[2] * self.o["social"], r[3] * self.o["repel"]]
            new = w[0] * self.v[i] + w[1] * (self.p[i] - self.x[i])
            new = new + w[2] * (self.g - self.x[i]) - w[3] * (self.w - self.x[i])
            self.v[i] = new / sum(w)
            self.x[i] = self.x[i] + self.step * self.v[i]

    def told(self, u: list[float]) -> None:
        best = max(self.g_history)
        for i, value in enumerate(u):
            if np.isnan(value):
                u[i] = self.history[i][-1]
            elif value > max(self.history[i]):
                self.p[i] = self.x[i]
            self.history[i].append(u[i])
        if max(u) > best:
            self.g = self.x[u.index(max(u))]
        self.g_history.append(max(best, max(u)))
        if min(u) < self.w_utility:
            self.w_utility = min(u)
            tied = [i for i, value in enumerate(u) if value == self.w_utility]
            self.w = self.x[tied[-1 if self.o["reference_code"] else 0]]
        self.step = max(self.step * self.o["step_length_factor"], self.o["minimum_step_length"])

    def stops(self) -> bool:
        last = self.g_history[-self.o["patience"] :]
        return len(self.g_history) > self.o["patience"] and len(set(last)) == 1


@pytest.mark.parametrize(("seed", "groups"), [(0, 1), (1, 1), (2, 1), (3, 3), (4, 3)])
@pytest.mark.parametrize(
    "options",
    [PAPER | {"particles": 12}, CODE | {"particles": 12, "drop_particle": 0.3}],
    ids=["paper", "code"],
)
def test_thirty_iterations_are_the_textbook_on_vectors(
    options: dict[str, Any], seed: int, groups: int
) -> None:
    random = np.random.default_rng(seed)
    vectors, target = random.normal(size=(5, groups, 37)), random.normal(size=(groups, 37))

    def merged(rows: np.ndarray) -> np.ndarray:
        return np.einsum("...gk,kgd->...gd", rows.reshape(*rows.shape[:-1], groups, 5), vectors)

    def utilities(rows: list[np.ndarray]) -> list[float]:  # rounded, so that there are ties
        return [-round(float(np.linalg.norm(row - target)), 1) for row in rows]

    book, swarm = Textbook(vectors, seed, options), MemeticSwarm(**options)
    swarm.start(5, seed, groups)
    np.testing.assert_allclose(merged(swarm.ask()), book.x, atol=1e-10)
    u = utilities(book.x)
    book.first(u)
    swarm.tell(np.array(u))
    restarts = 0
    for iteration in range(1, 31):
        before, length, c = swarm.positions, swarm.current_step_length, swarm.ask()
        moved = swarm.origins(before) + length * swarm.velocities
        np.testing.assert_allclose(c, moved, atol=1e-12)
        book.move()
        np.testing.assert_allclose(merged(c), book.x, atol=1e-10)
        np.testing.assert_allclose(merged(swarm.velocities), book.v, atol=1e-10)
        np.testing.assert_array_equal(swarm.restarted, np.array(book.restarts) == iteration)
        np.testing.assert_allclose(c.reshape(-1, 5).sum(axis=1), 1, atol=1e-12)
        np.testing.assert_allclose(swarm.velocities.reshape(-1, 5).sum(axis=1), 0, atol=1e-12)
        u = np.where(swarm.evaluate, utilities(book.x), np.nan)
        swarm.tell(u)
        book.told(u.tolist())
        np.testing.assert_allclose(merged(swarm.personal_positions), book.p, atol=1e-10)
        np.testing.assert_allclose(merged(swarm.best_position), book.g, atol=1e-10)
        np.testing.assert_allclose(merged(swarm.worst_position), book.w, atol=1e-10)
        assert swarm.best_utility == book.g_history[-1]
        assert swarm.current_step_length == pytest.approx(book.step, abs=1e-15)
        if options["reference_code"]:
            assert (swarm.stop_reason() is not None) == book.stops()
        restarts += swarm.restarted.sum()
    assert restarts


def begun(experts: int = 4, seed: int = 0, **options: Any) -> MemeticSwarm:
    swarm = MemeticSwarm(**{"particles": 6, **options})
    swarm.start(experts, seed)
    return swarm


def play(swarm: MemeticSwarm, utilities: Callable[[MemeticSwarm], Any], iterations: int) -> None:
    for _ in range(iterations):
        swarm.ask()
        told = np.broadcast_to(utilities(swarm), swarm.evaluate.shape)
        swarm.tell(np.where(swarm.evaluate, told, np.nan))


def bowl(swarm: MemeticSwarm) -> np.ndarray:
    target = np.arange(1.0, swarm.positions.shape[1] + 1)
    return -((swarm.positions - target / target.sum()) ** 2).sum(axis=1)


def test_starting_velocities() -> None:
    random = begun(seed=3)
    differences = random.positions[None] - random.positions[:, None]
    for i, velocity in enumerate(random.velocities):
        partners = np.flatnonzero((differences[i] == velocity).all(axis=1))
        assert len(partners) and i not in partners
    assert not begun(starting_velocity="zero").velocities.any()
    best = begun(starting_velocity="best")
    play(best, bowl, 1)
    np.testing.assert_array_equal(best.velocities, best.best_position - best.positions)
    assert not best.velocities[bowl(best).argmax()].any()


def test_crossover_children() -> None:
    """They lie between two experts; in the original code beyond, and have children."""
    rows = random_streams.initial_population(10, 500, seed=1)
    np.testing.assert_array_equal(rows[:10], np.eye(10))
    children = rows[10:]
    assert ((children != 0).sum(axis=1) == 2).all()
    assert children.min() >= 0 and children.max() <= 1
    assert (children != 0).any(axis=0).all()
    beyond = random_streams.initial_population(10, 500, seed=1, maximum=2.0)[10:]
    assert ((beyond != 0).sum(axis=1) == 2).all()
    assert 1.9 < beyond.max() <= 2 and -1 <= beyond.min() < -0.9
    assert 0.4 < (beyond.min(axis=1) < 0).mean() < 0.6  # half of them extrapolate
    family = random_streams.initial_population(10, 500, seed=1, children_are_parents=True)[10:]
    assert ((family != 0).sum(axis=1) > 2).any()


@pytest.mark.parametrize(
    ("options", "restarts"),
    [
        ({}, [6, 11, 16]),  # after 5 stale iterations, then every 5
        ({"restart_cool_down": 3}, [6, 9, 12, 15]),
        ({"restart_cool_down": 0}, list(range(6, 17))),
        ({"restart": False}, []),
    ],
)
def test_a_stray_particle_restarts_and_then_rests(
    options: dict[str, Any], restarts: list[int]
) -> None:
    swarm, seen = begun(patience=40, max_iterations=40, **options), []
    for iteration in range(17):
        play(swarm, lambda _: 0.0, 1)
        assert swarm.restarted.all() or not swarm.restarted.any()
        seen += [iteration] * bool(swarm.restarted.any())
    assert seen == restarts


@pytest.mark.parametrize(("code", "after"), [(False, 10), (True, 9)])
def test_patience(code: bool, after: int) -> None:
    def end(improvements: set[int]) -> int:
        swarm, value = begun(reference_code=code), 0.0
        while swarm.stop_reason() is None:
            number = swarm.iteration + (swarm.iteration > 0 or swarm.has_utilities)
            value += number in improvements
            play(swarm, lambda _, value=value: value, 1)
        return swarm.iteration

    assert end(set()) == 10
    for last in (1, 4, 9):
        assert end({last}) == end(set(range(1, last + 1))) == last + after


def test_the_step_shrinks_once_an_iteration_to_its_floor() -> None:
    for first, iterations in ((1.0, 45), (0.5, 32)):
        swarm, steps = begun(step_length=first), []
        for _ in range(61):
            play(swarm, bowl, 1)
            steps.append(swarm.current_step_length)
        assert steps[:3] == pytest.approx([first, first * 0.95, first * 0.95**2])
        assert steps.index(0.1) == iterations


def test_dropped_particles_move_unevaluated() -> None:
    swarm, kept = begun(drop_particle=0.5, particles=20), []
    for _ in range(50):
        before = swarm.positions
        play(swarm, bowl, 1)
        kept.append(swarm.evaluate.mean())
        assert not swarm.iteration or (swarm.positions != before).any(axis=1).all()
    assert kept[0] == 1 and 0.4 < np.mean(kept[1:]) < 0.6 and len(set(kept)) > 3


@pytest.mark.parametrize("code", [False, True])
def test_skipped_iterations_cost_patience_in_the_original_only(code: bool) -> None:
    swarm = begun(drop_iteration=0.5, max_iterations=200, reference_code=code)
    evaluated = -1
    while swarm.stop_reason() is None:
        play(swarm, lambda _: 1.0, 1)
        evaluated += bool(swarm.evaluate.any())
        assert swarm.evaluate.any() == swarm.evaluate.all()
    assert (swarm.iteration == 10) == code and (evaluated == 10) != code
    nothing = begun(drop_iteration=1.0)
    play(nothing, lambda _: 1.0, 51)
    assert nothing.stop_reason() == "50 iterations done" and not nothing.stale.any()


def test_a_first_utility_may_be_missing() -> None:
    swarm = begun()
    play(swarm, lambda s: np.where(np.arange(6) < 2, np.nan, bowl(s)), 1)
    assert swarm.state_dict()["personal_utilities"][:2] == [None, None]
    play(swarm, lambda _: -100.0, 1)
    assert (swarm.personal_utilities[:2] == -100).all()
    np.testing.assert_array_equal(swarm.personal_positions[:2], swarm.positions[:2])
    assert (swarm.personal_utilities[2:] > -100).all() and swarm.worst_utility == -100


def test_draws_depend_on_nothing_but_their_four_numbers() -> None:
    numbers = [*np.ndindex(3, 4, 5, 5)]
    draws = [random_streams.counter_rng(*each).random() for each in numbers]
    assert len(set(draws)) == len(numbers)  # a repeated number would be one fewer in the set
    random_streams.counter_rng(0, 0, 0, 0).random(1000)
    assert [random_streams.counter_rng(*each).random() for each in numbers] == draws
    assert random_streams.counter_rng(-1, 2, 3, 4).random() not in draws


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"minimum_step_length": 0.7}, "must be at most optimizer.step_length=0.5"),
        ({"starting_velocity": "fast"}, "must be random, zero or best"),
        (dict.fromkeys(("inertia", "cognitive", "social", "repel"), 0), "must not all be 0"),
        *(
            ({"starts": wrong}, r"starts.*: must be a list")
            for wrong in ([0.5], [[]], [[float("nan")]])
        ),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=rf"^optimizer\..*{says}"):
        MemeticSwarm(**options, **({"descent": None} if "social" in options else {}))


def test_what_does_not_fit_together() -> None:
    with pytest.raises(UserError, match=r"particles=5 is fewer than the pool's 10 experts; .* 10 "):
        MemeticSwarm(particles=5).start(10, 0)
    with pytest.raises(UserError, match="must be 6"):
        MemeticSwarm(particles=7).load_state_dict(begun().state_dict())
    every = MemeticSwarm(particles=None, soups=0)
    every.start(7, 0)
    np.testing.assert_array_equal(every.ask(), np.eye(7))


def test_a_search_starts_from_given_positions() -> None:
    given = [[0.7, -0.2, 0.4], [0.1, 0.1, 0.1]]
    swarm = MemeticSwarm(starts=given)
    swarm.start(3, 0, groups=2)
    rows = swarm.ask()
    np.testing.assert_array_equal(rows[4:], np.tile(given, 2))
    np.testing.assert_array_equal(rows[:3], np.tile(np.eye(3), 2))
    more = MemeticSwarm(starts=given, particles=8)
    more.start(3, 0, groups=2)
    np.testing.assert_array_equal(more.ask()[:6], rows)
    with pytest.raises(UserError, match="a position has 3 coefficients, and the pool has 4"):
        MemeticSwarm(starts=given).start(4, 0)
    with pytest.raises(UserError, match=r"particles=5: must be at least 6, .* and 2 starts"):
        MemeticSwarm(starts=given, particles=5).start(3, 0)


def test_the_files_name_every_option() -> None:
    names = {field.name for field in fields(MemeticSwarm)}
    plain = OmegaConf.to_container(OmegaConf.load(CONF / "optimizer" / "pso.yaml"))
    assert plain.pop("_target_") == "swarm.optimizers.swarm.MemeticSwarm"
    defaults = MemeticSwarm()
    plain["descent"] = instantiate(plain["descent"])
    assert plain == {name: getattr(defaults, name) for name in names}
    assert names == set(PAPER) == set(CODE)
    document = (CONF.parent / "docs" / "pso.md").read_text()
    assert not [name for name in names if f"`{name}`" not in document]
