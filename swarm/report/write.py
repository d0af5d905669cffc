"""The report of a run folder, put together and written: report.html, report.md and report/*.png."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from swarm.files import write_atomic
from swarm.report import png, result
from swarm.report.blocks import ReportBlock, ChartChoice, Report
from swarm.report.compared import TestComparison
from swarm.report.course import coefficient_section, diversity_section, progress_section
from swarm.report.expenses import cost_section
from swarm.report.folder import RunFolder
from swarm.report.front import front_section
from swarm.report.items import changed_items_section
from swarm.report.markdown import render_markdown
from swarm.report.numbers import format_count, pluralize
from swarm.report.page import render_page
from swarm.report.pictures import Chart
from swarm.report.setup import configuration_section

SECTIONS = (result.start_end_section, front_section, progress_section, coefficient_section, diversity_section, changed_items_section, result.statistics_section, cost_section,
            configuration_section)  # fmt: skip


def build_report(folder: str | Path) -> Report:
    """What a run came to, as far as it is.

    Raises:
        UserError: The folder holds no search, or one without an iteration.
    """
    run = RunFolder(folder)
    models = TestComparison(run)
    kind, verdict, told = result.summarize_verdict(models)
    return Report(
        run.path.resolve().name,
        _describe_run(run),
        kind,
        verdict,
        told,
        result.headline_figures(models),
        [made for section in SECTIONS if (made := section(models)) is not None],
    )


def _describe_run(run: RunFolder) -> str:
    task = run.identity.get("task.name")
    said = [f"task {task}"] if task else []
    said += [f"{len(run.experts)} experts", f"{run.particles} particles"]
    done = pluralize(len(run.rounds) - 1, "iteration")
    said.append(done)
    if run.finished != f"{done} done":
        said.append(run.finished or "still running")
    if "seed" in run.identity:
        said.append(f"seed {format_count(run.identity['seed'])}")
    return ", ".join(said)


def write_report(folder: str | Path) -> list[Path]:
    """Write the report into its run folder; without matplotlib there are no PNGs.

    Raises:
        UserError: As `report`, or the folder cannot be written.
    """
    found, home = build_report(folder), Path(folder)
    charts = list(_iterate_charts([block for one in found.sections for block in one.blocks]))
    pictures = [home / "report" / f"{chart.key}.png" for chart in charts] if png.is_available() else []
    for chart, path in zip(charts, pictures, strict=bool(pictures)):
        png.write_png(chart, path)
    texts = {
        home / "report.html": render_page(found),
        home / "report.md": render_markdown(found, {path.stem for path in pictures}),
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
