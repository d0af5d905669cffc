"""Charts by matplotlib: SVGs of the report, whose texts are texts, and figures of other kinds."""

import io
import re
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.report.document import COLOURS, GREY, INVALID_CHARACTERS, Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKER_SHAPES = ("o", "s", "^", "D", "v", "P", "X")
"""Marker of each colour, in matplotlib's codes, so that series differ by more than colour."""

DASHES = ("-", (0, (7, 3)), (0, (2, 3)))
"""Line styles, by how often the palette has been used up."""

MAX_MARKERS = 12
"""Approximate maximum number of markers on a line."""

FONTS = (
    "DejaVu Sans, Noto Sans, Noto Sans CJK SC, Noto Sans CJK JP, Noto Sans KR, "
    "WenQuanYi Micro Hei, Microsoft YaHei, PingFang SC, Hiragino Sans, Malgun Gothic, "
    "Noto Sans Arabic, Noto Sans Hebrew, Noto Sans Devanagari, Arial Unicode MS, Noto Emoji, "
    "Segoe UI Symbol"
).split(", ")
"""Fonts in order of preference; each character uses the first that contains it."""


def render_svg(chart: Chart, number: int = 0) -> str:
    """Draw a chart with its legend as an element of a page; see `figure_to_element`."""
    return figure_to_element(draw_chart(chart), number)


def figure_to_element(figure: "Figure", number: int = 0) -> str:
    """Return a figure as an element of a page.

    Args:
        number: Its number in the page, which makes the ids of its parts unique.
    """
    drawn = figure_to_bytes(figure, "svg").decode()
    svg = drawn[drawn.index("<svg") :]
    # Ids of paths that elements refer to; gradients and links are not drawn.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>c{number}-", svg)
    # The page has the style sheet.
    return re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)


def draw_chart(chart: Chart) -> "Figure":
    """Draw a chart with its legend."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    styles = count()
    for one in chart.series:
        _draw_series(axes, one, None if one.weight == "faint" else next(styles))
    for name, value in chart.marks:
        axes.axhline(value, color="#555", linestyle="--", linewidth=1, label=legend_label(name))
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e5e9")
    axes.set_axisbelow(True)
    if chart.x_name in ("iteration", "round"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(axes.get_legend_handles_labels()[1]) > 1:
        figure.legend(loc="outside upper left", frameon=False, fontsize="small", ncols=3)
    return figure


def _draw_series(axes: "Axes", one: Series, style: int | None) -> None:
    """Draw a series in the style of this number; `None` is grey."""
    x, y = np.asarray(one.x, dtype=float), np.asarray(one.y, dtype=float)
    known = np.isfinite(x) & np.isfinite(y)
    rounds, place = divmod(style or 0, len(COLOURS))
    colour, marker = COLOURS[place], MARKER_SHAPES[place]
    line: Any = DASHES[rounds % len(DASHES)]
    if style is None:
        colour, marker, line = GREY, ".", "-"
    points = one.kind == "points"
    axes.plot(
        x[known],
        y[known],
        color=colour,
        linestyle="none" if points else line,
        linewidth={"strong": 2.4, "faint": 0.8}.get(one.weight, 1.6),
        marker=marker if points or style is not None else None,
        markersize=3 if style is None else 6,
        markevery=None if points else max(1, int(known.sum()) // MAX_MARKERS),
        drawstyle="steps-post" if one.kind == "steps" else "default",
        label=None if style is None else legend_label(one.name),
        zorder=1 if style is None else 3,
    )


def draw_bands(axes: "Axes", names: Sequence[str], values: np.ndarray) -> None:
    """Draw shares [T, K] as stacked bands; negative ones are stacked downwards.

    Each value is held until the next iteration. Repeated colours are more transparent.
    """
    from matplotlib.ticker import MaxNLocator

    up, down = np.maximum(values, 0), np.minimum(values, 0)
    high, low = up.cumsum(axis=1), down.cumsum(axis=1)
    edges = np.where(values < 0, low, high - up), np.where(values < 0, low - down, high)
    for k, name in enumerate(names):
        lower, upper = (np.append(one[:, k], one[-1, k]) for one in edges)
        axes.fill_between(
            np.arange(len(lower)),
            lower,
            upper,
            step="post",
            linewidth=0,
            color=COLOURS[k % len(COLOURS)],
            alpha=0.85 / (1 + k // len(COLOURS)),
            label=legend_label(name),
            gid=f"band-{k}",
        )
    axes.axhline(0, color="#555", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_label(name: str) -> str:
    """Return a label of a legend, from which matplotlib hides those that begin with `_`."""
    label = name if len(name) <= 32 else f"{name[:31]}…"
    return f" {label}" if label.startswith("_") else label


def figure_to_bytes(figure: "Figure", kind: str, **options: Any) -> bytes:
    """Return a figure as an image file; the same figure gives the same bytes.

    Texts are drawn as they are: a `$` begins no formula, and each character is from the first font
    of `FONTS` that has it.

    Args:
        kind: "svg", whose texts are texts, "png" or any other kind of matplotlib.
        options: Of `Figure.savefig`.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(lambda one: isinstance(one, Text)):
        assert isinstance(text, Text)
        text.set_fontfamily(_installed_fonts())
        text.set_parse_math(False)
        text.set_text(INVALID_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text.get_text()))
    if kind in ("svg", "png"):
        options["metadata"] = {"Date": None} if kind == "svg" else {"Software": None}
    drawn = io.BytesIO()
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "swarm"}),
        warnings.catch_warnings(),
    ):
        # A character that no font has, or axes that long labels squeeze.
        warnings.filterwarnings("ignore", message="Glyph|constrained_layout")
        figure.savefig(drawn, format=kind, **options)
    return drawn.getvalue()


@cache
def _installed_fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    there = {one.name for one in fontManager.ttflist}
    return [name for name in FONTS if name in there]
