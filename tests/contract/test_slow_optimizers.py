"""Optimizers that take long, and the record of each one's state."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
import test_optimizers as contract

from swarm._util.files import encode_json
from swarm.errors import UserError
from swarm.optimizers.bayes import BayesianSearch
from swarm.runs.folder import apply_difference, difference

SLOW = {file.stem: file for file in contract.FILES if contract.claims(file).slow}


@pytest.mark.parametrize("name", SLOW)
def test_the_slow_keep_the_contract(name: str) -> None:
    contract.test_comes_near_the_optimum_of_a_bowl(SLOW[name])
    contract.test_groups_find_mixtures_of_their_own(SLOW[name])
    contract.go_on(SLOW[name], quick=False)  # the quick options are another method


@pytest.mark.parametrize("file", contract.FILES, ids=lambda file: file.stem)
def test_every_optimizers_state_is_in_its_differences(file: Path) -> None:
    """Exactly, signs of zero too; and a difference is no longer in late rounds."""
    optimizer = contract.begun(file, experts=4)
    kept: dict[str, Any] = {}
    sizes = []
    while len(sizes) < 24 and not optimizer.stop_reason():
        rows = optimizer.ask()
        found = np.where(optimizer.evaluate, -((rows - 0.2) ** 2).sum(axis=1), np.nan)
        parts = np.stack([found, -(rows[:, 0] ** 2)], axis=1)
        optimizer.tell(found, objectives=parts)
        line = encode_json(difference(kept, optimizer.state_dict()))
        apply_difference(kept, json.loads(line))
        exact = (json.dumps(one, sort_keys=True) for one in (kept, optimizer.state_dict()))
        assert len(set(exact)) == 1
        sizes.append(len(line))
    assert len(sizes) < 24 or max(sizes[-3:]) < 1.5 * max(sizes[:12]), sizes


TARGET = np.array([0.5, 0.3, 0.2, 0.0])


def bowl(rows: np.ndarray) -> np.ndarray:
    return -((rows - TARGET) ** 2).sum(axis=1)


def step(optimizer: Any, objective: Any = bowl) -> np.ndarray:
    rows: np.ndarray = optimizer.ask()
    optimizer.tell(np.where(optimizer.evaluate, objective(rows), np.nan))
    return rows


def begun(optimizer: Any, experts: int = 4, seed: int = 0) -> Any:
    optimizer.start(experts, seed)
    return optimizer


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
