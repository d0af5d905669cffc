"""CMA-ES and LoraHub: generations, losses, restarts, bounds, and what the search begins with."""

import itertools

import numpy as np
import pytest

from swarm.optimizers.base import CoefficientBounds
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.lorahub import LoraHub
from swarm.optimizers.random_streams import sample_mixtures


def begun(kind: type[CMAES] = CMAES, **options: object) -> CMAES:
    search = kind(**options)  # type: ignore[arg-type]
    search.start(5, 0)
    return search


def test_the_experts_are_as_typical_as_draws_of_the_first_distribution() -> None:
    search = begun(particles=200)
    rows = search.ask()
    away = np.linalg.norm(rows - 0.2, axis=1)
    np.testing.assert_allclose(away[:5], np.sqrt(0.8))
    assert 0.9 < np.sqrt((away[5:] ** 2).mean()) / np.sqrt(0.8) < 1.1
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)


def test_what_was_lost_is_drawn_again_before_the_next_generation() -> None:
    search = begun(particles=8)
    lost = np.zeros(8)
    lost[[1, 4, 7]] = np.nan
    search.tell(lost)
    assert search.ask().shape == (8, 5) and search.evaluate.sum() == 3
    search.tell(np.where(search.evaluate, 1.0, np.nan))
    search.ask()
    assert search.evaluate.all()


def test_what_was_not_asked_teaches_nothing() -> None:
    search = begun(particles=8)
    search.tell(np.array([np.nan, *range(7)]))
    search.ask()
    search.tell(np.arange(8.0))
    assert len(search.rows) == 8


def test_a_restart_doubles_the_generation_elsewhere() -> None:
    search = begun(particles=6, max_iterations=400)
    target = np.full(5, 0.2)
    sizes, spent = [], 0
    while search.stop_reason() is None:
        rows = search.ask()
        assert search.evaluate.sum() <= 6
        spent += search.evaluate.sum()
        search.tell(np.where(search.evaluate, -((rows - target) ** 2).sum(axis=1), np.nan))
        sizes.append(search._cma.population_size)
    assert [size for size, _ in itertools.groupby(sizes)][:2] == [6, 12]
    assert spent == len(search.rows)
    resumed = CMAES(particles=6, max_iterations=400)
    resumed.load_state_dict(search.state_dict())
    assert resumed._cma.population_size == sizes[-1]


@pytest.mark.parametrize("sum_to_one", [True, False])
def test_positions_keep_to_the_bounds(sum_to_one: bool) -> None:
    """The best lies far outside; many draws do, too."""
    search = begun(low=-0.1, high=1.0, sum_to_one=sum_to_one, particles=8)
    for _ in range(30):
        rows = search.ask()
        assert (rows >= -0.1).all() and (rows <= 1.0).all()
        if sum_to_one:
            np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)
        search.tell(rows[:, 0] - 3 * rows[:, 1])
    np.testing.assert_allclose(rows[:, 1].mean(), -0.1, atol=0.05)


def test_only_ranks_count() -> None:
    one, other = begun(), begun()
    for _ in range(12):
        rows = one.ask()
        np.testing.assert_array_equal(rows, other.ask())
        utility = -((rows - [0.6, 0.1, 0.2, 0.3, -0.2]) ** 2).sum(axis=1)
        one.tell(utility)
        other.tell(np.exp(5 * utility) - 7)


def test_lorahub_begins_at_zero_and_does_not_learn_from_the_experts() -> None:
    search = begun(LoraHub)
    rows = search.ask()
    np.testing.assert_array_equal(rows[:5], np.eye(5))
    np.testing.assert_array_equal(rows[5], np.zeros(5))
    search.tell(np.arange(float(len(rows))))
    np.testing.assert_array_equal(search.rows, rows[5:])
    assert abs(rows[6:].sum(axis=1) - 1).min() > 1e-6  # free of any sum


def test_lorahub_pays_for_large_coefficients() -> None:
    """Where nothing else differs, it comes to the zero vector; free of charge it does not."""

    def size(l1: float) -> float:
        search = begun(LoraHub, l1=l1)
        while search.stop_reason() is None:
            search.ask()
            search.tell(np.where(search.evaluate, 0.5, np.nan))
        return float(np.abs(search.ask()).mean())

    assert size(0.05) < 0.01 < size(0.0)


def test_the_nearest_position_is_the_nearest() -> None:
    random = np.random.default_rng(0)
    region = CoefficientBounds(4, -0.2, 1.0)
    inside = region.project(random.normal(size=(3000, 4)))
    np.testing.assert_allclose(inside.sum(axis=1), 1.0, atol=1e-12)
    assert (inside >= -0.2).all() and (inside <= 1.0).all()
    np.testing.assert_allclose(region.project(inside), inside, atol=1e-12)
    for row in random.normal(size=(20, 4)):
        nearest = region.project(row[None])[0]
        assert ((row - nearest) ** 2).sum() <= ((row - inside) ** 2).sum(axis=1).min() + 1e-12


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sum_to_one", [True, False])
def test_coordinates_keep_distances(sum_to_one: bool, groups: int) -> None:
    region = CoefficientBounds(4, -1, 2, sum_to_one, groups)
    rows = sample_mixtures(np.random.default_rng(0), 6, 4, groups)
    there = region.to_coordinates(rows)
    assert there.shape == (6, groups * (4 - sum_to_one))
    np.testing.assert_allclose(region.to_positions(there), rows, atol=1e-15)
    np.testing.assert_allclose(
        np.linalg.norm(there[0] - there[1]), np.linalg.norm(rows[0] - rows[1])
    )
