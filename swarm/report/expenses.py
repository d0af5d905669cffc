"""What a search cost, and what it did not have to ask."""

from typing import Any

from swarm.manifest import verify_run_file
from swarm.report.blocks import ReportSection, TableBlock, TextBlock
from swarm.report.compared import TestComparison
from swarm.report.course import signal_suffix, objective_label
from swarm.report.economy import measure_economy
from swarm.report.folder import RunFolder
from swarm.report.numbers import format_count, pluralize, format_duration, format_number
from swarm.report.pictures import Chart, Series
from swarm.report.starts import read_starts

FINAL_STAGES = {
    "test": "on test, at the end",
    "judged": "on dev by the task's own measure, at the end",
    "confirm": "on the kept part of dev, at the end",
    "again": "on dev once more, for the noise floor",
}
"""What answers/KIND_*.json.gz was asked for."""


def cost_section(models: TestComparison) -> ReportSection:
    """Prompts, time and tokens; what racing, positions met before and other searches saved."""
    run = models.run
    spent = measure_economy(run)
    asked = int(spent["prompts"][-1])
    rows = [["on dev, by the search", format_count(asked)], *_final_rows(run)]
    blocks: list[Any] = [
        _economy_chart(run, spent),
        TableBlock("Prompts that were asked", ["prompts", "how many"], rows),
        TableBlock("Prompts that were not asked", ["prompts", "how many"], _saved_rows(run, spent, asked)),
    ]
    if timed := _time_rows(run, asked):
        blocks.append(TableBlock("Time and tokens", ["what", "how much"], timed))
    if taken := run.metrics.get("spent"):
        blocks.append(TableBlock(
            "What scoring took", ["measure", "texts met for the first time", "met again"],
            [[name, format_number(n["first"]), format_number(n["again"])] for name, n in taken.items()],
        ))  # fmt: skip
    better = spent["improvements"]
    each = spent["prompts_per_improvement"]
    if each is not None:
        blocks.append(TextBlock([f"The best rose {pluralize(better, 'time')} after the start, "
                             f"once every {format_count(each)} prompts."]))  # fmt: skip
    return ReportSection(
        "cost",
        "What it cost",
        "A prompt is one item put to one position. The curve's first point is the price of asking "
        "every starting particle; where it is flat, prompts bought nothing.",
        blocks,
    )


def _economy_chart(run: RunFolder, spent: dict[str, Any]) -> Chart:
    """The best so far against prompts."""
    prompts, best = spent["prompts"], spent["best"]
    labels = [f"iteration {n}" for n in range(len(best))]
    return Chart(
        "budget", "What prompts bought", "prompts on dev", objective_label(run),
        [Series("best so far", prompts, best, "steps", "strong", labels)],
        f"{format_count(prompts[-1])} prompts took the best from {format_number(best[0])} to {format_number(best[-1])}"
        f"{signal_suffix(run)}",
    )  # fmt: skip


def _final_rows(run: RunFolder) -> list[list[str]]:
    rows: list[list[str]] = []
    # One that is gone is not found by its name.
    verify_run_file(run.path / "answers")
    for kind, name in FINAL_STAGES.items():
        paths = list((run.path / "answers").glob(f"{kind}_*.json.gz"))
        if asked := sum(len(run.load_packed(path)) for path in paths):
            rows.append([name, format_count(asked)])
    return rows


def _saved_rows(run: RunFolder, spent: dict[str, Any], asked: int) -> list[list[str]]:
    """Prompts saved on dev, by what saved them."""
    scored = sum(n or 0 for entry in run.rounds for n in entry.get("items_scored", ()))
    shared = sum(entry.get("prompts_shared", 0) for entry in run.rounds)
    rows = [
        ["racing: stopped, could not win any more", spent["raced"]],
        ["cache: the same position was met before", max(0, scored - asked)],
        ["dropping: moved without being asked", spent["dropped"]],
    ]
    if spent["beyond_budget"]:
        rows.append(["budget: nothing was left for them", spent["beyond_budget"]])
    if shared:
        rows.append(["shared: another search had asked (counted as asked above)", shared])
    return [[name, format_count(saved)] for name, saved in rows]


def _time_rows(run: RunFolder, asked: int) -> list[list[str]]:
    """Rows on time and tokens, from the log; none without one."""
    seconds, times, tokens = read_log(run)
    if not times:
        return []
    rows = [["time from start to end, waiting between starts left out", format_duration(seconds)]]
    if times > 1:
        rows.append(["times it was started", str(times)])
    if seconds > 0:
        rows.append(["prompts on dev a second, everything included", format_number(asked / seconds, 1)])
    if tokens:
        rows.append(["tokens read and written on dev", format_count(tokens)])
    return rows


def read_log(run: RunFolder) -> tuple[float, int, int]:
    """Seconds at work, how often the search was started, and tokens on dev; 0 where unknown."""
    found = read_starts(run)
    tokens = {number: n for one in found for number, n in one.tokens.items()}
    return sum(one.seconds for one in found), len(found), sum(tokens.values())
