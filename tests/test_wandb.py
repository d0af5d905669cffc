"""An offline run of Weights & Biases, read back from what it wrote."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import searches

BLOCK = 32768


def records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a log in LevelDB's format after a header of seven bytes."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        room = BLOCK - place % BLOCK
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_back(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """History, summary and configuration of the offline runs in a folder, the oldest first."""
    from wandb.proto import wandb_internal_pb2

    history: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                history.append({name(i): json.loads(i.value_json) for i in record.history.item})
            elif kind == "summary":
                summary |= {name(i): json.loads(i.value_json) for i in record.summary.update}
            elif kind == "run":
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
    return history, summary, config


def name(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def test_an_offline_run_has_the_originals_series(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, wandb="offline")
    result = searches.run(command)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "search" / "run"
    history, summary, config = read_back(folder)
    state = json.loads((folder / "state.json").read_text())
    pad = json.loads((folder / "utility_scratchpad.json").read_text())
    assert [row["g"] for row in history] == pad["g_history"]
    for number, entry in enumerate(state["rounds"]):
        assert history[number]["_step"] == number
        assert [history[number][f"particle_{i}_now"] for i in range(6)] == entry["utilities"]
    assert history[-1]["g_worst"] == pad["g_worst"]
    for metric in ("starting_best_validation_utility", "ending_best_single_test_accuracy"):
        assert summary[metric] == state["metrics"][metric]
    assert config["seed"] == 42 and config["optimizer"]["particles"] == 6


def test_disabled_writes_nothing(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, optimizer__max_iterations=1)
    assert searches.run(command).returncode == 0
    assert not (tmp_path / "search" / "run" / "wandb").exists()
