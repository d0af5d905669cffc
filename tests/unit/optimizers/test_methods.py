"""Beyond the contract: differential evolution, random search, PSO-Merging, MERGEvolve."""

from typing import Any

import numpy as np
import pytest

from swarm.errors import UserError
from swarm.optimizers.de import DifferentialEvolution
from swarm.optimizers.mergevolve import MergeEvolve
from swarm.optimizers.pso_merging import PSOMerging
from swarm.optimizers.random_search import RandomSearch

TARGET = np.array([0.7, -0.4, 0.6])


def bowl(rows: np.ndarray) -> np.ndarray:
    return -((rows[:, :3] - TARGET) ** 2).sum(axis=1)


def begun(optimizer: Any, experts: int = 3, groups: int = 1) -> Any:
    optimizer.start(experts, 0, groups)
    return optimizer


def begun4(optimizer: Any, experts: int = 4) -> Any:
    return begun(optimizer, experts)


def step(optimizer: Any, objective: Any = bowl) -> np.ndarray:
    rows: np.ndarray = optimizer.ask()
    optimizer.tell(np.where(optimizer.evaluate, objective(rows), np.nan))
    return rows


def test_a_challenger_wins_if_it_is_as_good_and_never_if_it_was_lost() -> None:
    evolution = begun4(DifferentialEvolution(particles=6))
    step(evolution, lambda rows: np.zeros(len(rows)))
    before, rows = evolution.members, evolution.ask()
    evolution.tell(np.array([0.0, 1.0, -1.0, np.nan, 0.0, 0.0]))
    wins = [True, True, False, False, True, True]
    np.testing.assert_array_equal(evolution.members, np.where(np.c_[wins], rows, before))
    np.testing.assert_array_equal(evolution.utilities, [0, 1, 0, 0, 0, 0])


def test_a_member_that_was_never_measured_gives_way() -> None:
    evolution = begun4(DifferentialEvolution(particles=6))
    evolution.tell(np.full(6, np.nan))
    rows = step(evolution)
    np.testing.assert_array_equal(evolution.members, rows)


@pytest.mark.parametrize("strategy", ["best", "rand"])
def test_challengers_keep_to_the_sum_and_the_bounds(strategy: str) -> None:
    evolution = begun4(
        DifferentialEvolution(strategy=strategy, low=-0.1, high=1.0, crossover=0.5)  # type: ignore[arg-type]
    )
    for _ in range(30):
        rows = step(evolution, lambda rows: rows[:, 0] - 2 * rows[:, 1])
        np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)
        assert (rows >= -0.1).all() and (rows <= 1.0).all()
    assert rows[:, 1].mean() < -0.05


def test_differential_evolution_needs_four_members() -> None:
    with pytest.raises(UserError, match=r"optimizer.particles=3: .* at least 4"):
        DifferentialEvolution(particles=3)
    assert begun4(DifferentialEvolution(particles=None), experts=2).ask().shape == (4, 2)


def test_random_search_is_uniform_in_the_simplex() -> None:
    rows = begun4(RandomSearch(particles=2000)).ask()
    np.testing.assert_array_equal(rows[:4], np.eye(4))
    assert (rows >= 0).all() and rows[4:].min() < 0.001
    np.testing.assert_allclose(rows[4:].mean(axis=0), 0.25, atol=0.02)


def test_pso_merging_begins_with_the_rows_of_the_pool_and_the_base() -> None:
    np.testing.assert_array_equal(begun(PSOMerging()).ask(), np.vstack([np.eye(3), np.zeros(3)]))
    np.testing.assert_array_equal(begun(PSOMerging(base=False)).ask(), np.eye(3))
    more = begun(PSOMerging(particles=6)).ask()
    np.testing.assert_array_equal(more[:4], np.vstack([np.eye(3), np.zeros(3)]))
    np.testing.assert_allclose(more[4:].sum(axis=1), 1.0)


def test_pso_merging_moves_by_its_equation() -> None:
    swarm = begun(PSOMerging())
    swarm.ask()
    swarm.tell(np.array([0.1, 0.5, 0.3, 0.2]))
    first = swarm.ask()
    assert list(swarm.evaluate) == [True, False, True, True]  # the best has nowhere to go
    start = np.vstack([np.eye(3), np.zeros(3)])
    # Without a velocity each goes towards the best alone, at most twice as far as it is away.
    shares = [(new - old)[1] for new, old in zip(first, start, strict=True)]
    for new, old, share in zip(first, start, shares, strict=True):
        np.testing.assert_allclose(new - old, share * (start[1] - old))
        assert 0 <= share <= 2
    swarm.tell(np.array([0.6, np.nan, 0.0, np.nan]))
    velocity, second = first - start, swarm.ask()
    # Particle 0 is the best and its own best, so that it goes on by inertia alone.
    np.testing.assert_allclose(second[0], first[0] + 0.2 * velocity[0])
    # The best before had no velocity and is its own best, so that it goes towards particle 0.
    moved, towards = second[1] - first[1], first[0] - first[1]
    np.testing.assert_allclose(moved, moved @ towards / (towards @ towards) * towards)


@pytest.mark.parametrize("utilities", [[0.2, 0.5, 0.3], [0.4, 0.4, 0.4], [np.nan, 0.5, 0.3]])
def test_mergevolve_begins_with_a_softmax_of_z_scores(utilities: list[float]) -> None:
    search = begun(MergeEvolve(tau=0.5, samples=2))
    search.ask()
    search.tell(np.array(utilities))
    u = np.array(utilities)
    z = (u - np.nanmean(u)) / (np.nanstd(u) or 1.0)
    weights = np.where(np.isnan(u), 0.0, np.exp(z / 0.5))
    np.testing.assert_allclose(search.ask()[0], weights / weights.sum())


def test_mergevolve_steps_along_the_ranked_noise() -> None:
    search = begun(MergeEvolve(samples=4, sigma=0.2, alpha=0.3))
    step(search)
    rows = search.ask()
    theta, noise = rows[0], (rows[1:] - rows[0]) / 0.2
    assert len(rows) == 5 and 0.2 < noise.std() < 2
    search.tell(np.array([9.0, 0.1, 0.4, np.nan, 0.2]))  # theta's own utility moves nothing
    # log(3 / 2 + 1) - log k of the three ranks, at least 0, normalised, less a third.
    raw = np.maximum(0, np.log(2.5) - np.log([3, 1, 2]))
    weights = raw / raw.sum() - 1 / 3
    wanted = theta + 0.3 / (0.2 * 3) * weights @ noise[[0, 1, 3]]
    np.testing.assert_allclose(search.ask()[0], wanted)


def test_mergevolve_merges_the_first_rows_alone() -> None:
    search = begun(MergeEvolve(merged=2))
    step(search)
    assert search.ask()[0][2] == 0 and search.ask()[0].sum() == pytest.approx(1)
    with pytest.raises(UserError, match=r"optimizer.merged=4: must be at most 3"):
        begun(MergeEvolve(merged=4))
