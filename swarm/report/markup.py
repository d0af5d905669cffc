"""Words and tables as HTML; nothing that a model wrote is ever markup."""

import math
import re
from collections.abc import Sequence
from html import escape

from swarm.report.blocks import Spark, Table, Words
from swarm.report.numbers import number

NUMBER = re.compile(r"[+\u2212<]? ?\.?\d[\d,.%]*( \[.*\])?$|\[?[+\u2212\d][^a-z]*\]$|–$")
"""What stands to the right in its column."""

STRANGE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Characters that a page cannot hold."""


def text(words: str) -> str:
    """Words for a page: nothing in them is markup, and what a page cannot hold is replaced."""
    return escape(STRANGE.sub("\N{REPLACEMENT CHARACTER}", words.replace("\r\n", "\n")))


def paragraphs(words: Words) -> str:
    """Paragraphs, or a list."""
    if words.listed:
        return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in words.lines)}</ul>"
    return "".join(f"<p>{text(line)}</p>" for line in words.lines)


def table(one: Table) -> str:
    """A table in a box of its own that scrolls where it is too wide for the page."""
    right = [_is_numeric([row[n] for row in one.rows]) for n in range(len(one.header))]
    head = "".join(
        f'<th scope="col"{" class=n" * right[n]}>{_head(name, one.sortable)}</th>'
        for n, name in enumerate(one.header)
    )
    rows = "".join(f"<tr>{_row(row, right)}</tr>" for row in one.rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(one.caption)}">'
        f"<table><caption>{text(one.caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _is_numeric(cells: Sequence[str | Spark]) -> bool:
    return all(isinstance(cell, str) and NUMBER.match(cell) for cell in cells)


def _head(name: str, sortable: bool) -> str:
    return f'<button type="button">{text(name)}</button>' if sortable else text(name)


def _row(row: Sequence[str | Spark], right: Sequence[bool]) -> str:
    first, *rest = row
    told = f'<th scope="row">{_cell(first)}</th>'
    for cell, numeric in zip(rest, right[1:], strict=True):
        kind = " class=n" if numeric else " class=long" if _is_long(cell) else ""
        told += f"<td{kind}{_order(cell)}>{_cell(cell)}</td>"
    return told


def _is_long(cell: str | Spark) -> bool:
    return isinstance(cell, str) and len(cell) > 24


def _order(cell: str | Spark) -> str:
    """By what a column of small pictures is ordered: by their last number."""
    return f' data-v="{cell.values[-1]:.6g}"' if isinstance(cell, Spark) else ""


def _cell(cell: str | Spark) -> str:
    return _spark(cell.values) if isinstance(cell, Spark) else text(cell)


def _spark(values: Sequence[float]) -> str:
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
    told = f"from {number(known[0])} to {number(known[-1])}, highest {number(high)}"
    return (
        f'<svg class="spark" viewBox="0 0 90 20" role="img" aria-label="{told}">'
        f'<path class="line" d="{line}"/></svg>'
    )
