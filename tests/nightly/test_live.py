"""The live view in a real terminal, and plain lines where there is none."""

import io
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyte
import pytest
import searches
from rich.console import Console

from swarm._util.terminal import format_p, format_p_value
from swarm.engine.gradient import Gradient
from swarm.executors import JobResult
from swarm.loop.evaluator import scores_to_records
from swarm.loop.final_metrics import sum_scoring_costs
from swarm.loop.live_view import (
    LiveView,
    draw_sparkline,
    render_particles,
    render_progress,
)
from swarm.loop.progress import SearchProgress
from swarm.loop.reporter import describe_cost
from swarm.loop.summary import position_lines, scoring_cost_line
from swarm.merging.positions import describe_position
from swarm.runs.folder import RunRecord
from swarm.runs.verdict import Compared, Verdict
from swarm.tasks.base import Score
from swarm.ui.state import describe_progress

LINES = 24
Search = Callable[..., list[str]]


def written(command: list[str], columns: int, **environment: str) -> bytes:
    """Everything a search writes to a terminal of so many columns and 24 lines."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (LINES, columns))
    surroundings = searches.environment(**{"TERM": "xterm-256color", **environment})
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.search", *command],
        cwd=searches.ROOT,
        env=surroundings,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            seen += part
    os.close(ours)
    assert process.wait(timeout=60) == 0, seen.decode()
    return seen


def screens(seen: bytes, columns: int) -> list[list[str]]:
    """What stands on the screen whenever the live view is drawn anew, and at the end."""
    screen = pyte.HistoryScreen(columns, LINES, history=1000)
    stream = pyte.ByteStream(screen)
    found = []
    for part in re.split(rb"(?=\r\x1b\[2K)", seen):
        stream.feed(part)
        found.append([line.rstrip() for line in screen.display])
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path) -> Search:
    """The arguments of a search of a second, by name and further keys."""
    folder = tmp_path_factory.mktemp("live")

    def command(name: str, **more: Any) -> list[str]:
        keys = {
            "optimizer__max_iterations": 2,
            "test": "false",
            "noise_floor": "false",
            "ensemble": 0,
            **more,
        }
        return searches.arguments(folder, tiny_llama, tiny_pool, name, **keys)

    return command


@pytest.mark.parametrize(("columns", "particles"), [(80, 7), (200, 8)])
def test_a_terminal_shows_the_search_live(columns: int, particles: int, small: Search) -> None:
    # Long enough for a picture, drawn four times a second, between two iterations.
    more = {"optimizer__max_iterations": 8, "optimizer__patience": 8}
    command = small(f"wide_{columns}", optimizer__particles=particles, **more)
    seen = written(command, columns, **({"NO_COLOR": "1"} if columns == 200 else {}))
    shown = screens(seen, columns)
    assert (b"\x1b[1;32m" in seen) == (columns == 80), "colour, but for NO_COLOR"
    assert not re.search(rb"\x1b\[[0-9;]*(3|4|9)[0-7]m", seen) or columns == 80
    live = [text for text in map("\n".join, shown) if "tokens/s" in text and "*" in text]
    assert live, "no live view with particles"
    text = live[-1]
    assert re.search(r"items\s+\d+\.\d prompts/s\s+\d+ tokens/s", text)
    assert re.search(r"^best 0\.\d{3}  (found|improved by 0\.\d{3}) in iteration \d", text, re.M)
    cells = re.findall(r"(?:^|\s)(\d+) ([▁▂▃▄▅▆▇█·]+) (0\.\d{3})\*?", text)
    assert [int(number) for number, _, _ in cells] == list(range(particles))
    assert len({len(line) for _, line, _ in cells}) == 1 and "*" in text
    end = "\n".join(shown[-1])
    assert "best initial expert" in end and "tokens/s" not in end and "Traceback" not in end


def test_a_dumb_terminal_gets_lines_without_escape_codes(small: Search) -> None:
    seen = written(small("dumb"), 80, TERM="dumb").decode()
    assert "\x1b" not in seen and "iteration   2  best 0." in seen
    assert "best found is the maximum of many\r\nand so" in seen, "broken between words"
    assert all(len(line) <= 80 or " " not in line for line in seen.splitlines())


def test_a_pipe_gets_a_line_an_iteration(small: Search) -> None:
    done = searches.run(small("piped"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("iteration")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2"], done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "prompts/s" in lines[0]
    phases = [line for line in done.stdout.splitlines() if line.startswith("evaluating")]
    assert [re.sub(r"\d+", "N", line) for line in phases] == [
        "evaluating dev: N positions, N items each"
    ], "short phases are announced once"


def halfway(particles: int, iterations: int) -> SearchProgress:
    """A search in the midst of an iteration, with lost and saved evaluations."""
    progress = SearchProgress(50)
    for number in range(iterations):
        progress.start_evaluation(f"iteration {number}", number, particles, 100)
        known: list[float | None] = [0.3 + 0.01 * (i * 7 % 10 + number) for i in range(particles)]
        known[-1] = None if number else 0.1
        progress.end_iteration(
            {
                "utilities": known,
                "prompts_scored": 80,
                "prompts_saved": 15,
                "prompts_shared": 3,
                "items_scored": [25, 60, None],
            }
        )
    progress.start_evaluation(f"iteration {iterations}", iterations, particles, 100)
    progress.add_job_result(JobResult(0, [[Score(1.0, "A")] * 3] * 2, prompts=6, tokens=60))
    return progress


@pytest.mark.parametrize("particles", [5, 20, 100])
@pytest.mark.parametrize(("width", "height"), [(40, 8), (80, 24), (200, 24), (200, 60)])
def test_the_picture_keeps_to_the_terminal(width: int, height: int, particles: int) -> None:
    lines = render_progress(halfway(particles, 40), width, height).plain.split("\n")
    assert len(lines) <= height and max(map(len, lines)) <= width
    shown = sum(len(re.findall(r"\d (?:[▁-█·]+ )?(?:0\.\d{3}|  -  )", line)) for line in lines)
    left = re.fullmatch(r"and (\d+) more particles", lines[-1])
    assert shown + int(left[1] if left else 0) - sum("best" in line for line in lines) in (
        particles - 1,
        particles,
    )


def test_more_columns_hold_more_particles_in_a_line() -> None:
    narrow, wide = (render_particles(halfway(20, 9), width, 20) for width in (80, 200))
    assert len(narrow) == 7 and len(wide) == 3
    assert "".join(line.plain.split()[1] for line in narrow[:1]) in wide[0].plain


def test_the_picture_says_what_is_saved_and_written() -> None:
    progress = halfway(5, 2)
    progress.writing = "new bests"
    text = render_progress(progress, 100, 20).plain
    # Put: 77 in each of 2 rounds; 15 saved by racing, 5 met before, 3 shared.
    saved = "of 200 prompts: 30 stopped early, 10 answered before, 6 from other searches"
    assert f"{saved}  writing new bests" in text
    assert "improved by 0.010 in iteration 1" in text


def test_the_picture_in_ascii() -> None:
    assert render_progress(halfway(5, 3), 80, 20, blocks=False).plain.isascii()


def test_the_heights_are_those_of_the_numbers() -> None:
    assert draw_sparkline([0.0, 0.5, None, 1.0], (0.0, 1.0)) == "▁▅·█"
    assert draw_sparkline([0.3, 0.3], (0.3, 0.3)) == "▁▁"


def test_the_time_left_is_that_of_the_last_iterations() -> None:
    clock = 0.0
    progress = SearchProgress(4, lambda: clock)
    assert progress.seconds_left() is None
    for number, seconds in enumerate([60, 10, 12]):
        progress.start_evaluation(f"iteration {number}", number, 2, 50)
        clock += seconds / 2
        progress.add_job_result(JobResult(0, [[Score(1.0, "A")] * 50], prompts=50, tokens=500))
        if number == 0:
            assert progress.seconds_left() == 30 + 4 * 60 and progress.prompts_per_second == 50 / 30
        clock += seconds / 2
        progress.end_iteration({"utilities": [0.5, 0.5], "prompts_scored": 100})
    assert progress.seconds_left() == 2 * 11
    # One that evaluates nothing has no pace.
    clock += 0.1
    progress.end_iteration({"utilities": [0.5, 0.5], "prompts_scored": 0})
    assert progress.seconds_left() == 2 * 11
    progress.start_evaluation("test", 3, 1, 100, to_come=200)
    clock += 5
    progress.add_job_result(JobResult(0, [[Score(1.0, "A")] * 50], prompts=50, tokens=500))
    assert progress.seconds_left() == 5 + 2 * 10 and progress.share == 1


def test_the_time_left_includes_the_evaluation_on_test() -> None:
    clock = 0.0
    progress = SearchProgress(4, lambda: clock)
    progress.final_items = 300
    out = io.StringIO()
    view = LiveView(progress, Console(file=out))
    progress.start_evaluation("iteration 0: evaluating dev", 0, 2, 50)
    clock += 10
    progress.add_job_result(JobResult(0, [[Score(1.0, "A")] * 50] * 2, prompts=100, tokens=500))
    progress.end_iteration({"utilities": [0.5, 0.5], "prompts_scored": 100})
    view.print_iteration()
    # Four iterations of 10 s, and 0.1 s for each item on test.
    assert progress.seconds_left() == 4 * 10 + 300 * 0.1
    assert "at most 1 min 10 s left with test" in out.getvalue()
    progress.start_evaluation("test: best found (1 of at most 3)", 0, 1, 100, to_come=200)
    assert progress.seconds_left() == 30, "the rate of the search, until there is another"
    clock += 10
    progress.add_job_result(JobResult(0, [[Score(1.0, "A")] * 50], prompts=50, tokens=500))
    assert progress.seconds_left() == 10 + 200 * 0.2


def test_a_long_evaluation_tells_how_far_it_is() -> None:
    clock, out = 0.0, io.StringIO()
    progress = SearchProgress(4, lambda: clock)
    view = LiveView(progress, Console(file=out, width=100))
    told = []
    progress.start_evaluation("iteration 1: gradient steps", 1, 1, 400)
    for second in range(200):
        clock += 1
        if second % 2:
            progress.add_job_result(JobResult(0, [], 2, 0, Gradient(1.0, np.ones(2))))
        view.report_progress()
        if line := out.getvalue():
            told.append(line.strip())
            out.seek(0)
            out.truncate()
    assert told == [
        "iteration 1: gradient steps: 20 of 400 items after 20 s, about 6 min 20 s more",
        "iteration 1: gradient steps: 40 of 400 items after 40 s, about 6 min 00 s more",
        "iteration 1: gradient steps: 80 of 400 items after 1 min 20 s, about 5 min 20 s more",
        "iteration 1: gradient steps: 160 of 400 items after 2 min 40 s, about 4 min 00 s more",
    ]
    progress.start_evaluation("iteration 1: evaluating dev", 1, 1, 400)
    clock += 19
    view.report_progress()
    assert not out.getvalue(), "a new evaluation"
    clock += 1
    view.report_progress()
    assert out.getvalue() == "iteration 1: evaluating dev: 0 of 400 items after 20 s\n"
    progress.add_job_result(JobResult(0, [[Score(1.0, "A")] * 400], prompts=400, tokens=500))
    clock += 100
    view.report_progress()
    assert out.getvalue().count("\n") == 1, "nothing after its end"


def test_under_a_budget_the_page_shows_its_share() -> None:
    progress = SearchProgress(50, budget=1000)
    progress.start_evaluation("iteration 0: evaluating dev", 0, 5, 10)
    progress.add_iteration({"utilities": [0.5], "prompts_scored": 420})
    progress.start_evaluation("iteration 1: evaluating dev", 1, 5, 10)
    words = describe_progress(progress.to_status())
    assert words == "iteration 1 (42 % of the budget): evaluating dev, 0 of 50 items"
    unlimited = SearchProgress(50)
    unlimited.start_evaluation("iteration 1: evaluating dev", 1, 5, 10)
    assert describe_progress(unlimited.to_status()).startswith("iteration 1 of at most 50: eval")


def test_the_time_left_ends_with_the_budget() -> None:
    """An iteration's gradients count in its seconds, and the budget ends before the iterations."""
    clock = 0.0
    progress = SearchProgress(50, lambda: clock, budget=1000)

    def work(activity: str, result: JobResult, items: int, seconds: float) -> None:
        nonlocal clock
        progress.start_evaluation(activity, int(activity[10]), 1, items)
        clock += seconds
        progress.add_job_result(result)

    scores = [[Score(1.0, "A")] * 100]
    work("iteration 0: evaluating dev", JobResult(0, scores, prompts=100, tokens=0), 100, 10)
    assert progress.seconds_left() == 90 and progress.share == 0.1
    progress.end_iteration({"utilities": [0.5], "prompts_scored": 100})
    gradient = JobResult(0, [], 100, 0, Gradient(1.0, np.ones(2)))
    work("iteration 1: gradient steps", gradient, 200, 80)
    # 400 of 1,000 prompt-equivalents took 90 s.
    assert progress.seconds_left() == 600 * 90 / 400 and progress.to_status()["done"] == 100
    work("iteration 1: evaluating dev", JobResult(0, scores, prompts=100, tokens=0), 100, 20)
    progress.end_iteration(
        {"utilities": [0.5], "prompts_scored": 100, "gradients_computed": 100, "losses_computed": 0}
    )
    assert progress.spent == 500 and progress.seconds_left() == 500 * 100 / 400
    assert progress.share == 0.5


def test_the_time_left_ends_with_the_limit() -> None:
    clock = 0.0
    progress = SearchProgress(50, lambda: clock, limit=600)
    progress.add_iteration({"utilities": [0.5], "seconds": 100.0})  # of an earlier process
    progress.start_evaluation("iteration 1: evaluating dev", 1, 1, 100)
    assert progress.seconds_left() == 500
    clock += 20
    progress.add_job_result(JobResult(0, [[Score(1.0, "A")] * 50], prompts=50, tokens=0))
    assert progress.seconds_left() == 480
    progress.end_iteration({"utilities": [0.5], "prompts_scored": 100, "seconds": 50.0})
    assert progress.seconds == 150 and progress.share == 0.25


def test_what_an_iteration_says() -> None:
    out = io.StringIO()
    progress = SearchProgress(10)
    view = LiveView(progress, Console(file=out, width=100))
    with view:
        progress.start_evaluation("iteration 0", 0, 2, 3)
        progress.add_job_result(JobResult(0, [[Score(1.0, "A")] * 3] * 2, prompts=6, tokens=60))
        progress.end_iteration({"utilities": [0.25, None, 0.5]})
        view.print_iteration()
    line = out.getvalue()
    assert "best 0.500" in line and "this iteration 0.250 to 0.500" in line and "prompts/s" in line
    assert "at most" in line and "\x1b" not in line and len(line) <= 110


def test_a_report_into_a_closed_pipe_ends_the_search() -> None:
    code = """
import sys, time
from swarm.loop import live_view
from swarm.loop.progress import SearchProgress
live_view.FIRST_REPORT_S = 0.1
progress = SearchProgress(3)
with live_view.LiveView(progress):
    progress.start_evaluation("iteration 1", 1, 1, 10)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(7)
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, timeout=50)
    os.close(writer)
    assert done.returncode == 7


def test_a_position_reads_as_a_sentence() -> None:
    names = ["cot", "lima", "sharegpt", "oasst"]
    assert (
        describe_position(names, [0.41, 0.33, -0.08, 0.001])
        == "0.41 cot + 0.33 lima - 0.08 sharegpt"
    )
    assert describe_position(names, [-1.2, 0.0, 0.2, 0.0]) == "- 1.20 cot + 0.20 sharegpt"


def verdict_on(position: list[float], label: str | None = None) -> Verdict:
    return Verdict(Compared("found", "best found", position=position), "cot", [], found_label=label)


def test_the_best_of_many_kinds_of_prompts_takes_a_few_lines() -> None:
    names, routes = ["cot", "lima"], [f"kind{number}" for number in range(16)]
    groups = [f"{route} / {part}" for route in routes for part in ("mlp", "attention")]
    position = np.repeat([[number / 10, 1.0] for number in range(16)], 2, axis=0).ravel().tolist()
    lines = position_lines(verdict_on(position), names, groups)
    assert len(lines) == 8 and lines[0].startswith("best found = a model for each kind of prompt")
    assert lines[1:3] == ["  kind0   1.00 lima", "  kind1   1.00 lima + 0.10 cot"]
    assert lines[-1] == "  and 10 more, which the report lists"
    soup = verdict_on([0.5, 0.5] * 32, "uniform soup")
    assert position_lines(soup, names, groups) == [
        "best found = uniform soup: 0.50 cot + 0.50 lima"
    ]


def test_the_cost_says_what_the_budget_counts() -> None:
    counts = {"prompts_scored": 198, "prompts_saved": 0}
    assert describe_cost(counts, {"racing": 0, "known": 0, "shared": 6}) == (
        "cost on dev: 198 prompts"
    )
    counts |= {"losses_computed": 22, "gradients_computed": 126, "prompt_equivalents": 598}
    assert describe_cost(counts, {"racing": 0, "known": 18, "shared": 0}) == (
        "cost on dev: 198 prompts, 126 gradients at 3 prompts each, 22 losses at 1, in all 598; "
        "not counted: 18 answered before"
    )


def test_a_small_p_value_is_a_bound() -> None:
    assert [format_p(p) for p in (1.6e-65, 0.00099, 0.001, 0.0123, 1.0)] == [
        "p < 0.001",
        "p < 0.001",
        "p = 0.001",
        "p = 0.0123",
        "p = 1",
    ]
    assert format_p_value(1.6e-65) == "< 0.001"


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
    assert "judge_tokens 50 + 20, judge_cost 31 + 2 (" in scoring_cost_line(
        sum_scoring_costs(record)
    )


def test_a_search_without_a_judge_says_nothing_of_it(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run")
    record.open_or_resume({}, ["amber", "birch"])
    scores = [Score(1.0, "A", "A", measures={"length": 3.0})]
    record.add_iteration(np.eye(2), np.ones(2), {0: scores_to_records([{"id": 0}], scores)}, {}, {})
    assert sum_scoring_costs(record) == {}
