"""Weights & Biases: offline runs, read back from what they wrote."""

import contextlib
import hashlib
import json
import logging
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import run_folders
import searches
import tracker_files
import wandb

from swarm.errors import UserError
from swarm.report.analyses import measure_trajectory
from swarm.runs.folder import RunFolder, build_scratchpad, read_state
from swarm.runs.verdict import read_verdict
from swarm.trackers import MultiTracker, SearchTracker, Tracker, WandB
from swarm.trackers.wandb import artifact_names

KEY = "sk-secret-0123456789"
OFFLINE = {"tracker": "wandb", "tracker__mode": "offline"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Iterator[Path]:
    """A finished run that was searched without a tracker and shown later, secrets about it."""
    place: Path = tmp_path_factory.mktemp("shown")
    made = run_folders.folder(place / "run", text=f"my key is {KEY}")
    run_folders.data_file(made, "What", 40)
    for path, data in {
        made / "global_best" / "adapter_model.safetensors": b"best",
        made / "global_best" / "answers_dev.jsonl": b"{}",
        place / "pool" / "logic" / "adapter_model.safetensors": b"logic",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        config = json.loads((made / "config.json").read_text())
        config |= {"pool": {"folder": str(place / "pool")}, "url": "http://me:password@host/v1"}
        tell(made, WandB("offline", group="mine"), config)
        yield made


def tell(folder: Path, tracker: Tracker, config: dict[str, Any]) -> None:
    """Tell a tracker of a finished run."""
    state = read_state(folder)
    followed = SearchTracker(tracker, folder)
    with followed.track_search(state, config):
        followed.log_verdict(read_verdict(state))


@pytest.fixture(scope="module")
def shown(folder: Path) -> tracker_files.Offline:
    return tracker_files.Offline(folder)


def test_an_offline_run_has_an_overview_then_each_particle(
    folder: Path, shown: tracker_files.Offline
) -> None:
    state, run = read_state(folder), RunFolder(folder)
    pad, rows = build_scratchpad(state["rounds"]), shown.history
    assert shown.steps == [*range(5)]
    assert min(name for name in rows[0] if not name.startswith("_")) == "overview/best"
    assert [row["overview/best"] for row in rows] == pad["g_history"]
    alone = run.utility_at(run.best_expert())
    assert {row["overview/strongest_alternative"] for row in rows} == {alone}
    for number, row in enumerate(rows):
        assert row["swarm/worst"] == min(min(e["utilities"]) for e in state["rounds"][: number + 1])
    assert all(rows[4][f"particle/{i}"] == pad[f"particle_{i}_best"] for i in range(6))
    assert np.allclose(
        [row["swarm/diversity"] for row in rows], measure_trajectory(run)["diversity"]
    )
    assert all(row["prompts/saved"] == 0 and row["prompts/scored"] == 180 for row in rows)
    for metric in ("starting_best_validation_utility", "ending_best_single_test_accuracy"):
        assert shown.summary[metric] == read_verdict(state).original_names()[metric]
    assert shown.config["seed"] == 7 and shown.config["task"]["name"] == "made"
    assert (shown.code, shown.run.job_type, shown.run.run_group) == (0, "search", "mine")
    assert (shown.run.display_name, [*shown.run.tags]) == ("run", ["task: made", "seed: 7"])


def test_both_tell_the_same(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    tell(copy, MultiTracker("offline"), {})
    found, offline = tracker_files.events(copy), tracker_files.Offline(copy)
    scalars = found.Tags()["scalars"]
    series = {name for row in offline.history[:5] for name in row if not name.startswith("_")}
    assert set(scalars) == series
    for name in scalars:
        theirs = [row[name] for row in offline.history if name in row]
        assert len(theirs) > 1, "a single point is no series"
        assert np.allclose([event.value for event in found.Scalars(name)], theirs)


def test_the_best_is_an_artifact_that_names_its_experts(
    folder: Path, shown: tracker_files.Offline
) -> None:
    (artifact,) = [one for one in shown.artifacts if one.type == "model"]
    weights = folder / "global_best" / "adapter_model.safetensors"
    (entry,) = artifact.manifest.contents
    assert artifact.name == shown.summary[
        "best_artifact"
    ] == "run-best" and entry.local_path == str(weights)  # and no copy
    facts, run = json.loads(artifact.metadata), RunFolder(folder)
    assert facts["test"] == run.verdict.found.test.utility
    shares = [facts["experts"][name]["coefficient"] for name in run.experts]
    assert shares == run.positions[run.find_best()].tolist()
    expert = facts["experts"]["logic"]
    assert expert["folder"] == str(folder.parent / "pool" / "logic")
    assert expert["sha256"] == hashlib.sha256(b"logic").hexdigest()
    assert facts["experts"]["counting"]["folder"] is None
    (table,) = shown.files.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [
        list(one) for one in zip(run.experts, shares, strict=True)
    ]


def test_what_cannot_be_linked_is_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    with caplog.at_level(logging.WARNING, "swarm"):
        tell(copy, WandB("offline", link="wandb-registry-model/nlgraph"), {})
    assert "not linked to wandb-registry-model/nlgraph (the run is offline" in caplog.text
    again = tracker_files.Offline(copy)
    assert again.code == 0 and [one.name for one in again.artifacts if one.type == "model"]


def test_experts_name_the_artifacts_that_they_were(tmp_path: Path) -> None:
    (tmp_path / "artifacts" / "cot:v3").mkdir(parents=True)
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "cot").symlink_to(tmp_path / "artifacts" / "cot:v3")
    assert artifact_names([tmp_path / "pool" / "cot", tmp_path / "pool"]) == ["cot:v3"]


def test_nothing_is_written_that_was_not_told(folder: Path, shown: tracker_files.Offline) -> None:
    theirs = b"".join(p.read_bytes() for p in folder.glob("wandb/**/*") if p.is_file())
    assert KEY.encode() not in theirs and b"password" not in theirs
    assert [one.name for one in shown.files.iterdir()] == ["media"], "the table"
    assert not shown.run.host and not shown.run.git.remote_url
    (rule,) = shown.metrics
    assert rule.glob_name == "particle/*" and rule.summary.none, "no column of the table of runs"


def test_another_start_writes_the_whole_run_again(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    first = tracker_files.Offline(copy)
    for file in copy.glob("wandb/offline-run-*/*.wandb"):  # a kill, and nobody to write the rest
        file.write_bytes(file.read_bytes()[:900])
    tell(copy, WandB("offline"), {})
    again = tracker_files.Offline(copy)
    assert again.run.run_id == first.run.run_id and again.steps == first.steps
    best = [row.get("overview/best") for row in first.history]
    assert [row.get("overview/best") for row in again.history] == best


def test_an_interrupted_and_a_killed_search_go_on_as_one_run(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    more = {"optimizer__max_iterations": 200, "optimizer__patience": 200, **OFFLINE}
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, **more)
    folder = tmp_path / "search" / "run"
    ids = set()
    for signal_, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        before = _rounds(folder)
        process = searches.start(command)
        while _rounds(folder) < before + 2 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal_)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        ids.add((folder / "wandb" / "id").read_text())
    shown, state = tracker_files.Offline(folder), read_state(folder)
    assert state is not None
    assert shown.code == 130 and ids == {shown.run.run_id}
    assert shown.steps == list(range(len(shown.steps)))
    # What ends between a round's record and its telling is told by the next start.
    assert len(state["rounds"]) - len(shown.steps) in (0, 1)
    best = build_scratchpad(state["rounds"])["g_history"]
    assert [row["overview/best"] for row in shown.history] == best[: len(shown.steps)]
    assert "overview/minutes_left" in shown.history[-1]


def _rounds(folder: Path) -> int:
    return len((read_state(folder) or {"rounds": []})["rounds"])


def test_searches_of_a_sweep_are_one_group(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    more = {"optimizer__max_iterations": 1, "ensemble": 0, "test": "false", **OFFLINE}
    words = searches.arguments(tmp_path, tiny_llama, tiny_pool, noise_floor="false", **more)
    result = searches.run(["-m", "seed=1,2", *words])
    assert result.returncode == 0, result.stderr
    runs = [tracker_files.Offline(tmp_path / "search" / f"run_{number}") for number in (0, 1)]
    assert [one.run.run_group for one in runs] == ["run", "run"]
    assert runs[0].run.run_id != runs[1].run.run_id
    metrics = read_verdict(read_state(tmp_path / "search" / "run_1"))
    name = "ending_best_validation_utility"
    assert runs[1].summary[name] == metrics.dev.utility and runs[1].code == 0
    assert "adapter_model.safetensors" in {e.path for e in runs[1].artifacts[-1].manifest.contents}


def test_a_tracker_that_dies_under_way_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = WandB("offline")
    tracker.start(tmp_path)
    tracker.log(0, {"g": 0.5})
    children = psutil.Process().children(recursive=True)
    killed = 0
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "wandb" in process.name():
                process.kill()
                killed += 1
    with caplog.at_level(logging.WARNING, "swarm"):
        for step in range(1, 50):
            tracker.log(step, {"g": 0.5})
            time.sleep(0.01)
        tracker.finish({"g": 0.5})
    told = [record.message for record in caplog.records if record.name.startswith("swarm")]
    with contextlib.suppress(ConnectionError):  # what comes after has a service of its own
        wandb.teardown()
    assert killed and len(told) == 1 and told[0].startswith("WandB shows no more of this run")


def test_one_of_both_that_cannot_begin_ends_the_other(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write .*tensorboard"):
        MultiTracker("offline").start(tmp_path)
    assert tracker_files.Offline(tmp_path).code == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "wandb").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write .*wandb"):
        MultiTracker("offline").start(tmp_path / "other")
