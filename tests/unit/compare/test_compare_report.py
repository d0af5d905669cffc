"""The report of a run: its tables and figures, whatever was answered."""

import csv
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from test_compare_statistics import answers

from swarm.compare import report
from swarm.compare.report import save_figures
from swarm.errors import InvalidArgument
from swarm.stats.summary_table import summary


def test_a_report_shows_models_by_paraphrases_and_is_written_anew(tmp_path: Path) -> None:
    long = [f"answer {i}" for i in range(36)]
    df = pd.concat(
        [
            answers(group, model, ["x", "y", None if group == "b" else "x"] * 12).assign(
                paraphrase_ix=[0, 1, 2] * 12,
                cost=cost,
                score=np.arange(36) / 7,
                score_question="?",
                mood=long,
                mood_question="?",
            )
            for group, model, cost in (("a", "m", 0.001), ("b", "n (new)", None))
        ]
    )
    told = report.write_question_section(tmp_path, "song(1)", df)
    there = sorted(path.name for path in (tmp_path / "song(1)").glob("*.png"))
    assert there == [
        "answer_models.png",
        "mood_plot.png",
        "plot.png",
        "score_models.png",
        "score_plot.png",
    ], "of moods that are all different no heat map"
    assert "![score](song%281%29/score_models.png)" in told
    assert "cost $0.036000 at least, as no price is known for n (new)." in told
    assert "26 more |" in told and " 0.722 |" in told, "what is left of 36 moods"
    free = report.write_question_section(tmp_path, "song(1)", df[df["group"] == "b"])
    assert "no price known" in free and "$" not in free
    assert not (tmp_path / "song(1)" / "answer_differences.csv").exists(), "a former run's"
    many = pd.concat([answers(f"g{i}", "m", [1.5, 2.5, 3.5]) for i in range(57)])
    [_, line] = save_figures(tmp_path, many, "answer", "group")
    assert line.startswith("No figure: 57 answers are more than can be distinguished")


def test_no_cell_of_a_table_is_a_formula(tmp_path: Path) -> None:
    df = answers("=g", "@m", ["=1+1", "-2", "b"])
    report.write_question_section(tmp_path, "q", df)
    for file in ("data.csv", "answer_summary.csv"):
        with (tmp_path / "q" / file).open(newline="") as told:
            cells = [cell for row in csv.reader(told) for cell in row]
        assert not [one for one in cells if one.startswith(("=", "+", "@", "-2"))], file
        assert "'@m" in cells


@pytest.mark.parametrize(
    "said",
    [
        ["x\ud800", "y", "x\ud800", "y"],
        [True, False, None, True],
        [10**400, "1", [1], {"a": 1}],
        [{}, {}, {}, {}],
        ["", " ", "\n", "\0"],
        [float("nan"), 1.5, 2.5, float("nan")],
        [{"1": 0.5, "2": 0.4}, {"x": 0.1}, {"1": 1.0}, {}],
        [{"1": 0.5, "99999999999": 0.5}] * 4,
    ],
)
def test_odd_answers_are_counted_without_a_crash_or_a_warning(
    tmp_path: Path, said: list[Any]
) -> None:
    df = pd.DataFrame(
        {
            "model": pd.Series(["m\ud800", "n"] * 2, dtype=object),
            "answer": pd.Series(said, dtype=object),
            "group": ["日本", "b"] * 2,
            "paraphrase_ix": [0, 0, 1, 1],
            "error": None,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.write_report(tmp_path, {"q": df})
        table = summary(df.assign(group=pd.Categorical(df["group"])))
    known = sum(one is not None and one == one for one in said)
    assert table.drop_duplicates("group")["n"].sum() == known


def test_what_could_not_have_been_seen_is_told(tmp_path: Path) -> None:
    df = pd.concat([answers(group, f"{group}{n}", [group] * 9) for group in "xy" for n in range(2)])
    told = report.write_report(tmp_path, {"q": df})
    assert told == "q: answer: No difference could have been detected: too few answers."
    more = [answers(group, f"{group}{n}", [group] * 9) for group in "xy" for n in range(5)]
    assert "Different at 5 %" in report.write_report(tmp_path, {"q": pd.concat(more)})


def test_an_infinite_number_is_one_line() -> None:
    with pytest.raises(InvalidArgument, match="the column answer has an infinite number"):
        summary(answers("a", "m", [1.5, float("inf"), 2.5]))
