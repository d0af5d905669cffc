"""Pools of more adapters than a search mixes, and pools of random twins."""

import json
from pathlib import Path

import searches


def test_a_search_of_random_twins_is_a_control(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, optimizer__max_iterations=1)
    done = searches.run([*command, "pool.control=random"])
    assert done.returncode == 0, done.stderr
    assert "a control: random twins of the experts" in done.stdout
    assert "Control with random twins of the experts, " in done.stdout
    folder = tmp_path / "search" / "run"
    assert json.loads((folder / "global_best" / "swarm.json").read_text())["control"] == "random"
    refused = searches.run(command)
    assert refused.returncode == 1
    assert "pool.control: 'random' then, None now" in refused.stderr
