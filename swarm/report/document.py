"""Data model of a report (sections, tables, charts, changed items) and its basic HTML rendering.

A `Chart` describes the data; swarm/report/charts.py draws it as SVG or PNG. Text from a model or a
data file is always escaped, never interpreted as markup.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

import numpy as np

from swarm._util.terminal import format_number
from swarm.runs.verdict import Statement

Numbers = Sequence[float] | np.ndarray

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6d00")
"""The Okabe-Ito palette, which is distinguishable with colour vision deficiency.

Its yellow is darkened, as it is too light for a line on white, and its black is left out, as axes
and text use it.
"""

GREY = "#9aa1a9"

MARKER_SHAPES = ("o", "s", "^", "D", "v", "P", "X")
"""Marker of each colour, in matplotlib's codes, so that series differ by more than colour."""

DASH_PATTERNS = ("", "7 3", "2 3")
"""Line dashes, by how often the palette has been used up."""

MAX_MARKERS = 12
"""Approximate maximum number of markers on a line."""


class Series(NamedTuple):
    """A named series of points (x, y); points with a NaN are left out.

    Attributes:
        kind: "line" joins the points, "steps" holds each y until the next x, "points" draws markers
            only.
        weight: "normal", "strong" (emphasised) or "faint" (grey background, no marker, no legend
            entry).
        labels: Tooltip label of each point; empty for none.
        spans: Interval of each point on the x axis, as (low, high); empty for none.
    """

    name: str
    x: Numbers
    y: Numbers
    kind: str = "line"
    weight: str = "normal"
    labels: Sequence[str] = ()
    spans: Sequence[tuple[float, float]] = ()


def style_of_series(style: int) -> tuple[int, str]:
    """Return a style's index into `COLOURS` and `MARKER_SHAPES`, and its dash pattern."""
    rounds, place = divmod(style, len(COLOURS))
    return place, DASH_PATTERNS[rounds % len(DASH_PATTERNS)]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: series on two axes.

    Attributes:
        key: Unique key, used as the file name.
        alt_text: One-sentence summary, the alternative text of the image.
        marks: Horizontal reference lines, as (name, y).
        rows: Row names for y = 0, 1, ... from the top; empty if y is numeric.
        integer_x: Whether x takes integers only, which then are its ticks.
        log: Use a logarithmic x axis with a tick at each x; requires x > 0.
    """

    key: str
    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    alt_text: str = ""
    marks: Sequence[tuple[str, float]] = ()
    rows: Sequence[str] = ()
    integer_x: bool = False
    log: bool = False

    def series_style(self, number: int) -> int | None:
        """Return the index of a series among those that are not faint; `None` for a faint one."""
        if self.series[number].weight == "faint":
            return None
        shown = [one for one in self.series[:number] if one.weight != "faint"]
        return len(shown)

    def x_range(self) -> tuple[float, float]:
        """Return the lowest and the highest x, including the ends of spans."""
        ends = [end for one in self.series for span in one.spans for end in span]
        return _padded_range([*(v for one in self.series for v in one.x), *ends])

    def y_range(self) -> tuple[float, float]:
        """Return the lowest and the highest y, including the marks."""
        marks = [value for _, value in self.marks]
        return _padded_range([*(v for one in self.series for v in one.y), *marks])


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    known = [float(v) for v in values if math.isfinite(v)] or [0.0]
    low, high = min(known), max(known)
    # Values that differ only by rounding are treated as one value.
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        half = abs(low) * 0.1 if abs(low) > 1e-9 else 0.5
        return low - half, high + half
    return low, high


def axis_ticks(low: float, high: float, limit: int = 6, integers: bool = False) -> list[float]:
    """Return at most `limit` round numbers that cover the range from `low` to `high`.

    Args:
        limit: Maximum number of ticks, at least 3.
        integers: Whether ticks must be integers.
    """
    step = 10.0 ** math.floor(math.log10((high - low) / limit))
    if integers:
        step = max(1.0, step)
    for factor in (1, 2, 5, 10, 20, 50, 100):
        first = math.floor(low / (step * factor) + 1e-9)
        last = math.ceil(high / (step * factor) - 1e-9)
        if last - first < limit:
            break
    return [float(f"{n * step * factor:.12g}") for n in range(first, last + 1)]


def tick_label(value: float, among: Sequence[float]) -> str:
    """Format a tick with as many decimals as its distance from its neighbours requires."""
    step = among[1] - among[0] if len(among) > 1 else abs(value) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if step >= 1e6 or decimals > 5:
        return f"{value:.3g}"
    return f"{value + 0.0:,.{decimals}f}".replace("-", "\N{MINUS SIGN}")


class TextBlock(NamedTuple):
    """Paragraphs, or the items of one list if `listed` is set."""

    lines: Sequence[str]
    listed: bool = False


class Sparkline(NamedTuple):
    """A table cell that shows the course of a number; NaN where it was not measured."""

    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows of cells; the first column names the row.

    Attributes:
        sortable: Whether readers can sort the rows by a column.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Sparkline]]
    sortable: bool = False


@dataclass(frozen=True, slots=True)
class ChartChoice:
    """Charts by name, of which the reader selects one; the first is selected initially."""

    label: str
    charts: dict[str, Chart]


@dataclass(frozen=True, slots=True)
class ChangedItem:
    """An item whose answers by two models have different values.

    Attributes:
        item: Item id, prefixed with its part in a mixture.
        question: Question and choices; empty if the data file could not be read.
        gold: Correct answer; empty if there is none or it is unknown.
        before, after: Parsed answer and full text of each model.
        values: Value of each answer.
    """

    item: str
    question: str
    gold: str
    before: tuple[str, str]
    after: tuple[str, str]
    values: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChangedItems:
    """Items that all changed in the same direction.

    Attributes:
        total: Number of such items, including those not shown.
        names: Names of the models before and after.
    """

    title: str
    total: int
    names: tuple[str, str]
    flips: Sequence[ChangedItem]


ReportBlock = TextBlock | TableBlock | Chart | ChartChoice | ChangedItems


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A section of the report.

    Attributes:
        key: Anchor in the page's URL.
        explanation: One or two sentences on how to read the section.
        folded: Collapsed blocks, by their summary line.
    """

    key: str
    title: str
    explanation: str
    blocks: Sequence[ReportBlock]
    folded: dict[str, Sequence[ReportBlock]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a run.

    Attributes:
        name: Name of the run.
        about: One-line description of what ran.
        verdict: The outcome.
        figures: Headline figures, as (label, value).
        comparisons: The best found against each baseline on test; `None` for fewer than two.
        warnings: Warnings that qualify the outcome.
    """

    name: str
    about: str
    verdict: Statement
    figures: Sequence[tuple[str, str]]
    sections: Sequence[ReportSection]
    comparisons: TableBlock | None = None
    warnings: Sequence[str] = ()


NUMBER_PATTERN = re.compile(r"[+\u2212<]? ?\.?\d[\d,.%]*( \[.*\])?$|\[?[+\u2212\d][^a-z]*\]$|–$")
"""Cells that match are right-aligned as numbers."""

INVALID_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Characters that are not allowed in an HTML page."""


def escape_text(words: str) -> str:
    """Escape text for HTML and replace characters that are not allowed in it."""
    return escape(INVALID_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", words.replace("\r\n", "\n")))


def render_paragraphs(words: TextBlock) -> str:
    """Render paragraphs or a list as HTML."""
    if words.listed:
        return f"<ul>{''.join(f'<li>{escape_text(line)}</li>' for line in words.lines)}</ul>"
    return "".join(f"<p>{escape_text(line)}</p>" for line in words.lines)


def render_table(one: TableBlock) -> str:
    """Render a table as HTML, in a container that scrolls horizontally if the table is too wide."""
    right = [_is_numeric([row[n] for row in one.rows]) for n in range(len(one.header))]
    head = "".join(
        f'<th scope="col"{" class=n" * right[n]}>{_render_header_cell(name, one.sortable)}</th>'
        for n, name in enumerate(one.header)
    )
    rows = "".join(f"<tr>{_render_row(row, right)}</tr>" for row in one.rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape_text(one.caption)}">'
        f"<table><caption>{escape_text(one.caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _is_numeric(cells: Sequence[str | Sparkline]) -> bool:
    return all(isinstance(cell, str) and NUMBER_PATTERN.match(cell) for cell in cells)


def _render_header_cell(name: str, sortable: bool) -> str:
    return f'<button type="button">{escape_text(name)}</button>' if sortable else escape_text(name)


def _render_row(row: Sequence[str | Sparkline], right: Sequence[bool]) -> str:
    first, *rest = row
    cells = f'<th scope="row">{_render_cell(first)}</th>'
    for cell, numeric in zip(rest, right[1:], strict=True):
        kind = " class=n" if numeric else " class=long" if _is_long(cell) else ""
        cells += f"<td{kind}{_sort_attribute(cell)}>{_render_cell(cell)}</td>"
    return cells


def _is_long(cell: str | Sparkline) -> bool:
    return isinstance(cell, str) and len(cell) > 24


def _sort_attribute(cell: str | Sparkline) -> str:
    """Return the sort key of a sparkline cell, its last value; empty for text."""
    return f' data-v="{cell.values[-1]:.6g}"' if isinstance(cell, Sparkline) else ""


def _render_cell(cell: str | Sparkline) -> str:
    return _render_sparkline(cell.values) if isinstance(cell, Sparkline) else escape_text(cell)


def _render_sparkline(values: Sequence[float]) -> str:
    """Render a sparkline as an SVG of 90 by 20, scaled to the range of its values."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return "–"
    low, high = min(known), max(known)
    wide, tall = 84 / max(1, len(values) - 1), 14 / ((high - low) or 1.0)
    pen, line = "M", ""
    for index, value in enumerate(values):
        if not math.isfinite(value):
            pen = "M"
            continue
        y = 17 - (value - low) * tall if high > low else 10.0
        line += f"{pen}{3 + index * wide:.1f} {y:.1f}"
        pen = "L"
    first, last = format_number(known[0]), format_number(known[-1])
    description = f"from {first} to {last}, highest {format_number(high)}"
    return (
        f'<svg class="spark" viewBox="0 0 90 20" role="img" aria-label="{description}">'
        f'<path class="line" d="{line}"/></svg>'
    )
