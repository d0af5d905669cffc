"""Beyond the contract: what each method other than the swarm promises itself."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from swarm.optimizers.base import CoefficientBounds, rank_weights
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.genome import Genome
from swarm.optimizers.lorahub import LoraHub
from swarm.optimizers.random_search import RandomSearch
from swarm.optimizers.random_streams import sample_mixtures


def begun(kind: Any, experts: int = 4, groups: int = 1, **options: Any) -> Any:
    optimizer = kind(**options)
    optimizer.start(experts, 0, groups)
    return optimizer


def bowl_at(*target: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: -((rows[:, : len(target)] - target) ** 2).sum(axis=1)


def step(optimizer: Any, objective: Callable[[np.ndarray], Any]) -> np.ndarray:
    rows: np.ndarray = optimizer.ask()
    optimizer.tell(np.where(optimizer.evaluate, objective(rows), np.nan))
    return rows


NEAR = bowl_at(0.5, 0.3, 0.2, 0.0)


@pytest.mark.parametrize("sum_to_one", [True, False])
def test_positions_keep_to_the_sum_and_the_bounds(sum_to_one: bool) -> None:
    """The best lies far outside."""
    search = begun(CMAES, low=-0.1, high=1.0, particles=8, sum_to_one=sum_to_one)
    for _ in range(30):
        rows = step(search, lambda rows: rows[:, 0] - 3 * rows[:, 1])
        if sum_to_one:
            np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)
        assert (rows >= -0.1).all() and (rows <= 1.0).all()
    assert rows[:, 1].mean() < -0.05


def test_random_search_is_uniform_in_the_simplex() -> None:
    rows = begun(RandomSearch, particles=2000).ask()
    np.testing.assert_array_equal(rows[:4], np.eye(4))
    assert (rows >= 0).all() and rows[4:].min() < 0.001
    np.testing.assert_allclose(rows[4:].mean(axis=0), 0.25, atol=0.02)


# CMA-ES and LoraHub


def test_the_experts_are_as_typical_as_draws_of_the_first_distribution() -> None:
    rows = begun(CMAES, 5, particles=200).ask()
    away = np.linalg.norm(rows - 0.2, axis=1)
    np.testing.assert_allclose(away[:5], np.sqrt(0.8))
    assert 0.9 < np.sqrt((away[5:] ** 2).mean()) / np.sqrt(0.8) < 1.1
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)


def test_what_was_lost_is_drawn_again_before_the_next_generation() -> None:
    search = begun(CMAES, 5, particles=8)
    lost = np.zeros(8)
    lost[[1, 4, 7]] = np.nan
    search.tell(lost)
    assert search.ask().shape == (8, 5) and search.evaluate.sum() == 3
    search.tell(np.arange(8.0))  # what was not asked teaches nothing
    assert len(search.rows) == 8
    search.ask()
    assert search.evaluate.all()


def test_a_restart_doubles_the_generation_elsewhere() -> None:
    search = begun(CMAES, 5, particles=6, max_iterations=400)
    sizes, spent = [], 0
    while search.stop_reason() is None:
        step(search, bowl_at(*[0.2] * 5))
        assert search.evaluate.sum() <= 6
        spent += search.evaluate.sum()
        sizes.append(search._cma.population_size)
    assert [size for size, _ in itertools.groupby(sizes)][:2] == [6, 12]
    assert spent == len(search.rows)
    resumed = CMAES(particles=6, max_iterations=400)
    resumed.load_state_dict(search.state_dict())
    assert resumed._cma.population_size == sizes[-1]


@pytest.mark.parametrize("scale", [lambda u: np.exp(8 * u), lambda u: u - 100])
@pytest.mark.parametrize("kind", [CMAES, Genome])
def test_only_ranks_count(kind: Any, scale: Callable[[np.ndarray], np.ndarray]) -> None:
    """Negative utilities too: they are no chances of a roulette."""
    one, other = begun(kind, particles=12), begun(kind, particles=12)
    for _ in range(15):
        np.testing.assert_array_equal(one.ask(), other.ask())
        step(one, NEAR)
        step(other, lambda rows: scale(NEAR(rows)))


def test_lorahub_begins_at_zero_does_not_learn_from_the_experts_and_pays_for_size() -> None:
    search = begun(LoraHub, 5)
    rows = step(search, lambda rows: np.arange(float(len(rows))))
    np.testing.assert_array_equal(rows[:6], np.vstack([np.eye(5), np.zeros(5)]))
    np.testing.assert_array_equal(search.rows, rows[5:])
    assert abs(rows[6:].sum(axis=1) - 1).min() > 1e-6  # free of any sum

    def size(l1: float) -> float:
        search = begun(LoraHub, 5, l1=l1)
        while search.stop_reason() is None:
            step(search, lambda rows: 0.5)
        return float(np.abs(search.ask()).mean())

    assert size(0.05) < 0.01 < size(0.0)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sum_to_one", [True, False])
def test_coordinates_keep_distances_and_projections_are_the_nearest(
    sum_to_one: bool, groups: int
) -> None:
    draw = np.random.default_rng(0)
    region = CoefficientBounds(4, -1, 2, sum_to_one, groups)
    rows = sample_mixtures(draw, 6, 4, groups)
    there = region.to_coordinates(rows)
    assert there.shape == (6, groups * (4 - sum_to_one))
    np.testing.assert_allclose(region.to_positions(there), rows, atol=1e-15)
    np.testing.assert_allclose(
        np.linalg.norm(there[0] - there[1]), np.linalg.norm(rows[0] - rows[1])
    )
    region = CoefficientBounds(4, -0.2, 1.0, sum_to_one)
    inside = region.project(draw.normal(size=(3000, 4)))
    assert not sum_to_one or np.allclose(inside.sum(axis=1), 1.0, atol=1e-12)
    assert (inside >= -0.2).all() and (inside <= 1.0).all()
    np.testing.assert_allclose(region.project(inside), inside, atol=1e-12)
    for row in draw.normal(size=(20, 4)):
        nearest = region.project(row[None])[0]
        assert ((row - nearest) ** 2).sum() <= ((row - inside) ** 2).sum(axis=1).min() + 1e-12


# GENOME


def test_the_elite_stays_the_best_is_never_lost_and_scores_are_of_where_members_are() -> None:
    genome, best = begun(Genome, particles=12), -np.inf
    for _ in range(40):
        rows = step(genome, NEAR)
        best = max(best, NEAR(rows[genome.evaluate]).max())
        assert genome.utilities.max() == best
        np.testing.assert_array_equal(genome.extremes[0], genome.members[genome.utilities.argmax()])
        np.testing.assert_allclose(genome.utilities, NEAR(genome.members), atol=1e-15)
        np.testing.assert_allclose(genome.own_utilities, NEAR(genome.own_positions), atol=1e-15)
        assert (genome.own_utilities >= genome.utilities).all()


def test_asks_are_succession_and_offspring_by_turns() -> None:
    genome = begun(Genome, particles=12, crossover=1.0, mutation=0.0, elite=0.25)
    step(genome, NEAR)
    before = genome.members
    rows = genome.ask()
    moved = (rows != before).any(axis=1)
    assert (genome.evaluate == moved).all() and moved.sum() == 9  # all but 3 of 12
    step(genome, NEAR)
    rows = genome.ask()
    assert genome.evaluate.sum() == 6  # a child of each pair
    for child in rows[genome.evaluate]:
        assert any(
            np.allclose(child, t * a + (1 - t) * b)
            for a in genome.members
            for b in genome.members
            for t in [((child - b) @ (a - b)) / max(((a - b) ** 2).sum(), 1e-30)]
            if -1e-9 <= t <= 1 + 1e-9
        )


def test_mutants_differ_and_stay_among_the_sums_to_one() -> None:
    mutants = {"crossover": 0.0, "mutation": 1.0, "gene": 0.0, "succession": False}
    genome = begun(Genome, particles=12, **mutants)
    step(genome, NEAR)
    rows = genome.ask()
    changes = rows - genome.members
    assert genome.evaluate.all() and (np.abs(changes).max(axis=1) > 0).all()
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)
    # One gene changes, and what keeps the sum is shared by all.
    assert all(len(np.unique(np.round(change, 12))) == 2 for change in changes)


def test_utilities_by_rank() -> None:
    # ln 3 - ln 1 and ln 3 - ln 2, divided by their sum, less a quarter.
    first, second = np.log(3), np.log(1.5)
    wanted = np.array([first, 0.0, second, 0.0]) / (first + second) - 0.25
    np.testing.assert_allclose(rank_weights(np.array([3.0, 1.0, 2.0, 0.0])), wanted, atol=1e-15)
    tied = rank_weights(np.array([1.0, 1.0, 0.0, 0.0]))
    np.testing.assert_allclose(tied, [0.25, 0.25, -0.25, -0.25])
    np.testing.assert_allclose(rank_weights(np.ones(5)), 0, atol=1e-15)
