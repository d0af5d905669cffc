"""Plots of an experiment: figures with 95 % intervals, returned and optionally saved.

Colours are distinguishable for colour-blind readers, no figure stays open, and no display is
needed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import is_color_like
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from swarm._util.files import write_atomic
from swarm._util.settings import Settings, parse_settings
from swarm._util.terminal import pluralize
from swarm.compare.answer_values import (
    CLUSTER_COLUMNS,
    OTHER_ANSWERS,
    UNSEEN_ANSWERS,
    AnswerMatrix,
    are_ratings,
    get_column,
    infer_kind,
    parse_probabilities,
    read_answers,
    to_hashable_column,
)
from swarm.errors import InvalidArgument
from swarm.report.charts import figure_to_bytes
from swarm.stats.intervals import ColumnIntervals, bootstrap_intervals
from swarm.stats.significance import make_generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#56B4E9", "#E69F00", "#0072B2", "#009E73", "#F0E442", "#CC79A7", "#D55E00")
"""Colours of Okabe and Ito (2008, "Color Universal Design") without black, which is used for text.

In an order in which neighbours have the largest distance under deuteranopia and protanopia.
"""

HATCHES = ("", "//", "..", "xx", "--", "\\\\", "oo", "++")

LINE_STYLES = ("-", "--", ":", "-.")

FIXED_COLOURS = {OTHER_ANSWERS: "#9A9A9A", UNSEEN_ANSWERS: "#E8E8E8"}

MAX_ANSWERS = 14
"""Number of distinguished answers by default."""

MIN_LABELLED_SHARE = 0.045
"""A smaller share has no number in its segment, as it would not fit."""

MAX_LABEL_CHARS = 48
"""Maximum characters of a label; longer ones lack their middle."""

MAX_DOTS = 400
"""Maximum dots per category; more answers are sampled at random."""

Look = dict[str, Any]
"""Arguments of a matplotlib artist."""


class FigureOptions(Settings):
    """Options of every plot; see `plot`."""

    category_column: str = "group"
    selected_categories: Sequence[Any] | None = None
    colors: Mapping[Any, str] | None = None
    title: str | None = None
    filename: str | Path | None = None
    error_bars: bool = True


def parse_options(given: Mapping[str, Any]) -> FigureOptions:
    """Check the options of a plot.

    Raises:
        InvalidArgument: One does not exist or has an invalid value.
    """
    options = parse_settings(FigureOptions, given, "plot")
    for name, colour in (options.colors or {}).items():
        if not is_color_like(colour):
            raise InvalidArgument(
                f"colors: {colour!r} for {name!r} is not a colour, as 'red' or '#56B4E9'"
            )
    return options


def plot(
    df: pd.DataFrame,
    answer_column: str | None = None,
    category_column: str = "group",
    *,
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
    min_rating: int | None = None,
    max_rating: int | None = None,
    **options: Any,
) -> Figure:
    """Draw the plot that fits a column.

    Answers become stacked bars of their shares, tokens with probabilities stacked bars of these,
    ratings with probabilities cumulative lines, and other numbers boxes. With `selected_answers` or
    `min_fraction`, all become stacked bars. Refused and failed answers are excluded from shares;
    their number is shown under each category.

    Args:
        df: Frame with the columns of `Question.df`, or custom ones.
        answer_column: Column of answers; by default "probs" for ratings, else "answer".
        category_column: Column to compare by: "group", "model", "paraphrase_ix" or any other.
        selected_answers: Answers to distinguish, in this order; others become "[OTHER]". By default
            the 14 most frequent.
        min_fraction: Alternatively, distinguish answers with at least this share in one category.
        min_rating, max_rating: Ends of the rating axis.
        options: `selected_categories`: categories to show, in this order; by default models are
            sorted by group. `colors`: colours of answers, or of categories where these are
            coloured. `title`: by default a paraphrase and the number of others. `filename`: file
            to save, .png, .svg or .pdf. `error_bars`: whether to draw 95 % intervals
            (`swarm.stats.intervals.bootstrap_intervals`).

    Returns:
        The figure, which a notebook displays by itself.

    Raises:
        UserError: An argument is invalid, or the figure cannot be saved.
    """
    if answer_column is None:
        answer_column = "probs" if "probs" in df.columns else "answer"
    answers = get_column(df, answer_column, "answer_column").dropna()
    kind, choosing = infer_kind(answers), selected_answers is not None or min_fraction is not None
    options |= {"category_column": category_column}
    if not choosing and kind == "probabilities" and are_ratings(answers):
        return rating_cumulative_plot(df, answer_column, min_rating, max_rating, **options)
    if not choosing and kind == "mean":
        return judge_scores(df, answer_column, **options)
    return stacked_bars(
        df, answer_column, selected_answers, min_fraction, kind == "probabilities", **options
    )


def stacked_bars(
    df: pd.DataFrame,
    answer_column: str = "answer",
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
    probabilities: bool = False,
    **given: Any,
) -> Figure:
    """Draw a bar per category with a segment per answer; other arguments as `plot`.

    Args:
        probabilities: The answers are dictionaries of probabilities, whose means are drawn;
            probability that the endpoint did not report is a light segment.
    """
    options = parse_options(given)
    by = options.category_column
    values = read_answers(
        df,
        answer_column,
        by,
        options.selected_categories,
        selected_answers,
        min_fraction,
        count=not probabilities,
        limit=MAX_ANSWERS,
    )
    if not len(values.category):
        return _empty_figure(values, df, options)
    # Answers with a given colour come first, in the order of the colours.
    first = {name: place for place, name in enumerate(options.colors or {})}
    order = sorted(range(len(values.names)), key=lambda k: first.get(values.names[k], len(first)))
    values = values._replace(names=[values.names[k] for k in order], matrix=values.matrix[:, order])
    looks = assign_looks(values.names, options.colors)
    figure, axes = _create_figure(3.4 + 1.4 * len(values.categories), 5.4)
    for place, found in _intervals_by_category(values, by).items():
        _draw_bar(axes, place, found, [looks[name] for name in values.names], options.error_bars)
    _label_categories(axes, values, by)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("mean probability" if values.kind == "probabilities" else "share of answers")
    patches = [Patch(label=shorten_label(name), **looks[name]) for name in values.names]
    _add_legend(axes, answer_column, handles=patches[::-1])
    note = "In brackets: 95 % intervals, in percent." if options.error_bars else ""
    return _finish_figure(figure, df, options, note)


free_form_stacked_bar = stacked_bars


def probs_stacked_bar(df: pd.DataFrame, probs_column: str = "probs", **options: Any) -> Figure:
    """Draw the mean probabilities of a column of dictionaries; arguments as `stacked_bars`."""
    return stacked_bars(df, probs_column, probabilities=True, **options)


def _intervals_by_category(values: AnswerMatrix, by: str) -> dict[int, ColumnIntervals]:
    """Return the means with their intervals of each category that has answers."""
    clusters = values.cluster_codes(name for name in CLUSTER_COLUMNS if name != by)
    found = {}
    for place in np.unique(values.category):
        here = values.category == place
        codes = [one[here] for one in clusters]
        found[int(place)] = bootstrap_intervals(values.matrix[here], codes, values.kind)
    return found


def _draw_bar(
    axes: "Axes", place: int, found: ColumnIntervals, looks: Sequence[Look], error_bars: bool
) -> None:
    """Draw one category's segments from the bottom, each with its share and interval."""
    bottom = 0.0
    for k, look in enumerate(looks):
        share = float(found.center[k])
        if share <= 0:
            continue
        axes.bar(place, share, 0.85, bottom, linewidth=0.8, **look)
        if share >= MIN_LABELLED_SHARE:
            text = f"{share:.0%}"
            if error_bars and np.isfinite(found.low[k]):
                text += f" [{100 * found.low[k]:.0f}, {100 * found.high[k]:.0f}]"
            box: Look = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.2}}
            height = bottom + share / 2
            axes.text(place, height, text, ha="center", va="center", fontsize=8, zorder=6, **box)
        bottom += share


def rating_cumulative_plot(
    df: pd.DataFrame,
    probs_column: str = "probs",
    min_rating: int | None = None,
    max_rating: int | None = None,
    **given: Any,
) -> Figure:
    """Draw for each category the cumulative distribution of ratings; arguments as `plot`."""
    options = parse_options(given)
    by = options.category_column
    expected = []
    for answer in get_column(df, probs_column, "probs_column"):
        found = parse_probabilities(answer) if isinstance(answer, Mapping) else {}
        total = sum(found.values())
        expected.append(sum(k * p for k, p in found.items()) / total if total else None)
    frame = df.assign(**{"expected rating": pd.Series(expected, df.index, dtype=float)})
    values = read_answers(frame, "expected rating", by, options.selected_categories)
    if not len(values.category):
        return _empty_figure(values, df, options)
    if len(values.categories) > (most := len(COLOURS) * len(LINE_STYLES)):
        raise InvalidArgument(
            f"{len(values.categories)} lines are more than can be distinguished ({most}); give "
            "selected_categories"
        )
    answers = [parse_probabilities(answer) for answer in values.frame[probs_column]]
    table = pd.DataFrame(answers).fillna(0.0)
    first = int(min(table.columns)) if min_rating is None else min_rating
    last = int(max(table.columns)) if max_rating is None else max_rating
    if last - first > 10_000:
        raise InvalidArgument(f"ratings from {first} to {last} are too many to plot")
    scale = np.arange(first, last + 1)
    shares = table.reindex(columns=list(scale), fill_value=0.0).to_numpy().cumsum(axis=1)
    means = _intervals_by_category(values, by)
    ends = _intervals_by_category(values._replace(matrix=shares, kind="probabilities"), by)
    figure, axes = _create_figure(8.5, 5)
    for place, name in enumerate(values.categories):
        label = _category_label(values, place).replace("\n", ", ")
        colour = (options.colors or {}).get(name, COLOURS[place % len(COLOURS)])
        line: Look = {"color": colour, "ls": LINE_STYLES[place // len(COLOURS)]}
        if place not in ends:
            axes.plot([], [], label=label, **line)
            continue
        center, low, high = (float(end[0]) for end in means[place])
        label += f"\nmean {center:.1f}" + (f" [{low:.1f}, {high:.1f}]" if low == low else "")
        middle, lower, upper = ends[place]
        axes.step(scale, middle, where="post", linewidth=2, label=label, **line)
        if options.error_bars:
            band: Look = {"color": colour, "alpha": 0.18, "linewidth": 0}
            axes.fill_between(scale, lower, upper, step="post", **band)
    axes.set(xlim=(first, max(last, first + 1)), ylim=(0, 1.02))
    axes.locator_params("x", integer=True)
    axes.set_xlabel("rating" if probs_column == "probs" else probs_column)
    axes.set_ylabel("share of ratings ≤ x")
    _add_legend(axes, by)
    note = "Bands, and brackets after means: 95 % intervals." if options.error_bars else ""
    return _finish_figure(figure, df, options, note)


def judge_scores(df: pd.DataFrame, score_column: str, **given: Any) -> Figure:
    """Draw a box per category of a numeric column, with its answers as dots, and its mean.

    Arguments as `plot`.

    Raises:
        InvalidArgument: The column is not numeric, or an argument is invalid.
    """
    options = parse_options(given)
    by = options.category_column
    values = read_answers(df, score_column, by, options.selected_categories, measure=True)
    if not len(values.category):
        return _empty_figure(values, df, options)
    if values.kind != "mean":
        raise InvalidArgument(f"score_column: {score_column} has no numbers; see plots.plot")
    looks = assign_looks(values.categories, options.colors)
    figure, axes = _create_figure(3 + 1.2 * len(values.categories), 5)
    for place, found in _intervals_by_category(values, by).items():
        scores = values.matrix[values.category == place, 0]
        _draw_box(axes, place, scores, looks[values.categories[place]])
        center, low, high = (float(end[0]) for end in found)
        if options.error_bars and np.isfinite(low):
            axes.plot([place] * 2, [low, high], color="white", linewidth=4, zorder=4)
            axes.plot([place] * 2, [low, high], color="black", linewidth=1.6, zorder=5, marker="_")
        axes.plot([place], [center], "o", color="black", markeredgecolor="white", zorder=6)
        text = f"{center:.1f}" if abs(center) >= 10 else f"{center:.2f}"
        beside: Look = {"xytext": (9, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (place, center), zorder=7, **beside)
    _label_categories(axes, values, by)
    axes.set_ylabel(score_column)
    note = "Boxes: quartiles. Large dots: means" + ", with 95 % intervals." * options.error_bars
    return _finish_figure(figure, df, options, note)


def _draw_box(axes: "Axes", place: int, scores: np.ndarray, look: Look) -> None:
    generator = make_generator(4)
    dots = scores if len(scores) <= MAX_DOTS else generator.choice(scores, MAX_DOTS, replace=False)
    aside = place - 0.25 + generator.uniform(-0.1, 0.1, len(dots))
    axes.plot(aside, dots, "o", color="#555555", markersize=2.5, alpha=0.35, zorder=1)
    if len(scores) > 1:
        plain: Look = {"showfliers": False, "patch_artist": True, "manage_ticks": False}
        median = {"color": "black"}
        box = axes.boxplot(
            [scores], positions=[place], widths=0.22, medianprops=median, zorder=2, **plain
        )
        box["boxes"][0].set(**{**look, "edgecolor": "#333333"})


# Parts of figures


class NotebookFigure(Figure):
    """A figure that a notebook displays as the last value of a cell."""

    def _repr_png_(self) -> bytes:
        return figure_to_bytes(self, "png", dpi=110, bbox_inches="tight")


def _create_figure(width: float, height: float) -> tuple[NotebookFigure, Any]:
    """Return a figure without matplotlib's global state (pyplot), and its axes; in inches."""
    size = (min(60.0, width), min(60.0, height))
    figure = NotebookFigure(figsize=size, layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finish_figure(
    figure: NotebookFigure, df: pd.DataFrame, options: FigureOptions, note: str = ""
) -> NotebookFigure:
    """Add title and note, then save the figure atomically.

    Raises:
        UserError: The extension is not that of an image, or the file cannot be written.
    """
    title = options.title
    if title is None and "question" in df.columns:
        questions = list(to_hashable_column(df["question"]).dropna().unique())
        lines = wrap(shorten_label(questions[0], 240), 90)[:3] if questions else []
        if len(questions) > 1:
            lines.append(f"and {pluralize(len(questions) - 1, 'other paraphrase')}")
        title = "\n".join(lines)
    if title:
        figure.axes[0].set_title(title, fontsize=11, loc="left")
    if note:
        figure.supxlabel(note, fontsize=8, color="#404040", x=0.01, ha="left")
    if options.filename is not None:
        path = Path(options.filename).expanduser()
        kind = path.suffix[1:].lower()
        if kind not in (kinds := sorted(figure.canvas.get_supported_filetypes())):
            raise InvalidArgument(
                f"filename: {path} should end in .png, .svg or .pdf (or .{', .'.join(kinds)})"
            )
        write_atomic(path, figure_to_bytes(figure, kind, dpi=150, bbox_inches="tight"))
    return figure


def _empty_figure(values: AnswerMatrix, df: pd.DataFrame, options: FigureOptions) -> NotebookFigure:
    """Return a figure with a message that there is nothing to show, and why."""
    refused, errors = sum(values.refused.values()), sum(values.errors.values())
    figure, axes = _create_figure(7, 3)
    axes.set_axis_off()
    message = f"No answers: {refused} refused or unreadable, {errors} failed."
    axes.text(0.5, 0.5, message, ha="center", va="center", transform=axes.transAxes)
    return _finish_figure(figure, df, options)


def _add_legend(axes: "Axes", title: str, **given: Any) -> None:
    look: Look = {"frameon": False, "fontsize": 9, "alignment": "left", "title": title}
    axes.legend(**given, loc="upper left", bbox_to_anchor=(1.01, 1), **look)


def _category_label(values: AnswerMatrix, place: int, width: int = MAX_LABEL_CHARS) -> str:
    """Return a category's label with its number of answers, refusals and errors."""
    name = values.categories[place]
    n = int((values.category == place).sum())
    refused, errors = values.refused[name], values.errors[name]
    lines = [*wrap(shorten_label(name), width), f"n = {n}" if n else "no answers"]
    if refused:
        lines.append(f"{refused / (n + refused):.0%} refused")
    if errors:
        lines.append(f"{errors} failed")
    return "\n".join(lines)


def _label_categories(axes: "Axes", values: AnswerMatrix, by: str) -> None:
    """Label the categories of an x axis; many are turned."""
    count = len(values.categories)
    few = count <= 8
    labels = [_category_label(values, place, 13 if few else 48) for place in range(count)]
    turned: Look = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(count), labels, **({} if few else turned))
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_xlabel(by)


def shorten_label(value: Any, longest: int = MAX_LABEL_CHARS) -> str:
    """Return a label in one line; a long one lacks its middle, as many begin alike."""
    text = " ".join(str(value).split()) or repr(value)
    half = longest // 2
    return text if len(text) <= longest else f"{text[: half - 1]}…{text[-half:]}"


def assign_looks(names: Sequence[Any], colors: Mapping[Any, str] | None = None) -> dict[Any, Look]:
    """Assign distinct arguments of a bar or patch to each name; `colors` take precedence.

    Raises:
        InvalidArgument: There are more names than looks.
    """
    fixed = {**FIXED_COLOURS, **(colors or {})}
    taken = {str(one).lower() for one in fixed.values()}
    pairs = [(colour, hatch) for hatch in HATCHES for colour in COLOURS]
    free = [pair for pair in pairs if pair[1] or pair[0].lower() not in taken]
    unnamed = [name for name in names if name not in fixed]
    if len(unnamed) > len(free):
        raise InvalidArgument(
            f"{len(names)} answers are more than can be distinguished by colour and hatch "
            f"({len(free)}); give selected_answers or min_fraction"
        )
    chosen = dict(zip(unnamed, free, strict=False))
    looks = {}
    for name in names:
        colour, hatch = chosen.get(name) or (fixed[name], "")
        edge = "#333333" if hatch else "white"
        looks[name] = {"facecolor": colour, "hatch": hatch, "edgecolor": edge}
    return looks
