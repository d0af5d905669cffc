"""Stacked bars: what share of a category's answers, or of its probability, each answer has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.plots import canvas
from swarm.compare.plots.palette import Look, looks, text_on
from swarm.compare.statistics import CLUSTERS
from swarm.compare.statistics.resampling import Interval, interval
from swarm.compare.statistics.values import Values, read

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ANSWERS = 14
"""Told apart where nobody chose."""

WIDE = 0.8
TOLD = 0.045
"""A smaller share has no number in its segment, which would not fit."""

NOTE = "Lines: 95 % intervals of each segment's own share, drawn from its lower edge."


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
    """A bar for each category, a segment for each answer; arguments as `plots.plot`.

    Raises:
        WrongValue: An argument has no such value.
    """
    values = read(
        df, answer_column, category_column, selected_categories, selected_answers, min_fraction,
        count=True, most=ANSWERS,
    )  # fmt: skip
    return stacked(values, df, category_column, answer_column, colors, title, filename,
                   error_bars, show)  # fmt: skip


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
    """A bar of mean probabilities for each category, of a column of dictionaries.

    Probability that was not told for any token is a light segment of its own.

    Raises:
        WrongValue: An argument has no such value.
    """
    values = read(
        df, probs_column, category_column, selected_categories, selected_answers, min_fraction,
        most=ANSWERS,
    )  # fmt: skip
    return stacked(values, df, category_column, legend_title or probs_column, colors, title,
                   filename, error_bars, show)  # fmt: skip


def stacked(
    values: Values,
    df: "pd.DataFrame",
    category_column: str,
    legend_title: str,
    colors: Mapping[Any, str] | None,
    title: str | None,
    filename: str | Path | None,
    error_bars: bool,
    show: bool,
) -> "Figure":
    """Draw them."""
    if filename is not None:
        canvas.check(filename)
    title = canvas.heading(df, title)
    if not len(values.category):
        return canvas.empty(values, title, filename, show)
    names = [name for name in colors or {} if name in values.names]
    order = sorted(range(len(values.names)), key=lambda k: _place(values.names[k], names))
    values = values._replace(names=[values.names[k] for k in order], matrix=values.matrix[:, order])
    styles = looks(values.names, colors)
    count = len(values.categories)
    picture, axes = canvas.axes(4.6 + 1.2 * count, 5.4)
    clusters = values.clusters([name for name in CLUSTERS if name != category_column])
    for place in range(count):
        here = values.category == place
        if here.any():
            found = interval(values.matrix[here], [one[here] for one in clusters], values.kind)
            _bar(axes, place, found, [styles[name] for name in values.names], error_bars)
    _frame(axes, values, category_column)
    _legend(axes, values, styles, legend_title)
    return canvas.finish(picture, title, NOTE if error_bars else "", filename, show)


def _place(name: Any, first: list[Any]) -> int:
    return first.index(name) if name in first else len(first)


def _bar(
    axes: "Axes", place: int, found: Interval, styles: Sequence[Look], error_bars: bool
) -> None:
    """One category's segments from the bottom, and their intervals from left to right."""
    import numpy as np

    bottom, drawn = 0.0, [k for k, share in enumerate(found.center) if share > 0]
    # Numbers stand on the left, so that no line crosses them.
    across = dict(zip([k for k in drawn if found.center[k] >= TOLD],
                      np.linspace(-0.1, 0.5, int((found.center >= TOLD).sum()) + 2)[1:-1] * WIDE,
                      strict=True))  # fmt: skip
    for k in drawn:
        share, look = float(found.center[k]), styles[k]
        axes.bar(place, share, WIDE, bottom, color=look.colour, hatch=look.hatch,
                 edgecolor="white" if not look.hatch else "#333333", linewidth=0.8)  # fmt: skip
        if k in across:
            axes.text(place - 0.27 * WIDE, bottom + share / 2, f"{share:.0%}", ha="center",
                      va="center", fontsize=9, color=text_on(look.colour), zorder=6,
                      bbox={"facecolor": look.colour, "edgecolor": "none", "pad": 1.2})  # fmt: skip
            if error_bars and found.high[k] - found.low[k] > 0.001:
                ends = bottom + np.array([found.low[k], found.high[k]])
                _line(axes, place + across[k], ends)
        bottom += share


def _line(axes: "Axes", x: float, ends: Any) -> None:
    """An interval: dark on light, so that it is seen on any colour."""
    axes.plot([x] * 2, ends, color="white", linewidth=3.2, zorder=4)
    axes.plot([x] * 2, ends, color="black", linewidth=1.3, zorder=5, marker="_", markersize=5)


def _frame(axes: "Axes", values: Values, category_column: str) -> None:
    canvas.categories(axes, values, category_column)
    axes.set_ylim(0, max(1.0, axes.dataLim.y1) + 0.02)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("mean probability" if values.kind == "probabilities" else "share of answers")


def _legend(axes: "Axes", values: Values, styles: Mapping[Any, Look], title: str) -> None:
    """From the top as the segments lie."""
    from matplotlib.patches import Patch

    told = canvas.labels(values.names)
    patches = [
        Patch(facecolor=styles[name].colour, hatch=styles[name].hatch, label=label,
              edgecolor="white" if not styles[name].hatch else "#333333")
        for name, label in zip(values.names, told, strict=True)
    ]  # fmt: skip
    axes.legend(handles=patches[::-1], title=title, loc="upper left", bbox_to_anchor=(1.01, 1),
                frameon=False, fontsize=9, alignment="left")  # fmt: skip
