"""What a running search shows: its numbers, the live view, lines without one, and the verdict."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from swarm.executors import JobResult
from swarm.loop.evaluator import scores_to_records
from swarm.loop.final_evaluation import sum_scoring_costs
from swarm.loop.terminal import Progress, SearchView, render
from swarm.merging.positions import describe_position
from swarm.runs.folder import RunRecord
from swarm.tasks.base import Score
from swarm.trackers import Tracker


class Clock:
    """A time that stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def job(items: int, prompts: int | None = None) -> JobResult:
    return JobResult(0, [[Score(1.0, "A")] * items], prompts or items, 10 * items)


def entry(particles: int, scored: int, number: int = 0, **more: Any) -> dict[str, Any]:
    known: list[float | None] = [0.3 + 0.01 * (i * 7 % 10 + number) for i in range(particles)]
    known[-1] = None if number else 0.1
    return {"utilities": known, "prompts_scored": scored, **more}


def halfway(particles: int, iterations: int) -> Progress:
    """A search in the middle of an iteration, with saved evaluations."""
    progress = Progress(50)
    saved = {"prompts_saved": 15, "prompts_shared": 3, "items_scored": [25, 60, None]}
    for number in range(iterations):
        progress.start(f"iteration {number}: evaluating dev", particles * 100)
        progress.add_iteration(entry(particles, 80, number, **saved))
    progress.start(f"iteration {iterations}: evaluating dev", particles * 100)
    progress.add_job(job(6))
    return progress


def drawn(progress: Progress, width: int, height: int, blocks: bool = True) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as found:
        console.print(render(progress, width, height, blocks))
    return [line.rstrip() for line in found.get().splitlines()]


@pytest.mark.parametrize("particles", [5, 20, 100])
@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 24), (200, 24), (200, 60)])
def test_the_live_view_fits_the_terminal(width: int, height: int, particles: int) -> None:
    lines = drawn(halfway(particles, 30), width, height)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    cells = re.findall(r"(\d+) ([▁▂▃▄▅▆▇█·]*) +(?:0\.\d{3}|-)", text)
    shown = [int(number) for number, _ in cells]
    assert shown == list(range(len(shown))) and len(lines) <= height
    assert len(shown) == particles or f"and {particles - len(shown)} more mixtures" in text


def test_the_live_view_has_the_best_the_saved_and_each_particle() -> None:
    text = "\n".join(drawn(halfway(3, 4), 100, 24))
    assert "iteration 4: evaluating dev" in text and "6/300 items" in text
    assert re.search(r"best 0\.400 +improved by 0\.010 in round 3", text)
    assert "of 400 prompts: 60 stopped early, 20 answered before, 12 from other" in text
    assert "*" in text and "at most" in text
    assert "▁" not in "\n".join(drawn(halfway(3, 4), 100, 24, blocks=False))


def test_the_time_left_is_that_of_the_last_iterations_and_of_the_test() -> None:
    clock = Clock()
    progress = Progress(10, clock=clock)
    assert progress.seconds_left() is None
    progress.start("iteration 0: evaluating dev", 100)
    clock.now = 10.0
    progress.add_job(job(50))
    # In the first iteration by its jobs: 11 iterations of 100 items, of which 50 are done.
    assert progress.seconds_left() == pytest.approx(1050 * 10 / 50)
    clock.now = 60.0  # the first one starts the workers
    progress.add_job(job(50))
    progress.add_iteration(entry(2, 100))
    for number in (1, 2):
        progress.start(f"iteration {number}: evaluating dev", 100)
        clock.now += 20.0
        progress.add_job(job(100))
        progress.add_iteration(entry(2, 100, number))
    assert progress.seconds_left() == pytest.approx(8 * 20)
    progress.final_items = 30
    assert progress.seconds_left() == pytest.approx(8 * 20 + 30 * 0.2)
    assert progress.status()["share"] == pytest.approx(3 / 11, abs=1e-4)
    progress.start("test: base model", 15, to_come=15)
    assert progress.seconds_left() == pytest.approx(30 * 0.2)
    assert progress.status()["share"] == 1.0


def test_budget_and_limit_end_a_search_earlier() -> None:
    clock = Clock()
    progress = Progress(100, budget=400, limit=60.0, clock=clock)
    progress.start("iteration 0: evaluating dev", 100)
    clock.now = 10.0
    progress.add_job(job(100))
    assert progress.seconds_left() == pytest.approx(300 * 10 / 100)
    gradients = {"gradients_computed": 50, "losses_computed": 0, "seconds": 10.0}
    progress.add_iteration(entry(2, 100, **gradients))
    assert progress.status()["budget_share"] == pytest.approx(250 / 400)
    clock.now = 45.0
    assert progress.seconds_left() == pytest.approx(60 - 10 - 35), "the limit is sooner"


@pytest.fixture
def view(tmp_path: Path) -> SearchView:
    record = RunRecord(tmp_path / "run")
    record.open_or_resume({}, ["amber", "birch"])
    return SearchView(record, Tracker(), Progress(5))


def test_without_a_terminal_there_are_lines(
    view: SearchView, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    view.progress._clock = clock
    with view:
        view.start("dev", "evaluating dev: 2 positions, 9 items each", "iteration 0", 18)
        for _ in range(2):
            clock.now += 21.0
            view.show_job(job(4))
        utilities = np.array([0.25, 0.5])
        facts = {"prompts_scored": 18, "prompts_saved": 0}
        view.record.add_iteration(np.eye(2), utilities, {}, {}, facts)
        view.show_iteration(0)
        view.start("dev", "evaluating dev: short ones once", "iteration 1", 18)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "evaluating dev: 2 positions, 9 items each"
    assert out[1] == "iteration 0: 4 of 18 items after 21 s, about 1 min 14 s more"
    assert out[2].startswith("iteration 0: 8 of 18 items after 42 s")
    assert out[3].startswith("round 0: best 0.500, this round 0.250 to 0.500, ")
    assert len(out) == 4


def test_the_log_says_what_the_budget_counts(
    view: SearchView, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"prompts_scored": 198, "prompts_saved": 0, "items_scored": [108, 108]}
    facts |= {"losses_computed": 22, "gradients_computed": 126}
    view.record.add_iteration(np.eye(2), np.ones(2), {}, {}, facts)
    view.progress.add_iteration(view.record.iterations[0])
    with caplog.at_level("INFO", "swarm.loop.terminal"):
        view.show_end("1 iteration done")
    assert capsys.readouterr().out == "search ends: 1 round done\n"
    assert caplog.messages[-1] == (
        "cost on dev: 198 prompts, 126 gradients at 3 prompts each, 22 losses at 1, in all 598; "
        "not counted: 18 answered before"
    )


def test_a_position_in_words() -> None:
    words = describe_position(["cot", "lima", "sharegpt", "oasst"], [0.41, 0.33, -0.08, 0.001])
    assert words == "0.41 cot + 0.33 lima - 0.08 sharegpt"


def judgement(text: str, cost: float) -> Score:
    return Score(0.5, text, text, measures={"rating": 5.0, "judge_tokens": 10, "judge_cost": cost})


def test_what_scoring_took_is_summed_and_said(tmp_path: Path) -> None:
    """Texts that come again, in the same round or later, are kept apart; dev and test are not."""
    record = RunRecord(tmp_path / "run")
    record.open_or_resume({}, ["amber", "birch"])
    items = [{"id": 0}, {"id": 1}]
    rounds = [
        {0: [judgement("a", 1.0), judgement("b", 2.0)], 1: [judgement("a", 1.0)]},
        {1: [judgement("a", 1.0), judgement("c", 4.0)]},
    ]
    for scores in rounds:
        rows = {i: scores_to_records(items[: len(mine)], mine) for i, mine in scores.items()}
        record.add_iteration(np.eye(2), np.array([0.5, 0.5]), rows, {}, {})
    record.save_answers(
        "test",
        [1.0, 0.0],
        "0",
        scores_to_records(items, [judgement("a", 8.0), judgement("a", 16.0)]),
    )
    assert sum_scoring_costs(record) == {
        "judge_tokens": {"first": 50.0, "again": 20.0},
        "judge_cost": {"first": 31.0, "again": 2.0},
    }
