"""Importance of experts: total Sobol' indices of known functions."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import run_folders

from swarm.report.analyses import expert_importance
from swarm.runs.folder import RunFolder

KNOWN: dict[str, tuple[Callable[[np.ndarray], np.ndarray], list[float]]] = {
    # Additive in uniform inputs: each share is its squared slope over their sum.
    "linear": (lambda x: x[:, 0] + 2 * x[:, 1], [1 / 5, 4 / 5, 0, 0]),
    # x0 x1 on [-1, 1]: all variance is the interaction, so both have the index 1.
    "product": (lambda x: x[:, 0] * x[:, 1], [1, 1, 0, 0]),
    # Var(x0) = 1/3, Var(x2^2) = 4/45.
    "quadratic": (lambda x: x[:, 0] + x[:, 2] ** 2, [15 / 19, 0, 4 / 19, 0]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_indices_of_known_functions(name: str) -> None:
    function, expected = KNOWN[name]
    x = np.random.default_rng(3).uniform(-1, 1, (200, 4))
    surrogate = expert_importance.fit_surrogate(x, function(x))
    found = expert_importance.total_sobol_indices(surrogate, x, [np.array([k]) for k in range(4)])
    assert surrogate.r2 > 0.98
    assert found == pytest.approx(expected, abs=0.06)


def test_blocks_are_one_input() -> None:
    x = np.random.default_rng(3).uniform(-1, 1, (150, 4))
    surrogate = expert_importance.fit_surrogate(x, x[:, 0] + x[:, 1] + 2 * x[:, 2])
    blocks = [np.array([0, 1]), np.array([2, 3])]
    found = expert_importance.total_sobol_indices(surrogate, x, blocks)
    assert found == pytest.approx([2 / 6, 4 / 6], abs=0.06)


def test_noise_is_not_explained() -> None:
    draw = np.random.default_rng(5)
    x = draw.uniform(-1, 1, (80, 4))
    assert expert_importance.fit_surrogate(x, draw.normal(size=80)).r2 < 0.1


def test_a_run_is_measured_and_small_runs_are_not(tmp_path: Path) -> None:
    # Ten positions of two groups; the utility rises with the first expert only.
    run = RunFolder(run_folders.folder(tmp_path / "run", particles=12, groups=("low", "high")))
    target = run.positions.reshape(*run.positions.shape[:2], 2, 4)[..., 2].sum(axis=2)
    run.utilities[:] = target
    found = expert_importance.measure_importance(run)
    assert found is not None and found.reliable and found.positions > 12
    assert found.experts[0] == run.experts[2] and found.shares[0] > 0.8
    assert expert_importance.measure_importance(run) == found  # the same draws each time
    assert not dataclasses.replace(found, positions=29).reliable
    assert not dataclasses.replace(found, r2=0.19).reliable
    run.utilities[:] = 0.5
    assert expert_importance.measure_importance(run) is None
    small = RunFolder(run_folders.folder(tmp_path / "small", particles=4, iterations=1))
    assert expert_importance.measure_importance(small) is None


def test_many_groups_take_less_than_seconds() -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(300, 10 * 100))
    began = time.process_time()
    surrogate = expert_importance.fit_surrogate(x, x[:, :100].sum(axis=1))
    blocks = list(np.arange(1000).reshape(10, 100))
    expert_importance.total_sobol_indices(surrogate, x, blocks)
    assert time.process_time() - began < 20
