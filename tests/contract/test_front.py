"""Several objectives: the front of a search, its hypervolume, constraints, report and export."""

import json
import shutil
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import run_folders
import searches

from swarm.errors import UserError
from swarm.export.export import Export
from swarm.report.document import Chart, TableBlock
from swarm.report.page import build_report, write_report
from swarm.runs.folder import read_state
from swarm.runs.pareto_front import ParetoFront, compute_hypervolume, find_non_dominated
from swarm.runs.verdict import read_verdict
from swarm.ui.run_data import load_run_series


def sheet(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "front.json").read_text())
    return found


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_state(folder)
    return found


def test_a_front_is_what_nothing_dominates() -> None:
    values = np.random.default_rng(0).integers(0, 6, size=(60, 3)).astype(float)
    for row, found in zip(values, find_non_dominated(values), strict=True):
        better = ((values >= row).all(axis=1) & (values > row).any(axis=1)).any()
        assert found == (not better)
    violations = np.where(values[:, 0] > 3, 0.5, 0.0)
    kept = find_non_dominated(values, violations)
    assert (violations[kept] == 0).all()
    np.testing.assert_array_equal(
        kept[violations == 0], find_non_dominated(values[violations == 0])
    )
    # None meets them: those that miss them by the least.
    assert list(find_non_dominated(values[:3], np.array([2.0, 1.0, 3.0]))) == [False, True, False]


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
def test_the_hypervolume_is_that_of_pymoo(objectives: int) -> None:
    from pymoo.indicators.hv import HV

    draw = np.random.default_rng(objectives)
    for count in (0, 1, 2, 12):
        values = draw.normal(size=(count, objectives)).round(1)
        reference = draw.normal(size=objectives) - 0.7
        mine = compute_hypervolume(values, reference)
        if objectives == 1:
            assert mine == pytest.approx(max([0.0, *(values - reference).ravel()]))
            continue
        theirs = HV(ref_point=-reference)(-values) if count else 0.0
        assert mine == pytest.approx(float(theirs), abs=1e-12)


def made(
    told: list[list[list[float] | None]], experts: int = 2, **optimizer: Any
) -> dict[str, Any]:
    """A record's state of [T][N][M] objectives at positions that all differ; zero is particle 2."""
    rounds = []
    for number, entry in enumerate(told):
        positions = [[1.0 + number, float(i)] for i in range(len(entry))]
        if number == 0 and len(entry) > 2:
            positions[2] = [0.0, 0.0]
        utilities = [None if row is None else sum(row) / len(row) for row in entry]
        rounds.append({"positions": positions, "utilities": utilities, "objectives": entry})
    return {
        "objectives": {"A": 10, "B": 20},
        "rounds": rounds,
        "own": experts,
        "experts": ["x", "y"],
        "groups": ["all"],
        "optimizer": optimizer,
    }


def test_points_are_numbered_and_equal_ones_count_once() -> None:
    first = [[0.2, 0.8], [0.6, 0.1], [0.1, 0.1], None]
    second = [[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [0.5, 0.3]]
    front = ParetoFront.from_state(made([first, second]))
    assert front is not None
    assert front.front_indices == [(1, 0), (0, 0), (1, 2)]
    assert len(front.measured_indices) == 7
    # Beyond (.2, .1), the worst of the two experts.
    assert front.hypervolume_history == pytest.approx([0.0, 0.4 * 0.3])
    assert front.evenly_spaced_points(2) == [0, 2] and front.evenly_spaced_points(9) == [0, 1, 2]
    assert ParetoFront.from_state({**made([first]), "objectives": None}) is None


def test_constraints_decide_before_the_utility() -> None:
    first = [[0.2, 0.8], [0.9, 0.1], [0.1, 0.5]]
    second = [[0.9, 0.4], [0.4, 0.5], [0.3, 0.6]]

    def front(**optimizer: Any) -> ParetoFront:
        found = ParetoFront.from_state(made([first, second], **optimizer))
        assert found is not None
        return found

    free = front()
    assert free.best_index() == (1, 0) and free.best_index(2) == (0, 0)
    bound = front(constraints={"B": "base"})
    assert bound.constraint_bounds == {"B": 0.5}
    assert bound.front_indices == [(1, 1), (1, 2), (0, 0)] and bound.best_index() == (0, 0)
    only = front(constraints={"B": 0.45}, objectives=["A"])
    assert only.front_indices == [(1, 1)] and only.reference_point.tolist() == [0.2]
    never = front(constraints={"B": 0.95, "A": 0.3})
    assert never.best_index() == (0, 0), "it misses both bounds by the least: .15 + .1"
    assert never.hypervolume_history == [0.0, 0.0]


@pytest.fixture(scope="module")
def found(tiny_llama: Path, tiny_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished search in the delta space, with free sums and a constraint."""
    folder = tmp_path_factory.mktemp("found")
    more = {
        "optimizer": "nsga2",
        "optimizer__constraints": "{B: base}",
        "pool__space": "delta",
        "optimizer__sum_to_one": "false",
        "pool__groups": "thirds",
        "optimizer__particles": 8,
        "front": 3,
    }
    result = commands.run(
        "swarm.search", *searches.several(folder, tiny_llama, tiny_pool, "first", **more)
    )
    assert result.code == 0, result.err
    return folder / "search" / "first"


def test_a_search_keeps_its_front(found: Path) -> None:
    content, kept = sheet(found), state(found)
    assert content["objectives"] == ["A", "B"] and content["dev_items"] == {"A": 4, "B": 5}
    rounds, metrics = kept["rounds"], read_verdict(kept)
    assert all(len(entry["objectives"]) == 8 for entry in rounds)
    for entry in rounds:
        for utility, row in zip(entry["utilities"], entry["objectives"], strict=True):
            assert utility == pytest.approx(sum(row) / 2)
    base = rounds[0]["objectives"][4]
    assert not any(rounds[0]["positions"][4]), "the base is among the first positions"
    assert content["constraints"] == {"B": {"at_least": base[1], "base": True}}
    assert content["feasible"] and len(content["points"]) >= 2
    assert content["hypervolume"] == sorted(content["hypervolume"])
    tested = [point for point in content["points"] if "test_parts" in point]
    assert len(tested) == min(3, len(content["points"]))
    for point in content["points"]:
        place = point["iteration"], point["particle"]
        assert point["coefficients"] == rounds[place[0]]["positions"][place[1]]
        assert point["dev"]["B"] >= base[1]
    for point in tested:
        part = point["test_parts"]["A"]
        assert part["low"] <= part["utility"] <= part["high"]
        assert point["dev_parts"]["B"]["utility"] == pytest.approx(point["dev"]["B"])
    # The best found is the best of those that meet the bound.
    measured = [zip(one["utilities"], one["objectives"], strict=True) for one in rounds]
    allowed = [u for entry in measured for u, row in entry if row[1] >= base[1]]
    assert metrics.dev.utility == pytest.approx(max(allowed))
    bound = metrics.constraints["B"]
    assert bound.met and bound.at_least == base[1] and bound.gain is not None
    best = json.loads((found / "global_best" / "swarm.json").read_text())
    assert best["coefficients"] == metrics.found.position


def test_the_report_and_the_page_show_the_front(found: Path) -> None:
    text = write_report(found).read_text()
    assert "Front of the objectives" in text and "Constraint: B at least" in text
    section = run_folders.section(build_report(found), "front")
    charts = {one.title: one for one in section.blocks if isinstance(one, Chart)}
    scatter, table = charts["A and B"], section.blocks[2]
    points = sheet(found)["points"]
    assert list(scatter.series[0].x) == [point["dev"]["A"] for point in points]
    assert list(charts["Hypervolume of the front"].series[0].y) == sheet(found)["hypervolume"]
    assert [row[-1] for row in table.rows] == [point["words"] for point in points]
    assert table.header[:3] == ["point", "A, dev, n = 4", "B, dev, n = 5"]
    html = (found / "report.html").read_text()
    run_folders.Document(html)
    assert 'id="front"' in html and "point 1" in html
    shown = load_run_series(found).details
    assert table.rows in [one.rows for one in shown if isinstance(one, TableBlock)]
    assert "A and B" in [one.title for one in shown if isinstance(one, Chart)]


def test_a_point_is_exported(found: Path, tmp_path: Path) -> None:
    point = sheet(found)["points"][1]
    Export(str(found), str(tmp_path / "mine"), point=1).write()
    note = json.loads((tmp_path / "mine" / "swarm.json").read_text())
    assert note["coefficients"] == point["coefficients"] and note["point"] == 1
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "Point 1 of the front" in card and f"{point['dev']['A']:.3f}" in card
    before = searches.tree(found / "front")
    Export(str(found), str(tmp_path / "mine"), point=1).write()
    assert searches.tree(found / "front") == before, "it is saved once"
    last = len(sheet(found)["points"]) - 1
    for point_, more, words in (
        (last + 1, {}, f"point={last + 1}: the front has 0 to {last}"),
        (True, {}, "point=true"),
        (0, {"baseline": "expert"}, "one of these may be set"),
    ):
        with pytest.raises(UserError, match=words):
            Export(str(found), str(tmp_path / "other"), point=point_, **more)
    with pytest.raises(UserError, match="point=0: one of these"):
        Export(str(found / "global_best"), str(tmp_path / "other"), point=0)


def test_a_swarm_on_a_mixture_has_a_front_too(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    pool = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    command = searches.several(tmp_path, tiny_llama, pool, "run", optimizer="pso")
    assert commands.run("swarm.search", *command).code == 0
    folder = tmp_path / "search" / "run"
    assert len(sheet(folder)["points"]) >= 2
    assert not any("test_parts" in point for point in sheet(folder)["points"])
    assert run_folders.section(build_report(folder), "front")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(pool / "birch" / name, pool / "amber" / name)
    with pytest.raises(UserError, match="have changed since the search"):
        Export(str(folder), str(tmp_path / "mine"), point=0)


def test_a_bound_by_a_signal_is_judged_by_the_task_s_own_measure(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    limits = {"signal": "both", "dev_limit": 6, "test_limit": 4}
    words = [f"+task@task.tasks.{part}=nlgraph_mini" for part in "AB"]
    words += [f"task.tasks.{part}.{key}={value}" for part in "AB" for key, value in limits.items()]
    more = {"optimizer": "nsga2", "optimizer__max_iterations": 2, "front": 2}
    plain = searches.arguments(tmp_path, tiny_llama, tiny_pool, **more)
    command = ["task=mixture", *(word for word in plain if not word.startswith("task")), *words]
    for constraint, said in (
        ("A: 0.5", "optimizer.constraints.A=0.5: a number is ambiguous"),
        ("C: base", "optimizer.constraints: the task has no part 'C'; it has: A, B"),
    ):
        refused = commands.run("swarm.search", *command, f"optimizer.constraints={{{constraint}}}")
        assert said in refused.err
    result = commands.run("swarm.search", *command, "optimizer.constraints={B: base}")
    assert result.code == 0, result.err
    bound = read_verdict(state(tmp_path / "search" / "run")).constraints["B"]  # type: ignore[union-attr]
    assert bound.at_least in (0.0, 1 / 6, 2 / 6), "an accuracy, not the signal"
