"""Several runs side by side: their course, the settings that differ, and the paired test."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from nicegui import run, ui

from swarm.errors import UserError
from swarm.report.compared import TestComparison
from swarm.report.folder import RunFolder
from swarm.report.numbers import format_interval, format_number, format_signed
from swarm.report.setup import flatten_keys
from swarm.secrets import clean
from swarm.ui import charts
from swarm.ui.frame import page_frame, draw_heading
from swarm.ui.home import AppState
from swarm.ui.parts import draw_plain_table
from swarm.ui.seen import describe_unreadable
from swarm.ui.shelf import UNREADABLE_ERRORS
from swarm.words import MAX_DOMAINS, shorten_text, format_one_answer_warnings, describe_difference

MAX_RUNS = 8
"""Runs that are compared at once: as many as there are colours."""

ALWAYS_DIFFERENT_KEYS = ("name", "folder")
"""Keys that differ because the runs do."""


@dataclass
class RunComparison:
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


def register_compare_page(home: AppState) -> None:
    """Put the page at /together?run=NAME&run=NAME."""

    @ui.page("/together")
    async def compare_runs_page(names: Annotated[list[str], Query(alias="run")] = []) -> None:  # noqa: B006
        with page_frame("Runs compared", "Runs"):
            try:
                chosen = [home.run_path(name) for name in dict.fromkeys(names)]
                if not 2 <= len(chosen) <= MAX_RUNS:
                    raise UserError(f"choose 2 to {MAX_RUNS} runs to compare")
                found = await run.io_bound(compare_runs, chosen)
            except (UserError, *UNREADABLE_ERRORS) as error:
                told = str(error) if isinstance(error, UserError) else describe_unreadable(error)
                ui.label(told).classes("text text-negative").props("role=alert")
                ui.link("Choose among the runs", "/")
                return
            if found is not None:
                _draw_comparison(found)


def compare_runs(paths: list[Path]) -> RunComparison:
    """Compare runs.

    Raises:
        UserError: One of them is no run, or has no iteration.
    """
    runs = [RunFolder(path) for path in paths]
    names = [run.path.name for run in runs]
    return RunComparison(names, charts.run_comparison_chart(runs), [_result_row(run) for run in runs],
                differing_settings(runs), _describe_tests(runs), domain_rows(runs), _list_warnings(runs))  # fmt: skip


def _result_row(run: RunFolder) -> list[str]:
    models = TestComparison(run)
    cells = [run.path.name, str(len(run.rounds) - 1)]
    for split in ("dev", "test"):
        found = models.split_result("ending", split)
        cells.append(format_interval(found.utility, found.ends) if found else "–")
    return cells


def domain_rows(runs: list[RunFolder]) -> list[list[str]]:
    """Each best found's test utility in the domains of the first run, and its constant answer's.

    Returns:
        The header and a row a run; empty unless the first run has 2 to 12 domains.
    """
    key = "ending_best_single_test_domains"
    names = list(runs[0].metrics.get(key) or ())
    if not 2 <= len(names) <= MAX_DOMAINS:
        return []
    rows = [["best found on test", *map(shorten_text, names)]]
    constant = (runs[0].metrics.get("constant_answers") or {}).get("by_domain", {}).get("test")
    if constant:
        mine = constant["domains"]
        rows.append(["best constant answer", *(format_number(mine[name]["utility"]) for name in names)])
    for one in runs:
        mine = one.metrics.get(key) or {}
        cells = (mine.get(name) for name in names)
        shown = (format_interval(cell["utility"], cell["interval"]) if cell else "–" for cell in cells)
        rows.append([one.path.name, *shown])
    return rows


def _list_warnings(runs: list[RunFolder]) -> list[str]:
    return [
        words
        for one in runs
        for words in format_one_answer_warnings(
            one.metrics.get("ending_best_single_test_one_answer", ()),
            f"the best found of {one.path.name}",
            "test",
        )
    ]


def differing_settings(runs: list[RunFolder]) -> list[list[str]]:
    """The keys whose values are not the same in all runs, with their values."""
    found: list[dict[str, Any]] = []
    for one in runs:
        try:
            found.append(dict(flatten_keys(clean(one.config))))
        except UserError:
            found.append(one.identity)
    keys = dict.fromkeys(key for tree in found for key in tree if key not in ALWAYS_DIFFERENT_KEYS)
    rows = [[key, *(str(tree.get(key, "–")) for tree in found)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _describe_tests(runs: list[RunFolder]) -> list[str]:
    """What the paired test says of each run's best found against the first run's."""
    from swarm.studies.comparison import compare_runs

    first, *others = runs
    said = []
    for other in others:
        pair = f"{other.path.name} against {first.path.name}"
        try:
            by, apart = compare_runs(first, other)
        except (UserError, *UNREADABLE_ERRORS) as error:
            said.append(f"{pair}: not tested against each other ({error}).")
            continue
        points = bool(first.metrics.get("in_points", False))
        of = "test items that both were asked" if apart else "test items"
        words = describe_difference(by.difference, (by.low, by.high), by.p, by.n, of, points)
        said.append(f"{pair}: {format_signed(by.difference)}. {words}")
    return said


def _draw_comparison(found: RunComparison) -> None:
    with ui.card().classes("w-full gap-2"):
        draw_heading("Best so far")
        ui.echart(found.chart).classes("w-full h-96").props(
            'role=img aria-label="Best so far of the runs"'
        )
    with ui.card().classes("w-full gap-2"):
        draw_heading("Best found, with 95 % intervals")
        draw_plain_table(["run", "iterations", "dev", "test"], found.results)
        if found.domains:
            draw_plain_table(found.domains[0], found.domains[1:])
        for words in found.warnings:
            ui.label(words).classes("text")
    with ui.card().classes("w-full gap-2"):
        draw_heading("Paired test")
        for words in found.tests:
            ui.label(words).classes("text")
    with ui.card().classes("w-full gap-2"):
        draw_heading("Settings that differ")
        if found.settings:
            draw_plain_table(["key", *found.names], found.settings, "left")
        else:
            ui.label("None.").classes("quiet")
