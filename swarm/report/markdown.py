"""Reports as Markdown, for keeping among other text files; pictures are in report/."""

import math
import re
from collections.abc import Collection, Sequence

from swarm._util.terminal import format_sparkline
from swarm._util.terminal import format_table as aligned
from swarm.report.document import (
    ChangedItems,
    Chart,
    ChartChoice,
    Report,
    ReportBlock,
    ReportSection,
    Sparkline,
    TableBlock,
    TextBlock,
)

MAX_CHANGED_ITEMS = 20
"""Maximum number of items shown as won, and as lost; the HTML page shows more."""

MAX_FOLDED_ROWS = 20
"""Maximum number of rows of a table that the HTML page folds; of a longer one, only its title."""

FULL_REPORT = "report.html"
"""File that contains what the Markdown leaves out, beside it."""

MARKUP_CHARACTERS = re.compile(r"([\\`*_\[\]<>|#~$])")


def render_markdown(report: Report, pictures: Collection[str]) -> str:
    """Render the complete Markdown file.

    Args:
        pictures: Keys of the charts that have a PNG.
    """
    verdict = report.verdict
    lines = [f"# {escape_markdown(report.name)}", "", escape_markdown(report.about), ""]
    lines += [
        "## Result",
        "",
        f"**{verdict.headline}:** {escape_markdown(verdict.sentence)}",
        "",
    ]
    lines += [f"- {what}: {much}" for what, much in report.figures]
    if report.comparisons:
        lines += ["", *_render_table(report.comparisons)]
    for words in report.warnings:
        lines += ["", escape_markdown(words)]
    for section in report.sections:
        lines += ["", *_render_section(section, pictures)]
    return "\n".join([*lines, ""])


def escape_markdown(words: str) -> str:
    """Collapse text into one line and escape its Markdown."""
    return MARKUP_CHARACTERS.sub(r"\\\1", " ".join(words.split()))


def _render_section(section: ReportSection, pictures: Collection[str]) -> list[str]:
    lines = [f"## {section.title}", "", escape_markdown(section.explanation)]
    for block in section.blocks:
        if text := _render_block(block, pictures):
            lines += ["", *text]
    for summary, blocks in section.folded.items():
        for block in blocks:
            if isinstance(block, TableBlock) and len(block.rows) > MAX_FOLDED_ROWS:
                lines += ["", f"{escape_markdown(summary)}: in {FULL_REPORT}."]
            elif text := _render_block(block, pictures):
                lines += ["", *text]
    return lines


def _render_block(block: ReportBlock, pictures: Collection[str]) -> list[str]:
    match block:
        case TextBlock():
            mark = "- " if block.listed else ""
            return [
                line for words in block.lines for line in (f"{mark}{escape_markdown(words)}", "")
            ][:-1]
        case TableBlock():
            return _render_table(block)
        case Chart():
            if block.key in pictures:
                return [
                    f"![{escape_markdown(block.title)}. "
                    f"{escape_markdown(block.alt_text)}](report/{block.key}.png)"
                ]
            return [f"{escape_markdown(block.title)}: {escape_markdown(block.alt_text)}."]
        case ChartChoice():
            return [
                line for chart in block.charts.values() for line in _render_block(chart, pictures)
            ]
        case ChangedItems():
            return _render_changed_items(block)


def _render_table(one: TableBlock) -> list[str]:
    rows = [[_render_cell(cell) for cell in row] for row in one.rows]
    return [
        f"**{escape_markdown(one.caption)}**",
        "",
        *aligned([escape_markdown(name) for name in one.header], rows),
    ]


def _render_cell(cell: str | Sparkline) -> str:
    if isinstance(cell, Sparkline):
        return format_sparkline([v if math.isfinite(v) else math.nan for v in cell.values])
    return escape_markdown(cell)


def _render_changed_items(block: ChangedItems) -> list[str]:
    lines = [f"### {escape_markdown(block.title)}", ""]
    rows: list[Sequence[str]] = [
        [
            escape_markdown(_shorten_text(one.item)),
            escape_markdown(_shorten_text(one.question)),
            escape_markdown(_shorten_text(one.gold)),
            escape_markdown(_shorten_text(one.before[0])),
            escape_markdown(_shorten_text(one.after[0])),
        ]
        for one in block.flips[:MAX_CHANGED_ITEMS]
    ]
    if not rows:
        return [*lines, "None."]
    lines += aligned(["item", "question", "right", *map(escape_markdown, block.names)], rows)
    if block.total > len(rows):
        lines += ["", f"{block.total - len(rows)} more are not shown here."]
    return lines


def _shorten_text(words: str, limit: int = 160) -> str:
    words = " ".join(words.split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"
