"""A small real search with every optimizer; some of them killed, which ends as if never killed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import searches

OPTIMIZERS = sorted(path.stem for path in (searches.ROOT / "conf" / "optimizer").glob("*.yaml"))
KILLED = {"bayes", "cmaes", "evogm", "genome", "mergevolve", "pso_async", "pso_merging"}
"""The others keep their state as these do; the contract test takes it out and in again for all."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_search_and_its_resumption(
    name: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    more = {"optimizer": name, "job__items": 4}
    plain = searches.arguments(tmp_path, tiny_llama, tiny_pool, "plain", **more)
    result = searches.run(plain)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "search" / "plain"
    rounds = json.loads((folder / "state.json").read_text())["rounds"]
    # The recipes end with the third and last candidate of the greedy soup.
    assert len(rounds) == (4 if name == "recipes" else 5)
    assert all(len(entry["positions"]) == 6 for entry in rounds)
    np.testing.assert_array_equal(np.array(rounds[0]["positions"])[:4], np.eye(4))
    assert (folder / "global_best" / "adapter_model.safetensors").is_file()
    if name not in KILLED:
        return
    killed = searches.arguments(tmp_path, tiny_llama, tiny_pool, "killed", **more)
    lab = [sys.executable, "tests/kills.py", str(tmp_path / "search" / "killed"), *killed]
    result = subprocess.run(lab, cwd=searches.ROOT, env=searches.environment(), text=True,
                            capture_output=True, timeout=300)  # fmt: skip
    assert result.returncode == 0, result.stderr
    kills = json.loads(result.stdout.splitlines()[-1])
    assert any(0 < count < 5 for count in kills), kills
    first, second = searches.tree(folder), searches.tree(tmp_path / "search" / "killed")
    assert first.keys() == second.keys()
    assert [file for file in first if first[file] != second[file]] == []
