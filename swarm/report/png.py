"""Charts as PNG, by matplotlib, for a text that cannot hold SVG."""

import io
import warnings
from pathlib import Path

import numpy as np

from swarm.files import write_atomic
from swarm.report.markup import INVALID_CHARACTERS
from swarm.report.pictures import COLOURS, GREY, MAX_MARKERS, MARKER_SHAPES, Chart, style_of_series
from swarm.report.svg import shorten_text


def is_available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def write_png(chart: Chart, path: Path) -> None:
    """Draw a chart and write it, 1,280 pixels wide.

    Raises:
        UserError: It cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for number in range(len(chart.series)):
        _draw_series(axes, chart, number)
    for name, value in chart.marks:
        axes.axhline(value, color="#555", linestyle="--", linewidth=1, label=_escape_text(name))
    axes.set_title(_escape_text(chart.title), loc="left")
    axes.set_xlabel(_escape_text(chart.x_name))
    axes.set_ylabel(_escape_text(chart.y_name))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e5e9")
    axes.set_axisbelow(True)
    if chart.whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.rows:
        names = [_escape_text(shorten_text(name, 32)) for name in chart.rows]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        # A script that the font does not have becomes boxes; the page has the names.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(drawn, format="png", metadata={"Software": None})
    write_atomic(path, drawn.getvalue())


def _draw_series(axes: object, chart: Chart, number: int) -> None:
    one, style = chart.series[number], chart.series_style(number)
    x, y = np.asarray(one.x, dtype=float), np.asarray(one.y, dtype=float)
    known = np.isfinite(x) & np.isfinite(y)
    faint = style is None
    colour, marker, dashes = GREY, ".", ""
    if style is not None:
        place, dashes = style_of_series(style)
        colour, marker = COLOURS[place], MARKER_SHAPES[place]
    line: object = (0, [float(n) for n in dashes.split()]) if dashes else "-"
    axes.plot(  # type: ignore[attr-defined]
        x[known],
        y[known],
        color=colour,
        linestyle="none" if one.kind == "points" else line,
        linewidth=2.4 if one.weight == "strong" else 0.8 if faint else 1.6,
        marker=marker if one.kind == "points" or not faint else None,
        markersize=3 if faint else 6,
        markevery=max(1, known.sum() // MAX_MARKERS) if one.kind != "points" else None,
        drawstyle="steps-post" if one.kind == "steps" else "default",
        label=None if faint else _escape_text(shorten_text(one.name, 32)),
        zorder=1 if faint else 3,
    )
    for (low, high), level in zip(one.spans, one.y, strict=False):
        axes.plot([low, high], [level, level], color=colour)  # type: ignore[attr-defined]


def _escape_text(words: str) -> str:
    """Words that matplotlib does not take for a formula or, with a low line, for nothing."""
    words = INVALID_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", words).replace("$", r"\$")
    return f" {words}" if words.startswith("_") else words
