"""TensorBoard: event files, read back by its own reader."""

import json
import logging
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders
import tracker_files
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

from swarm.errors import UserError
from swarm.report.charts import band_edges
from swarm.runs.manifest import read_state
from swarm.runs.run_reader import RunFolder
from swarm.trackers import (
    TensorBoard,
    TrackedRun,
    Tracker,
    TrackerTable,
    tracker_by_name,
)
from swarm.trackers.records import SEARCH_CHARTS, SearchTracker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A finished run of a mixture."""
    place = tmp_path_factory.mktemp("shown") / "run"
    made = run_folders.folder(place, text="a|b\nc", parts=("roads", "sums"))
    (made / "global_best").mkdir()
    tell(made, TensorBoard())
    return made


def tell(folder: Path, tracker: Tracker) -> None:
    """Tell a tracker of a finished run."""
    state = json.loads((folder / "state.json").read_text())
    followed = SearchTracker(tracker, folder)
    with followed.track_search(state, {"seed": 7, "api_key": "sk-secret"}):
        followed.log_final_metrics(state["metrics"])


def test_the_series_are_those_of_the_run(folder: Path) -> None:
    found, run = tracker_files.events(folder), RunFolder(folder)
    best = found.Scalars("swarm/best")
    assert [event.step for event in best] == list(range(5))
    assert np.allclose([event.value for event in best], run.best_so_far())
    for i in range(run.particles):
        now = [event.value for event in found.Scalars(f"particle/{i}_now")]
        assert np.allclose(now, run.utilities[:, i])
    tags = set(found.Tags()["scalars"])
    assert {"swarm/diversity", "prompts/saved", "coefficient/logic", "final/test_gain"} <= tags
    assert found.Scalars("final/test_gain")[0].value == pytest.approx(run.metrics["test_gain"])


def test_tables_pictures_and_settings_are_there(folder: Path) -> None:
    found = tracker_files.events(folder)
    (image,) = found.Images("coefficients")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width == 1000
    assert "a\\|b c" in tracker_files.text(found, "flips/dev")
    config = tracker_files.text(found, "config")
    assert '"seed": 7' in config and "sk-secret" not in config
    assert '"coefficient"' in tracker_files.text(found, "best")


def test_series_are_grouped_and_charts_show_several(folder: Path) -> None:
    """The page groups by what is before the first slash; the plugin reads the charts itself."""
    tags = tracker_files.events(folder).Tags()["scalars"]
    groups = {"coefficient", "final", "particle", "prompts", "swarm"}
    assert {tag.partition("/")[0] for tag in tags} == groups
    runs = EventMultiplexer()
    runs.AddRunsFromDirectory(str(folder / "tensorboard"))
    runs.Reload()
    provider = MultiplexerDataProvider(runs, str(folder))
    plugin = CustomScalarsPlugin(TBContext(data_provider=provider, plugin_name_to_instance={}))
    layout = json.loads(plugin.layout_impl(RequestContext(), ""))
    shown = [
        (section["title"], chart["title"], chart["multiline"]["tag"])
        for section in layout["category"]
        for chart in section["chart"]
    ]
    assert shown == [(one.section, one.title, list(one.series)) for one in SEARCH_CHARTS]
    for _, title, series in shown:
        found = {tag for tag in tags for one in series if re.match(one, tag)}
        assert found or title == "speed", title  # which a record does not have
    page = (Path(__file__).parents[3] / "docs" / "wandb.md").read_text(encoding="utf-8")
    for section, title, series in shown:
        told = ", ".join(f"`{one}`" for one in series)
        assert f"| {section} | {title} | {told} |" in page


def test_flips_are_counted_by_domain(folder: Path) -> None:
    run = RunFolder(folder)
    before, after = (run.load_answers(place) for place in (run.best_expert(), run.find_best()))
    pairs = [(a["part"], b["value"] - a["value"]) for a, b in zip(before, after, strict=True)]
    words = tracker_files.text(tracker_files.events(folder), "flips/by_domain").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in words]
    assert rows[0][:5] == ["split", "domain", "items", "won", "lost"]
    assert [row[:2] for row in rows[2:]] == [
        [split, name] for split in ("dev", "test") for name in ("roads", "sums", "all")
    ]
    for row in rows[2:5]:
        gains = [gain for part, gain in pairs if row[1] in (part, "all")]
        won, lost = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        assert [int(cell) for cell in row[2:5]] == [len(gains), won, lost]
        assert float(row[6]) - float(row[5]) == pytest.approx(np.mean(gains), abs=1e-5)
    assert any(int(row[3]) for row in rows[2:5])


def test_another_start_leaves_no_step_twice(folder: Path) -> None:
    before = [
        (event.step, event.value) for event in tracker_files.events(folder).Scalars("swarm/best")
    ]
    tell(folder, TensorBoard())
    assert len(list(folder.glob("tensorboard/*"))) == 1
    assert [
        (event.step, event.value) for event in tracker_files.events(folder).Scalars("swarm/best")
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
    assert len(found.Scalars("swarm/best")) == 5
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
