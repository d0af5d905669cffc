"""Charts and texts of the page of a run, as the options that the browser draws."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import run_folders

from swarm.runs.folder import RunFolder
from swarm.runs.verdict import Compared, Verdict
from swarm.tasks.metrics import Measured
from swarm.ui import charts
from swarm.ui.run_data import (
    METRICS_LINE,
    load_changed_items,
    load_position,
    load_run_series,
    positions_csv,
    round_numbers,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two groups of modules and three domains."""

    def more(verdict: Verdict) -> Verdict:
        (expert,) = verdict.alternatives

        def with_domains(one: Compared, utility: float) -> Compared:
            domains = {
                name: Measured(utility + n / 10, utility, utility + 0.3, 9)
                for n, name in enumerate(("maths", "law", "music"))
            }
            return replace(one, test=None, gain=None, dev=replace(one.dev, domains=domains))

        found, expert = with_domains(verdict.found, 0.5), with_domains(expert, 0.2)
        return replace(verdict, found=found, alternatives=[expert])

    made = tmp_path_factory.mktemp("run") / "drawn"
    return run_folders.folder(made, particles=8, experts=14, groups=("low", "high"), more=more)


def test_the_best_is_a_step_and_points_name_their_particle(folder: Path) -> None:
    run = RunFolder(folder)
    options = charts.particle_chart(run)
    best = options["series"][-1]
    assert (best["name"], best["step"]) == ("best so far", "end")
    assert best["data"] == [round(float(v), 4) for v in run.best_so_far()]
    assert [one["name"] for one in options["series"][:2]] == ["particle 0", "particle 1"]
    assert options["tooltip"]["formatter"].startswith("{a}") and options["dataZoom"]
    rest = [value for one in options["series"] for value in one["data"]]
    assert all(round(value, 4) == value for value in rest)


def test_the_heat_map_has_a_cell_per_expert_and_group(folder: Path) -> None:
    run = RunFolder(folder)
    best = run.find_best()
    cells = charts.module_chart(run, best)["series"][0]["data"]
    grid = np.full((2, 14), math.nan)
    for cell in cells:
        grid[cell["value"][0], cell["value"][1]] = cell["value"][2]
    assert grid.ravel().tolist() == pytest.approx(run.positions[best].tolist(), abs=1e-4)


def test_domains_have_bars_and_intervals(folder: Path, tmp_path: Path) -> None:
    options = charts.domain_chart(RunFolder(folder))
    kinds = [(one["name"], one["type"]) for one in options["series"]]
    assert kinds == [
        ("best initial expert", "bar"),
        ("best initial expert", "custom"),
        ("best found", "bar"),
        ("best found", "custom"),
    ]
    assert options["yAxis"]["data"] == ["maths", "law", "music"]
    assert options["series"][2]["data"] == [0.5, 0.6, 0.7]
    assert options["series"][3]["data"][2] == [2, 0.5, 0.8, 1]
    plain = RunFolder(run_folders.folder(tmp_path / "plain"))
    assert charts.domain_chart(plain) == {}


def test_a_page_has_the_charts_that_apply(folder: Path, tmp_path: Path) -> None:
    found = load_run_series(folder)
    assert set(found.charts) == {"particles", "coefficients", "domains", "modules"}
    assert json.loads(json.dumps(found.charts, allow_nan=False)) == found.charts
    sentences, changed = load_changed_items(folder, found.baselines[0])
    assert sentences and [title.split(":")[0] for title, _ in changed] == ["Won", "Lost"]
    run, table = RunFolder(folder), found.positions
    assert table.rows.shape == (run.utilities.size, 4 + 14)
    best = max(table.rows, key=lambda row: row[2])
    assert best[2] == run.utilities.max() and best[3] == 30
    assert best[4:].tolist() == run.means[int(best[0]), int(best[1])].tolist()
    details = load_position(folder, (1, 2))
    assert len(details.answers) == 30 and details.coefficients.header == ["expert", "low", "high"]
    header, *rows = csv.reader(positions_csv(folder).splitlines())
    assert header[4 + 14] == f"low: {run.experts[0]}" and len(rows) == run.utilities.size
    assert [float(cell) for cell in rows[-1][18:]] == run.positions[-1, -1].tolist()
    other = next(name for name in found.baselines[1:])
    assert " dev items" in load_changed_items(folder, other)[0][0]
    plain = run_folders.folder(tmp_path / "plain", particles=2, iterations=1)
    small = load_run_series(plain)
    assert set(small.charts) == {"particles", "coefficients"}


def test_cosines_are_a_square() -> None:
    cells = charts.cosine_chart(["a", "b"], [[1.0, -0.5], [-0.5, 1.0]])["series"][0]["data"]
    assert [cell["value"] for cell in cells] == [[0, 0, 1], [0, 1, -0.5], [1, 0, -0.5], [1, 1, 1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("utility 0.8734512341", "utility 0.8735"),
        ("[-0.250000012, 0.5, 1234.567891]", "[-0.25, 0.5, 1234.6]"),
        ("p 1.7234567e-13, 0.0000012345", "p 1.723e-13, 1.234e-06"),
        ("torch 2.10.12345, 10.1.2.33333", "torch 2.10.12345, 10.1.2.33333"),
        ("2026-11-23 13:13:21,604 INFO 0.1234", "2026-11-23 13:13:21,604 INFO 0.1234"),
    ],
)
def test_numbers_of_the_log_are_rounded(text: str, expected: str) -> None:
    assert round_numbers(text) == expected


def test_metrics_that_are_objects_are_not_in_the_log() -> None:
    kept = "2026-11-23 13:13:21,604 INFO test_gain_interval: [-0.25, 0.5]\n"
    line = "2026-11-23 13:13:21,604 INFO baselines: [{'name': 'base'}]\n"
    assert METRICS_LINE.sub("", line + kept + line.replace("[", "").replace("]", "")) == kept
