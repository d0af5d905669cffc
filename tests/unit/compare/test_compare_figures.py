"""Plots and reports: what is drawn is read back from the figures, and files are really written."""

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import colors as mcolors
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.text import Text

from swarm.compare import Question, report
from swarm.compare.plots import (
    COLOURS,
    HATCHES,
    assign_looks,
    free_form_stacked_bar,
    judge_scores,
    plot,
    probs_stacked_bar,
    rating_cumulative_plot,
)
from swarm.compare.statistics import summary
from swarm.errors import InvalidArgument, UserError


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A warning is an error, and nothing stays open."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert pyplot.get_fignums() == []


def frame(said: dict[str, list[Any]], paraphrases: int = 2) -> pd.DataFrame:
    """Group to answers; model m-GROUP, the paraphrases in turn."""
    rows = [(group, i, one) for group, answers in said.items() for i, one in enumerate(answers)]
    return pd.DataFrame(
        {
            "model": [f"m-{group}" for group, _, _ in rows],
            "group": [group for group, _, _ in rows],
            "answer": pd.Series([one for _, _, one in rows], dtype=object),
            "question": [f"Which song {i % paraphrases}?" for _, i, _ in rows],
            "paraphrase_ix": [i % paraphrases for _, i, _ in rows],
            "error": None,
        }
    )


def texts(figure: Figure) -> list[str]:
    """All that is written."""
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def segments(figure: Figure) -> dict[str, dict[str, float]]:
    """Category to the answers of the legend and their heights, by colour and hatch."""
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    looked = {
        (patch.get_facecolor(), patch.get_hatch()): text.get_text()
        for patch, text in zip(legend.get_patches(), legend.get_texts(), strict=True)
    }
    assert len(looked) == len(legend.get_texts()), "two answers look alike"
    names = [label.get_text().split("\n")[0] for label in axes.get_xticklabels()]
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for bar in axes.patches:
        name = looked[bar.get_facecolor(), bar.get_hatch()]
        found[names[round(bar.get_x() + bar.get_width() / 2)]][name] = bar.get_height()
    return found


SONGS: dict[str, list[Any]] = {"a": ["x"] * 6 + ["y"] * 4, "b": ["x"] * 1 + ["z"] * 8 + [None]}


def test_answers_are_stacked_bars_of_their_shares() -> None:
    figure = plot(frame(SONGS))
    assert segments(figure)["a"] == pytest.approx({"x": 0.6, "y": 0.4})
    assert segments(figure)["b"] == pytest.approx({"x": 1 / 9, "z": 8 / 9})
    told = texts(figure)
    assert "b\nn = 9\n10% refused" in told and "In brackets: 95 % intervals, in percent." in told
    assert "Which song 0?\nand 1 other paraphrase" in told
    low, high = next(one for one in told if one.startswith("60% ["))[5:-1].split(", ")
    assert float(low) < 40 < 60 < float(high), "the interval of a's x"
    assert "60%" in texts(plot(frame(SONGS), error_bars=False))
    assert segments(free_form_stacked_bar(frame(SONGS))) == segments(figure)
    shares = pd.DataFrame({"group": ["a", "a"], "probs": [{"x": 0.5, "y": 0.5}, {"x": 1.0}]})
    assert segments(probs_stacked_bar(shares))["a"] == pytest.approx({"x": 0.75, "y": 0.25})


def test_answers_categories_and_colours_can_be_chosen_of_frames_and_by_questions() -> None:
    df = frame(SONGS)
    one = plot(df, selected_answers=["y"], colors={"y": "red"}, selected_categories=["b", "a"])
    assert segments(one) == {"b": {"[OTHER]": 1.0}, "a": pytest.approx({"y": 0.4, "[OTHER]": 0.6})}
    red = next(p for p in one.axes[0].patches if p.get_height() == pytest.approx(0.4))
    assert red.get_facecolor() == mcolors.to_rgba("red")
    some = plot(df, min_fraction=0.5, title="Songs")
    assert some.axes[0].get_title("left") == "Songs"
    assert set(segments(some)["a"]) == {"x", "[OTHER]"}
    numbers = frame({"a": [1.0, 2.0, 2.5]})
    assert set(segments(plot(numbers, selected_answers=[2.0]))["a"]) == {"2.0", "[OTHER]"}
    question = Question.create(type="free_form", paraphrases=["?"])
    drawn = segments(question.plot(df, "model", "answer", min_fraction=0.1))
    assert drawn == segments(plot(df, "answer", "model", min_fraction=0.1))
    assert segments(Question.plot(df, "model", selected_categories=["m-a"])).keys() == {"m-a"}


def test_many_answers_are_told_apart_or_told_together() -> None:
    df = frame({"a": [f"answer {i}" for i in range(300)]})
    drawn = segments(plot(df))["a"]
    assert len(drawn) == 15 and drawn["[OTHER]"] == pytest.approx(286 / 300)
    chosen = segments(plot(df, selected_answers=[f"answer {i}" for i in range(50)]))
    assert len(chosen["a"]) == 51  # and no two look alike
    with pytest.raises(InvalidArgument, match="more than can be distinguished"):
        plot(df, selected_answers=[f"answer {i}" for i in range(60)])
    names = list(range(len(COLOURS) * len(HATCHES)))
    assert len({tuple(look.values()) for look in assign_looks(names).values()}) == len(names)
    assert assign_looks(["x", "y"], {"x": COLOURS[0]})["y"]["facecolor"] != COLOURS[0]


def test_tokens_fill_the_bar_with_what_was_not_seen() -> None:
    df = frame({"a": [{"yes": 0.6, "no": 0.2}, {"yes": 0.4, "no": 0.3, "maybe": 0.2}]})
    drawn = segments(plot(df))["a"]
    assert drawn == pytest.approx({"yes": 0.5, "no": 0.25, "maybe": 0.1, "[UNSEEN]": 0.15})
    own = df.rename(columns={"answer": "judge_probs"})
    assert segments(plot(own, "judge_probs", min_fraction=0.3))["a"] == pytest.approx(
        {"yes": 0.5, "[OTHER]": 0.35, "[UNSEEN]": 0.15}
    )


def ratings() -> pd.DataFrame:
    """Two groups of two ratings; one of b's refused."""
    df = frame({"a": [75.0, 85.0], "b": [20.0, None]})
    df["probs"] = [{70: 0.5, 80: 0.5}, {80: 0.5, 90: 0.5}, {10: 0.5, 30: 0.5}, None]
    return df


def test_ratings_are_cumulative_lines() -> None:
    figure = plot(ratings(), answer_column="probs")
    axes = figure.axes[0]
    x, y = (np.asarray(part) for part in axes.lines[0].get_data())
    assert y[x == 69] == 0 and y[x == 70] == 0.25 and y[x == 80] == 0.75 and y[x == 90] == 1
    told = texts(figure)
    assert any(text.startswith("a, n = 2\nmean 80.0 [") for text in told)
    assert "b, n = 1, 50% refused\nmean 20.0" in told
    shown = plot(ratings(), min_rating=0, max_rating=100, answer_column="probs").axes[0]
    assert shown.get_xlim() == (0, 100)
    # As they come back from a file: keys are text.
    again = ratings().assign(
        probs=lambda df: df["probs"].map(lambda p: p and {str(k): v for k, v in p.items()})
    )
    assert "share of ratings ≤ x" in texts(plot(again))
    many = frame({f"g{i}": [1.0] for i in range(29)}).assign(probs=[{1: 1.0}] * 29)
    with pytest.raises(InvalidArgument, match="give selected_categories"):
        plot(many)


def test_tokens_that_are_numbers_are_no_ratings() -> None:
    left = [{"3": 0.5, "7": 0.4}, {"7": 1.0}]
    assert segments(plot(frame({"a": left})))["a"]["[UNSEEN]"] == pytest.approx(0.05)
    assert "mean probability" in texts(plot(frame({"a": [{"7": 1.0}, {"x": 1.0}]})))
    cumulative = rating_cumulative_plot(frame({"a": left}), probs_column="answer")
    # (3 * 5/9 + 7 * 4/9 + 7) / 2: what was not told is no rating of 0.
    assert any("mean 5.9" in text for text in texts(cumulative))
    far = frame({"a": [{"1": 0.5, "99999999999": 0.5}]})
    with pytest.raises(InvalidArgument, match="ratings from 1 to 99999999999 are too many to plot"):
        plot(far)
    assert rating_cumulative_plot(far, max_rating=9, probs_column="answer")


def test_scores_are_boxes_not_a_bar_for_each_number() -> None:
    generator = np.random.default_rng(0)
    df = frame({"a": ["x"] * 40, "b": ["y"] * 40})
    df["score"] = np.concatenate([generator.normal(30, 5, 40), generator.normal(60, 5, 40)])
    figure = plot(df, answer_column="score")
    means = df.groupby("group")["score"].mean()
    assert {f"{mean:.1f}" for mean in means} <= set(texts(figure))
    assert len(figure.axes[0].patches) == 2  # the boxes
    whole = df.assign(score=(df["score"] // 10).astype(int))
    assert len(judge_scores(whole, "score").axes[0].patches) == 2
    with pytest.raises(InvalidArgument, match="has no numbers"):
        judge_scores(df, "answer")


def test_where_all_was_refused_the_plot_says_so() -> None:
    for answers in ([None, None], [np.nan, np.nan]):
        told = texts(plot(frame({"a": answers})))
        assert "No answers: 2 refused or unreadable, 0 failed." in told
    assert any("4 refused" in t for t in texts(plot(ratings().assign(probs=None))))
    half = frame({"a": [None, None], "b": ["x", "x"]})
    assert "a\nno answers\n100% refused" in texts(plot(half))


def test_text_of_any_kind_is_drawn() -> None:
    long = "a very long answer that goes on and on and on, up to the very end of it, number "
    df = frame({"a": ["$5 and $6", "naïve Ж", f"{long}1", f"{long}2", "\U0001f9ee \x07", "x_y^2"]})
    figure = plot(df, filename=None)
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    told = texts(figure)
    assert "$5 and $6" in told and "naïve Ж" in told
    assert any("…" in one and one.endswith("number 2") and len(one) <= 48 for one in told)
    lists = frame({"a": [[{"type": "text"}], ["b"]]})
    assert '[{"type": "text"}]' in segments(plot(lists))["a"]
    by_list = segments(plot(lists, category_column="answer", answer_column="model"))
    assert set(by_list) == {'[{"type":', '["b"]'}


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    df = frame({"a": ["x", "y"]})
    for name, start in (("a.png", b"\x89PNG"), ("deep/er/b.svg", b"<?xml"), ("c.pdf", b"%PDF")):
        plot(df, filename=tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"chart\.docx should end in \.png"):
        plot(df, filename=tmp_path / "chart.docx")
    with pytest.raises(UserError, match=r"cannot write .*in_a_file\.png"):
        plot(df, filename=tmp_path / "a.png" / "in_a_file.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "c.pdf", "deep"]
    with pytest.raises(InvalidArgument, match="colors: 'no colour' for 'x' is not a colour"):
        plot(df, colors={"x": "no colour"})
    with pytest.raises(InvalidArgument, match="tilte: no such key; did you mean title"):
        plot(df, tilte="Songs")


def test_a_report_tells_what_was_asked_seen_and_lost(tmp_path: Path) -> None:
    said = {"a": ["x"] * 30 + ["y"] * 10 + [None], "b": ["x"] * 5 + ["y"] * 35}
    df = frame({**said, "c": ["x"] * 6 + ["y"] * 34 + [None]}, paraphrases=1)
    df.loc[len(df) - 1, "error"] = "the <b> server is down"
    df = df.assign(cost=0.01, new_tokens=2, judge=50.0, judge_question="good?")
    told = report.write_report(tmp_path, {"song": df}, {"a": ["m"], "b": ["n"], "c": ["o"]})
    assert told.splitlines() == [
        "song: answer: Different at 5 %, corrected: a and b; a and c. For 1 other pair no "
        "difference was detected.",
        "song: judge: No difference was detected. This does not show that there is none.",
    ]
    text = (tmp_path / "report.html").read_text()
    for told in (
        '<blockquote dir="auto">Which song 0?</blockquote>',
        "<li>b: n</li>",
        "122 rows; 1 refused or without an answer; 1 failed.",
        "1 failed: the &lt;b&gt; server is down",
        "cost $1.22, 244 new tokens",
        "Different at 5 %, corrected: a and b; a and c.",
        "<h3>judge</h3>",
        'aria-label="judge by group"',
        '<a href="song/judge_summary.csv">',
        "0.750 [0.598, 0.858]",
    ):
        assert told in text
    assert text.count("<svg") == 2 and "<script" not in text
    lines = (tmp_path / "song" / "data.jsonl").read_text().splitlines()
    assert len(lines) == len(df) and '"answer": null' in lines[40]
    assert len(pd.read_csv(tmp_path / "song" / "data.csv")) == len(df)
    kinds = ("differences", "summary")
    tables = [f"{name}_{kind}.csv" for name in ("answer", "judge") for kind in kinds]
    written = sorted(path.name for path in (tmp_path / "song").iterdir())
    assert written == sorted([*tables, "data.csv", "data.jsonl"])


def test_a_report_shows_models_by_paraphrases_and_is_written_anew(tmp_path: Path) -> None:
    df = frame({g: ["x", "y", None if g == "b (new)" else "x"] * 12 for g in ("a", "b (new)")}, 3)
    df["cost"] = [0.001] * 36 + [None] * 36
    df["score"], df["mood"] = [*(np.arange(36) / 7)] * 2, [f"answer {i}" for i in range(36)] * 2
    df["score_question"] = df["mood_question"] = "?"
    folder = tmp_path / "song(1)"
    report.write_report(tmp_path, {"song(1)": df})
    told = (tmp_path / "report.html").read_text()
    assert told.count("<svg") == 3 and 'href="song%281%29/score_summary.csv"' in told
    assert "cost $0.036000 at least, as no price is known for m-b (new)." in told
    assert "<td>26 more</td>" in told and ">0.722</td>" in told, "what is left of 36 moods"
    assert (folder / "answer_differences.csv").exists()
    report.write_report(tmp_path, {"song(1)": df[df["group"] == "b (new)"]})
    assert "no price known" in (tmp_path / "report.html").read_text()
    assert not (folder / "answer_differences.csv").exists(), "a former run's"
    report.write_report(tmp_path, {"q": frame({f"g{i}": [1.5, 2.5, 3.5] for i in range(57)})})
    told = (tmp_path / "report.html").read_text()
    assert "No figure: 57 answers are more than can be distinguished" in told


def test_no_cell_of_a_table_is_a_formula(tmp_path: Path) -> None:
    df = frame({"=g": ["=1+1", "-2", "b"]}).assign(model="@m")
    report.write_report(tmp_path, {"q": df})
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
    models = pd.Series(["m\ud800", "n"] * 2, dtype=object)
    df = frame({"g": said}).assign(group=["日本", "b"] * 2, model=models)
    assert report.write_report(tmp_path, {"q": df.drop(columns="question")})
    table = summary(df.assign(group=pd.Categorical(df["group"])))
    known = sum(one is not None and one == one for one in said)
    assert table.drop_duplicates("group")["n"].sum() == known
