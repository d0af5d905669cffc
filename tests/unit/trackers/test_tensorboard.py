"""Trackers: what is logged of a run, and TensorBoard's event files, read back by its own reader."""

import logging
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders
import tracker_files

from swarm.errors import UserError
from swarm.runs.folder import RunFolder, read_state
from swarm.runs.verdict import read_verdict
from swarm.trackers import SearchTracker, TensorBoard, Tracker, WandB


def log_run(folder: Path, tracker: Tracker) -> None:
    """Log a finished run."""
    state = read_state(folder)
    logged = SearchTracker(tracker, folder)
    with logged.track_search(state, {"seed": 7, "api_key": "sk-secret"}):
        logged.log_verdict(read_verdict(state))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A finished run of a mixture."""
    made = run_folders.folder(tmp_path_factory.mktemp("shown") / "run", parts=("roads", "sums"))
    (made / "global_best").mkdir()
    log_run(made, TensorBoard())
    return made


def test_the_series_are_those_of_the_run(folder: Path) -> None:
    found, run = tracker_files.events(folder), RunFolder(folder)
    best = found.Scalars("overview/best")
    assert [event.step for event in best] == list(range(5))
    assert np.allclose([event.value for event in best], run.best_so_far())
    for i in range(run.particles):
        best = [event.value for event in found.Scalars(f"particle/{i}")]
        assert np.allclose(best, np.maximum.accumulate(run.utilities[:, i]))
    tags = found.Tags()["scalars"]
    assert min(tags) == "overview/best" and {"swarm/diversity", "prompts/saved"} <= {*tags}
    assert all(len(found.Scalars(tag)) == 5 for tag in tags)
    config = tracker_files.text(found, "config")
    assert '"seed": 7' in config and "sk-secret" not in config
    assert '"coefficient"' in tracker_files.text(found, "best")
    table = tracker_files.text(found, "overview/coefficients").splitlines()
    share = run.positions[run.find_best()][0]
    assert table[2] == f"| {run.experts[0]} | {share:.3f} |" and len(table) == 6
    gain = run.verdict.start_model.gain.difference
    assert f'"gain": {gain}' in tracker_files.text(found, "overview/final")


def test_another_start_logs_no_step_twice(folder: Path) -> None:
    before = [
        (one.step, one.value) for one in tracker_files.events(folder).Scalars("overview/best")
    ]
    log_run(folder, TensorBoard())
    assert len(list(folder.glob("tensorboard/*"))) == 1
    after = [(one.step, one.value) for one in tracker_files.events(folder).Scalars("overview/best")]
    assert after == before


def test_an_interrupted_run_is_marked(tmp_path: Path) -> None:
    made = run_folders.folder(tmp_path / "run", finished=False)
    state = read_state(made)
    assert state is not None
    with (
        pytest.raises(KeyboardInterrupt),
        SearchTracker(TensorBoard(), made).track_search(state, {}),
    ):
        raise KeyboardInterrupt
    found = tracker_files.events(made)
    assert len(found.Scalars("overview/best")) == 5
    assert "code 130" in tracker_files.text(found, "interrupted")


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = TensorBoard()
    tracker.start(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "swarm"):
            for step in range(200):
                tracker.log(step, {"g": 0.5})
            tracker.finish({"g": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    warned = [record.message for record in caplog.records if record.name.startswith("swarm")]
    assert len(warned) == 1 and "too large" in warned[0]


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write .*tensorboard"):
        TensorBoard().start(tmp_path)
    for wrong in ({"link": "nlgraph"}, {"link": "a/b:v3"}, {"link": "a/b", "model": False}):
        with pytest.raises(UserError, match=r"^tracker\.link"):
            WandB("offline", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^tracker\.mode=sometimes: must be online or offline$"):
        WandB("sometimes")  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracker = WandB()
    assert tracker.mode == "offline"
    tracker.check()
