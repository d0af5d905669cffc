"""Several runs side by side: their course, the settings that differ, and the paired test."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from nicegui import run, ui

from swarm.errors import UserError
from swarm.report.compared import Compared
from swarm.report.folder import RunFolder
from swarm.report.numbers import interval, number, signed
from swarm.report.setup import flat
from swarm.secrets import clean
from swarm.ui import charts
from swarm.ui.frame import frame, heading
from swarm.ui.home import Home
from swarm.ui.parts import plain_table
from swarm.ui.seen import unreadable
from swarm.ui.shelf import BROKEN
from swarm.words import MOST_DOMAINS, line, one_answer_lines, told

MOST = 8
"""Runs that are compared at once: as many as there are colours."""

ALWAYS = ("name", "folder")
"""Keys that differ because the runs do."""


@dataclass
class Side:
    """Runs as they are compared.

    Attributes:
        chart: Of their best so far.
        results: A row a run: name, dev, test.
        settings: A row a key that differs: key, and its value in each run.
        tests: A sentence for each run but the first, which it is compared with.
        domains: Test utilities by domain, a row a run under the header; empty without domains.
        warnings: Of best founds that give one answer throughout.
    """

    names: list[str]
    chart: dict[str, Any]
    results: list[list[str]]
    settings: list[list[str]]
    tests: list[str] = field(default_factory=list)
    domains: list[list[str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def register(home: Home) -> None:
    """Put the page at /together?run=NAME&run=NAME."""

    @ui.page("/together")
    async def together(names: Annotated[list[str], Query(alias="run")] = []) -> None:  # noqa: B006
        with frame("Runs compared", "Runs"):
            try:
                chosen = [home.run(name) for name in dict.fromkeys(names)]
                if not 2 <= len(chosen) <= MOST:
                    raise UserError(f"choose 2 to {MOST} runs to compare")
                found = await run.io_bound(beside, chosen)
            except (UserError, *BROKEN) as error:
                told = str(error) if isinstance(error, UserError) else unreadable(error)
                ui.label(told).classes("text text-negative").props("role=alert")
                ui.link("Choose among the runs", "/")
                return
            if found is not None:
                _draw(found)


def beside(paths: list[Path]) -> Side:
    """Compare runs.

    Raises:
        UserError: One of them is no run, or has no iteration.
    """
    runs = [RunFolder(path) for path in paths]
    names = [run.path.name for run in runs]
    return Side(names, charts.side_by_side(runs), [_result(run) for run in runs],
                settings(runs), _tests(runs), domains(runs), _warnings(runs))  # fmt: skip


def _result(run: RunFolder) -> list[str]:
    models = Compared(run)
    cells = [run.path.name, str(len(run.rounds) - 1)]
    for split in ("dev", "test"):
        found = models.measured("ending", split)
        cells.append(interval(found.utility, found.ends) if found else "–")
    return cells


def domains(runs: list[RunFolder]) -> list[list[str]]:
    """Each best found's test utility in the domains of the first run, and its constant answer's.

    Returns:
        The header and a row a run; empty unless the first run has 2 to 12 domains.
    """
    key = "ending_best_single_test_domains"
    names = list(runs[0].metrics.get(key) or ())
    if not 2 <= len(names) <= MOST_DOMAINS:
        return []
    rows = [["best found on test", *map(line, names)]]
    constant = (runs[0].metrics.get("constant_answers") or {}).get("by_domain", {}).get("test")
    if constant:
        mine = constant["domains"]
        rows.append(["best constant answer", *(number(mine[name]["utility"]) for name in names)])
    for one in runs:
        mine = one.metrics.get(key) or {}
        cells = (mine.get(name) for name in names)
        shown = (interval(cell["utility"], cell["interval"]) if cell else "–" for cell in cells)
        rows.append([one.path.name, *shown])
    return rows


def _warnings(runs: list[RunFolder]) -> list[str]:
    return [
        words
        for one in runs
        for words in one_answer_lines(
            one.metrics.get("ending_best_single_test_one_answer", ()),
            f"the best found of {one.path.name}",
            "test",
        )
    ]


def settings(runs: list[RunFolder]) -> list[list[str]]:
    """The keys whose values are not the same in all runs, with their values."""
    found: list[dict[str, Any]] = []
    for one in runs:
        try:
            found.append(dict(flat(clean(one.config))))
        except UserError:
            found.append(one.identity)
    keys = dict.fromkeys(key for tree in found for key in tree if key not in ALWAYS)
    rows = [[key, *(str(tree.get(key, "–")) for tree in found)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _tests(runs: list[RunFolder]) -> list[str]:
    """What the paired test says of each run's best found against the first run's."""
    from swarm.studies.comparison import against

    first, *others = runs
    said = []
    for other in others:
        pair = f"{other.path.name} against {first.path.name}"
        try:
            by, apart = against(first, other)
        except (UserError, *BROKEN) as error:
            said.append(f"{pair}: not tested against each other ({error}).")
            continue
        points = bool(first.metrics.get("in_points", False))
        of = "test items that both were asked" if apart else "test items"
        words = told(by.difference, (by.low, by.high), by.p, by.n, of, points)
        said.append(f"{pair}: {signed(by.difference)}. {words}")
    return said


def _draw(found: Side) -> None:
    with ui.card().classes("w-full gap-2"):
        heading("Best so far")
        ui.echart(found.chart).classes("w-full h-96").props(
            'role=img aria-label="Best so far of the runs"'
        )
    with ui.card().classes("w-full gap-2"):
        heading("Best found, with 95 % intervals")
        plain_table(["run", "iterations", "dev", "test"], found.results)
        if found.domains:
            plain_table(found.domains[0], found.domains[1:])
        for words in found.warnings:
            ui.label(words).classes("text")
    with ui.card().classes("w-full gap-2"):
        heading("Paired test")
        for words in found.tests:
            ui.label(words).classes("text")
    with ui.card().classes("w-full gap-2"):
        heading("Settings that differ")
        if found.settings:
            plain_table(["key", *found.names], found.settings, "left")
        else:
            ui.label("None.").classes("quiet")
