"""Pools of more adapters than a search mixes, and pools of random twins."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
import tiny
from safetensors.torch import load_file, save_file

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.lora import LoraLinear
from swarm.errors import UserError
from swarm.loop.selection import Selection, spaced_items
from swarm.pool.adapter import WEIGHTS_FILE
from swarm.pool.pool import Pool
from swarm.runs.folder import read_state
from swarm.tasks.multiple_choice import MultipleChoice


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
    """A folder of adapters e000 and on: one expert, ever larger."""
    tiny.pool(base, folder, ["first"])
    weights = load_file(folder / "first" / WEIGHTS_FILE)
    for number in range(count):
        shutil.copytree(folder / "first", made := folder / f"e{number * 7 % count:03d}")
        scale = 0.2 + 3 * number / count
        changed = {k: w * scale if "lora_B" in k else w for k, w in weights.items()}
        save_file(changed, made / WEIGHTS_FILE)
    shutil.rmtree(folder / "first")
    return folder


@pytest.fixture(scope="module")
def twenty(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_adapters(tmp_path_factory.mktemp("twenty") / "pool", tiny_llama, 20)


def selecting(folder: Path, base: Path, pool: Path, name: str = "run", **more: Any) -> list[str]:
    keys = {"optimizer__max_iterations": 1, "test": "false", "noise_floor": "false"}
    keys |= {"optimizer__particles": 8, "pool__most": 5, "ensemble": 0}
    return searches.arguments(folder, base, pool, name, **{**keys, **more})


def test_the_best_of_300_adapters_are_chosen_with_one_in_memory(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = many_adapters(tmp_path / "pool", tiny_llama, 300)
    command = selecting(tmp_path, tiny_llama, pool)
    planned = searches.run([*command, "dry_run=true"]).stdout
    assert "5 of 300 adapters, chosen at the start by dev loss: 3.6 k prompts" in planned
    layers, most, loads = weakref.WeakSet[Any](), [0], [0]
    begin, exchange = LoraLinear.__init__, HFEngine.set_pool

    def count_layer(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        layers.add(self)
        most[0] = max(most[0], len(layers))

    def count_load(self: Any, held: Any) -> None:
        exchange(self, held)
        loads[0] += 1

    monkeypatch.setattr(LoraLinear, "__init__", count_layer)
    monkeypatch.setattr(HFEngine, "set_pool", count_load)
    done = searches.run(command)
    assert done.returncode == 0, done.stderr
    assert loads == [301] and most == [len(Pool(pool).open().modules)]
    assert "5 of 300 adapters chosen by dev loss: best " in done.stdout
    assert "3,600 prompts beside the budget" in done.stdout
    state = read_state(tmp_path / "search" / "run")
    assert state is not None
    values, chosen = state["selection"]["values"], state["selection"]["chosen"]
    assert set(chosen) == set(sorted(values, key=values.get)[:5]) and chosen == state["experts"]
    config = json.loads((tmp_path / "search" / "run" / "config.json").read_text())
    assert config["pool"]["experts"] == chosen
    task = MultipleChoice("tiny", str(tmp_path / "tiny.json"), scoring="logits")
    engine, some = HFEngine(), Pool(pool, [chosen[0], "e100"]).open()
    engine.open(BaseModel(str(tiny_llama)), some, "cpu")
    examples = task.gold_examples(task.items("dev"))
    for row, name in zip(np.eye(2), some.names, strict=True):
        loss = engine.compute_gradient(row, examples, slope=False).loss / 12
        assert loss == pytest.approx(values[name], rel=1e-4)
    again = searches.run(command)
    assert again.returncode == 0 and loads == [302] and "chosen by dev loss" in again.stdout


def test_a_selection_goes_on_where_it_was_killed(
    tiny_llama: Path, twenty: Path, tmp_path: Path
) -> None:
    whole = searches.run(selecting(tmp_path, tiny_llama, twenty, "whole"))
    assert whole.returncode == 0, whole.stderr
    pool = shutil.copytree(twenty, tmp_path / "pool")
    intact = load_file(pool / "e011" / WEIGHTS_FILE)
    save_file({k: w * np.nan for k, w in intact.items()}, pool / "e011" / WEIGHTS_FILE)
    command = selecting(tmp_path, tiny_llama, pool)
    failed = searches.run(command)
    assert failed.returncode == 1 and "e011: " in failed.stderr and "NaN" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    record = tmp_path / "search" / "run" / "rounds.jsonl"
    lines = record.read_bytes().splitlines(True)
    assert len(lines) == 1 + 11
    record.write_bytes(b"".join(lines[:-3]) + lines[-3][:20])
    save_file(intact, pool / "e011" / WEIGHTS_FILE)
    done = searches.run(command)
    assert done.returncode == 0, done.stderr
    states = [read_state(tmp_path / "search" / name) for name in ("whole", "run")]
    assert states[0]["selection"]["values"] == states[1]["selection"]["values"]
    assert states[0]["rounds"] == states[1]["rounds"]
    shutil.copytree(pool / "e000", pool / "e999")
    refused = searches.run(command)
    assert refused.returncode == 1 and "experts to choose from: " in refused.stderr


def test_processes_choose_the_same_experts(tiny_llama: Path, twenty: Path, tmp_path: Path) -> None:
    for name, keys in (("one", {}), ("two", {"executor": "processes", "executor__workers": 2})):
        done = searches.run(selecting(tmp_path, tiny_llama, twenty, name, **keys))
        assert done.returncode == 0, done.stderr
    one, two = (read_state(tmp_path / "search" / name) for name in ("one", "two"))
    assert one["selection"] == two["selection"] and one["rounds"] == two["rounds"]


def test_a_damaged_adapter_of_many_is_named_before_anything_is_written(
    tiny_llama: Path, twenty: Path, tmp_path: Path
) -> None:
    pool = shutil.copytree(twenty, tmp_path / "pool")
    file = pool / "e013" / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-7])
    done = searches.run(selecting(tmp_path, tiny_llama, pool))
    assert done.returncode == 1 and f"{pool / 'e013'}: " in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "search").exists()


def test_without_gold_answers_scores_choose(twenty: Path) -> None:
    pool = Pool(twenty).open()
    values = {name: float(number % 4) for number, name in enumerate(pool.names)}
    found = Selection(pool, 3, spaced_items(range(100)), by_loss=False).choose(values)
    assert found["chosen"] == ["e003", "e007", "e011"] and found["by"] == "score"
    assert (found["items"], found["prompts"], found["cut_off"]) == (40, 800, 3.0)
    with pytest.raises(UserError, match=r"pool.most=1"):
        Pool(twenty, most=1)


def test_what_was_chosen_is_what_descends(tiny_llama: Path, twenty: Path, tmp_path: Path) -> None:
    """In the process that chose, too: its worker has the whole pool until then."""
    descent = "{_target_: swarm.optimizers.gradient.Descent, steps: 3, batch: 2, signal: gold}"
    words = selecting(
        tmp_path,
        tiny_llama,
        twenty,
        pool__space="delta",
        optimizer__descent=descent,
        optimizer__active=1,
    )
    done = searches.run(words)
    assert done.returncode == 0, done.stderr
    rounds = (read_state(tmp_path / "search" / "run") or {})["rounds"]
    assert sum(entry.get("gradients_computed", 0) for entry in rounds)
