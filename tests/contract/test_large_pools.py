"""Pools of more adapters than a search mixes, and pools of random twins."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import searches
import tiny
from safetensors.torch import load_file, save_file

from swarm.pool.adapter import WEIGHTS_FILE


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


def many_adapters(folder: Path, base: Path, count: int) -> Path:
    """A folder of copies of one expert with small differences; every 40th is far stronger."""
    tiny.pool(base, folder, ["first"])
    weights = load_file(folder / "first" / WEIGHTS_FILE)
    for number in range(count):
        shutil.copytree(folder / "first", made := folder / f"e{number:03d}")
        scale = 1 + number / count if number % 40 else 30.0
        changed = {k: w * (scale if "lora_B" in k else 1) for k, w in weights.items()}
        save_file(changed, made / WEIGHTS_FILE)
    shutil.rmtree(folder / "first")
    return folder


@pytest.fixture(scope="module")
def large_pool(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_adapters(tmp_path_factory.mktemp("large") / "pool", tiny_llama, 300)


def selecting(folder: Path, base: Path, pool: Path, **more: Any) -> list[str]:
    keys = {"optimizer__max_iterations": 1, "test": "false", "noise_floor": "false"}
    keys |= {"optimizer__particles": 10, "pool__most": 10, "ensemble": 0}
    return searches.arguments(folder, base, pool, **{**keys, **more})
