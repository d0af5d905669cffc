"""What a chart shows, whoever draws it: swarm/report/charts.py or swarm/report/charts.py."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

import numpy as np

from swarm.stats.format import format_number

Numbers = Sequence[float] | np.ndarray

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6d00")
"""Okabe and Ito's, which readers who see fewer colours can tell apart; their yellow, which is
too light for a line on paper, darkened, and no black, which is the axes' and the text's."""

GREY = "#9aa1a9"

MARKER_SHAPES = ("o", "s", "^", "D", "v", "P", "X")
"""The marker that goes with each colour, in matplotlib's letters: colour alone tells nothing."""

DASH_PATTERNS = ("", "7 3", "2 3")
"""How lines are drawn when all colours are taken once, twice, and three times."""

MAX_MARKERS = 12
"""About as many of a line's points have a marker."""


class Series(NamedTuple):
    """Points (x, y) and how they hang together; one with a NaN is left out.

    Attributes:
        kind: "line" joins the points, "steps" holds each y until the next x, "points" are single.
        weight: "strong" stands out, "faint" is background: grey, without marker and legend.
        labels: What each point is, beside its numbers; empty is nothing.
        spans: The ends of each point's interval on x; empty is none.
    """

    name: str
    x: Numbers
    y: Numbers
    kind: str = "line"
    weight: str = "normal"
    labels: Sequence[str] = ()
    spans: Sequence[tuple[float, float]] = ()


def style_of_series(style: int) -> tuple[int, str]:
    """The place in COLOURS and SHAPES of a series with a `Chart.style`, and its dashes."""
    rounds, place = divmod(style, len(COLOURS))
    return place, DASH_PATTERNS[rounds % len(DASH_PATTERNS)]


@dataclass(frozen=True, slots=True)
class Chart:
    """Series on two axes.

    Attributes:
        key: Names its file.
        told: What it shows, in a sentence, for who does not see it.
        marks: Horizontal lines at a value, by name.
        rows: Names of y = 0, 1, ... from above; empty where y is a number.
        whole: The x are whole numbers, and so are its ticks.
        log: The x axis of a file of its own is logarithmic, with a tick at each x; all are above 0.
    """

    key: str
    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    told: str = ""
    marks: Sequence[tuple[str, float]] = ()
    rows: Sequence[str] = ()
    whole: bool = False
    log: bool = False

    def series_style(self, number: int) -> int | None:
        """The number of a series among those that are not faint; `None` for a faint one."""
        if self.series[number].weight == "faint":
            return None
        shown = [one for one in self.series[:number] if one.weight != "faint"]
        return len(shown)

    def x_range(self) -> tuple[float, float]:
        """The lowest and the highest x, the ends of intervals too."""
        ends = [end for one in self.series for span in one.spans for end in span]
        return _padded_range([*(v for one in self.series for v in one.x), *ends])

    def y_range(self) -> tuple[float, float]:
        """The lowest and the highest y, the marks too."""
        marks = [value for _, value in self.marks]
        return _padded_range([*(v for one in self.series for v in one.y), *marks])


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    known = [float(v) for v in values if math.isfinite(v)] or [0.0]
    low, high = min(known), max(known)
    # What differs by rounding alone is one value.
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        half = abs(low) * 0.1 if abs(low) > 1e-9 else 0.5
        return low - half, high + half
    return low, high


def axis_ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, `most` of them or fewer.

    Args:
        most: At least 3.
        whole: The numbers are whole.
    """
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    if whole:
        step = max(1.0, step)
    for factor in (1, 2, 5, 10, 20, 50, 100):
        first = math.floor(low / (step * factor) + 1e-9)
        last = math.ceil(high / (step * factor) - 1e-9)
        if last - first < most:
            break
    return [float(f"{n * step * factor:.12g}") for n in range(first, last + 1)]


def tick_label(value: float, among: Sequence[float]) -> str:
    """A tick with as many decimals as tell it from its neighbours."""
    step = among[1] - among[0] if len(among) > 1 else abs(value) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if step >= 1e6 or decimals > 5:
        return f"{value:.3g}"
    return f"{value + 0.0:,.{decimals}f}".replace("-", "\N{MINUS SIGN}")


# What a report is made of, whatever file it becomes: words, tables, charts and items.


class TextBlock(NamedTuple):
    """Paragraphs, or with `listed` one list."""

    lines: Sequence[str]
    listed: bool = False


class Sparkline(NamedTuple):
    """A cell that shows how a number went, NaN where it was not measured."""

    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows of cells; the first column names the row.

    Attributes:
        sortable: Readers may order the rows by a column.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Sparkline]]
    sortable: bool = False


@dataclass(frozen=True, slots=True)
class ChartChoice:
    """Charts of which one is shown, by name; the first one at first."""

    label: str
    charts: dict[str, Chart]


@dataclass(frozen=True, slots=True)
class ChangedItem:
    """An item that two models answered with different value.

    Attributes:
        item: Its id, and its part in a mixture.
        question: What was asked, and the choices; empty where the data file could not be read.
        gold: The right answer; empty where there is none or it is not known.
        before, after: What the two answered: as it was read, and the text.
        values: What the answers were worth.
    """

    item: str
    question: str
    gold: str
    before: tuple[str, str]
    after: tuple[str, str]
    values: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChangedItems:
    """Items that went one way.

    Attributes:
        total: How many there are, those left out too.
        names: Who answered before and after.
    """

    title: str
    total: int
    names: tuple[str, str]
    flips: Sequence[ChangedItem]


ReportBlock = TextBlock | TableBlock | Chart | ChartChoice | ChangedItems


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A part of the report.

    Attributes:
        key: Names it in addresses.
        how: How to read it, in one or two sentences.
        folded: Blocks that are opened only on demand, by what is said of them.
    """

    key: str
    title: str
    how: str
    blocks: Sequence[ReportBlock]
    folded: dict[str, Sequence[ReportBlock]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A run's.

    Attributes:
        name: The run's.
        about: What ran, in a line.
        kind: "better", "worse", "unclear", "open" (no test yet).
        verdict: That in two or three words.
        result: The result in one plain sentence.
        figures: Short facts, as what and how much.
    """

    name: str
    about: str
    kind: str
    verdict: str
    result: str
    figures: Sequence[tuple[str, str]]
    sections: Sequence[ReportSection]


# Words and tables as HTML; nothing that a model wrote is ever markup.

NUMBER_PATTERN = re.compile(r"[+\u2212<]? ?\.?\d[\d,.%]*( \[.*\])?$|\[?[+\u2212\d][^a-z]*\]$|–$")
"""What stands to the right in its column."""

INVALID_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Characters that a page cannot hold."""


def escape_text(words: str) -> str:
    """Words for a page: nothing in them is markup, and what a page cannot hold is replaced."""
    return escape(INVALID_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", words.replace("\r\n", "\n")))


def render_paragraphs(words: TextBlock) -> str:
    """Paragraphs, or a list."""
    if words.listed:
        return f"<ul>{''.join(f'<li>{escape_text(line)}</li>' for line in words.lines)}</ul>"
    return "".join(f"<p>{escape_text(line)}</p>" for line in words.lines)


def render_table(one: TableBlock) -> str:
    """A table in a box of its own that scrolls where it is too wide for the page."""
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
    told = f'<th scope="row">{_render_cell(first)}</th>'
    for cell, numeric in zip(rest, right[1:], strict=True):
        kind = " class=n" if numeric else " class=long" if _is_long(cell) else ""
        told += f"<td{kind}{_sort_attribute(cell)}>{_render_cell(cell)}</td>"
    return told


def _is_long(cell: str | Sparkline) -> bool:
    return isinstance(cell, str) and len(cell) > 24


def _sort_attribute(cell: str | Sparkline) -> str:
    """By what a column of small pictures is ordered: by their last number."""
    return f' data-v="{cell.values[-1]:.6g}"' if isinstance(cell, Sparkline) else ""


def _render_cell(cell: str | Sparkline) -> str:
    return _render_sparkline(cell.values) if isinstance(cell, Sparkline) else escape_text(cell)


def _render_sparkline(values: Sequence[float]) -> str:
    """A line of 90 by 20 from the lowest to the highest."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return "–"
    low, high = min(known), max(known)
    wide, tall = 84 / max(1, len(values) - 1), 14 / ((high - low) or 1.0)
    pen, line = "M", ""
    for place, value in enumerate(values):
        if not math.isfinite(value):
            pen = "M"
            continue
        y = 17 - (value - low) * tall if high > low else 10.0
        line += f"{pen}{3 + place * wide:.1f} {y:.1f}"
        pen = "L"
    first, last = format_number(known[0]), format_number(known[-1])
    told = f"from {first} to {last}, highest {format_number(high)}"
    return (
        f'<svg class="spark" viewBox="0 0 90 20" role="img" aria-label="{told}">'
        f'<path class="line" d="{line}"/></svg>'
    )
