"""The asynchronous swarm, differential evolution, random search and Bayesian optimization."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import searches

from swarm.errors import UserError
from swarm.optimizers.bayes import BayesianSearch
from swarm.optimizers.de import DifferentialEvolution
from swarm.optimizers.random_search import RandomSearch

TARGET = np.array([0.5, 0.3, 0.2, 0.0])


def bowl(rows: np.ndarray) -> np.ndarray:
    return -((rows - TARGET) ** 2).sum(axis=1)


def step(optimizer, objective=bowl) -> np.ndarray:
    rows = optimizer.ask()
    optimizer.tell(np.where(optimizer.evaluate, objective(rows), np.nan))
    return rows


def begun(optimizer, experts: int = 4, seed: int = 0):
    optimizer.start(experts, seed)
    return optimizer


def test_a_challenger_wins_if_it_is_as_good_and_never_if_it_was_lost() -> None:
    evolution = begun(DifferentialEvolution(particles=6))
    step(evolution, lambda rows: np.zeros(len(rows)))
    before, rows = evolution.members, evolution.ask()
    evolution.tell(np.array([0.0, 1.0, -1.0, np.nan, 0.0, 0.0]))
    wins = [True, True, False, False, True, True]
    np.testing.assert_array_equal(evolution.members, np.where(np.c_[wins], rows, before))
    np.testing.assert_array_equal(evolution.utilities, [0, 1, 0, 0, 0, 0])


def test_a_member_that_was_never_measured_gives_way() -> None:
    evolution = begun(DifferentialEvolution(particles=6))
    evolution.tell(np.full(6, np.nan))
    rows = step(evolution)
    np.testing.assert_array_equal(evolution.members, rows)


@pytest.mark.parametrize("strategy", ["best", "rand"])
def test_challengers_keep_to_the_sum_and_the_bounds(strategy: str) -> None:
    evolution = begun(
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
    assert begun(DifferentialEvolution(particles=None), experts=2).ask().shape == (4, 2)
    with pytest.raises(UserError, match=r"optimizer.lowest_weight=2"):
        DifferentialEvolution(lowest_weight=2.0)


def test_random_search_reaches_as_far_as_it_is_told() -> None:
    simplex = begun(RandomSearch(particles=2000))
    rows = simplex.ask()[4:]
    assert (rows >= 0).all() and rows.min() < 0.001
    np.testing.assert_allclose(rows.mean(axis=0), 0.25, atol=0.02)
    wider = begun(RandomSearch(particles=2000, reach=2.0)).ask()
    np.testing.assert_allclose(wider[4:], 0.25 + 2 * (rows - 0.25))
    np.testing.assert_array_equal(wider[:4], np.eye(4))
    few = begun(RandomSearch(particles=2000, concentration=0.1)).ask()[4:]
    assert few.max(axis=1).mean() > rows.max(axis=1).mean() + 0.2


def test_bayes_learns_and_asks_in_turn() -> None:
    search = begun(BayesianSearch(sampler="tpe", particles=6, batch=4, max_iterations=30))
    best, first = [], None
    for turn in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [0, 1, 4, 5], [2, 3, 4, 5]):
        best.append(bowl(step(search)).max())
        assert list(np.flatnonzero(search.evaluate)) == turn
    while search.stop_reason() is None:
        rows = step(search)
        first = bowl(rows[search.evaluate]).mean() if first is None else first
    assert bowl(rows[search.evaluate]).mean() > first
    assert len(search.rows) == 6 + 30 * 4


def test_the_gaussian_process_finds_a_bowl_in_forty_scores() -> None:
    search = begun(BayesianSearch(max_iterations=7))
    while search.stop_reason() is None:
        step(search)
    assert search.utilities.max() > bowl(np.eye(4)).max() / 50


@pytest.mark.parametrize("utility", [np.nan, 0.0, 1.0])
def test_the_gaussian_process_bears_that_nothing_differs(utility: float) -> None:
    search = begun(BayesianSearch(max_iterations=3), experts=2)
    while search.stop_reason() is None:
        assert np.isfinite(step(search, lambda rows: np.full(len(rows), utility))).all()


def test_no_package_is_imported_before_it_is_used() -> None:
    modules = sorted((searches.ROOT / "swarm" / "optimizers").glob("[a-z]*.py"))
    names = ", ".join(f"swarm.optimizers.{path.stem}" for path in modules)
    heavy = {"cmaes", "optuna", "pymoo", "scipy", "torch"}
    code = f"import sys, {names}; print({heavy} & {{*sys.modules}})"
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=searches.ROOT,
        capture_output=True,
        text=True,
        env=searches.environment(),
        check=True,
    )
    assert out.stdout.strip() == "set()"


def test_without_the_package_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    hidden = lambda name: None if name == "greenlet" else real(name)  # noqa: E731
    monkeypatch.setattr("swarm.optimizers.bayes.find_spec", hidden)
    with pytest.raises(UserError, match=r"needs the package greenlet: pip install .*\[bayes\]"):
        begun(BayesianSearch())
    assert len(begun(BayesianSearch(sampler="tpe")).ask()) == 4
