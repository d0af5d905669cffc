"""What a search cost, and what it did not have to ask."""

from typing import Any

from swarm.manifest import verify
from swarm.report.blocks import Section, Table, Words
from swarm.report.compared import Compared
from swarm.report.course import by_signal, measure
from swarm.report.economy import economy
from swarm.report.folder import RunFolder
from swarm.report.numbers import count, counted, duration, number
from swarm.report.pictures import Chart, Series
from swarm.report.starts import starts

ENDINGS = {
    "test": "on test, at the end",
    "judged": "on dev by the task's own measure, at the end",
    "confirm": "on the kept part of dev, at the end",
    "again": "on dev once more, for the noise floor",
}
"""What answers/KIND_*.json.gz was asked for."""


def cost(models: Compared) -> Section:
    """Prompts, time and tokens; what racing, positions met before and other searches saved."""
    run = models.run
    spent = economy(run)
    asked = int(spent["prompts"][-1])
    rows = [["on dev, by the search", count(asked)], *_at_the_end(run)]
    blocks: list[Any] = [
        _bought(run, spent),
        Table("Prompts that were asked", ["prompts", "how many"], rows),
        Table("Prompts that were not asked", ["prompts", "how many"], _saved(run, spent, asked)),
    ]
    if timed := _time(run, asked):
        blocks.append(Table("Time and tokens", ["what", "how much"], timed))
    if taken := run.metrics.get("spent"):
        blocks.append(Table(
            "What scoring took", ["measure", "texts met for the first time", "met again"],
            [[name, number(n["first"]), number(n["again"])] for name, n in taken.items()],
        ))  # fmt: skip
    better = spent["improvements"]
    each = spent["prompts_per_improvement"]
    if each is not None:
        blocks.append(Words([f"The best rose {counted(better, 'time')} after the start, "
                             f"once every {count(each)} prompts."]))  # fmt: skip
    return Section(
        "cost",
        "What it cost",
        "A prompt is one item put to one position. The curve's first point is the price of asking "
        "every starting particle; where it is flat, prompts bought nothing.",
        blocks,
    )


def _bought(run: RunFolder, spent: dict[str, Any]) -> Chart:
    """The best so far against prompts."""
    prompts, best = spent["prompts"], spent["best"]
    labels = [f"iteration {n}" for n in range(len(best))]
    return Chart(
        "budget", "What prompts bought", "prompts on dev", measure(run),
        [Series("best so far", prompts, best, "steps", "strong", labels)],
        f"{count(prompts[-1])} prompts took the best from {number(best[0])} to {number(best[-1])}"
        f"{by_signal(run)}",
    )  # fmt: skip


def _at_the_end(run: RunFolder) -> list[list[str]]:
    rows: list[list[str]] = []
    # One that is gone is not found by its name.
    verify(run.path / "answers")
    for kind, name in ENDINGS.items():
        paths = list((run.path / "answers").glob(f"{kind}_*.json.gz"))
        if asked := sum(len(run.packed(path)) for path in paths):
            rows.append([name, count(asked)])
    return rows


def _saved(run: RunFolder, spent: dict[str, Any], asked: int) -> list[list[str]]:
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
    return [[name, count(saved)] for name, saved in rows]


def _time(run: RunFolder, asked: int) -> list[list[str]]:
    """Rows on time and tokens, from the log; none without one."""
    seconds, times, tokens = read_log(run)
    if not times:
        return []
    rows = [["time from start to end, waiting between starts left out", duration(seconds)]]
    if times > 1:
        rows.append(["times it was started", str(times)])
    if seconds > 0:
        rows.append(["prompts on dev a second, everything included", number(asked / seconds, 1)])
    if tokens:
        rows.append(["tokens read and written on dev", count(tokens)])
    return rows


def read_log(run: RunFolder) -> tuple[float, int, int]:
    """Seconds at work, how often the search was started, and tokens on dev; 0 where unknown."""
    found = starts(run)
    tokens = {number: n for one in found for number, n in one.tokens.items()}
    return sum(one.seconds for one in found), len(found), sum(tokens.values())
