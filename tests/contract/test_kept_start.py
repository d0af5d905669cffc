"""A search never returns what its own unused items show to be worse than its start."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.loop.evaluator import scores_to_records
from swarm.loop.final_evaluation import FinalEvaluation
from swarm.runs.folder import RunRecord, read_state
from swarm.runs.verdict import Start, state_verdict
from swarm.stats.significance import PairedTest
from swarm.tasks.base import Score
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.metrics import Measured

EXPERTS = np.eye(2)


def task_of(path: Path, items: int) -> ExactMatch:
    split = {
        name: [{"id": i, "question": f"{name} {i}", "answer": "1"} for i in range(items)]
        for name in ("dev", "test")
    }
    path.write_text(json.dumps(split))
    return ExactMatch("made", str(path))


def right(task: ExactMatch, items: Sequence[int]) -> list[Score]:
    """Scores of a model that answers only these items correctly."""
    return [Score(float(i in items), str(int(i in items))) for i in range(len(task.items("dev")))]


def ended(
    folder: Path,
    task: ExactMatch,
    rounds: Sequence[tuple[np.ndarray, Sequence[Sequence[int]]]],
    unused: Sequence[int],
    routes: Sequence[int] | None = None,
) -> FinalEvaluation:
    """A search with these positions, and the items that each answers correctly, is over."""
    record = RunRecord(folder)
    names = ["all"] if routes is None else [f"kind {r} / all" for r in range(max(routes) + 1)]
    record.open_or_resume({"seed": 1}, ["amber", "birch"], names)
    for positions, answered in rounds:
        scores = [right(task, items) for items in answered]
        rows = {i: scores_to_records(task.items("dev"), one) for i, one in enumerate(scores)}
        utilities = np.array([task.utility(one) for one in scores])
        facts = {"items_scored": [len(s) for s in scores], "prompts_scored": 1, "prompts_saved": 0}
        record.add_iteration(positions, utilities, rows, {}, facts)

    def refuse(*_: object) -> list[list[Score]]:
        raise AssertionError("nothing has to be scored again")

    return FinalEvaluation(
        record,
        task,
        refuse,
        refuse,
        lambda *_: None,
        range(len(task.items("dev"))),
        [],
        unused,
        item_routes=None if routes is None else np.array(routes),
        routes=len(names),
    )


def test_a_best_found_that_is_worse_on_unused_items_is_replaced_by_the_start(
    tmp_path: Path,
) -> None:
    task = task_of(tmp_path / "made.json", 10)
    moved = np.array([[0.6, 0.4], [0.0, 1.0]])
    # Trained on 0 to 7, of which it knows all; of the others the first expert knows both.
    rounds = [(EXPERTS, [[0, 1, 2, 3, 8, 9], [0]]), (moved, [range(8), [0]])]
    ending = ended(tmp_path / "run", task, rounds, unused=[8, 9])
    assert ending.choose_bests() == ((0, 0), (0, 0))
    found = ending.compare_models(test=False, ensemble=0, noise_floor=False)
    assert found.start == Start(True, "best of the first round: amber", 1, None)
    test = Measured(0.6, 0.3, 0.8, 10)
    expert = replace(found.start_model, test=test, gain=PairedTest(0.0, 0.0, 0.0, 1.0, 10))
    tested = replace(found, found=replace(found.found, test=test), alternatives=[expert])
    words = str(state_verdict(tested))
    assert words.startswith("Not worth it")
    assert "nothing better than the best of the first round: amber" in words


@pytest.mark.parametrize(("unused", "kept"), [([7, 8], False), ([8, 9], True), ([], False)])
def test_equal_or_better_on_unused_items_is_kept(
    unused: list[int], kept: bool, tmp_path: Path
) -> None:
    task = task_of(tmp_path / "made.json", 10)
    moved = np.array([[0.6, 0.4], [0.0, 1.0]])
    rounds = [(EXPERTS, [[0, 8, 9], [0]]), (moved, [range(8), [0]])]
    ending = ended(tmp_path / "run", task, rounds, unused)
    assert ending.choose_bests()[1] == ((0, 0) if kept else (1, 0))
    # The choice is in the record: a second end reads it.
    again = FinalEvaluation(
        *(ending.record, task, ending.ask, ending.ask, ending.begin, ending.searched, [], unused)
    )
    assert again.choose_bests() == ending.choose_bests()


def test_the_best_starts_of_each_kind_are_composed(tmp_path: Path) -> None:
    task = task_of(tmp_path / "made.json", 8)
    routes = [0, 0, 0, 0, 1, 1, 1, 1]
    experts = np.hstack([EXPERTS, EXPERTS])
    moved = np.array([[0.5, 0.5, 0.7, 0.3], [0.0, 1.0, 0.0, 1.0]])
    # Of the unused 3, 6 and 7 the search knows one, the best starts of both kinds all.
    rounds = [(experts, [[3], [6, 7]]), (moved, [[0, 1, 2, 3, 4, 5], [6]])]
    ending = ended(tmp_path / "run", task, rounds, [3, 6, 7], routes)
    _, (number, particle) = ending.choose_bests()
    record = ending.record
    assert record.position_at((number, particle)) == [1.0, 0.0, 0.0, 1.0]
    rows = record.load_answers((number, particle))
    assert [row["value"] for row in rows] == [0, 0, 0, 1, 0, 0, 1, 1]
    assert record.utility_at((number, particle)) == 0.375
    # A start again finds the round that was added, and adds no other.
    again = RunRecord(record.folder)
    assert again.open_or_resume({"seed": 1}, ["amber", "birch"])
    assert len(again.iterations) == 3 and again.find_best() == (number, particle)
    found = ending.compare_models(test=False, ensemble=0, noise_floor=False)
    assert found.start.whole
    again.reopen()
    assert len((read_state(record.folder) or {})["rounds"]) == 2
    assert len(again.iterations) == 2 and again.find_best() == (1, 0)
