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
        told |= facts[number] if facts else {}
        record.add_iteration(x, utilities, answers, {}, told)
    return RunFolder(folder)


def test_emergence_is_that_counted_by_hand(tmp_path: Path) -> None:
    start = [[1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 1]]
    end = [[1, 0, 1, 0, 0, 1], [0, 1, 1, 1, 0, 0]]
    found = analyses.measure_emergence(made(tmp_path / "a", [start, end]))
    shares = {name: one["observed"] for name, one in found["shares"].items()}
    assert (found["items"], found["particles"], found["hard_items"]) == (6, 2, 3)
    # More right: items 2 and 3 of 6. Wrong for both at the start: 2, 3 and 4.
    assert shares["C-surge"][::3] == (2 / 6, 6) and shares["C-emerge"][::3] == (2 / 3, 3)
    # Both end with 3 of 6, the first of equals counts: it solves item 2 alone.
    assert shares["best alone"][::3] == (1 / 3, 3)
    assert list(found["mirror"].values()) == [2, 1, 2, 0]
    # A personal best counts, not the last round.
    rounds: list[Values] = [[[1, 0, 0], [0, 1, 0]], [[1, 1, 0], [0, 1, 1]], [[0, 0, 0], None]]
    found = analyses.measure_emergence(made(tmp_path / "b", rounds))
    assert found["shares"]["C-emerge"]["observed"].mean == 1.0
    assert found["mirror"]["fewer_right"] == 0
    found = analyses.measure_emergence(made(tmp_path / "c", [[[1, 1], [1, 0]]]))
    assert found["shares"]["C-emerge"] is None and found["shares"]["C-surge"]["observed"].mean == 0
    rated = analyses.measure_emergence(made(tmp_path / "d", [[[0.5, 1], [1, 0]]]))
    assert not rated["applies"] and rated["reason"].startswith("the answers' values are not all")


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
        known = [share for one in swarms if (share := one["shares"][name]) is not None]
        inside = [s["chance"][1] <= s["observed"].mean <= s["chance"][2] for s in known]
        assert np.mean(inside) > 0.85, name
        assert np.mean([s["p_above_chance"] <= 0.05 for s in known]) < 0.2, name
    assert np.mean([one["shares"]["C-emerge"]["observed"].mean for one in swarms]) > 0.8
    # Guessers improve on the items that they are selected on.
    assert all(one["mirror"]["more_right"] > one["mirror"]["fewer_right"] for one in swarms)
    # Particles that answer alike are one guesser.
    start, end, best = swarm_of_guessers(2)
    end[:] = np.arange(60) % 3 == 0
    chance = analyses.compare_with_controls(start, end, best)["shares"]["C-emerge"]["chance"][0]
    assert abs(chance - 1 / 3) < 0.03


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
    """Of a run of so many tenths right, in which one particle gets all right."""
    values = [[1.0] * round(10 * u) + [0.0] * (10 - round(10 * u)) for u in start]
    end = [[1.0] * 10 if i == winner else None for i in range(len(start))]
    found = analyses.rank_of_origin(made(tmp_path, [values, end]))
    assert (found["particle"], found["rank"], found["of"]) == (winner, rank, len(start))
    assert (found["started_best"], found["bottom_half"]) == (best, bottom)
    assert found["start_kind"] == (["amber", "birch", *["crossover child"] * 2][winner])


def test_spread_and_hull_of_the_swarm(tmp_path: Path) -> None:
    x = [[[1, 0, 0], [0, 1, 0]], [[0.5, 0.5, 0], [0.5, 0.5, 0]], [[1.5, -0.5, 0], [0.5, 0.5, 0]]]
    values: list[Values] = [[[1, 0], [0, 0]], [[0, 0], [0, 0]], [[1, 1], [0, 0]]]
    run = made(tmp_path / "a", values, x, ("amber", "birch", "cedar"))
    found = analyses.measure_trajectory(run)
    # Two corners are half of sqrt 2 from their middle; then both are in one place.
    assert found["diversity"][:2] == pytest.approx([0.5**0.5, 0])
    assert found["outside"] == pytest.approx([0, 0, 0.5])
    assert analyses.best_positions(run).tolist() == [x[0][0], x[0][0], x[2][0]]
    # A sum other than 1 is outside, and each kind of start has a name.
    x = [[[1, 0], [0, 1], [0.75, 0.75], [0.5, 0.5], [0.9, 0.1], [0.9, 0.3]]]
    models = PairedComparison(made(tmp_path / "b", [[[1.0, 0.0]] * 5 + [[1.0, 1.0]]], x))
    kinds = [analyses.describe_start(models.run, i) for i in range(6)]
    soups = ["1.5 x mean", "mean of all"]
    assert kinds == ["amber", "birch", *soups, "crossover child", "drawn"]
    assert analyses.rank_of_origin(models.run)["start_kind"] == "drawn"
    assert "were 33% of the mixtures" in str(sections.progress_blocks(models)[-1])


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
