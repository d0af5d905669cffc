"""What every optimizer of conf/optimizer has to keep; what one promises itself is in CLAIMS."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from swarm.errors import UserError
from swarm.optimizers.base import GRADIENT_COST, LossRequest, SearchResources
from swarm.runs.pareto_front import compute_hypervolume, find_non_dominated

VARIANTS = sorted((Path(__file__).parent / "variants").glob("*.yaml"))
"""Optimizers with other options than those of their file in conf/optimizer."""

FILES = sorted((Path(__file__).parents[3] / "conf" / "optimizer").glob("*.yaml")) + VARIANTS
EXPERTS, BUDGET, SEEDS = 10, 1020, 10
GROUPS = 3


@dataclass(frozen=True)
class Claims:
    """What an optimizer promises beyond the protocol."""

    near: float = 0.2
    """Of the best expert's squared distance to the optimum, what is left at most (median)."""
    budget: int = BUDGET
    """Of evaluations, the experts' among them, for that."""
    beats_random: bool = True
    """Nearer on most seeds than as many uniform draws from the simplex."""
    sums: bool = True
    """The coefficients of a group sum to 1."""
    apart: float = 1.6
    """Of the squared distance of the best position whose groups are all alike to an optimum whose
    three groups differ, what is left at most (median); below 1 no search of one group comes."""
    raced: bool = False
    """It needs no utility of what did not beat its own best (`Raceable`)."""
    slow: bool = False
    """It takes long to think; the other tests set `quick`."""
    seeds: int = SEEDS
    """Bowls on which its claims are tried."""
    quick: tuple[tuple[str, Any], ...] = ()
    wide: tuple[tuple[str, Any], ...] = ()
    """Options that it needs for more than one group."""
    alike: int = 1
    """First asks in which all groups may be alike."""
    resources: SearchResources | None = None
    """What the task offers."""
    searches: bool = True
    """Another seed looks elsewhere, and each group for its own; else neither."""


MUTATED = SearchResources(gradients=True, positions=1000)
"""A black box whose items have reference texts."""

BAYES = Claims(near=0.05, budget=60, slow=True, seeds=1, quick=(("sampler", "tpe"),),
               wide=(("max_dimensions", 30),))  # fmt: skip

CLAIMS: dict[str, Claims] = {
    "bayes": BAYES,
    "bayes_free": replace(BAYES, sums=False, alike=3),
    # Its gradients are not counted here, and their loss is the utility.
    "pso_mutated": Claims(sums=False, raced=True, resources=MUTATED, budget=120),
    "cmaes": Claims(near=1e-6, apart=0.05),
    "cmaes_free": Claims(alike=2, near=1e-6, sums=False, apart=0.1),
    "cmaes_separable": Claims(alike=2, near=1e-6, sums=False, apart=0.05),
    "genome": Claims(near=0.06),
    # Its gradients are not counted here: 21 evaluations at most.
    "gradient": Claims(near=0.01, sums=False, apart=0.1, budget=30, raced=True),
    "lorahub": Claims(near=0.001, sums=False, apart=0.1),
    "nes": Claims(alike=2, near=1e-6, sums=False, apart=0.05),
    "nsga2": Claims(near=0.005, apart=0.3),
    "nsga2_free": Claims(near=0.02, apart=0.5, sums=False),
    "pso": Claims(near=0.1, sums=False, raced=True),
    "random": Claims(near=0.15, beats_random=False, apart=1.0),
    "random_free": Claims(near=0.5, beats_random=False, sums=False),
    # Of a round bowl the experts' heights tell the optimum: it is the weighted soup.
    "recipes": Claims(near=1e-5, budget=50, beats_random=False, sums=False, searches=False),
}
Objective = Callable[[np.ndarray], np.ndarray]


def claims(file: Path) -> Claims:
    return CLAIMS.get(file.stem, Claims())


each = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
# Those that take long: tests/contract/test_slow_optimizers.py.
QUICK = [file for file in FILES if not claims(file).slow]
each_quick = pytest.mark.parametrize("file", QUICK, ids=[file.stem for file in QUICK])


@cache
def configuration(file: Path) -> Any:
    return OmegaConf.load(file)


def made(file: Path, quick: bool = True) -> Any:
    optimizer = instantiate(
        configuration(file), _convert_="all", **(dict(claims(file).quick) if quick else {})
    )
    if (resources := claims(file).resources) is not None:
        optimizer.set_resources(resources)
    return optimizer


def begun(
    file: Path, experts: int = EXPERTS, seed: int = 0, quick: bool = True, groups: int = 1
) -> Any:
    optimizer = made(file, quick)
    for name, value in claims(file).wide if groups > 1 else ():
        setattr(optimizer, name, value)
    optimizer.start(experts, seed, groups)
    return optimizer


@cache
def target(seed: int, groups: int = 1, experts: int = EXPERTS) -> np.ndarray:
    """An optimum in which a few of the experts matter, others in each group, [G, K]; sums to 1."""
    found = np.random.default_rng(1000 + seed).dirichlet(np.full(experts, 0.3), size=groups)
    found.setflags(write=False)
    return found


def bowl(seed: int, groups: int = 1, experts: int = EXPERTS) -> Objective:
    optimum = target(seed, groups, experts).ravel()
    return lambda rows: -((rows - optimum) ** 2).sum(axis=1)


@dataclass(frozen=True)
class Noisy:
    """The loss of a minibatch and its slope, as an engine would measure them."""

    loss: float
    slope: np.ndarray


def measured(x: np.ndarray, items: Sequence[int], objective: Objective) -> Noisy:
    """Minus the objective, by central differences, off by a little that its items decide."""
    width = 1e-3
    objective = getattr(objective, "exact", objective)
    steps = width * np.eye(len(x))
    slope = (objective(x - steps) - objective(x + steps)) / (2 * width)
    return Noisy(-float(objective(x[None])[0]), slope + noise(sum(items), len(x)))


@cache
def noise(seed: int, length: int) -> np.ndarray:
    """What a minibatch changes of a slope."""
    found = 0.01 * np.random.default_rng(seed).normal(size=length)
    found.setflags(write=False)
    return found


@dataclass
class Learner:
    """What a worker is to `Descent.run`, on an objective; counts prompt-equivalents."""

    objective: Objective
    cost: int = 0

    def measure(self, position: np.ndarray, items: Sequence[int], slope: bool = True) -> Noisy:
        self.cost += len(items) * (GRADIENT_COST if slope else 1)
        return measured(position, items, self.objective)

    def step(self, factor: float) -> None:
        pass


def descend(optimizer: Any, objective: Objective, items: int = 80) -> int:
    """Answer what an optimizer wants of derivatives; gives the prompt-equivalents."""
    if optimizer.needs_gradients is None:
        return 0
    descent, answers, learner = optimizer.descend(items), None, Learner(objective)
    while True:
        try:
            wanted = descent.send(answers)
        except StopIteration:
            return learner.cost
        answers = []
        for one in wanted:
            if isinstance(one, LossRequest):
                answers.append(learner.measure(one.position, one.items))
                continue
            mine, routes = one.descent, [i % one.descent.routes for i in range(items)]
            reached = mine.run(one.position, one.particle, routes, mine.steps_by(False), learner)
            answers.append(SimpleNamespace(position=reached, descent=mine))


def step(optimizer: Any, objective: Objective) -> np.ndarray:
    """One ask and tell; the utilities it was told, [N]."""
    descend(optimizer, objective)
    positions = optimizer.ask()
    wanted = np.asarray(optimizer.evaluate)
    utilities = np.where(wanted, objective(positions), np.nan)
    optimizer.tell(utilities)
    return utilities


def search(optimizer: Any, objective: Objective, budget: int) -> tuple[float, int]:
    """The best utility within the budget, and after how many evaluations the search ended."""
    best, spent = -np.inf, 0
    while optimizer.stop_reason() is None and spent < budget:
        utilities = step(optimizer, objective)
        best, spent = np.nanmax([best, *utilities]), spent + np.isfinite(utilities).sum()
    return float(best), int(spent)


def saved(optimizer: Any) -> Any:
    return json.loads(json.dumps(optimizer.state_dict(), allow_nan=False))


@each
def test_ask_and_tell(file: Path) -> None:
    """The first ask has the experts, an ask is the same until it is told, and the seed decides."""

    def search_of(seed: int) -> np.ndarray:
        optimizer, rows = begun(file, seed=seed), None
        for iteration in range(4):
            descend(optimizer, bowl(0))
            positions = optimizer.ask()
            copy = positions.copy()
            assert positions.dtype == np.float64 and positions.ndim == 2
            assert positions.shape[1] == EXPERTS and np.isfinite(positions).all()
            assert rows in (None, len(positions)), "the record needs the same N in every ask"
            rows = len(positions)
            assert optimizer.evaluate.shape == (rows,) and optimizer.evaluate.dtype == bool
            if iteration == 0:
                assert optimizer.evaluate.all()
                np.testing.assert_array_equal(positions[:EXPERTS], np.eye(EXPERTS))
            assert optimizer.stop_reason() is None
            np.testing.assert_array_equal(optimizer.ask(), copy)
            step(optimizer, bowl(0))
            with pytest.raises(ValueError, match="once per ask"):
                optimizer.tell(np.zeros(rows))
        optimizer.ask()
        with pytest.raises(ValueError, match="once per ask"):
            optimizer.tell(np.zeros(rows + 1))
        return optimizer.positions

    np.random.seed(0)
    first = search_of(3)
    np.random.seed(1)  # the global generator plays no part
    np.testing.assert_array_equal(search_of(3), first)
    assert np.array_equal(search_of(4), first) != claims(file).searches


@each_quick
def test_comes_near_the_optimum_of_a_bowl(file: Path) -> None:
    """And nearer than random search of the same budget, if it claims to."""
    seeds = range(claims(file).seeds)
    found = [search(begun(file, seed=s, quick=False), bowl(s), claims(file).budget) for s in seeds]
    assert max(spent for _, spent in found) <= claims(file).budget + 20  # the last ask is whole
    left = [best / bowl(s)(np.eye(EXPERTS)).max() for s, (best, _) in enumerate(found)]
    assert np.median(left) <= claims(file).near
    won = 0
    for seed, (best, spent) in enumerate(found):
        rows = np.random.default_rng(seed).dirichlet(np.ones(EXPERTS), size=spent)
        won += best > bowl(seed)(rows).max()
    assert won > len(found) / 2 or not claims(file).beats_random


@each
def test_a_lost_evaluation_is_no_more_than_that(file: Path) -> None:
    """A fifth of all utilities is lost, those of the best positions too; then noise is added."""
    random, left = np.random.default_rng(0), []
    for seed in range(5):

        def objective(rows: np.ndarray, seed: int = seed) -> np.ndarray:
            return np.where(random.random(len(rows)) < 0.2, np.nan, bowl(seed)(rows))

        objective.exact = bowl(seed)  # type: ignore[attr-defined]
        best, _ = search(begun(file, seed=seed), objective, 200)
        left.append(best / bowl(seed)(np.eye(EXPERTS)).max())
    assert np.median(left) < 0.5

    def noisy(rows: np.ndarray) -> np.ndarray:
        missing = random.random(len(rows)) < (1.0 if random.random() < 0.2 else 0.2)
        return np.where(missing, np.nan, bowl(0)(rows) + 0.05 * random.normal(size=len(rows)))

    optimizer = begun(file)
    for _ in range(20):
        step(optimizer, noisy)
        saved(optimizer)
        assert np.isfinite(optimizer.ask()).all()


@each
@pytest.mark.parametrize("utility", [np.nan, 0.0, 1.0], ids=["missing", "zero", "one"])
def test_ends_where_nothing_differs(file: Path, utility: float) -> None:
    optimizer = begun(file, experts=3)
    while (reason := optimizer.stop_reason()) is None:
        assert np.isfinite(optimizer.ask()).all()
        step(optimizer, lambda rows: np.full(len(rows), utility))
        assert optimizer.iteration < 10_000
    assert isinstance(reason, str) and reason


@each
def test_says_how_many_iterations_it_takes_at_most(file: Path) -> None:
    optimizer, told = begun(file), 0
    while optimizer.stop_reason() is None:
        # Always something new, so that nothing but their number ends it.
        step(optimizer, lambda rows, told=told: bowl(0)(rows) + told)
        told += 1
    assert told <= optimizer.max_iterations + 1  # the start is none


@each
@pytest.mark.parametrize("groups", [1, GROUPS])
def test_goes_on_from_its_state(file: Path, groups: int) -> None:
    go_on(file, quick=True, groups=groups)


def go_on(file: Path, quick: bool, groups: int = 1) -> None:
    """A search that is saved and loaded after every ask and tell, beside one that is not."""
    straight, resumed = (begun(file, quick=quick, groups=groups) for _ in range(2))
    for _ in range(8):
        for optimizer in (straight, resumed):
            descend(optimizer, bowl(0, groups))
        np.testing.assert_array_equal(resumed.ask(), straight.ask())
        np.testing.assert_array_equal(resumed.evaluate, straight.evaluate)
        state = saved(resumed)
        resumed = made(file, quick)
        resumed.load_state_dict(state)  # between ask and tell
        step(straight, bowl(0, groups))
        step(resumed, bowl(0, groups))
        assert resumed.stop_reason() == straight.stop_reason()
        state = saved(resumed)
        assert state == saved(straight)
        resumed = made(file, quick)
        resumed.load_state_dict(state)  # between tell and ask


@each_quick
def test_groups_find_mixtures_of_their_own(file: Path) -> None:
    experts, left = np.tile(np.eye(EXPERTS), GROUPS), []
    for seed in range(1 if claims(file).slow else 3):
        objective, optimum = bowl(seed, GROUPS), target(seed, GROUPS)
        optimizer = begun(file, seed=seed, quick=False, groups=GROUPS)
        np.testing.assert_array_equal(optimizer.ask()[:EXPERTS], experts)
        best, _ = search(optimizer, objective, claims(file).budget)
        assert best > objective(experts).max()
        left.append(best / objective(np.tile(optimum.mean(axis=0), (1, GROUPS)))[0])
    assert np.median(left) <= claims(file).apart


@each
@pytest.mark.parametrize(("groups", "experts"), [(GROUPS, EXPERTS), (30, 9)])
def test_positions_of_groups(file: Path, groups: int, experts: int) -> None:
    """Begun with the experts alone, sums are kept and new positions differ between groups."""
    optimizer = made(file)
    optimizer.particles = None
    optimizer.start(experts, 0, groups)
    for iteration in range(claims(file).alike + 1):
        descend(optimizer, bowl(0, groups, experts))
        rows = optimizer.ask().reshape(-1, groups, experts)
        assert np.isfinite(rows).all()
        if claims(file).sums:
            np.testing.assert_allclose(rows.sum(axis=2), 1.0, atol=1e-12)
        apart = np.ptp(rows[optimizer.evaluate], axis=1).max(axis=1) > 1e-6
        assert iteration < claims(file).alike or (apart.mean() >= 0.5) == claims(file).searches
        step(optimizer, bowl(0, groups, experts))


@each
def test_the_yaml_has_the_defaults_of_the_class(file: Path) -> None:
    if file not in VARIANTS:
        optimizer = instantiate(configuration(file), _convert_="all")
        same_options(optimizer, type(optimizer)())


def same_options(one: Any, other: Any) -> None:
    for field in fields(one):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(mine):  # the gradient term
            same_options(mine, yours)
        else:
            assert mine == yours or [*mine] == [*yours], field.name


@each
def test_refuses_states_and_options_that_do_not_fit(file: Path) -> None:
    with pytest.raises(UserError, match="'another'"):
        made(file).load_state_dict({"optimizer": "another"})
    state = saved(begun(file, groups=2))
    with pytest.raises(UserError, match=r"^pool.groups: .*1.*2.*$"):
        begun(file, groups=1).load_state_dict(state)
    made(file).load_state_dict(state)  # never started, it takes what there is
    longer = begun(file)
    longer.particles = len(longer.ask()) + 1
    with pytest.raises(UserError, match=r"optimizer.particles"):
        longer.load_state_dict(begun(file).state_dict())
    for options, experts, words in (
        ({"particles": 9}, EXPERTS, "optimizer.particles=9"),
        ({"particles": 1}, EXPERTS, "optimizer.particles=1"),
        ({"particles": None}, 1, "pool.experts"),
    ):
        with pytest.raises(UserError, match=words):
            type(made(file))(**options).start(experts, 0)
    assert begun(file).can_race == claims(file).raced


# Several objectives

NSGA2 = next(file for file in FILES if file.stem == "nsga2")


def two_bowls(groups: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Minus the squared distances to two optima [N, 2]: the front is the line between the two."""
    bowls = bowl(1, groups), bowl(2, groups)
    return lambda rows: np.stack([one(rows) for one in bowls], axis=1)


def several(groups: int = 1, seed: int = 0, start: bool = True, **options: Any) -> Any:
    optimizer = instantiate(OmegaConf.load(NSGA2), **options, _convert_="all")
    if start:
        optimizer.start(EXPERTS, seed, groups)
        optimizer.name_objectives(["A", "B"])
    return optimizer


def step_of_several(optimizer: Any, groups: int = 1, lost: float = 0.0) -> np.ndarray:
    """One ask and tell; the objectives it was told, [N, 2]."""
    positions = optimizer.ask()
    wanted = np.asarray(optimizer.evaluate).copy()
    wanted &= np.random.default_rng(optimizer.iteration).random(len(wanted)) >= lost
    objectives = np.where(wanted[:, None], two_bowls(groups)(positions), np.nan)
    optimizer.tell(objectives.mean(axis=1), objectives=objectives)
    return objectives


def covered(values: np.ndarray) -> float:
    """The share of the true front's hypervolume, from the worst expert in each objective on."""
    reference = two_bowls()(np.eye(EXPERTS)).min(axis=0)
    ends = np.stack([target(1).ravel(), target(2).ravel()])
    line = two_bowls()(np.linspace(0, 1, 200)[:, None] @ (ends[1:] - ends[:1]) + ends[:1])
    return compute_hypervolume(values, reference) / compute_hypervolume(line, reference)


def test_covers_the_front_of_two_bowls() -> None:
    for seed in range(3):
        optimizer, found = several(seed=seed), []
        while optimizer.stop_reason() is None:
            found.append(step_of_several(optimizer, lost=0.1))
        values = np.concatenate(found)
        values = values[np.isfinite(values).all(axis=1)]
        # As many mixtures at random cover .87 to .92.
        rows = np.random.default_rng(seed).dirichlet(np.ones(EXPERTS), size=len(values))
        assert covered(values) > max(0.97, covered(two_bowls()(rows)))
        assert find_non_dominated(values).sum() >= 20


@pytest.mark.parametrize("options", [{}, {"sum_to_one": False}, {"constraints": {"B": "base"}}])
@pytest.mark.parametrize("groups", [1, GROUPS])
def test_several_objectives_go_on_from_a_state(groups: int, options: dict[str, Any]) -> None:
    straight, resumed = (several(groups, **options) for _ in range(2))
    for _ in range(8):
        np.testing.assert_array_equal(resumed.ask(), straight.ask())
        state = saved(resumed)
        resumed = several(start=False, **options)
        resumed.load_state_dict(state)  # between ask and tell
        step_of_several(straight, groups, lost=0.2)
        step_of_several(resumed, groups, lost=0.2)
        state = saved(resumed)
        assert state == saved(straight)
        resumed = several(start=False, **options)
        resumed.load_state_dict(state)  # between tell and ask


def test_free_sums_leave_the_simplex() -> None:
    optimizer = several(GROUPS, sum_to_one=False, high=1.5)
    for _ in range(3):
        step_of_several(optimizer, GROUPS)
        rows = optimizer.ask()
        assert rows.min() >= -1 and rows.max() <= 1.5
        assert np.ptp(rows.reshape(-1, EXPERTS).sum(axis=1)) > 0.5


@pytest.mark.parametrize("lost", [False, True])
def test_a_bound_is_what_the_base_reaches(lost: bool) -> None:
    """The base is no worse than the best expert at B here: without the bound few positions are."""

    def found(constraints: dict[str, Any]) -> float:
        optimizer, values = several(constraints=constraints, objectives=["A"]), []
        for number in range(25):
            rows = optimizer.ask()
            base = ~rows.any(axis=1)
            assert base.any() == bool(constraints and (number == 0 or (lost and number == 1)))
            told = two_bowls()(rows)
            told[base, 1] = bound
            if lost and number == 0:
                told[base] = np.nan
            optimizer.tell(told[:, 0], objectives=told)
            values.append(told[~base])
        return float((np.concatenate(values[5:])[:, 1] >= bound).mean())

    bound = two_bowls()(np.eye(EXPERTS))[:, 1].max() + 0.05
    bounded, free = found({"B": "base"}), found({})
    assert bounded > 0.5 and bounded > free + 0.2, (bounded, free)


def test_options_of_several_objectives_are_checked() -> None:
    kind = type(several(start=False))
    for options, words in (
        ({"objectives": []}, r"optimizer.objectives=\[\]"),
        ({"constraints": {"B": "best"}}, "optimizer.constraints"),
    ):
        with pytest.raises(UserError, match=words):
            kind(**options)
    for options in ({"objectives": ["C"]}, {"constraints": {"C": 0.5}}):
        with pytest.raises(UserError, match=r"no part 'C'; it has: A, B"):
            kind(**options).name_objectives(["A", "B"])
    with pytest.raises(UserError, match=r"optimizer.particles=10: .* take 11"):
        kind(particles=EXPERTS, constraints={"A": "base"}).start(EXPERTS, 0)
    with pytest.raises(ValueError, match="of the parts"):
        several().tell(np.zeros(20), objectives=np.zeros((20, 3)))
