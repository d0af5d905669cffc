"""What every optimizer of conf/optimizer has to keep; what one promises itself is in CLAIMS."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from swarm.errors import UserError
from swarm.optimizers.base import LossRequest, SearchResources
from swarm.optimizers.gradient import Descent
from swarm.optimizers.swarm import GradientDescent, MemeticSwarm
from swarm.runs.pareto_front import compute_hypervolume, find_non_dominated

VARIANTS = sorted((Path(__file__).parent / "variants").glob("*.yaml"))
"""Optimizers with other options than those of their file in conf/optimizer."""

FILES = sorted((Path(__file__).parents[3] / "conf" / "optimizer").glob("*.yaml")) + VARIANTS
EXPERTS, BUDGET, SEEDS = 10, 1020, 10
GROUPS = 3


@dataclass(frozen=True)
class Claims:
    """What an optimizer promises beyond the protocol."""

    starts_with_experts: bool = True
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


MUTATED = SearchResources(gradients=True, positions=1000, black_box=True)
"""A black box whose items have reference texts."""

CLAIMS: dict[str, Claims] = {
    # Its gradients are not counted here: 61 evaluations at most.
    "adamerging": Claims(near=0.02, sums=False, apart=0.1),
    "bayes": Claims(
        near=0.05,
        budget=60,
        slow=True,
        seeds=1,
        quick=(("sampler", "tpe"),),
        wide=(("max_dimensions", 30),),
    ),
    "bayes_free": Claims(
        near=0.05,
        budget=60,
        slow=True,
        seeds=1,
        quick=(("sampler", "tpe"),),
        sums=False,
        alike=3,
        wide=(("max_dimensions", 30),),
    ),
    # Here it is bayes_free; without gold answers and a Gaussian process CMA-ES with free sums.
    "auto": Claims(
        near=0.05,
        budget=60,
        slow=True,
        seeds=1,
        quick=(("surrogate", False),),
        sums=False,
        alike=2,
    ),
    # Its gradients are not counted here, and their loss is the utility.
    "auto_mutated": Claims(sums=False, raced=True, resources=MUTATED, budget=120),
    "pso_mutated": Claims(sums=False, raced=True, resources=MUTATED, budget=120),
    "cmaes": Claims(near=1e-6, apart=0.05),
    "cmaes_free": Claims(alike=2, near=1e-6, sums=False, apart=0.1),
    "cmaes_separable": Claims(alike=2, near=1e-6, sums=False, apart=0.05),
    "de": Claims(near=0.001, apart=0.3),
    "de_free": Claims(near=0.001, sums=False, apart=0.3),
    # Its two rounds end after 150 evaluations.
    "evogm": Claims(
        near=0.4,
        beats_random=False,
        slow=True,
        seeds=1,
        quick=(("epochs", 3),),
        sums=False,
        apart=1.2,
    ),
    "genome": Claims(near=0.06),
    # Its gradients are not counted here: 21 evaluations at most.
    "gradient": Claims(near=0.01, sums=False, apart=0.1, budget=30, raced=True),
    "lorahub": Claims(near=0.001, sums=False, apart=0.1),
    "nes": Claims(alike=2, near=1e-6, sums=False, apart=0.05),
    "nes_adam": Claims(near=0.05, apart=0.3),
    "mergevolve": Claims(near=0.05, sums=False, apart=0.3),
    "nsga2": Claims(near=0.005, apart=0.3),
    "nsga2_free": Claims(near=0.02, apart=0.5, sums=False),
    "pso": Claims(near=0.1, sums=False, raced=True),
    "pso_merging": Claims(sums=False),
    "random": Claims(near=0.15, beats_random=False, apart=1.0),
    "random_free": Claims(near=0.5, beats_random=False, sums=False),
    # Of a round bowl the experts' heights tell the optimum: it is the weighted soup.
    "recipes": Claims(near=1e-5, budget=50, beats_random=False, sums=False, searches=False),
}
Objective = Callable[[np.ndarray], np.ndarray]


def claims(file: Path) -> Claims:
    return CLAIMS.get(file.stem, Claims())


NUMPY = [file for file in FILES if file.stem != "evogm"]  # it needs torch
each = pytest.mark.parametrize("file", NUMPY, ids=[file.stem for file in NUMPY])
# Those that take long or need torch: tests/contract/test_slow_optimizers.py.
QUICK = [file for file in FILES if not claims(file).slow]
each_quick = pytest.mark.parametrize("file", QUICK, ids=[file.stem for file in QUICK])


@cache
def configuration(file: Path) -> Any:
    return OmegaConf.load(file)


def made(file: Path, quick: bool = True, dimensions: int = EXPERTS) -> Any:
    optimizer = instantiate(
        configuration(file), _convert_="all", **(dict(claims(file).quick) if quick else {})
    )
    if (resources := claims(file).resources) is not None:
        optimizer.set_resources(resources)
    return optimizer.choose(dimensions)


def begun(
    file: Path, experts: int = EXPERTS, seed: int = 0, quick: bool = True, groups: int = 1
) -> Any:
    optimizer = made(file, quick, experts * groups)
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


def measured(wanted: LossRequest, objective: Objective) -> Noisy:
    """Minus the objective, by central differences, off by a little that its items decide."""
    x, width = wanted.position, 1e-3
    objective = getattr(objective, "exact", objective)
    steps = width * np.eye(len(x))
    slope = (objective(x - steps) - objective(x + steps)) / (2 * width)
    return Noisy(-float(objective(x[None])[0]), slope + noise(sum(wanted.items), len(x)))


@cache
def noise(seed: int, length: int) -> np.ndarray:
    """What a minibatch changes of a slope."""
    found = 0.01 * np.random.default_rng(seed).normal(size=length)
    found.setflags(write=False)
    return found


def descend(optimizer: Any, objective: Objective, items: int = 80) -> int:
    """Answer what an optimizer wants of derivatives; gives the prompt-equivalents."""
    if optimizer.needs_gradients is None:
        return 0
    descent, answers, cost = optimizer.descend(items), None, 0
    while True:
        try:
            wanted = descent.send(answers)
        except StopIteration:
            return cost
        cost += sum(one.prompt_cost for one in wanted)
        answers = [measured(one, objective) for one in wanted]


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


@cache
def searches_of_bowls(file: Path) -> list[tuple[float, int]]:
    """What it comes to, as its yaml has it, on the bowl of each seed."""
    budget = claims(file).budget
    seeds = range(claims(file).seeds)
    return [search(begun(file, seed=s, quick=False), bowl(s), budget) for s in seeds]


def saved(optimizer: Any) -> Any:
    return json.loads(json.dumps(optimizer.state_dict(), allow_nan=False))


@each
def test_ask(file: Path) -> None:
    optimizer, rows = begun(file), None
    for iteration in range(4):
        positions = optimizer.ask()
        copy = positions.copy()
        assert positions.dtype == np.float64 and positions.ndim == 2
        assert positions.shape[1] == EXPERTS and np.isfinite(positions).all()
        assert rows in (None, len(positions)), "the record needs the same N in every ask"
        rows = len(positions)
        assert np.asarray(optimizer.evaluate).shape == (len(positions),)
        assert np.asarray(optimizer.evaluate).dtype == bool
        if iteration == 0:
            assert optimizer.evaluate.all()
            if claims(file).starts_with_experts:
                np.testing.assert_array_equal(positions[:EXPERTS], np.eye(EXPERTS))
        assert optimizer.stop_reason() is None
        np.testing.assert_array_equal(optimizer.ask(), copy)
        step(optimizer, bowl(0))


@each
def test_the_seed_decides(file: Path) -> None:
    def positions(seed: int) -> np.ndarray:
        optimizer = begun(file, seed=seed)
        for _ in range(4):
            step(optimizer, bowl(0))
        return optimizer.ask()

    np.random.seed(0)
    first = positions(3)
    np.random.seed(1)  # the global generator plays no part
    np.testing.assert_array_equal(positions(3), first)
    assert np.array_equal(positions(4), first) != claims(file).searches


@each_quick
def test_comes_near_the_optimum_of_a_bowl(file: Path) -> None:
    found = searches_of_bowls(file)
    assert max(spent for _, spent in found) <= claims(file).budget + 20  # the last ask is whole
    left = [best / bowl(s)(np.eye(EXPERTS)).max() for s, (best, _) in enumerate(found)]
    assert np.median(left) <= claims(file).near


@each_quick
def test_beats_random_search_of_the_same_budget(file: Path) -> None:
    if not claims(file).beats_random:
        pytest.skip("does not claim to")
    won, found = 0, searches_of_bowls(file)
    for seed, (best, spent) in enumerate(found):
        rows = np.random.default_rng(seed).dirichlet(np.ones(EXPERTS), size=spent)
        won += best > bowl(seed)(rows).max()
    assert won > len(found) / 2


@each
def test_a_lost_evaluation_is_no_more_than_that(file: Path) -> None:
    """A fifth of all utilities is lost, those of the best positions too."""
    random, left = np.random.default_rng(0), []
    for seed in range(5):

        def objective(rows: np.ndarray, seed: int = seed) -> np.ndarray:
            return np.where(random.random(len(rows)) < 0.2, np.nan, bowl(seed)(rows))

        objective.exact = bowl(seed)  # type: ignore[attr-defined]
        best, _ = search(begun(file, seed=seed), objective, 200)
        left.append(best / bowl(seed)(np.eye(EXPERTS)).max())
    assert np.median(left) < 0.5


@each
def test_bears_noise_and_missing_utilities(file: Path) -> None:
    random = np.random.default_rng(0)

    def objective(rows: np.ndarray) -> np.ndarray:
        noisy = bowl(0)(rows) + 0.05 * random.normal(size=len(rows))
        missing = random.random(len(rows)) < (1.0 if random.random() < 0.2 else 0.2)
        return np.where(missing, np.nan, noisy)

    optimizer = begun(file)
    for _ in range(20):
        step(optimizer, objective)
        saved(optimizer)
        assert np.isfinite(optimizer.ask()).all()


@each
@pytest.mark.parametrize("utility", [np.nan, 0.0, 1.0], ids=["missing", "zero", "one"])
def test_ends_where_nothing_differs(file: Path, utility: float) -> None:
    optimizer = begun(file, experts=3)
    for _ in range(10_000):
        if (reason := optimizer.stop_reason()) is not None:
            assert isinstance(reason, str) and reason
            return
        assert np.isfinite(optimizer.ask()).all()
        step(optimizer, lambda rows: np.full(len(rows), utility))
    pytest.fail("has no end")


@each
def test_says_how_many_iterations_it_takes_at_most(file: Path) -> None:
    optimizer = begun(file)
    assert isinstance(optimizer.max_iterations, int)
    told = 0
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
        resumed = made(file, quick, EXPERTS * groups)
        resumed.load_state_dict(state)  # between ask and tell
        step(straight, bowl(0, groups))
        step(resumed, bowl(0, groups))
        assert resumed.stop_reason() == straight.stop_reason()
        state = saved(resumed)
        assert state == saved(straight)
        resumed = made(file, quick, EXPERTS * groups)
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
    optimizer = made(file, dimensions=experts * groups)
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
def test_refuses_the_state_of_other_groups(file: Path) -> None:
    with pytest.raises(UserError, match=r"^pool.groups: .*1.*2.*$"):
        begun(file, groups=1).load_state_dict(saved(begun(file, groups=2)))
    made(file).load_state_dict(
        saved(begun(file, groups=2))
    )  # never started, it takes what there is


@each
def test_the_yaml_has_the_defaults_of_the_class(file: Path) -> None:
    if file in VARIANTS:
        pytest.skip("is not the default")
    optimizer = instantiate(configuration(file), _convert_="all")
    bare = type(optimizer)()
    same_options(optimizer, bare)


def same_options(one: Any, other: Any) -> None:
    for field in fields(one):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(mine):  # an optimizer within the optimizer
            assert type(mine) is type(yours)
            same_options(mine, yours)
        else:
            assert mine == yours or [*mine] == [*yours], field.name


@each
def test_refuses_the_state_of_another(file: Path) -> None:
    with pytest.raises(UserError, match="'another'"):
        made(file).load_state_dict({"optimizer": "another"})
    longer = begun(file)
    longer.particles = len(longer.ask()) + 1
    with pytest.raises(UserError, match=r"optimizer.particles"):
        longer.load_state_dict(begun(file).state_dict())


@each
@pytest.mark.parametrize(
    ("options", "experts", "words"),
    [
        ({"particles": 9}, EXPERTS, "optimizer.particles=9"),
        ({"particles": 1}, EXPERTS, "optimizer.particles=1"),
        ({"max_iterations": 0}, EXPERTS, "optimizer.max_iterations=0"),
        ({"max_iterations": True}, EXPERTS, "optimizer.max_iterations=true"),
        ({"particles": None}, 1, "pool.experts"),
    ],
)
def test_says_what_is_wrong_with_its_options(
    file: Path, options: dict[str, Any], experts: int, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        type(made(file))(**options).start(experts, 0)


@each
def test_is_raced_only_where_it_may_be(file: Path) -> None:
    assert begun(file).can_race == claims(file).raced


@each
def test_is_told_once_an_ask(file: Path) -> None:
    optimizer = begun(file)
    with pytest.raises(ValueError, match="once per ask"):
        optimizer.tell(np.zeros(3))
    step(optimizer, bowl(0))
    with pytest.raises(ValueError, match="once per ask"):
        optimizer.tell(np.zeros(len(optimizer.evaluate)))


SEVERAL = [file for file in FILES if begun(file).has_objectives]
each_of_several = pytest.mark.parametrize(
    "front_file", SEVERAL, ids=[file.stem for file in SEVERAL]
)


def two_bowls(groups: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Minus the squared distances to two optima [N, 2]: the front is the line between the two."""
    bowls = bowl(1, groups), bowl(2, groups)
    return lambda rows: np.stack([one(rows) for one in bowls], axis=1)


def several(file: Path, groups: int = 1, seed: int = 0, **options: Any) -> Any:
    optimizer = instantiate(OmegaConf.load(file), **options, _convert_="all")
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


@each_of_several
def test_covers_the_front_of_two_bowls(front_file: Path) -> None:
    for seed in range(3):
        optimizer, found = several(front_file, seed=seed), []
        while optimizer.stop_reason() is None:
            found.append(step_of_several(optimizer, lost=0.1))
        values = np.concatenate(found)
        values = values[np.isfinite(values).all(axis=1)]
        # As many mixtures at random cover .87 to .92.
        rows = np.random.default_rng(seed).dirichlet(np.ones(EXPERTS), size=len(values))
        assert covered(values) > max(0.97, covered(two_bowls()(rows)))
        assert find_non_dominated(values).sum() >= 20


@each_of_several
@pytest.mark.parametrize("options", [{}, {"sum_to_one": False}, {"constraints": {"B": "base"}}])
@pytest.mark.parametrize("groups", [1, GROUPS])
def test_several_objectives_go_on_from_a_state(
    front_file: Path, groups: int, options: dict[str, Any]
) -> None:
    straight, resumed = (several(front_file, groups, **options) for _ in range(2))
    for _ in range(8):
        np.testing.assert_array_equal(resumed.ask(), straight.ask())
        state = saved(resumed)
        resumed = instantiate(OmegaConf.load(front_file), **options, _convert_="all")
        resumed.load_state_dict(state)  # between ask and tell
        step_of_several(straight, groups, lost=0.2)
        step_of_several(resumed, groups, lost=0.2)
        state = saved(resumed)
        assert state == saved(straight)
        resumed = instantiate(OmegaConf.load(front_file), **options, _convert_="all")
        resumed.load_state_dict(state)  # between tell and ask


@each_of_several
def test_free_sums_leave_the_simplex(front_file: Path) -> None:
    optimizer = several(front_file, GROUPS, sum_to_one=False, high=1.5)
    for _ in range(3):
        step_of_several(optimizer, GROUPS)
        rows = optimizer.ask()
        assert rows.min() >= -1 and rows.max() <= 1.5
        assert np.ptp(rows.reshape(-1, EXPERTS).sum(axis=1)) > 0.5


@each_of_several
@pytest.mark.parametrize("lost", [False, True])
def test_a_bound_is_what_the_base_reaches(front_file: Path, lost: bool) -> None:
    """The base is no worse than the best expert at B here: without the bound few positions are."""

    def found(constraints: dict[str, Any]) -> float:
        optimizer, values = several(front_file, constraints=constraints, objectives=["A"]), []
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


@each_of_several
def test_options_of_several_objectives_are_checked(front_file: Path) -> None:
    kind = type(made(front_file))
    for options, words in (
        ({"objectives": "A"}, "optimizer.objectives=A"),
        ({"objectives": []}, r"optimizer.objectives=\[\]"),
        ({"constraints": {"B": "best"}}, "optimizer.constraints"),
        ({"constraints": ["B"]}, "optimizer.constraints="),
    ):
        with pytest.raises(UserError, match=words):
            kind(**options)
    for options in ({"objectives": ["C"]}, {"constraints": {"C": 0.5}}):
        with pytest.raises(UserError, match=r"no part 'C'; it has: A, B"):
            kind(**options).name_objectives(["A", "B"])
    with pytest.raises(UserError, match=r"optimizer.particles=10: .* take 11"):
        kind(particles=EXPERTS, constraints={"A": "base"}).start(EXPERTS, 0)
    with pytest.raises(ValueError, match="of the parts"):
        several(front_file).tell(np.zeros(20), objectives=np.zeros((20, 3)))


def test_a_descent_that_does_not_raise_the_utility_ends() -> None:
    """The loss of reference texts has its optimum elsewhere: the mutants' rates halve to rest."""
    swarm = begun(next(file for file in VARIANTS if file.stem == "pso_mutated"))
    swarm.patience = 100
    away, spent = (lambda rows: -((rows - 3.0) ** 2).sum(axis=1)), []
    for _ in range(40):
        spent.append(descend(swarm, away))
        wanted = swarm.ask()
        swarm.tell(np.where(swarm.evaluate, bowl(0)(wanted), np.nan))
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
        assert swarm.descent is not None
        run = swarm.descent.descend(np.zeros((1, 8)), [0], 20)
        next(run)
        with contextlib.suppress(StopIteration):
            run.send([Noisy(1.0, np.array([1.0, -2.0, 3.0, 4.0] * 2))])
        return swarm.positions[4].reshape(2, 4), np.abs(swarm.descent.reached.reshape(2, 4))

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
        descent = Descent(dropout=dropout, steps=4, rate=1e-9, holdout=0)
        descent.start(1, 40, 5, seed=0)
        run, found = descent.descend(np.ones((1, 200)), [0], 20), []
        wanted = next(run)
        with contextlib.suppress(StopIteration):
            while True:
                found.append(wanted[0].position)
                wanted = run.send([Noisy(1.0, np.ones(200))])
        return np.array(found)

    assert positions(0.0) == pytest.approx(np.ones((4, 200)))
    found = positions(0.2)
    left_out = found == 0
    assert (found == positions(0.2)).all() and found[~left_out] == pytest.approx(1.25)
    assert ((left_out.mean(axis=1) > 0.1) & (left_out.mean(axis=1) < 0.3)).all()
    assert len(np.unique(left_out, axis=0)) == 4
