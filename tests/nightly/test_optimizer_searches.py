"""A small real search with every optimizer; some of them killed, which ends as if never killed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches

from swarm.runs.folder import read_state

OPTIMIZERS = sorted(path.stem for path in (searches.ROOT / "conf" / "optimizer").glob("*.yaml"))
KILLED = {"bayes", "cmaes", "genome", "nsga2"}
"""The others keep their state as these do; the contract test takes it out and in again for all."""
SEVERAL = {"nsga2"}

DELTA = {"pool__space": "delta", "pool__groups": "per_module"}
NEEDED: dict[str, dict[str, Any]] = {
    name: {"optimizer__constraints": "{A: base}"} for name in SEVERAL
}
"""What has to be given with an optimizer."""

FREE: dict[str, dict[str, Any]] = {
    "nes": {},
    "cmaes": {"optimizer__sum_to_one": "false", "optimizer__separable": "true"},
    "bayes": {"optimizer__sum_to_one": "false", "optimizer__sampler": "tpe"},
    "random": {"optimizer__sum_to_one": "false"},
}
"""Searches of the delta space with coefficients of each adapted module."""
FREE_KILLED = {"nes", "bayes"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_search_and_its_resumption(
    name: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    more = {"optimizer": name, "job__items": 4, **NEEDED.get(name, {})}
    arguments = tmp_path, tiny_llama, tiny_pool
    folder = plain(*arguments, more)
    rounds = read_state(folder)["rounds"]
    # The recipes end with the third and last candidate of the greedy soup.
    assert len(rounds) == (4 if name == "recipes" else 5)
    assert all(len(entry["positions"]) == 6 for entry in rounds)
    positions = np.array(rounds[0]["positions"])[:4]
    np.testing.assert_array_equal(positions, np.tile(np.eye(4), positions.shape[1] // 4))
    assert (folder / "global_best" / "adapter_model.safetensors").is_file()
    if name in KILLED:
        killed(*arguments, more)


@pytest.mark.parametrize("name", FREE)
def test_a_search_with_coefficients_of_each_module(
    name: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    more = {"optimizer": name, "job__items": 4, **DELTA, **FREE[name]}
    folder = plain(tmp_path, tiny_llama, tiny_pool, more)
    state = read_state(folder)
    rows = np.array(state["rounds"][-1]["positions"]).reshape(-1, len(state["groups"]), 4)
    assert rows.shape == (6, 6, 4) and np.ptp(rows, axis=1).max() > 0.001
    sums = np.concatenate([np.array(entry["positions"]) for entry in state["rounds"]]).sum(axis=1)
    assert np.abs(sums / 6 - 1).max() > 0.01
    if name in FREE_KILLED:
        killed(tmp_path, tiny_llama, tiny_pool, more)


def command(tmp_path: Path, base: Path, pool: Path, name: str, more: dict[str, Any]) -> list[str]:
    """Its command line, on two tasks where the optimizer has several objectives."""
    arguments = searches.several if more["optimizer"] in SEVERAL else searches.arguments
    return arguments(tmp_path, base, pool, name, **more)


def plain(tmp_path: Path, base: Path, pool: Path, more: dict[str, Any]) -> Path:
    """The folder of a search that is never interrupted."""
    result = searches.run(command(tmp_path, base, pool, "plain", more))
    assert result.returncode == 0, result.stderr
    return tmp_path / "search" / "plain"


def killed(tmp_path: Path, base: Path, pool: Path, more: dict[str, Any]) -> None:
    """The same search, killed again and again, has the same files in the end."""
    words = command(tmp_path, base, pool, "killed", more)
    folder = tmp_path / "search"
    assert searches.run_killed(words, folder / "killed", few=True) == [1, 1, 3]
    assert searches.differences(folder / "plain", folder / "killed") == []
