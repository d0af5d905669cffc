"""Words and tables as HTML; nothing that a model wrote is ever markup."""

import math
import re
from collections.abc import Sequence
from html import escape

from swarm.report.blocks import Sparkline, TableBlock, TextBlock
from swarm.report.numbers import format_number

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
    told = f"from {format_number(known[0])} to {format_number(known[-1])}, highest {format_number(high)}"
    return (
        f'<svg class="spark" viewBox="0 0 90 20" role="img" aria-label="{told}">'
        f'<path class="line" d="{line}"/></svg>'
    )
