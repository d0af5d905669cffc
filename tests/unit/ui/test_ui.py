"""The page's runs: rows of their table, deletion, charts as the browser draws them, the log."""

import ast
import csv
import math
from pathlib import Path
from typing import Any

import pytest
import run_folders

from swarm._util.files import PACKAGE_FOLDER
from swarm.errors import UserError
from swarm.report.document import ChangedItems, Chart, Series, TableBlock
from swarm.runs.folder import RunFolder
from swarm.runs.lock import RunLock
from swarm.ui import charts, run_data
from swarm.ui.pages.runs import group_rows
from swarm.ui.state import AppState, RunIndex, delete_run, format_age


def test_only_runs_that_are_not_running_are_deleted(tmp_path: Path) -> None:
    home = AppState(tmp_path)
    run = run_folders.folder(home.runs_folder / "one")
    output = home.runs_folder / ".page" / "one.txt"
    output.parent.mkdir()
    output.write_text("said")
    trial = run_folders.folder(home.runs_folder / "sweep" / "trial_00")
    alike = run_folders.folder(home.runs_folder / "search" / "trial_00")
    (alike.parent / ".lock").touch()
    other = home.runs_folder / "other"
    other.mkdir()
    link = home.runs_folder / "link"
    link.symlink_to(run)
    lock = RunLock(run)
    for path, reason in (
        (run, "is running"),
        (trial, "belongs to sweep"),
        (alike, "belongs to search"),
        (other, "not a run folder"),
        (link, "not a run folder"),
        (home.run_path("none"), "not a run folder"),
    ):
        with pytest.raises(UserError, match=reason):
            delete_run(path)
    assert trial.is_dir() and other.is_dir() and output.is_file()
    lock.close()
    delete_run(run)
    assert not run.exists() and not output.exists()


def test_rows_are_filtered_and_grouped(tmp_path: Path) -> None:
    for name in ("alone", "sweep/trial_00", "sweep/trial_01"):
        run_folders.folder(tmp_path / name, particles=2, iterations=1)
    runs = RunIndex(tmp_path).list_runs()

    def names(words: str = "", *opened: str) -> list[str]:
        return sorted(row["name"] for row in group_rows(runs, words, {*opened}))

    trials = ["sweep", "sweep/trial_00", "sweep/trial_01"]
    assert names() == ["alone", "sweep"]
    assert names("", "sweep") == ["alone", *trials]
    assert names("ALONE finished") == ["alone"]
    assert names("trial_01") == ["sweep", "sweep/trial_01"]
    assert names("nothing like it") == []
    (group,) = (row for row in group_rows(runs, "", {"sweep"}) if row["trials"])
    assert (group["trials"], group["details"], group["open"]) == (2, "2 finished", True)


def test_a_row_has_course_and_age(tmp_path: Path) -> None:
    run_folders.folder(tmp_path / "one", iterations=2, test=40)
    (line,) = RunIndex(tmp_path).list_runs()
    row = line.to_row()
    assert row["trail"].startswith("0.0,") and row["trail"].count(" ") == 2
    assert max(line.trail) == line.trail[-1] == line.score
    assert row["when"] == "just now" and " arithmetic" in row["best"]
    ages = ((59, "just now"), (61, "1 min"), (150, "2 min"), (3700, "1 hour"), (90000, "1 day"))
    for seconds, words in ages:
        assert format_age(seconds).removesuffix(" ago") == words
    assert format_age(200_000) == "2 days ago"


def test_a_chart_of_the_report_is_drawn_by_the_browser() -> None:
    series = [
        Series("best", [0, 1, 2], [0.1, math.nan, 0.3], "steps", "strong"),
        Series("points", [0.5], [0.2], "points", "normal", ["one"]),
        Series("all", [0, 1], [0, 1], weight="faint"),
    ]
    options = charts.chart_options(Chart("t", "round", "utility", series, marks=[("base", 0.15)]))
    best, points, rest = options["series"]
    assert [one["value"] for one in best["data"]] == [[0, 0.1], [2, 0.3]] and best["step"] == "end"
    assert best["markLine"]["data"] == [{"yAxis": 0.15, "name": "base"}]
    assert (points["type"], points["data"][0]["name"]) == ("scatter", "one")
    assert rest["itemStyle"]["color"] == charts.GREY
    assert options["legend"]["data"] == ["best", "points"]


def test_a_page_has_what_applies_to_its_run(tmp_path: Path) -> None:
    folder = run_folders.folder(
        tmp_path / "drawn", particles=8, experts=14, groups=("low", "high"), test=None
    )
    found, run = run_data.load_run_series(folder), RunFolder(folder)
    assert found.number[1] == "on dev, not tested"
    titles = [one.title for one in found.details if isinstance(one, Chart)]
    assert titles[0] == "All 8 mixtures of each round" and len(titles) == 2
    tables = [one.header for one in found.details if isinstance(one, TableBlock)]
    assert ["expert", "low", "high"] in tables
    rows: Any = found.positions.rows
    assert rows.shape == (run.utilities.size, 4 + 14)
    highest = max(rows, key=lambda row: row[2])
    assert highest[2] == run.utilities.max() and highest[3] == 30
    assert highest[4:].tolist() == run.means[int(highest[0]), int(highest[1])].tolist()
    sentence, *others = run_data.load_changed_items(folder, found.baselines[0])
    assert "the best found won" in str(sentence)
    changed = [one for one in others if isinstance(one, ChangedItems)]
    assert [one.title.split(":")[0] for one in changed] == ["Won", "Lost"]
    details = run_data.load_position(folder, (1, 2))
    assert len(details.answers.rows) == 30
    assert details.coefficients.header == ["expert", "low", "high"]
    header, *lines = csv.reader(run_data.positions_csv(folder).splitlines())
    assert header[4 + 14] == f"low: {run.experts[0]}" and len(lines) == run.utilities.size
    assert [float(cell) for cell in lines[-1][18:]] == run.positions[-1, -1].tolist()
    tested = run_folders.folder(tmp_path / "tested", particles=2, iterations=1)
    number, of = run_data.load_run_series(tested).number
    assert number.endswith(" points") and of.startswith("more than the best expert")


def test_metrics_that_are_objects_are_not_in_the_log() -> None:
    kept = "2026-11-23 13:13:21,604 INFO test_gain_interval: [-0.25, 0.5]\n"
    line = "2026-11-23 13:13:21,604 INFO baselines: [{'name': 'base'}]\n"
    text = line + kept + line.replace("[", "").replace("]", "")
    assert run_data.METRICS_LINE.sub("", text) == kept


def test_no_page_waits_for_its_content() -> None:
    """NiceGUI sends a coroutine's page when it has ended, and answers 500 after three seconds."""
    kinds = [
        type(node)
        for path in (PACKAGE_FOLDER / "ui").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if any(ast.unparse(one).startswith("ui.page(") for one in node.decorator_list)
    ]
    assert kinds == [ast.FunctionDef] * 7
