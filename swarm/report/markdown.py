"""A report as Markdown, for a text that is kept beside others; pictures lie in report/."""

import math
import re
from collections.abc import Collection, Sequence

from swarm.report.blocks import Block, Choice, Flips, Report, Section, Spark, Table, Words
from swarm.report.pictures import Chart
from swarm.report.text import sparkline
from swarm.report.text import table as aligned

FLIPS = 20
"""Items shown of those won, and of those lost; the page has more."""

MARKS = re.compile(r"([\\`*_\[\]<>|#~$])")


def markdown(report: Report, pictures: Collection[str]) -> str:
    """The whole file.

    Args:
        pictures: The keys of the charts of which there is a PNG.
    """
    lines = [f"# {plain(report.name)}", "", plain(report.about), ""]
    lines += ["## Result", "", f"**{report.verdict}.** {plain(report.result)}", ""]
    lines += [f"- {what}: {much}" for what, much in report.figures]
    for section in report.sections:
        lines += ["", *_section(section, pictures)]
    return "\n".join([*lines, ""])


def plain(words: str) -> str:
    """Words in one line, in which nothing is markup."""
    return MARKS.sub(r"\\\1", " ".join(words.split()))


def _section(section: Section, pictures: Collection[str]) -> list[str]:
    lines = [f"## {section.title}", "", plain(section.how)]
    for block in (*section.blocks, *(one for some in section.folded.values() for one in some)):
        if told := _block(block, pictures):
            lines += ["", *told]
    return lines


def _block(block: Block, pictures: Collection[str]) -> list[str]:
    match block:
        case Words():
            mark = "- " if block.listed else ""
            return [line for words in block.lines for line in (f"{mark}{plain(words)}", "")][:-1]
        case Table():
            return _table(block)
        case Chart():
            if block.key in pictures:
                return [f"![{plain(block.title)}. {plain(block.told)}](report/{block.key}.png)"]
            return [f"{plain(block.title)}: {plain(block.told)}."]
        case Choice():
            return [line for chart in block.charts.values() for line in _block(chart, pictures)]
        case Flips():
            return _flips(block)


def _table(one: Table) -> list[str]:
    rows = [[_cell(cell) for cell in row] for row in one.rows]
    return [f"**{plain(one.caption)}**", "", *aligned([plain(name) for name in one.header], rows)]


def _cell(cell: str | Spark) -> str:
    if isinstance(cell, Spark):
        return sparkline([v if math.isfinite(v) else math.nan for v in cell.values])
    return plain(cell)


def _flips(block: Flips) -> list[str]:
    lines = [f"### {plain(block.title)}", ""]
    rows: list[Sequence[str]] = [
        [plain(_short(one.item)), plain(_short(one.question)), plain(_short(one.gold)),
         plain(_short(one.before[0])), plain(_short(one.after[0]))]
        for one in block.flips[:FLIPS]
    ]  # fmt: skip
    if not rows:
        return [*lines, "None."]
    lines += aligned(["item", "question", "right", *map(plain, block.names)], rows)
    if block.total > len(rows):
        lines += ["", f"{block.total - len(rows)} more are not shown here."]
    return lines


def _short(words: str, most: int = 160) -> str:
    words = " ".join(words.split())
    return words if len(words) <= most else f"{words[: most - 1]}…"
