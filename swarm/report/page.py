"""The report of a run as one HTML page: self-contained, without a script, and printable."""

import re
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swarm._util.files import write_atomic
from swarm._util.terminal import format_count, format_number, pluralize
from swarm.report import sections
from swarm.report.charts import render_svg
from swarm.report.document import (
    INVALID_CHARACTERS,
    ChangedItems,
    Chart,
    Report,
    ReportSection,
    TableBlock,
)
from swarm.report.paired_comparison import PairedComparison, changed_items_blocks
from swarm.runs.folder import RunFolder
from swarm.runs.verdict import format_one_answer_warnings

SECTIONS = (
    ("ends", "All models", sections.start_end_blocks),
    ("front", "Front of the objectives", sections.front_blocks),
    ("flips", "Item by item", changed_items_blocks),
    ("statistics", "Uncertainty, and what to check", sections.statistics_blocks),
    ("coefficients", "Coefficients of the best", sections.coefficient_blocks),
    ("progress", "Course of the search", sections.progress_blocks),
    ("emergence", "Items that emerge", sections.emergence_blocks),
    ("cost", "Cost", sections.cost_blocks),
    ("setup", "Configuration", sections.configuration_blocks),
)
"""Key, title and blocks of each folded section; one without blocks is left out."""

ICON = Path(__file__).with_name("icon.svg")
"""The picture of the project, of reports and of the web page."""

VERDICT_SIGNS = {"better": "▲", "worse": "▼", "unclear": "◆", "open": "○"}

NUMBER_PATTERN = re.compile(
    r"\(?[+\u2212<]? ?\.?\d[\d,.%]*\)?\*?( \[.*\])?$|\[?[+\u2212\d][^a-z]*\]$|–$"
)
"""Columns of which all cells but empty ones match are right-aligned as numbers."""


def build_report(folder: str | Path) -> Report:
    """Build the report of a run, which may be unfinished.

    Raises:
        UserError: The folder contains no search, or one without an iteration.
    """
    run = RunFolder(folder)
    models = PairedComparison(run)
    test = run.verdict.found.test if run.verdict else None
    return Report(
        run.name,
        _describe_run(run),
        sections.summarize_verdict(models),
        sections.headline_figures(models),
        [
            ReportSection(key, title, blocks)
            for key, title, build in SECTIONS
            if (blocks := build(models))
        ],
        [*sections.overview_blocks(models), *sections.main_charts(models)],
        format_one_answer_warnings(test.one_answer, "the best found", "test") if test else [],
    )


def _describe_run(run: RunFolder) -> str:
    task = run.identity.get("task.name")
    count = len(run.rounds) - 1
    parts = [f"task {task}"] if task else []
    parts.append(pluralize(len(run.experts), "adapter"))
    parts.append(f"{pluralize(count, 'round')} of {pluralize(run.particles, 'mixture')}")
    if run.finished != f"{pluralize(count, 'iteration')} done":
        parts.append(run.finished or "still running")
    if "seed" in run.identity:
        parts.append(f"seed {format_count(run.identity['seed'])}")
    return ", ".join(parts)


def write_report(folder: str | Path) -> Path:
    """Write report.html into a run folder and return its path.

    Raises:
        UserError: As in `build_report`, or the folder cannot be written.
    """
    path = Path(folder) / "report.html"
    write_atomic(path, render_page(build_report(folder)).encode())
    return path


def render_page(report: Report) -> str:
    """Render the complete page."""
    from markupsafe import Markup

    numbers = count()

    def draw(chart: Chart) -> Markup:
        return Markup(render_svg(chart, next(numbers)))

    page: str = load_template("page.html.j2").render(report=report, draw=draw, signs=VERDICT_SIGNS)
    return page


def render_changed_items(block: ChangedItems) -> str:
    """Render items, each of which expands to the question and both texts."""
    return str(load_template("macros.html.j2").module.items(block))


@cache
def load_template(name: str, folder: Path = Path(__file__).parent) -> Any:
    """Return a template, which can use the macros and the `style` of this page.

    Args:
        folder: Folder of the template.
    """
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    def clean(value: Any) -> Any:
        """Replace what is not allowed in a page; text is escaped besides."""
        if isinstance(value, str) and INVALID_CHARACTERS.search(value):
            return type(value)(INVALID_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", value))
        return value

    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]), autoescape=True, finalize=clean
    )
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    environment.globals |= {
        "number_columns": _number_columns,
        "suffix": _value_suffix,
        "style": Markup(style),
        "icon": f"data:image/svg+xml,{quote(ICON.read_text(encoding='utf-8'))}",
    }
    return environment.get_template(name)


def _number_columns(table: TableBlock) -> list[bool]:
    """Return for each column of a table whether it has numbers; the first one has names."""
    columns = list(zip(*table.rows, strict=True))[1:]
    return [False, *(all(NUMBER_PATTERN.match(c) for c in one if c) for one in columns)]


def _value_suffix(values: Sequence[float], which: int) -> str:
    """Return the value of an answer that is not simply right or wrong, in parentheses."""
    rated = not set(values) <= {0.0, 1.0}
    return f" ({format_number(values[which])})" if rated else ""
