"""python -m swarm.evaluate, as a user calls it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import searches
import small_evaluations

from swarm.engine.base_model import choose_device
from swarm.errors import UserError
from swarm.evaluation.evaluation import format_result


def called(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "swarm.evaluate", *arguments],
        cwd=searches.ROOT,
        env=searches.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def given(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> list[str]:
    return [
        *small_evaluations.keys(tmp_path, tiny_llama, tiny_pool)[:-1],
        f"out={tmp_path / 'out'}",
    ]


def test_it_prints_and_writes_and_shows_again(given: list[str], tmp_path: Path) -> None:
    arguments = [*given, "candidate=expert", "candidate.names=[cedar,amber]"]
    first = called(arguments)
    assert first.returncode == 0, first.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").open()]
    assert [voice["name"] for voice in result["voices"]] == ["cedar", "amber"]
    assert [(row["voice"], row["id"]) for row in rows[:1] + rows[-1:]] == [
        ("cedar", 100),
        ("amber", 115),
    ]
    for voice in result["voices"]:
        mine = [row["value"] for row in rows if row["voice"] == voice["name"]]
        assert voice["utility"] == sum(mine) / 16
    assert "mmlu, test, 16 items" in first.stdout and "95 % interval" in first.stdout
    assert f"{result['prompts']} prompts" in first.stdout and result["prompts"] == 32
    again = small_evaluations.evaluated(arguments)
    assert again == result and format_result(again) in first.stdout
    with pytest.raises(UserError, match="candidate, weights differ"):
        small_evaluations.evaluated([*given, "candidate=base"])


def test_an_evaluation_of_other_weights_is_another(
    given: list[str], tmp_path: Path, tiny_pool: Path
) -> None:
    adapter = shutil.copytree(tiny_pool / "amber", tmp_path / "adapter")
    keys = [*given, "candidate=adapter", f"candidate.folder={adapter}"]
    first = small_evaluations.evaluated(keys)
    assert small_evaluations.evaluated(keys) == first
    shutil.copy(tiny_pool / "birch" / "adapter_model.safetensors", adapter)
    with pytest.raises(UserError, match="weights differ"):
        small_evaluations.evaluated(keys)


WRONG = [
    (["task=chess"], 2, ["task=chess", "nlgraph"]),
    (["split=train"], 1, ["split=train", "dev or test"]),
    (["device=gpu"], 1, ["device=gpu", "cuda:1"]),
    (["candidate=run"], 1, ["candidate.folder"]),
]


@pytest.mark.parametrize(("change", "code", "words"), WRONG, ids=lambda v: str(v)[:40])
def test_a_mistake_is_one_line_and_leaves_nothing(
    change: list[str], code: int, words: list[str], given: list[str], tmp_path: Path
) -> None:
    result = called([*given, *change])
    lines = result.stderr.strip().splitlines()
    assert (result.returncode, len(lines)) == (code, 1), result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_device_is_one_that_is_there() -> None:
    import torch

    assert choose_device("cpu") == "cpu"
    if not torch.cuda.is_available():
        assert choose_device(None) == "cpu"
        with pytest.raises(UserError, match="no such GPU"):
            choose_device("cuda:1")
