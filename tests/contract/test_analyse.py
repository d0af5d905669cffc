"""The analyses of run folders, on folders whose answers are known and on a real search."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches

from swarm._util.terminal import format_sparkline
from swarm.errors import UserError
from swarm.report import __main__ as entry
from swarm.report.analyses import (
    analyse_runs,
    as_json,
    as_text,
    convergence,
    draw_charts,
    emergence,
    prompt_efficiency,
    trajectories,
)
from swarm.report.analyses import trajectories as origins
from swarm.report.paired_comparison import PairedComparison
from swarm.runs.folder import RunFolder, RunRecord, read_state
from swarm.runs.verdict import read_verdict

Values = Sequence[Sequence[float] | None]


def made(
    folder: Path,
    rounds: Sequence[Values],
    positions: Any = None,
    experts: Sequence[str] = ("amber", "birch"),
    facts: Sequence[dict[str, Any]] = (),
) -> RunFolder:
    """A run folder in which particle i of round t answered with these values; None: not asked."""
    record = RunRecord(folder)
    record.open_or_resume({"seed": 1}, experts)
    corners = np.eye(len(experts))[np.arange(len(rounds[0])) % len(experts)]
    for number, values in enumerate(rounds):
        x = corners if positions is None else np.array(positions[number], dtype=float)
        utilities = np.array([np.nan if row is None else float(np.mean(row)) for row in values])
        answers = {
            i: [{"id": j, "value": v, "answer": str(v), "text": ""} for j, v in enumerate(row)]
            for i, row in enumerate(values)
            if row is not None
        }
        scored = [None if row is None else len(row) for row in values]
        told = {"items_scored": scored, "prompts_scored": sum(n or 0 for n in scored)}
        record.add_iteration(
            x, utilities, answers, {}, {**told, **(facts[number] if facts else {})}
        )
    return RunFolder(folder)


# Emergence


def test_the_shares_are_those_counted_by_hand(tmp_path: Path) -> None:
    start = [[1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 1]]
    end = [[1, 0, 1, 0, 0, 1], [0, 1, 1, 1, 0, 0]]
    found = emergence.measure_emergence(made(tmp_path, [start, end]))
    shares = {name: one["observed"] for name, one in found["shares"].items()}
    assert (found["items"], found["particles"], found["hard_items"]) == (6, 2, 3)
    # More right: items 2 and 3 of 6. Wrong for both at the start: 2, 3 and 4.
    assert shares["C-surge"][::3] == (2 / 6, 6)
    assert shares["C-emerge"][::3] == (2 / 3, 3)
    # Both end with 3 of 6, the first of equals counts: it solves item 2 alone.
    assert shares["best alone"][::3] == (1 / 3, 3)
    mirror = found["mirror"]
    assert (mirror["more_right"], mirror["fewer_right"]) == (2, 1)
    assert (mirror["emerged"], mirror["vanished"]) == (2, 0)
    assert found["best_alone"]["dev"]["gained"] == 1 and found["best_alone"]["dev"]["lost"] == 0


def test_a_personal_best_counts_and_not_the_last_round(tmp_path: Path) -> None:
    first, better, worse = [[1, 0, 0], [0, 1, 0]], [[1, 1, 0], [0, 1, 1]], [[0, 0, 0], None]
    found = emergence.measure_emergence(made(tmp_path, [first, better, worse]))
    assert found["shares"]["C-emerge"]["observed"].mean == 1.0
    assert found["mirror"]["fewer_right"] == 0


def swarm_of_guessers(seed: int, particles: int = 8, items: int = 60) -> tuple[Any, Any, int]:
    """Right by chance one time in four, and each particle's best of ten tries is kept."""
    draw = np.random.default_rng(seed)
    start = draw.random((particles, items)) < 0.25
    end = start.copy()
    for _ in range(10):
        now = draw.random((particles, items)) < 0.25
        better = now.sum(axis=1) > end.sum(axis=1)
        end[better] = now[better]
    return start, end, int(end.sum(axis=1).argmax())


def test_guessers_do_not_come_out_as_emergent() -> None:
    """Although they are selected on these items, and seem to have learnt much."""
    swarms = [emergence.compare_with_controls(*swarm_of_guessers(seed)) for seed in range(30)]
    for name in ("C-surge", "C-emerge", "best alone"):
        found = [one["shares"][name] for one in swarms]
        known = [share for share in found if share is not None]
        inside = [s["chance"][1] <= s["observed"].mean <= s["chance"][2] for s in known]
        assert np.mean(inside) > 0.85, name
        assert np.mean([s["p_above_chance"] <= 0.05 for s in known]) < 0.2, name
    assert np.mean([one["shares"]["C-emerge"]["observed"].mean for one in swarms]) > 0.8
    # Guessers improve on the items that they are selected on: of the mirror, no p-value.
    mirrors = [one["mirror"] for one in swarms]
    assert all(one["more_right"] > one["fewer_right"] for one in mirrors)
    assert not any("p_" in name for one in mirrors for name in one)


def test_one_that_solves_what_nobody_could_is_seen() -> None:
    start, end, best = swarm_of_guessers(1)
    hard = ~start.any(axis=0)
    start[:, :10] = end[:, :10] = False
    hard = ~start.any(axis=0)
    end[best], end[best, hard] = False, True
    found = emergence.compare_with_controls(start, end, best)["shares"]["best alone"]
    assert found["p_above_chance"] < 0.01 and found["observed"].mean > found["chance"][2]


def test_particles_that_answer_alike_are_one_guesser() -> None:
    start, end, best = swarm_of_guessers(2)
    end[:] = np.arange(60) % 3 == 0
    chance = emergence.compare_with_controls(start, end, best)["shares"]["C-emerge"]["chance"][0]
    assert abs(chance - 1 / 3) < 0.03


def test_nothing_hard_and_nothing_to_count(tmp_path: Path) -> None:
    run = made(tmp_path, [[[1, 1], [1, 0]]])
    found = emergence.measure_emergence(run)
    assert found["shares"]["C-emerge"] is None and found["shares"]["C-surge"]["observed"].mean == 0
    assert "no such item" in "\n".join(emergence.format_emergence(found))


def test_ratings_have_no_emergence(tmp_path: Path) -> None:
    found = emergence.measure_emergence(made(tmp_path, [[[0.5, 1], [1, 0]]]))
    assert not found["applies"]
    assert emergence.format_emergence(found)[0].startswith(
        "Does not apply: the answers' values are not all"
    )


# Rank of origin


@pytest.mark.parametrize(
    ("start", "winner", "rank", "best", "bottom"),
    [
        ([0.4, 0.3, 0.2, 0.1], 0, 1, True, False),
        ([0.4, 0.3, 0.2, 0.1], 2, 3, False, True),
        ([0.4, 0.3, 0.2], 1, 2, False, False),
        ([0.4, 0.4, 0.1, 0.1], 1, 1.5, True, False),
        ([0.4, 0.1, 0.1, 0.1], 3, 3, False, True),
    ],
)
def test_the_rank_of_origin(
    tmp_path: Path, start: list[float], winner: int, rank: float, best: bool, bottom: bool
) -> None:
    found = started(tmp_path, start, winner)
    assert (found["particle"], found["rank"], found["of"]) == (winner, rank, len(start))
    assert (found["started_best"], found["bottom_half"]) == (best, bottom)
    assert found["start_kind"] == (["amber", "birch", *["crossover child"] * 2][winner])


def started(folder: Path, start: list[float], winner: int) -> dict[str, Any]:
    """The origin in a run of so many tenths right, in which one particle gets all right."""
    values = [[1.0] * round(10 * u) + [0.0] * (10 - round(10 * u)) for u in start]
    end = [[1.0] * 10 if i == winner else None for i in range(len(start))]
    return origins.rank_of_origin(made(folder, [values, end]))


def test_the_distribution_over_runs(tmp_path: Path) -> None:
    start = [0.4, 0.3, 0.2, 0.1]
    every = [started(tmp_path / str(winner), start, winner) for winner in (0, 0, 3)]
    found = origins.summarize_origins(every)
    assert found["started_best"].mean == pytest.approx(2 / 3) and found["started_best"].n == 3
    assert 0.2 < found["started_best"].low < 0.25  # Wilson, 2 of 3
    assert (found["started_best_blindly"], found["bottom_half_blindly"]) == (0.25, 0.5)


@pytest.mark.parametrize("start", [[0.4, 0.4, 0.1, 0.1, 0.1], [0.2] * 4, [0.4, 0.3, 0.3, 0.3]])
def test_picked_blindly_is_what_all_particles_give_with_equals_too(
    tmp_path: Path, start: list[float]
) -> None:
    every = [started(tmp_path / str(i), start, i) for i in range(len(start))]
    found = origins.summarize_origins(every)
    for name in ("started_best", "bottom_half"):
        assert found[name].mean == pytest.approx(found[f"{name}_blindly"]), name
        assert found[f"{name}_blindly"] == pytest.approx(np.mean([one[name] for one in every]))
    assert all(one["started_best_blindly"] == found["started_best_blindly"] for one in every)


# Trajectories


def test_positions_on_a_line_have_one_component(tmp_path: Path) -> None:
    x = [[[1, 0, 0], [0, 1, 0]], [[0.5, 0.5, 0], [0.5, 0.5, 0]], [[1.5, -0.5, 0], [0.5, 0.5, 0]]]
    values: list[Values] = [[[1, 0], [0, 0]], [[0, 0], [0, 0]], [[1, 1], [0, 0]]]
    run = made(tmp_path, values, x, ("amber", "birch", "cedar"))
    found = trajectories.measure_trajectory(run)
    assert found["explained"] == pytest.approx([1, 0])
    assert np.abs(found["axes"][0]) == pytest.approx([0.5**0.5, 0.5**0.5, 0])
    assert found["points"].shape == (3, 2, 2)
    # Two corners are half of sqrt 2 from their middle; then both are in one place.
    assert found["diversity"][:2] == pytest.approx([0.5**0.5, 0])
    assert found["outside"] == pytest.approx([0, 0, 0.5])
    assert [(one["iteration"], one["negative"], one["absolute"]) for one in found["best"]] == [
        (0, 0, 1),
        (2, -0.5, 2.0),
    ]


def test_free_sums_are_outside_of_the_hull_and_a_start_has_one_name(tmp_path: Path) -> None:
    x = [[[1, 0], [0, 1], [0.75, 0.75], [0.5, 0.5], [0.9, 0.1], [0.9, 0.3]]]
    run = made(tmp_path, [[[1.0, 0.0]] * 5 + [[1.0, 1.0]]], x)
    assert trajectories.measure_trajectory(run)["outside"] == pytest.approx([2 / 6])
    kinds = [trajectories.describe_start(run, i) for i in range(6)]
    soups = ["1.5 x soup", "uniform soup"]
    assert kinds == ["amber", "birch", *soups, "crossover child", "drawn"]
    assert origins.rank_of_origin(run)["start_kind"] == "drawn"
    section = convergence.progress_section(PairedComparison(run))
    (table,) = section.folded["Every particle"]
    assert [row[1] for row in table.rows] == kinds
    spread = convergence.diversity_section(PairedComparison(run))
    assert "33%" in str(spread.blocks[0]) and "a sum other than 1" in str(spread.blocks[-1])


def test_two_components_suffice_for_two_experts(tmp_path: Path) -> None:
    run = made(tmp_path, [[[1, 0], [0, 0]]])
    assert trajectories.measure_trajectory(run)["explained"].sum() == pytest.approx(1)
    assert format_sparkline([0, float("nan"), 1, 0.5]) == "▁ █▅"


# Economy


def test_what_dropping_and_racing_saved(tmp_path: Path) -> None:
    rounds: list[Values] = [
        [[1, 0, 0], [0, 0, 0]],
        [[1, 1, 0], None],
        [None, None],
        [[1, 1, 1], [0, 0, 0]],
    ]
    facts = [{}, {}, {"beyond_budget": 1}, {"prompts_scored": 4, "prompts_saved": 2}]
    found = prompt_efficiency.measure_economy(made(tmp_path, rounds, facts=facts))
    assert (found["dropped"], found["beyond_budget"]) == (6, 3)
    assert (found["raced"], found["evaluations"]) == (2, 5)
    assert found["prompts"].tolist() == [6, 9, 9, 13]
    assert found["improvements"] == 2 and found["prompts_per_improvement"] == 7 / 2


def test_runs_are_compared_at_equal_prompts(tmp_path: Path) -> None:
    zero, one, two = [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]
    quick = prompt_efficiency.measure_economy(made(tmp_path / "quick", [[zero, zero], [two, None]]))
    slow = prompt_efficiency.measure_economy(
        made(tmp_path / "slow", [[zero, zero], [one, zero], [two, zero]])
    )
    found = prompt_efficiency.compare_at_equal_prompts([quick, slow])
    assert found["budgets"].tolist() == [4, 5, 6]  # the start of both, and all of the cheaper
    assert found["best"].tolist() == [[0, 0, 1], [0, 0, 0]]
    text = "\n".join(prompt_efficiency.format_economy([quick, slow]))
    assert "best dev after prompts" in text
    other = prompt_efficiency.measure_economy(made(tmp_path / "other", [[[0.0] * 3, [1.0] * 3]]))
    assert "no comparison at equal prompts" in "\n".join(
        prompt_efficiency.format_economy([quick, other])
    )


# The command


def test_a_wrong_folder_is_one_line(tmp_path: Path, capsys: Any) -> None:
    RunRecord(tmp_path / "begun").open_or_resume({}, ["amber"])
    for name, word in (
        ("nowhere", "contains no search"),
        ("begun", "no iteration has finished yet"),
    ):
        assert entry.main(["analyse", str(tmp_path / name)]) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("error: ") and word in shown.err
    with pytest.raises(UserError):
        RunFolder(tmp_path)


def test_the_text_fits_eighty_columns(tmp_path: Path) -> None:
    experts = [f"expert-of-a-long-name-{k}" for k in range(12)]
    draw = np.random.default_rng(0)
    values = [(draw.random((14, 30)) < 0.3 + t / 9).astype(float).tolist() for t in range(5)]
    positions = draw.normal(size=(5, 14, 12))
    made(tmp_path / "a_run_with_a_very_long_name_2026-11-21_10-00-00", values, positions, experts)
    made(tmp_path / "short", values, positions, experts)
    found = analyse_runs(sorted(tmp_path.iterdir()))
    # A headline names the folder, however long that is.
    lines = [line for line in as_text(found).splitlines() if not line.startswith("# ")]
    assert [line for line in lines if len(line) > 80] == []
    again = json.loads(as_json(found))
    assert again["runs"][0]["finished"] is None and again["origins"]["runs"] == 2


def test_a_real_search(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    done = searches.run(searches.arguments(tmp_path, tiny_llama, tiny_pool))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "search" / "run"
    command = [
        sys.executable,
        "-m",
        "swarm.report",
        "analyse",
        str(folder),
        "--json",
        "--plots",
        str(tmp_path / "plots"),
    ]
    out = subprocess.run(
        command,
        cwd=searches.ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=searches.environment(),
    )
    (found,) = json.loads(out.stdout)["runs"]
    metrics = read_verdict(read_state(folder))
    alone = found["emergence"]["best_alone"]
    assert alone["expert"] == metrics.expert
    assert alone["test"]["paired"]["difference"] == pytest.approx(
        metrics.start_model.gain.difference
    )
    assert found["economy"]["prompts"][-1] == metrics.costs["prompts_scored"]
    assert found["trajectory"]["utility"][-1] == metrics.dev.utility
    assert len(draw_charts(analyse_runs([folder, folder]), tmp_path / "two")) == 5
    assert len(list((tmp_path / "two").iterdir())) == 5
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [p.stem for p in pictures] == ["economy", "run_coefficients", "run_principal"]
    for picture in pictures:
        assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
