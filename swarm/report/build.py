"""Builds the report of a run folder and writes report.html, report.md and report/*.png."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from swarm._util.files import write_atomic
from swarm._util.terminal import format_count, pluralize
from swarm.report import sections
from swarm.report.analyses.convergence import (
    coefficient_section,
    diversity_section,
    progress_section,
)
from swarm.report.charts import render_image
from swarm.report.document import Chart, ChartChoice, Report, ReportBlock
from swarm.report.html import render_page
from swarm.report.markdown import render_markdown
from swarm.report.paired_comparison import PairedComparison, changed_items_section
from swarm.report.pareto_front import front_section
from swarm.report.sections import configuration_section, cost_section
from swarm.runs.folder import RunFolder
from swarm.runs.verdict import Verdict, format_one_answer_warnings

SECTIONS = (
    sections.start_end_section,
    front_section,
    progress_section,
    coefficient_section,
    diversity_section,
    changed_items_section,
    sections.statistics_section,
    cost_section,
    configuration_section,
)


def build_report(folder: str | Path) -> Report:
    """Build the report of a run, which may be unfinished.

    Raises:
        UserError: The folder contains no search, or one without an iteration.
    """
    run = RunFolder(folder)
    models = PairedComparison(run)
    return Report(
        run.name,
        _describe_run(run),
        sections.summarize_verdict(models),
        sections.headline_figures(models),
        [made for section in SECTIONS if (made := section(models)) is not None],
        sections.comparison_table(models),
        _warn(run.verdict),
    )


def _warn(verdict: Verdict | None) -> list[str]:
    if verdict is None or not (test := verdict.found.test):
        return []
    return format_one_answer_warnings(test.one_answer, "the best found", "test")


def _describe_run(run: RunFolder) -> str:
    task = run.identity.get("task.name")
    parts = [f"task {task}"] if task else []
    parts += [f"{len(run.experts)} experts", f"{run.particles} particles"]
    iterations = pluralize(len(run.rounds) - 1, "iteration")
    parts.append(iterations)
    if run.finished != f"{iterations} done":
        parts.append(run.finished or "still running")
    if "seed" in run.identity:
        parts.append(f"seed {format_count(run.identity['seed'])}")
    return ", ".join(parts)


def write_report(folder: str | Path) -> list[Path]:
    """Write the report into its run folder.

    Returns:
        The files written.

    Raises:
        UserError: As in `build_report`, or the folder cannot be written.
    """
    found, target = build_report(folder), Path(folder)
    charts = list(_iterate_charts([block for one in found.sections for block in one.blocks]))
    pictures = [target / "report" / f"{chart.key}.png" for chart in charts]
    for chart, path in zip(charts, pictures, strict=True):
        write_atomic(path, render_image(chart, "png"))
    texts = {
        target / "report.html": render_page(found),
        target / "report.md": render_markdown(found, {path.stem for path in pictures}),
    }
    for path, text in texts.items():
        write_atomic(path, text.encode("utf-8", "replace"))
    return [*texts, *pictures]


def _iterate_charts(blocks: Sequence[ReportBlock]) -> Iterator[Chart]:
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, ChartChoice):
            yield from block.charts.values()
