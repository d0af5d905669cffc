"""The hierarchical search: stages, what a finer stage begins with, shares, exact resumption."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.errors import UserError
from swarm.optimizers.base import SupportsGroupHierarchy
from swarm.optimizers.bayes import BayesianSearch
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.de import DifferentialEvolution
from swarm.optimizers.genome import Genome
from swarm.optimizers.hierarchical import HierarchicalOptimizer
from swarm.optimizers.lorahub import LoraHub
from swarm.optimizers.multi_objective import NSGA2Search
from swarm.optimizers.nes import NaturalEvolution
from swarm.optimizers.pso import GradientDescent, ParticleSwarm
from swarm.optimizers.random_search import RandomSearch
from swarm.optimizers.static_merges import StaticMerges
from swarm.pool.pool import Pool

EXPERTS, GROUPS = 4, 6
DIVISIONS = {"global": [0] * 6, "kind": [0, 1, 0, 1, 0, 1], "per_module": [*range(6)]}
INNER: dict[str, Callable[[], Any]] = {
    "nes": NaturalEvolution,
    "cmaes": CMAES,
    "separable": lambda: CMAES(separable=True, sum_to_one=False),
    "de": lambda: DifferentialEvolution(particles=8),
    "pso": lambda: ParticleSwarm(particles=8, soups=0),
    "genome": lambda: Genome(particles=8),
    "random": lambda: RandomSearch(particles=8),
    "lorahub": LoraHub,
    "recipes": StaticMerges,
    "bayes": lambda: BayesianSearch(sampler="tpe"),
}
TARGET = np.random.default_rng(0).normal(0.4, 0.3, size=GROUPS * EXPERTS)


def parents(name: str) -> list[int]:
    if name not in DIVISIONS:
        raise UserError(f"pool.groups={name}")
    return DIVISIONS[name]


def made(inner: Any = None, positions: int | None = None, **options: Any) -> HierarchicalOptimizer:
    search = HierarchicalOptimizer(optimizer=inner, **options)
    search.set_group_hierarchy(parents, positions)
    return search


def begun(inner: Any = None, positions: int | None = None, **options: Any) -> HierarchicalOptimizer:
    search = made(inner, positions, **options)
    search.start(EXPERTS, 0, GROUPS)
    return search


def bowl(rows: np.ndarray) -> np.ndarray:
    return -np.asarray(((rows - TARGET) ** 2).sum(axis=1))


def step(search: Any) -> np.ndarray:
    rows: np.ndarray = search.ask()
    search.tell(np.where(search.evaluate, bowl(rows), np.nan))
    return rows


@pytest.mark.parametrize("name", INNER)
def test_positions_have_the_groups_of_their_stage(name: str) -> None:
    search, seen = begun(INNER[name](), max_iterations=20), set()
    while search.stop_reason() is None:
        rows = search.ask().reshape(-1, GROUPS, EXPERTS)
        for place in DIVISIONS[[*DIVISIONS][search.stage]]:
            alike = [
                p for p, own in enumerate(DIVISIONS[[*DIVISIONS][search.stage]]) if own == place
            ]
            np.testing.assert_array_equal(rows[:, alike], rows[:, alike[:1]].repeat(len(alike), 1))
        seen.add(search.stage)
        step(search)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("name", INNER)
def test_a_finer_stage_begins_with_the_experts_and_the_best_so_far(name: str) -> None:
    search, best, highest = begun(INNER[name](), max_iterations=20), None, -np.inf
    experts, stage = np.tile(np.eye(EXPERTS), GROUPS), 0
    while search.stop_reason() is None:
        rows = search.ask()
        if search.stage > stage:
            stage = search.stage
            np.testing.assert_array_equal(rows[:EXPERTS], experts)
            np.testing.assert_array_equal(rows[EXPERTS], best)
        step(search)
        utilities = np.where(search.evaluate, bowl(rows), -np.inf)
        if utilities.max() > highest:
            highest, best = utilities.max(), rows[utilities.argmax()]
    np.testing.assert_array_equal(search.best, best)
    assert stage == 2 and search.best_utility == highest


@pytest.mark.parametrize("name", ["nes", "cmaes", "separable"])
def test_a_finer_stage_looks_around_the_best_so_far(name: str) -> None:
    search = begun(INNER[name](), max_iterations=30)
    while search.stage < 1:
        step(search)
        search.ask()
    assert search.evaluate.sum() == EXPERTS + 1  # nothing that a run has to ask
    step(search)
    rows = search.ask()[search.evaluate]
    assert np.abs(rows - search.anchor).mean() < 0.2 < np.abs(np.eye(EXPERTS)[0] - 0.5).mean()


@pytest.mark.parametrize("name", INNER)
def test_sums_stay_at_one_where_the_inner_optimizer_keeps_them(name: str) -> None:
    if not getattr(INNER[name](), "sum_to_one", name not in ("lorahub", "recipes")):
        pytest.skip("sums are free")
    search = begun(INNER[name](), max_iterations=20)
    while search.stop_reason() is None:
        rows = step(search).reshape(-1, GROUPS, EXPERTS)
        np.testing.assert_allclose(rows.sum(axis=2), 1.0, atol=1e-9)


@pytest.mark.parametrize("name", INNER)
def test_it_goes_on_from_its_state_in_every_stage(name: str) -> None:
    straight, resumed = (begun(INNER[name](), max_iterations=12) for _ in range(2))
    while straight.stop_reason() is None:
        for moment in range(2):
            state = json.loads(json.dumps(resumed.state_dict(), allow_nan=False))
            resumed = made(INNER[name](), max_iterations=12)
            resumed.load_state_dict(state)
            if moment:
                break
            np.testing.assert_array_equal(resumed.ask(), straight.ask())
            np.testing.assert_array_equal(resumed.evaluate, straight.evaluate)
        step(straight)
        step(resumed)
        assert (
            resumed.state_dict() == straight.state_dict()
            and resumed.stop_reason() == straight.stop_reason()
        )
    assert straight.stage == 2


def test_stages_end_with_their_share_of_the_positions_that_a_run_can_pay() -> None:
    search, spent = begun(positions=100, shares=(0.5, 0.3, 0.2), max_iterations=9999), {}
    known: set[bytes] = set()
    for _ in range(40):
        rows = search.ask()
        new = {row.tobytes() for row in rows[search.evaluate]} - known
        known |= new
        spent[search.stage] = spent.get(search.stage, 0) + len(new)
        if sum(spent.values()) >= 100:
            break
        step(search)
    size = len(rows)
    assert 50 <= spent[0] < 50 + size and 80 <= spent[0] + spent[1] < 80 + size


def test_an_inner_end_begins_the_next_stage() -> None:
    search, stages = begun(StaticMerges(), max_iterations=60), []
    while (reason := search.stop_reason()) is None:
        step(search)
        stages.append(search.stage)
    assert stages.count(0) < 12 and {0, 1, 2} == set(stages)
    assert reason.startswith("per_module: every recipe is scored")


def test_a_division_that_divides_nothing_is_left_out() -> None:
    search = HierarchicalOptimizer(groups=("global", "attention_mlp", "per_module"))
    search.set_group_hierarchy(lambda name: DIVISIONS.get(name, [0] * 6), None)
    search.start(EXPERTS, 0, GROUPS)
    assert [level.name for level in search.levels] == ["attention_mlp", "per_module"]
    assert search.levels[0].share == pytest.approx(0.7)


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(
        UserError, match=r"optimizer.groups=.*end with the groups.*pool.groups=kind"
    ):
        made(groups=("global", "kind"), shares=(1, 1))
    with pytest.raises(UserError, match=r"optimizer.shares=\[1\]: must be 3"):
        HierarchicalOptimizer(shares=[1])
    with pytest.raises(UserError, match=r"optimizer.particles=4 .* allowed: 5 or more"):
        begun(particles=4)
    with pytest.raises(UserError, match="30 dimensions"):
        begun(
            BayesianSearch(sum_to_one=False, max_dimensions=8),
            groups=("global", "per_module"),
            shares=(1, 1),
            particles=5,
        )
    with pytest.raises(UserError, match=r"optimizer.optimizer=gradient: needs gradients"):
        HierarchicalOptimizer(optimizer=GradientDescent())
    with pytest.raises(UserError, match=r"optimizer.optimizer=nsga2: .* a front does not have"):
        HierarchicalOptimizer(optimizer=NSGA2Search())
    with pytest.raises(UserError, match="must be another optimizer"):
        HierarchicalOptimizer(optimizer=HierarchicalOptimizer())


def test_the_pool_knows_the_divisions(tiny_pool: Path) -> None:
    pool = Pool(tiny_pool, space="delta", groups="per_module").open()
    assert isinstance(HierarchicalOptimizer(), SupportsGroupHierarchy)
    search = HierarchicalOptimizer()
    search.set_group_hierarchy(pool.parents, None)
    search.start(len(pool.names), 0, len(pool.groups))
    assert [level.groups for level in search.levels] == [1, 3, len(pool.groups)]
    with pytest.raises(UserError, match=r"set pool.groups=per_module"):
        HierarchicalOptimizer().set_group_hierarchy(Pool(tiny_pool).open().parents, None)
