"""Charts: files by matplotlib (SVG and PNG), and inline SVGs of the page.

An inline SVG belongs to the page: the style sheet colours it, dark or light, and the script reads
its scales and marks the point under the pointer.
"""

import io
import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from swarm.report.document import (
    COLOURS,
    GREY,
    INVALID_CHARACTERS,
    MARKER_SHAPES,
    MAX_MARKERS,
    Chart,
    Series,
    axis_ticks,
    escape_text,
    style_of_series,
    tick_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTER_WIDTH = 6.4
"""Approximate width of a letter of the labels."""


class ChartSize(NamedTuple):
    """Size of a chart, in the units of its text (font size 12)."""

    width: int
    height: int


ROW_HEIGHT = 70
"""Height of a row in a chart with rows."""

WIDE_SIZE, NARROW_SIZE = ChartSize(500, 310), ChartSize(350, 280)
"""Sizes for a desktop page and for a phone."""


class LinearScale:
    """Linear map from values to coordinates; both ranges are given by their ends."""

    def __init__(self, values: tuple[float, float], places: tuple[float, float]) -> None:
        self.values, self.places = values, places

    def __call__(self, value: float) -> float:
        low, high = self.values
        start, end = self.places
        return round(start + (value - low) / (high - low) * (end - start), 1)


class LogScale(LinearScale):
    """Logarithmic map from values above 0 to coordinates."""

    def __call__(self, value: float) -> float:
        low, high = map(math.log, self.values)
        start, end = self.places
        return round(start + (math.log(value) - low) / (high - low) * (end - start), 1)


class ChartFrame:
    """Layout of a chart's axes.

    Attributes:
        x, y: Scales of the axes.
        x_ticks, y_ticks: Ticks of the axes, as (value, label).
    """

    def __init__(self, chart: Chart, size: ChartSize) -> None:
        if chart.rows:
            size = ChartSize(size.width, 66 + ROW_HEIGHT * len(chart.rows))
        self.size, self.top, self.bottom = size, 12, size.height - 46
        self.y_ticks = _row_ticks(chart, size) if chart.rows else _number_ticks(*chart.y_range())
        widest = max(len(words) for _, words in self.y_ticks)
        self.left = 30 + LETTER_WIDTH * widest
        low, high = chart.x_range()
        most = 7 if size.width > 400 else 5
        marks = _number_ticks(low, high, most, chart.integer_x)
        if chart.log:
            marks = [(x, f"{x:g}") for x in sorted({float(x) for s in chart.series for x in s.x})]
        # An iteration axis ends exactly at its data; other axes end at a tick.
        ends = (low, high) if chart.integer_x else (marks[0][0], marks[-1][0])
        self.right = size.width - max(14, 2 + LETTER_WIDTH / 2 * len(marks[-1][1]))
        self.x_ticks = [one for one in marks if ends[0] <= one[0] <= ends[1]]
        pad = 8 if chart.integer_x else 0
        scale = LogScale if chart.log and ends[0] < ends[1] else LinearScale
        self.x = scale(ends, (self.left + pad, self.right - pad))
        y_ends = (self.y_ticks[0][0], self.y_ticks[-1][0])
        if chart.rows:
            y_ends = (len(chart.rows) - 0.5, -0.5)
        self.y = LinearScale(y_ends, (self.bottom, self.top))


def _number_ticks(
    low: float, high: float, most: int = 6, whole: bool = False
) -> list[tuple[float, str]]:
    found = axis_ticks(low, high, most, whole)
    return [(value, tick_label(value, found)) for value in found]


def _row_ticks(chart: Chart, size: ChartSize) -> list[tuple[float, str]]:
    most = 30 if size.width > 400 else 17
    return [(float(n), shorten_text(name, most)) for n, name in enumerate(chart.rows)]


def shorten_text(words: str, max_length: int) -> str:
    """Truncate text to at most `max_length` characters."""
    return words if len(words) <= max_length else words[: max_length - 1] + "…"


def render_svg(chart: Chart, size: ChartSize = WIDE_SIZE) -> str:
    """Render a chart for the page, whose style sheet colours the classes c0, c1, ...; no legend."""
    frame = ChartFrame(chart, size)
    head = (
        f'<svg class="{"wide" if size == WIDE_SIZE else "narrow"}" viewBox="0 0 {size.width} '
        f'{frame.size.height}" role="img" '
        f'aria-label="{escape_text(f"{chart.title}. {chart.alt_text}")}" '
        f'data-x="{_format_scale(frame.x)}" data-y="{_format_scale(frame.y)}">'
    )
    content = (render_axes, _render_marks, _render_series)
    return "\n".join([head, *(line for part in content for line in part(chart, frame)), "</svg>"])


def legend_key(chart: Chart, number: int) -> str:
    """Render the legend symbol of a series: 24 wide, centred on y = 0."""
    style = chart.series_style(number)
    line = "" if chart.series[number].kind == "points" else _line_path("M0 0H24", style)
    return line + f'<path class="dot" d="{_marker_outline(style or 0, 12, 0)}"/>'


def series_classes(chart: Chart, number: int) -> str:
    """Return the CSS classes of a series."""
    style = chart.series_style(number)
    colour = "faint" if style is None else f"c{style_of_series(style)[0]}"
    return f"{colour} {chart.series[number].weight}"


def _line_path(line: str, style: int | None) -> str:
    dashes = style_of_series(style)[1] if style is not None else ""
    drawn = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path class="line"{drawn} d="{line}"/>'


def _format_scale(scale: LinearScale) -> str:
    return " ".join(f"{end:.6g}" for end in (*scale.values, *scale.places))


def render_axes(chart: Chart, frame: ChartFrame) -> list[str]:
    """Render both axes with their ticks and names."""
    left, right, bottom = round(frame.left, 1), frame.right, frame.bottom
    parts = []
    for value, words in frame.y_ticks:
        parts.append(f'<path class="grid" d="M{left} {frame.y(value)}H{right}"/>')
        parts.append(_text_element(left - 8, frame.y(value) + 4, words, "end"))
    for value, words in frame.x_ticks:
        parts.append(f'<path class="axis" d="M{frame.x(value)} {bottom}v5"/>')
        parts.append(_text_element(frame.x(value), bottom + 19, words, "middle"))
    parts.append(f'<path class="axis" d="M{left} {frame.top}V{bottom}H{right}"/>')
    parts.append(_text_element((left + right) / 2, frame.size.height - 8, chart.x_name, "middle"))
    if chart.y_name:
        middle = (frame.top + bottom) / 2
        parts.append(
            f'<g transform="rotate(-90 12 {middle})">'
            f"{_text_element(12, middle, chart.y_name, 'middle')}</g>"
        )
    return parts


def _render_marks(chart: Chart, frame: ChartFrame) -> list[str]:
    parts = []
    for name, value in chart.marks:
        y = frame.y(value)
        parts.append(
            f'<path class="mark" stroke-dasharray="5 4" d="M{frame.left:.1f} {y}H{frame.right}"/>'
        )
        parts.append(_text_element(frame.right, y - 5, name, "end"))
    return parts


def _render_series(chart: Chart, frame: ChartFrame) -> list[str]:
    """Render every series as a group, faint ones first and strong ones on top."""
    order = {"faint": 0, "normal": 1, "strong": 2}
    places = sorted(range(len(chart.series)), key=lambda n: order[chart.series[n].weight])
    parts = []
    for number in places:
        one, style = chart.series[number], chart.series_style(number)
        parts.append(
            f'<g class="{series_classes(chart, number)}" data-n="{number}">'
            + _series_path(one, frame, style)
            + _render_dots(one, frame, style)
            + "</g>"
        )
    return parts


def _series_path(one: Series, frame: ChartFrame, style: int | None) -> str:
    parts = [
        f"M{frame.x(low)} {frame.y(y)}H{frame.x(high)}"
        for (low, high), y in zip(one.spans, one.y, strict=False)
    ]
    pen = "M"
    for x, y in [] if one.kind == "points" else _finite_points(one):
        corner = f"H{frame.x(x)}V" if pen == "L" and one.kind == "steps" else f"{pen}{frame.x(x)} "
        parts.append(f"{corner}{frame.y(y)}")
        pen = "L"
    return _line_path("".join(parts), style) if parts else ""


def _finite_points(one: Series) -> list[tuple[float, float]]:
    points = [(float(x), float(y)) for x, y in zip(one.x, one.y, strict=True)]
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _render_dots(one: Series, frame: ChartFrame, style: int | None) -> str:
    points = _finite_points(one)
    if one.kind != "points":
        lone = len(points) == 1
        every = max(1, math.ceil(len(points) / MAX_MARKERS))
        points = points[::every] if style is not None or lone else []
    drawn = "".join(
        _marker_outline(style or 0, frame.x(x), frame.y(y), 2 if style is None else 4)
        for x, y in points
    )
    return f'<path class="dot" d="{drawn}"/>' if drawn else ""


def _marker_outline(style: int, x: float, y: float, r: float = 4) -> str:
    """Return the path of a series' marker around a point."""
    x, y = round(x, 1), round(y, 1)
    h, w = round(r * 0.8, 1), round(r * 1.2, 1)
    shapes: Sequence[str] = (
        f"M{x - r:g} {y:g}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        f"M{x - h:g} {y - h:g}h{2 * h:g}v{2 * h:g}h{-2 * h:g}z",
        f"M{x:g} {y - w:g}l{w} {2 * h:g}h{-2 * w:g}z",
        f"M{x:g} {y - w:g}l{w} {w}l{-w} {w}l{-w} {-w}z",
        f"M{x:g} {y + w:g}l{w} {-2 * h:g}h{-2 * w:g}z",
        f"M{x - r:g} {y - 1.5:g}h{r - 1.5:g}v{1.5 - r:g}h3v{r - 1.5:g}h{r - 1.5:g}v3h{1.5 - r:g}"
        f"v{r - 1.5:g}h-3v{1.5 - r:g}h{1.5 - r:g}z",
        f"M{x - r:g} {y - r:g}h3l{r - 3:g} {r - 2:g}l{r - 3:g} {2 - r:g}h3l{-r + 1:g} {r}"
        f"l{r - 1:g} {r}h-3l{3 - r:g} {2 - r:g}l{3 - r:g} {r - 2:g}h-3l{r - 1:g} {-r}z",
    )
    return shapes[style_of_series(style)[0]]


def _text_element(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape_text(words)}</text>'


FONTS = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans KR",
    "WenQuanYi Micro Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans",
    "Malgun Gothic",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Arial Unicode MS",
    "Noto Emoji",
    "Segoe UI Symbol",
)
"""Fonts in order of preference; each character uses the first that contains it."""


def render_image(chart: Chart, kind: str) -> bytes:
    """Draw a chart with title and legend as a file, 1,280 pixels wide as PNG.

    Args:
        kind: "svg" or "png".
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullLocator

    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for number in range(len(chart.series)):
        _draw_series(axes, chart, number)
    for name, value in chart.marks:
        axes.axhline(value, color="#555", linestyle="--", linewidth=1, label=legend_label(name))
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e5e9")
    axes.set_axisbelow(True)
    if chart.integer_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.log:
        axes.set_xscale("log")
        ticks = sorted({float(x) for one in chart.series for x in one.x})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    if chart.rows:
        axes.set_yticks(range(len(chart.rows)), [shorten_text(name, 32) for name in chart.rows])
        axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure_to_bytes(figure, kind)


def _draw_series(axes: "Axes", chart: Chart, number: int) -> None:
    one, style = chart.series[number], chart.series_style(number)
    x, y = np.asarray(one.x, dtype=float), np.asarray(one.y, dtype=float)
    known = np.isfinite(x) & np.isfinite(y)
    faint = style is None
    colour, marker, dashes = GREY, ".", ""
    if style is not None:
        place, dashes = style_of_series(style)
        colour, marker = COLOURS[place], MARKER_SHAPES[place]
    line: Any = (0, [float(n) for n in dashes.split()]) if dashes else "-"
    axes.plot(
        x[known],
        y[known],
        color=colour,
        linestyle="none" if one.kind == "points" else line,
        linewidth=2.4 if one.weight == "strong" else 0.8 if faint else 1.6,
        marker=marker if one.kind == "points" or not faint else None,
        markersize=3 if faint else 6,
        markevery=max(1, int(known.sum()) // MAX_MARKERS) if one.kind != "points" else None,
        drawstyle="steps-post" if one.kind == "steps" else "default",
        label=None if faint else legend_label(one.name),
        zorder=1 if faint else 3,
        gid=f"series-{number}",
    )
    for (low, high), level in zip(one.spans, one.y, strict=False):
        axes.plot([low, high], [level, level], color=colour)


def draw_bands(axes: "Axes", names: Sequence[str], values: np.ndarray) -> None:
    """Draw shares [T, K] as stacked bands; negative ones are stacked downwards.

    Each value is held until the next iteration. Repeated colours are more transparent.
    """
    from matplotlib.ticker import MaxNLocator

    low, high = band_edges(values)
    for k, name in enumerate(names):
        lower, upper = (np.append(one[:, k], one[-1, k]) for one in (low, high))
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


def band_edges(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper edges [T, K] of shares [T, K], negative ones stacked downwards."""
    up, down = np.maximum(values, 0), np.minimum(values, 0)
    high, low = up.cumsum(axis=1), down.cumsum(axis=1)
    return np.where(values < 0, low, high - up), np.where(values < 0, low - down, high)


def legend_label(name: str) -> str:
    """Return a label of a legend, from which matplotlib hides those that begin with `_`."""
    name = shorten_text(name, 32)
    return f" {name}" if name.startswith("_") else name


def figure_to_bytes(figure: "Figure", kind: str, **options: Any) -> bytes:
    """Return a figure as an image file; the same figure gives the same bytes.

    Texts are drawn as they are: a `$` begins no formula, and each character is from the first font
    of `FONTS` that has it. One that no font has is its code point in brackets; in an SVG it stays,
    as the viewer may have a font.

    Args:
        kind: "svg", whose texts are texts, "png" or any other kind of matplotlib.
        options: Of `Figure.savefig`.
    """
    from matplotlib import rc_context

    prepare_texts(figure, escape=kind != "svg")
    if kind in ("svg", "png"):
        options["metadata"] = {"Date": None} if kind == "svg" else {"Software": None}
    drawn = io.BytesIO()
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "swarm"}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph")  # of a character that no font has
        figure.savefig(drawn, format=kind, **options)
    return drawn.getvalue()


def prepare_texts(figure: "Figure", escape: bool = True) -> None:
    """Make all texts of a figure drawable; see `figure_to_bytes`.

    Args:
        escape: Replace characters that no font has.
    """
    from matplotlib.text import Text

    fonts = list(find_installed_fonts())
    for text in figure.findobj(Text):
        text.set_fontfamily(fonts)  # type: ignore[attr-defined]
        text.set_parse_math(False)  # type: ignore[attr-defined]
        words = INVALID_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text.get_text())  # type: ignore[attr-defined]
        text.set_text(escape_undrawable(words) if escape else words)  # type: ignore[attr-defined]


@cache
def find_installed_fonts() -> dict[str, Any]:
    """Return the installed fonts of `FONTS` with their character maps."""
    from matplotlib.font_manager import FontProperties, fontManager, get_font

    there = {one.name for one in fontManager.ttflist}
    return {
        name: get_font(fontManager.findfont(FontProperties(family=name)))
        for name in FONTS
        if name in there
    }


def escape_undrawable(text: str) -> str:
    """Replace characters that no installed font contains by their code point in brackets."""
    if text.isascii() and text.isprintable():
        return text
    fonts = list(find_installed_fonts().values())
    return "".join(
        c
        if c == "\n" or (c >= " " and any(font.get_char_index(ord(c)) for font in fonts))
        else f"[{ord(c):X}]"
        for c in text
    )
