"""The analyses of run folders whose answers are known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.report import analyses, sections
from swarm.report.paired_comparison import PairedComparison
from swarm.runs.folder import RunFolder, RunRecord

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
    found = analyses.measure_emergence(made(tmp_path, [start, end]))
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


def test_a_personal_best_counts_and_not_the_last_round(tmp_path: Path) -> None:
    first, better, worse = [[1, 0, 0], [0, 1, 0]], [[1, 1, 0], [0, 1, 1]], [[0, 0, 0], None]
    found = analyses.measure_emergence(made(tmp_path, [first, better, worse]))
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
    swarms = [analyses.compare_with_controls(*swarm_of_guessers(seed)) for seed in range(30)]
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


def test_particles_that_answer_alike_are_one_guesser() -> None:
    start, end, best = swarm_of_guessers(2)
    end[:] = np.arange(60) % 3 == 0
    chance = analyses.compare_with_controls(start, end, best)["shares"]["C-emerge"]["chance"][0]
    assert abs(chance - 1 / 3) < 0.03


def test_nothing_hard_and_nothing_to_count(tmp_path: Path) -> None:
    run = made(tmp_path, [[[1, 1], [1, 0]]])
    found = analyses.measure_emergence(run)
    assert found["shares"]["C-emerge"] is None and found["shares"]["C-surge"]["observed"].mean == 0


def test_ratings_have_no_emergence(tmp_path: Path) -> None:
    found = analyses.measure_emergence(made(tmp_path, [[[0.5, 1], [1, 0]]]))
    assert not found["applies"] and found["reason"].startswith("the answers' values are not all")


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
    return analyses.rank_of_origin(made(folder, [values, end]))


# Trajectories


def test_the_spread_of_the_swarm(tmp_path: Path) -> None:
    x = [[[1, 0, 0], [0, 1, 0]], [[0.5, 0.5, 0], [0.5, 0.5, 0]], [[1.5, -0.5, 0], [0.5, 0.5, 0]]]
    values: list[Values] = [[[1, 0], [0, 0]], [[0, 0], [0, 0]], [[1, 1], [0, 0]]]
    run = made(tmp_path, values, x, ("amber", "birch", "cedar"))
    found = analyses.measure_trajectory(run)
    # Two corners are half of sqrt 2 from their middle; then both are in one place.
    assert found["diversity"][:2] == pytest.approx([0.5**0.5, 0])
    assert found["outside"] == pytest.approx([0, 0, 0.5])


def test_free_sums_are_outside_of_the_hull_and_a_start_has_one_name(tmp_path: Path) -> None:
    x = [[[1, 0], [0, 1], [0.75, 0.75], [0.5, 0.5], [0.9, 0.1], [0.9, 0.3]]]
    run = made(tmp_path, [[[1.0, 0.0]] * 5 + [[1.0, 1.0]]], x)
    assert analyses.measure_trajectory(run)["outside"] == pytest.approx([2 / 6])
    kinds = [analyses.describe_start(run, i) for i in range(6)]
    soups = ["1.5 x soup", "uniform soup"]
    assert kinds == ["amber", "birch", *soups, "crossover child", "drawn"]
    assert analyses.rank_of_origin(run)["start_kind"] == "drawn"
    *_, table = sections.progress_blocks(PairedComparison(run))
    assert sorted(row[1] for row in table.rows) == sorted(kinds)
    _, spread = sections.diversity_blocks(PairedComparison(run))
    assert "33%" in spread and "a sum other than 1" in spread


# Economy


def test_what_dropping_and_racing_saved(tmp_path: Path) -> None:
    rounds: list[Values] = [
        [[1, 0, 0], [0, 0, 0]],
        [[1, 1, 0], None],
        [None, None],
        [[1, 1, 1], [0, 0, 0]],
    ]
    facts = [{}, {}, {"beyond_budget": 1}, {"prompts_scored": 4, "prompts_saved": 2}]
    found = analyses.measure_economy(made(tmp_path, rounds, facts=facts))
    assert (found["dropped"], found["beyond_budget"]) == (6, 3)
    assert (found["raced"], found["evaluations"]) == (2, 5)
    assert found["prompts"].tolist() == [6, 9, 9, 13]
    assert found["improvements"] == 2 and found["prompts_per_improvement"] == 7 / 2
