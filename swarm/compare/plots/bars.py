"""Stacked bars: the share of each answer, or its mean probability, by category."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.plots import style
from swarm.compare.plots.style import FillStyle, assign_fill_styles, text_colour_on
from swarm.stats.answer_values import AnswerMatrix, read_answers
from swarm.stats.intervals import ColumnIntervals, bootstrap_intervals
from swarm.stats.summary_table import CLUSTER_COLUMNS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ANSWERS = 14
"""Number of distinguished answers by default."""

BAR_WIDTH = 0.8
MIN_LABELLED_SHARE = 0.045
"""A smaller share has no number in its segment, as it would not fit."""

INTERVALS_NOTE = "Right: each share with its 95 % interval."

MARKERS = "osD^vP*X"
"""Markers of the first categories; those of later ones are hollow."""


def free_form_stacked_bar(
    df: "pd.DataFrame",
    category_column: str = "group",
    answer_column: str = "answer",
    selected_categories: Sequence[Any] | None = None,
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
    colors: Mapping[Any, str] | None = None,
    title: str | None = None,
    filename: str | Path | None = None,
    error_bars: bool = True,
    show: bool = False,
) -> "Figure":
    """Draw a bar per category with a segment per answer; arguments as `plots.plot`.

    Raises:
        InvalidArgument: An argument is invalid.
    """
    values = read_answers(
        df,
        answer_column,
        category_column,
        selected_categories,
        selected_answers,
        min_fraction,
        count=True,
        limit=MAX_ANSWERS,
    )
    return draw_stacked_bars(
        values, df, category_column, answer_column, colors, title, filename, error_bars, show
    )


def probs_stacked_bar(
    df: "pd.DataFrame",
    probs_column: str = "probs",
    category_column: str = "group",
    selected_categories: Sequence[Any] | None = None,
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
    colors: Mapping[Any, str] | None = None,
    title: str | None = None,
    filename: str | Path | None = None,
    legend_title: str | None = None,
    error_bars: bool = True,
    show: bool = False,
) -> "Figure":
    """Draw a bar of mean probabilities per category, from a column of dictionaries.

    Probability that the endpoint did not report is a light segment.

    Raises:
        InvalidArgument: An argument is invalid.
    """
    values = read_answers(
        df,
        probs_column,
        category_column,
        selected_categories,
        selected_answers,
        min_fraction,
        limit=MAX_ANSWERS,
    )
    return draw_stacked_bars(
        values,
        df,
        category_column,
        legend_title or probs_column,
        colors,
        title,
        filename,
        error_bars,
        show,
    )


def draw_stacked_bars(
    values: AnswerMatrix,
    df: "pd.DataFrame",
    category_column: str,
    legend_title: str,
    colors: Mapping[Any, str] | None,
    title: str | None,
    filename: str | Path | None,
    error_bars: bool,
    show: bool,
) -> "Figure":
    """Draw the bars and, beside them, the intervals."""
    if filename is not None:
        style.check_filename(filename)
    title = style.build_title(df, title)
    if not len(values.category):
        return style.empty_figure(values, title, filename, show)
    names = [name for name in colors or {} if name in values.names]
    order = sorted(range(len(values.names)), key=lambda k: _color_order(values.names[k], names))
    values = values._replace(names=[values.names[k] for k in order], matrix=values.matrix[:, order])
    styles = assign_fill_styles(values.names, colors)
    count = len(values.categories)
    clusters = values.cluster_codes([name for name in CLUSTER_COLUMNS if name != category_column])
    found = {}
    for index in range(count):
        if (selected := values.category == index).any():
            cluster_codes = [one[selected] for one in clusters]
            found[index] = bootstrap_intervals(values.matrix[selected], cluster_codes, values.kind)
    shades = [styles[name] for name in values.names]
    rows = answers_with_intervals(found.values()) if error_bars else []
    height = max(5.4, len(rows) * (0.16 * count + 0.15) + 1.5)
    picture, drawn = style.create_axes(3.4 + 1.2 * count, height, *([3.6] if rows else []))
    axes = drawn[0] if rows else drawn
    for index, one in found.items():
        _draw_bar(axes, index, one, shades)
        if rows:
            _draw_intervals(drawn[1], index, count, one, [(k, shades[k]) for k in rows])
    _format_bar_axes(axes, values, category_column)
    _draw_legend(axes, values, styles, legend_title)
    if rows:
        _format_interval_axes(drawn[1], [values.names[k] for k in rows], values.categories)
    return style.finish_figure(picture, title, INTERVALS_NOTE if rows else "", filename, show)


def answers_with_intervals(found: Iterable[ColumnIntervals]) -> list[int]:
    """Return the answers whose intervals are drawn: those with a labelled share anywhere."""
    import numpy as np

    known = [one for one in found if not np.isnan(one.low).all()]
    if not known:
        return []
    largest = np.max([one.center for one in known], axis=0)
    return [k for k, share in enumerate(largest) if share >= MIN_LABELLED_SHARE]


def _color_order(name: Any, first: list[Any]) -> int:
    return first.index(name) if name in first else len(first)


def _draw_bar(
    axes: "Axes", index: int, found: ColumnIntervals, styles: Sequence[FillStyle]
) -> None:
    """Draw one category's segments from the bottom."""
    bottom = 0.0
    for share, fill in zip(map(float, found.center), styles, strict=True):
        if share <= 0:
            continue
        axes.bar(
            index,
            share,
            BAR_WIDTH,
            bottom,
            color=fill.colour,
            hatch=fill.hatch,
            edgecolor="white" if not fill.hatch else "#333333",
            linewidth=0.8,
        )
        if share >= MIN_LABELLED_SHARE:
            axes.text(
                index,
                bottom + share / 2,
                f"{share:.0%}",
                ha="center",
                va="center",
                fontsize=9,
                color=text_colour_on(fill.colour),
                zorder=6,
                bbox={"facecolor": fill.colour, "edgecolor": "none", "pad": 1.2},
            )
        bottom += share


def _draw_intervals(
    axes: "Axes",
    index: int,
    count: int,
    found: ColumnIntervals,
    rows: Sequence[tuple[int, FillStyle]],
) -> None:
    """Draw one category's shares with their intervals, each in the row of its answer."""
    marker, hollow = MARKERS[index % len(MARKERS)], index >= len(MARKERS)
    shift = (0.5 - (index + 0.5) / count) * 0.8
    for row, (k, fill) in enumerate(rows):
        axes.plot([found.low[k], found.high[k]], [row + shift] * 2, color="#404040", linewidth=1.1)
        axes.plot(
            [found.center[k]],
            [row + shift],
            marker,
            markersize=5.5,
            markerfacecolor="white" if hollow else fill.colour,
            markeredgecolor="#202020",
            markeredgewidth=0.7,
        )


def _format_interval_axes(axes: "Axes", names: Sequence[Any], categories: Sequence[Any]) -> None:
    from matplotlib.lines import Line2D

    axes.set_yticks(range(len(names)), style.shorten_labels(names, 24))
    axes.set_ylim(-0.5, len(names) - 0.5)
    for row in range(1, len(names)):
        axes.axhline(row - 0.5, color="#dddddd", linewidth=0.6, zorder=1)
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if len(categories) < 2:
        return
    points = [
        Line2D(
            [],
            [],
            linestyle="",
            marker=MARKERS[index % len(MARKERS)],
            color="#404040",
            markerfacecolor="white" if index >= len(MARKERS) else "#404040",
            markersize=5.5,
            label=name,
        )
        for index, name in enumerate(style.shorten_labels(categories, 24))
    ]
    axes.legend(
        handles=points, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9
    )


def _format_bar_axes(axes: "Axes", values: AnswerMatrix, category_column: str) -> None:
    style.draw_category_axis(axes, values, category_column)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("mean probability" if values.kind == "probabilities" else "share of answers")


def _draw_legend(
    axes: "Axes", values: AnswerMatrix, styles: Mapping[Any, FillStyle], title: str
) -> None:
    """Draw the legend in the order of the segments from the top."""
    from matplotlib.patches import Patch

    labels = style.shorten_labels(values.names)
    patches = [
        Patch(
            facecolor=styles[name].colour,
            hatch=styles[name].hatch,
            label=label,
            edgecolor="white" if not styles[name].hatch else "#333333",
        )
        for name, label in zip(values.names, labels, strict=True)
    ]
    axes.legend(
        handles=patches[::-1],
        title=title,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        fontsize=9,
        alignment="left",
    )
