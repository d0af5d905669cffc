"""The report of a run folder, put together and written: report.html, report.md and report/*.png."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from swarm.files import write_whole
from swarm.report import png, result
from swarm.report.blocks import Block, Choice, Report
from swarm.report.compared import Compared
from swarm.report.course import coefficients, diversity, progress
from swarm.report.expenses import cost
from swarm.report.folder import RunFolder
from swarm.report.front import front
from swarm.report.items import flips
from swarm.report.markdown import markdown
from swarm.report.numbers import count, counted
from swarm.report.page import page
from swarm.report.pictures import Chart
from swarm.report.setup import configuration

SECTIONS = (result.ends, front, progress, coefficients, diversity, flips, result.statistics, cost,
            configuration)  # fmt: skip


def report(folder: str | Path) -> Report:
    """What a run came to, as far as it is.

    Raises:
        UserError: The folder holds no search, or one without an iteration.
    """
    run = RunFolder(folder)
    models = Compared(run)
    kind, verdict, told = result.verdict(models)
    return Report(
        run.path.resolve().name,
        _about(run),
        kind,
        verdict,
        told,
        result.figures(models),
        [made for section in SECTIONS if (made := section(models)) is not None],
    )


def _about(run: RunFolder) -> str:
    task = run.identity.get("task.name")
    said = [f"task {task}"] if task else []
    said += [f"{len(run.experts)} experts", f"{run.particles} particles"]
    done = counted(len(run.rounds) - 1, "iteration")
    said.append(done)
    if run.finished != f"{done} done":
        said.append(run.finished or "still running")
    if "seed" in run.identity:
        said.append(f"seed {count(run.identity['seed'])}")
    return ", ".join(said)


def write(folder: str | Path) -> list[Path]:
    """Write the report into its run folder; without matplotlib there are no PNGs.

    Raises:
        UserError: As `report`, or the folder cannot be written.
    """
    found, home = report(folder), Path(folder)
    charts = list(_charts([block for one in found.sections for block in one.blocks]))
    pictures = [home / "report" / f"{chart.key}.png" for chart in charts] if png.available() else []
    for chart, path in zip(charts, pictures, strict=bool(pictures)):
        png.write_png(chart, path)
    texts = {
        home / "report.html": page(found),
        home / "report.md": markdown(found, {path.stem for path in pictures}),
    }
    for path, text in texts.items():
        write_whole(path, text.encode("utf-8", "replace"))
    return [*texts, *pictures]


def _charts(blocks: Sequence[Block]) -> Iterator[Chart]:
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, Choice):
            yield from block.charts.values()
