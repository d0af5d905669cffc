"""TensorBoard: event files, read back by its own reader, and both trackers at once."""

import json
import logging
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders
import tracker_files

from swarm.errors import UserError
from swarm.report.charts import band_edges
from swarm.runs.manifest import read_state
from swarm.runs.run_reader import RunFolder
from swarm.trackers import (
    MultiTracker,
    TensorBoard,
    TrackedRun,
    Tracker,
    TrackerTable,
    tracker_by_name,
)
from swarm.trackers.records import SearchTracker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A finished run, shown in both."""
    made = run_folders.folder(tmp_path_factory.mktemp("shown") / "run", text="a|b\nc")
    (made / "global_best").mkdir()
    tell(made, MultiTracker("offline"))
    return made


def tell(folder: Path, tracker: Tracker) -> None:
    """Tell a tracker of a finished run."""
    state = json.loads((folder / "state.json").read_text())
    followed = SearchTracker(tracker, folder)
    with followed.track_search(state, {"seed": 7, "api_key": "sk-secret"}):
        followed.log_final_metrics(state["metrics"])


def test_the_series_are_those_of_the_run(folder: Path) -> None:
    found, run = tracker_files.events(folder), RunFolder(folder)
    best = found.Scalars("g")
    assert [event.step for event in best] == list(range(5))
    assert np.allclose([event.value for event in best], run.best_so_far())
    for i in range(run.particles):
        now = [event.value for event in found.Scalars(f"particle_{i}_now")]
        assert np.allclose(now, run.utilities[:, i])
    tags = set(found.Tags()["scalars"])
    assert {"diversity", "prompts_saved", "coefficient/logic", "final/test_gain"} <= tags
    assert found.Scalars("final/test_gain")[0].value == pytest.approx(run.metrics["test_gain"])


def test_tables_pictures_and_settings_are_there(folder: Path) -> None:
    found = tracker_files.events(folder)
    (image,) = found.Images("coefficients")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width == 1000
    assert "a\\|b c" in tracker_files.text(found, "flips_dev")
    config = tracker_files.text(found, "config")
    assert '"seed": 7' in config and "sk-secret" not in config
    assert '"coefficient"' in tracker_files.text(found, "best")


def test_both_tell_the_same(folder: Path) -> None:
    found, offline = tracker_files.events(folder), tracker_files.Offline(folder)
    scalars = [tag for tag in found.Tags()["scalars"] if not tag.startswith("final/")]
    series = {name for row in offline.history[:5] for name in row if not name.startswith("_")}
    assert set(scalars) == series
    for name in scalars:
        theirs = [row[name] for row in offline.history if name in row]
        assert np.allclose([event.value for event in found.Scalars(name)], theirs)


def test_another_start_leaves_no_step_twice(folder: Path) -> None:
    before = [(event.step, event.value) for event in tracker_files.events(folder).Scalars("g")]
    tell(folder, TensorBoard())
    assert len(list(folder.glob("tensorboard/*"))) == 1
    assert [
        (event.step, event.value) for event in tracker_files.events(folder).Scalars("g")
    ] == before


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    made = run_folders.folder(tmp_path / "run", finished=False)
    state = read_state(made)
    assert state is not None
    with (
        pytest.raises(KeyboardInterrupt),
        SearchTracker(TensorBoard(), made).track_search(state, {}),
    ):
        raise KeyboardInterrupt
    found = tracker_files.events(made)
    assert len(found.Scalars("g")) == 5
    assert "code 130" in tracker_files.text(found, "interrupted")


def test_a_disk_that_is_full_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = TensorBoard()
    tracker.start(TrackedRun("search", tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "swarm"):
            for step in range(200):
                tracker.log(step, {"g": 0.5})
            tracker.finish({"g": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = [record.message for record in caplog.records if record.name.startswith("swarm")]
    assert len(told) == 1 and "too large" in told[0]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write .*tensorboard"):
        TensorBoard().start(TrackedRun("search", tmp_path))


def test_a_long_table_says_what_it_leaves_out(tmp_path: Path) -> None:
    tracker = TensorBoard()
    tracker.start(TrackedRun("evaluation", tmp_path))
    tracker.log(0, {"answers": TrackerTable(["id"], [[str(n)] for n in range(1_205)])})
    tracker.finish({})
    words = tracker_files.text(tracker_files.events(tmp_path), "answers")
    assert "1,005 rows more" in words and "| 199 |" in words and "| 200 |" not in words


def test_stacked_bands_do_not_cover_each_other() -> None:
    low, high = band_edges(np.array([[0.5, -0.2, 0.7]]))
    assert np.allclose(low, [[0.0, -0.2, 0.5]]) and np.allclose(high, [[0.5, 0.0, 1.2]])


def test_words_for_trackers() -> None:
    assert isinstance(tracker_by_name("tensorboard"), TensorBoard)
    assert tracker_by_name("both-offline").trackers[0].mode == "offline"  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="must be one of none, wandb, wandb-offline"):
        tracker_by_name("wandb-online")
