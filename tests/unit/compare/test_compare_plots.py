"""Plots: what is drawn is read back from the figures, and files are really written."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

matplotlib = pytest.importorskip("matplotlib")

from matplotlib import colors as mcolors  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from matplotlib.container import BarContainer  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402

from swarm.compare import Question  # noqa: E402
from swarm.compare.plots import (  # noqa: E402
    heatmap,
    judge_scores,
    plot,
    probs_stacked_bar,
    rating_cumulative_plot,
    rating_violins,
)
from swarm.compare.plots.style import COLOURS, HATCHES, assign_fill_styles, text_colour_on  # noqa: E402
from swarm.errors import InvalidArgument, UserError  # noqa: E402


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A warning is an error, and nothing stays open."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert pyplot.get_fignums() == []


def frame(said: dict[str, list[Any]]) -> pd.DataFrame:
    """Group to answers; model m-GROUP, two paraphrases in turn."""
    return pd.DataFrame(
        [
            {
                "model": f"m-{group}",
                "group": group,
                "answer": answer,
                "question": f"Which song {i % 2}?",
                "paraphrase_ix": i % 2,
                "error": None,
            }
            for group, answers in said.items()
            for i, answer in enumerate(answers)
        ]
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
    assert "b\nn = 9\n10% refused" in told and "60%" in told
    assert "Which song 0?\nand 1 other paraphrase" in told
    shares = figure.axes[1]
    assert [label.get_text() for label in shares.get_yticklabels()] == ["z", "x", "y"]
    lines = [line.get_xdata() for line in shares.lines if len(line.get_xdata()) == 2]
    drawn = [(low, high) for low, high in lines if low < 0.6 < high]
    assert drawn and drawn[0][0] < 0.4, "the interval of a's x"
    assert len(plot(frame(SONGS), error_bars=False).axes) == 1
    assert len(plot(frame({"a": ["x"]})).axes) == 1, "one answer has no interval"


def test_answers_categories_and_colours_can_be_chosen() -> None:
    df = frame(SONGS)
    one = plot(df, selected_answers=["y"], colors={"y": "red"}, selected_categories=["b", "a"])
    assert segments(one) == {"b": {"[OTHER]": 1.0}, "a": pytest.approx({"y": 0.4, "[OTHER]": 0.6})}
    red = next(p for p in one.axes[0].patches if p.get_height() == pytest.approx(0.4))
    assert red.get_facecolor() == mcolors.to_rgba("red")
    assert plot(df, min_fraction=0.5, title="Songs").axes[0].get_title("left") == "Songs"
    assert set(segments(plot(df, min_fraction=0.5))["a"]) == {"x", "[OTHER]"}
    assert set(segments(plot(df, category_column="model"))) == {"m-a", "m-b"}
    numbers = frame({"a": [1.0, 2.0, 2.5]})
    assert set(segments(plot(numbers, selected_answers=[2.0]))["a"]) == {"2.0", "[OTHER]"}


def test_many_answers_are_told_apart_or_told_together() -> None:
    df = frame({"a": [f"answer {i}" for i in range(300)]})
    drawn = segments(plot(df))["a"]
    assert len(drawn) == 15 and drawn["[OTHER]"] == pytest.approx(286 / 300)
    chosen = segments(plot(df, selected_answers=[f"answer {i}" for i in range(50)]))
    assert len(chosen["a"]) == 51  # and no two look alike
    with pytest.raises(InvalidArgument, match="more than can be distinguished"):
        plot(df, selected_answers=[f"answer {i}" for i in range(60)])


def test_tokens_fill_the_bar_with_what_was_not_seen() -> None:
    df = frame({"a": [{"yes": 0.6, "no": 0.2}, {"yes": 0.4, "no": 0.3, "maybe": 0.2}]})
    drawn = segments(plot(df))["a"]
    assert drawn == pytest.approx({"yes": 0.5, "no": 0.25, "maybe": 0.1, "[UNSEEN]": 0.15})
    assert sum(drawn.values()) == pytest.approx(1)
    own = df.rename(columns={"answer": "judge_probs"})
    assert segments(probs_stacked_bar(own, "judge_probs", min_fraction=0.3))["a"] == pytest.approx(
        {"yes": 0.5, "[OTHER]": 0.35, "[UNSEEN]": 0.15}
    )


def ratings() -> pd.DataFrame:
    """Two groups of two ratings; one of b's refused."""
    df = frame({"a": [75.0, 85.0], "b": [20.0, None]})
    df["probs"] = [{70: 0.5, 80: 0.5}, {80: 0.5, 90: 0.5}, {10: 0.5, 30: 0.5}, None]
    return df


def test_ratings_are_cumulative_lines_and_violins() -> None:
    figure = plot(ratings(), answer_column="probs")
    axes = figure.axes[0]
    x, y = (np.asarray(part) for part in axes.lines[0].get_data())
    assert y[x == 69] == 0 and y[x == 70] == 0.25 and y[x == 80] == 0.75 and y[x == 90] == 1
    told = texts(figure)
    assert any(text.startswith("a, n = 2\nmean 80.0 [") for text in told)
    assert "b, n = 1, 50% refused\nmean 20.0" in told
    violins = rating_violins(ratings())
    bars = [one for one in violins.axes[0].containers if isinstance(one, BarContainer)]
    widths = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in bars[0]}
    assert widths[80] == pytest.approx(2 * widths[70]) and widths[75] == 0
    assert "80.0" in texts(violins)
    single = frame({"a": [5.0]}).assign(probs=[{5: 1.0}])
    assert "a, n = 1\nmean 5.0" in texts(plot(single))  # one answer: no interval
    assert "5.00" in texts(rating_violins(single))
    # As they come back from a file: keys are text.
    again = ratings().assign(
        probs=lambda df: df["probs"].map(lambda p: p and {str(k): v for k, v in p.items()})
    )
    assert "share of ratings ≤ x" in texts(plot(again))


def test_tokens_that_are_numbers_are_no_ratings() -> None:
    ratings = [{"3": 0.5, "7": 0.5}, {"7": 1.0}]
    assert "share of ratings ≤ x" in texts(plot(frame({"a": ratings})))
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


def test_names_that_no_font_has_are_told_by_their_codes() -> None:
    df = frame({"\u65e5\U000e0001": ["x\0", "y"], "b": ["x\0", "x\0"]})
    for figure in (plot(df), heatmap(df), heatmap(df, row_column="group")):
        figure.savefig(__import__("io").BytesIO())
    assert "x[0]" in texts(plot(df)) and any("[E0001]" in text for text in texts(plot(df)))


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


def test_a_heat_map_has_models_by_paraphrases() -> None:
    df = frame({"a": ["x", "x", "x", "y"], "b": ["y", "y", None, "x"]})
    figure = heatmap(df, answer="x", filename=None)
    image = figure.axes[0].images[0].get_array()
    assert image is not None and image.tolist() == [[1.0, 0.5], [0.0, 0.5]]
    told = texts(figure)
    assert "0.50" in told and "0\nWhich song 0?" in told and "m-b" in told
    assert "answer: share of 'x'" in told
    scores = df.assign(score=[10.0, 20, 30, 40, 50, np.nan, np.nan, np.nan])
    means = heatmap(scores, "score").axes[0].images[0].get_array()
    assert np.ma.filled(means, -1).tolist() == [[20.0, 30.0], [50.0, -1.0]]
    with pytest.raises(InvalidArgument, match=r"row_column: .* no column 'modle'; .* model"):
        heatmap(df, row_column="modle")
    with pytest.raises(InvalidArgument, match="no answer 'q'"):
        heatmap(df, answer="q")


def test_where_all_was_refused_the_plot_says_so() -> None:
    for answers in ([None, None], [np.nan, np.nan]):
        figure = plot(frame({"a": answers}))
        assert "All 2 answers were refused or could not be read." in texts(figure)
    refused = ratings().assign(probs=None)
    assert any("All 4 answers were refused" in t for t in texts(plot(refused)))
    failed = frame({"a": [None]}).assign(error="timeout")
    assert "No answers: 0 refused, 1 failed." in texts(plot(failed))
    assert any("has no such rows" in text for text in texts(plot(frame(SONGS)[:0])))
    half = frame({"a": [None, None], "b": ["x", "x"]})
    assert "a\nno answers\n100% refused" in texts(plot(half))


def test_text_of_any_kind_is_drawn() -> None:
    long = "a very long answer that goes on and on and on, up to the very end of it, number "
    df = frame({"a": ["$5 and $6", "naïve Ж", f"{long}1", f"{long}2", "\U0001f9ee \x07", "x_y^2"]})
    figure = plot(df, filename=None)
    figure.savefig(__import__("io").BytesIO())  # no glyph is missing, no formula is parsed
    told = texts(figure)
    assert "$5 and $6" in told and "naïve Ж" in told
    assert any("…" in one and one.endswith("number 2") and len(one) <= 49 for one in told)
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


def test_wrong_arguments_are_one_line() -> None:
    df = frame(SONGS)
    for keys, told in (
        ({"answer_column": "anwser"}, "it has for instance answer"),
        ({"category_column": "gruop"}, "it has for instance group"),
        ({"selected_answers": ["x"], "min_fraction": 0.1}, "give only one"),
        ({"colors": {"x": "no colour"}}, "is not a colour"),
        ({"selected_categories": ["q"]}, "group is never 'q'"),
    ):
        with pytest.raises(ValueError, match=told) as caught:
            plot(df, **keys)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    many = frame({f"g{i}": [1.0] for i in range(29)}).assign(probs=[{1: 1.0}] * 29)
    with pytest.raises(InvalidArgument, match="give selected_categories"):
        plot(many)
    with pytest.raises(UserError, match="no display"):
        plot(df, show=True)


def test_a_notebook_shows_the_figure_by_itself() -> None:
    figure = plot(frame({"a": ["x", "y"]}))
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


MACHADO = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "none": np.eye(3).tolist(),
}
"""How linear RGB is seen; Machado, Oliveira and Fernandes 2009, IEEE TVCG 15:1291, severity 1."""


def lab(colour: str, seen: Any) -> np.ndarray:
    """CIELAB of a colour as it is seen."""
    rgb = np.array(mcolors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]
    )
    xyz = to_xyz @ np.clip(np.array(seen) @ linear, 0, 1) / np.array([0.9505, 1.0, 1.0888])
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("sight", MACHADO)
def test_neighbouring_colours_stay_apart_for_the_colour_blind(sight: str) -> None:
    seen = [lab(colour, MACHADO[sight]) for colour in COLOURS]
    around = zip(seen, [*seen[1:], seen[0]], strict=True)
    assert min(float(np.linalg.norm(a - b)) for a, b in around) > 50
    pairs = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(pairs) > 15  # red and green of equal lightness have about 3 with deuteranopia


def test_no_two_looks_repeat_and_numbers_can_be_read() -> None:
    names = list(range(len(COLOURS) * len(HATCHES)))
    assert len(set(assign_fill_styles(names).values())) == len(names)
    assert assign_fill_styles(["x", "y"], {"x": COLOURS[0]})["y"].colour != COLOURS[0]
    assert text_colour_on("#F0E442") == "black" and text_colour_on("#0072B2") == "white"


def test_positional_arguments_have_llmcomps_order() -> None:
    """There `plots.plot` takes the answer first, and `question.plot` the category."""
    df = frame(SONGS)
    by_name = segments(plot(df, answer_column="answer", category_column="model"))
    assert segments(plot(df, "answer", "model", ["m-a", "m-b"])) == by_name
    question = Question.create(type="free_form", paraphrases=["?"])
    assert segments(question.plot(df, "model", "answer", None, 0.1)) == segments(
        plot(df, "answer", "model", min_fraction=0.1)
    )
    assert segments(Question.plot(df, "model", "answer", ["m-a"])).keys() == {"m-a"}
    with pytest.raises(TypeError, match="at most 8 positional"):
        question.plot(df, "model", "answer", *[None] * 6)


def test_a_paraphrase_and_the_range_of_ratings_can_be_chosen() -> None:
    df = frame(SONGS)
    df = df.assign(question=["one?", "two?"] * (len(df) // 2) + ["one?"] * (len(df) % 2))
    title = plot(df, selected_paraphrase="two?").axes[0].get_title("left")
    assert title.split("\n")[0] == "two?" and "1 other" in title
    rated = pd.DataFrame({"group": ["a"] * 3, "probs": [{3: 0.5, 5: 0.5}] * 3})
    assert plot(rated, min_rating=1, max_rating=9).axes[0].get_xlim() == (1, 9)


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie on each other; of turned ones, in their own direction."""
    figure.draw_without_rendering()
    shown = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    turns = np.radians(sorted({t.get_rotation() for t in shown} | {0.0, 90.0}))
    turns = np.concatenate([turns, turns + np.pi / 2])
    ways = np.stack([np.cos(turns), np.sin(turns)])
    spans = [corners(t) @ ways for t in shown]  # of each, where it lies along each direction
    low, high = np.array([s.min(0) for s in spans]), np.array([s.max(0) for s in spans])
    apart = (low[:, None] >= high[None] - 1).any(-1)
    pairs = np.argwhere(~(apart | apart.T))
    return [(shown[i].get_text(), shown[j].get_text()) for i, j in pairs if i < j]


def corners(text: Text) -> np.ndarray:
    """[4, 2] of a text as it is drawn, in pixels."""
    turned, turn = text.get_window_extent(), text.get_rotation()
    text.set_rotation(0)
    flat = text.get_window_extent()
    text.set_rotation(turn)
    half = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * [flat.width / 2, flat.height / 2]
    cos, sin = np.cos(np.radians(turn)), np.sin(np.radians(turn))
    middle = [(turned.x0 + turned.x1) / 2, (turned.y0 + turned.y1) / 2]
    moved: np.ndarray = half @ np.array([[cos, sin], [-sin, cos]]) + middle
    return moved


@pytest.mark.parametrize("count", [5, 12])
@pytest.mark.parametrize(
    "name", ["the fine-tuned model {}, with a description", "no-break-{}-" + "no-break" * 6]
)
def test_long_names_do_not_overlap(count: int, name: str) -> None:
    said = "Answer {} goes on for quite a while and says many things about nothing at all"
    df = pd.DataFrame(
        [
            {
                "model": name.format(i),
                "group": name.format(i),
                "answer": said.format((i + p + s) % 6),
                "question": said.format(p),
                "paraphrase_ix": p,
                "error": None,
            }
            for i in range(count)
            for p in range(6)
            for s in range(2)
        ]
    )
    assert overlapping(plot(df)) == []
    assert overlapping(heatmap(df)) == []
    assert overlapping(heatmap(df, row_column="paraphrase_ix", category_column="model")) == []
