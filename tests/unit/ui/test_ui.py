"""The page's runs: rows of their table, deletion, charts as the browser draws them, the log."""

import ast
import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders

from swarm._util.files import PACKAGE_FOLDER
from swarm.errors import UserError
from swarm.report.document import ChangedItems
from swarm.runs.folder import RunFolder
from swarm.runs.lock import RunLock
from swarm.runs.verdict import Compared, Verdict
from swarm.tasks.metrics import Measured
from swarm.ui import charts, run_data
from swarm.ui.pages.runs import group_rows
from swarm.ui.state import AppState, RunIndex, delete_run


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two groups of modules and three domains."""

    def more(verdict: Verdict) -> Verdict:
        def with_domains(one: Compared, utility: float) -> Compared:
            domains = {
                name: Measured(utility + n / 10, utility, utility + 0.3, 9)
                for n, name in enumerate(("maths", "law", "music"))
            }
            return replace(one, test=None, gain=None, dev=replace(one.dev, domains=domains))

        found, expert = with_domains(verdict.found, 0.5), with_domains(verdict.start_model, 0.2)
        return replace(verdict, found=found, alternatives=[expert])

    made = tmp_path_factory.mktemp("run") / "drawn"
    return run_folders.folder(made, particles=8, experts=14, groups=("low", "high"), more=more)


def test_charts_have_the_numbers_of_the_run(folder: Path) -> None:
    run = RunFolder(folder)
    options = charts.particle_chart(run)
    *others, best = options["series"]
    assert (best["name"], best["step"]) == ("best so far", "end")
    assert best["data"] == [round(float(v), 4) for v in run.best_so_far()]
    assert [one["name"] for one in others[:2]] == ["particle 0", "particle 1"]
    assert options["tooltip"]["formatter"].startswith("{a}") and options["dataZoom"]
    place = run.find_best()
    grid = np.full((2, 14), math.nan)
    for cell in charts.module_chart(run, place)["series"][0]["data"]:
        grid[cell["value"][0], cell["value"][1]] = cell["value"][2]
    assert grid.ravel().tolist() == pytest.approx(run.positions[place].tolist(), abs=1e-4)
    options = charts.domain_chart(run)
    kinds = [(one["name"], one["type"]) for one in options["series"]]
    labels = ("best expert", "best found")
    assert kinds == [(label, kind) for label in labels for kind in ("bar", "custom")]
    assert options["yAxis"]["data"] == ["maths", "law", "music"]
    assert options["series"][2]["data"] == [0.5, 0.6, 0.7]
    assert options["series"][3]["data"][2] == [2, 0.5, 0.8, 1]
    cells = charts.cosine_chart(["a", "b"], [[1.0, -0.5], [-0.5, 1.0]])["series"][0]["data"]
    assert [cell["value"] for cell in cells] == [[0, 0, 1], [0, 1, -0.5], [1, 0, -0.5], [1, 1, 1]]


def test_a_page_has_what_applies_to_its_run(folder: Path, tmp_path: Path) -> None:
    found, run = run_data.load_run_series(folder), RunFolder(folder)
    assert set(found.charts) == {"particles", "coefficients", "domains", "modules"}
    assert json.loads(json.dumps(found.charts, allow_nan=False)) == found.charts
    rows: Any = found.positions.rows
    assert rows.shape == (run.utilities.size, 4 + 14)
    best = max(rows, key=lambda row: row[2])
    assert best[2] == run.utilities.max() and best[3] == 30
    assert best[4:].tolist() == run.means[int(best[0]), int(best[1])].tolist()
    sentence, *others = run_data.load_changed_items(folder, found.baselines[0])
    assert "the best found won" in str(sentence)
    changed = [one for one in others if isinstance(one, ChangedItems)]
    assert [one.title.split(":")[0] for one in changed] == ["Won", "Lost"]
    assert " dev items" in str(run_data.load_changed_items(folder, found.baselines[1])[0])
    details = run_data.load_position(folder, (1, 2))
    assert len(details.answers.rows) == 30
    assert details.coefficients.header == ["expert", "low", "high"]
    header, *lines = csv.reader(run_data.positions_csv(folder).splitlines())
    assert header[4 + 14] == f"low: {run.experts[0]}" and len(lines) == run.utilities.size
    assert [float(cell) for cell in lines[-1][18:]] == run.positions[-1, -1].tolist()
    plain = run_folders.folder(tmp_path / "plain", particles=2, iterations=1)
    assert set(run_data.load_run_series(plain).charts) == {"particles", "coefficients"}


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
