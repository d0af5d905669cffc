"""The live view in a real terminal, and plain lines where there is none."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import searches
from rich.console import Console

from swarm.evaluation import as_rows
from swarm.executors import Result
from swarm.live import View, spent_line
from swarm.record import Record
from swarm.tasks import Score
from swarm.verdict import spent
from swarm.words import conclusion, sentence


def in_terminal(command: list[str], columns: int) -> str:
    """Everything a search writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environment = searches.environment(TERM="xterm-256color", COLUMNS=str(columns), LINES="40")
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.search", *command],
        cwd=searches.ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait(timeout=60) == 0, seen.decode()
    return seen.decode()


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_the_search_live(
    columns: int, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool)
    seen = in_terminal(command, columns)
    assert "\x1b[" in seen, "no live view"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert "prompts/s" in plain and "iteration   4" in plain and "0/" in plain
    assert "best initial expert" in plain and "Traceback" not in plain


def test_what_an_iteration_says() -> None:
    out = io.StringIO()
    view = View(10, Console(file=out, width=100))
    with view:
        view.begin("iteration 0", 0, 2, 3)
        view.watch(Result(0, [[Score(1.0, "A")] * 3] * 2, prompts=6, tokens=60))
        view.end([0.25, None, 0.5], 0.5, "")
    line = out.getvalue()
    assert "best 0.500" in line and "0.250 to 0.500" in line and "prompts/s" in line
    assert "at most" in line and "\x1b" not in line


def test_a_position_reads_as_a_sentence() -> None:
    names = ["cot", "lima", "sharegpt", "oasst"]
    assert sentence(names, [0.41, 0.33, -0.08, 0.001]) == "0.41 cot + 0.33 lima - 0.08 sharegpt"
    assert sentence(names, [-1.2, 0.0, 0.2, 0.0]) == "- 1.20 cot + 0.20 sharegpt"


def judgement(text: str, cost: float) -> Score:
    return Score(0.5, text, text, measures={"rating": 5.0, "judge_tokens": 10, "judge_cost": cost})


def test_what_scoring_took_is_summed_and_said(tmp_path: Path) -> None:
    """Texts that come again, in the same round or later, are kept apart; dev and test are not."""
    record = Record(tmp_path / "run")
    record.open({}, ["amber", "birch"])
    items = [{"id": 0}, {"id": 1}]
    rounds = [
        {0: [judgement("a", 1.0), judgement("b", 2.0)], 1: [judgement("a", 1.0)]},
        {1: [judgement("a", 1.0), judgement("c", 4.0)]},
    ]
    for scores in rounds:
        rows = {i: as_rows(items[: len(mine)], mine) for i, mine in scores.items()}
        record.add_round(np.eye(2), np.array([0.5, 0.5]), rows, {}, {})
    record.keep_answers(
        "test", [1.0, 0.0], "0", as_rows(items, [judgement("a", 8.0), judgement("a", 16.0)])
    )
    assert spent(record) == {
        "judge_tokens": {"first": 50.0, "again": 20.0},
        "judge_cost": {"first": 31.0, "again": 2.0},
    }
    assert "judge_tokens 50 + 20, judge_cost 31 + 2 (" in spent_line(spent(record))


def test_a_search_without_a_judge_says_nothing_of_it(tmp_path: Path) -> None:
    record = Record(tmp_path / "run")
    record.open({}, ["amber", "birch"])
    scores = [Score(1.0, "A", "A", measures={"length": 3.0})]
    record.add_round(np.eye(2), np.ones(2), {0: as_rows([{"id": 0}], scores)}, {}, {})
    assert spent(record) == {}


@pytest.mark.parametrize(
    ("gain", "p", "dev", "words"),
    [
        (0.05, 0.01, 0.6, "gain of 0.05 on 40 test items is distinguishable"),
        (-0.05, 0.01, 0.6, "loss of 0.05 on 40 test items is distinguishable"),
        (0.02, 0.4, 0.6, "is not distinguishable from chance"),
        (0.01, 1.0, 0.5, "nothing better on dev"),
    ],
)
def test_the_conclusion_claims_no_more_than_was_measured(
    gain: float, p: float, dev: float, words: str
) -> None:
    metrics = {
        "test_gain": gain,
        "test_gain_p_value": p,
        "test_gain_interval": [gain - 0.03, gain + 0.03],
        "ending_best_single_test_items": 40,
        "starting_best_validation_utility": 0.5,
        "ending_best_validation_utility": dev,
    }
    assert words in conclusion(metrics) and f"p = {p:.3g}" in conclusion(metrics)
