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

NEEDED: dict[str, dict[str, Any]] = {
    name: {"optimizer__constraints": "{A: base}"} for name in SEVERAL
}
"""What has to be given with an optimizer."""


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
