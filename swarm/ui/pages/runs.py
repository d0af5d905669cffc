"""Pages of all runs in a live table, and of several runs compared side by side.

The comparison shows best so far, differing settings and the paired test on shared test items.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query
from nicegui import run, ui

from swarm._util.format import format_interval, format_number, format_signed
from swarm._util.secrets import clean
from swarm.errors import UserError
from swarm.report.paired_comparison import PairedComparison
from swarm.report.sections import flatten_keys
from swarm.runs.describe import (
    MAX_DOMAINS,
    describe_difference,
    format_one_answer_warnings,
    shorten_text,
)
from swarm.runs.run_reader import RunFolder
from swarm.ui import charts
from swarm.ui.layout import draw_heading, draw_plain_table, page_frame
from swarm.ui.run_data import describe_unreadable
from swarm.ui.state import UNREADABLE_ERRORS, AppState, RunSummary

STATE_COLOURS = {
    "running": "primary",
    "finished": "green-9",
    "stopped": "grey-7",
    "failed": "negative",
}

TABLE_COLUMNS: list[dict[str, Any]] = [
    {"name": "name", "label": "Run", "field": "name", "align": "left", "sortable": True},
    {"name": "state", "label": "State", "field": "state", "align": "left", "sortable": True},
    {"name": "task", "label": "Task", "field": "task", "align": "left", "sortable": True},
    {"name": "best", "label": "Best on dev", "field": "best", "sortable": True},
    {"name": "gain", "label": "Gain on test, 95 %", "field": "gain", "sortable": True},
    {"name": "iterations", "label": "Iterations", "field": "iterations", "sortable": True},
    {"name": "changed", "label": "Changed", "field": "changed", "align": "left", "sortable": True},
]

NAME_TEMPLATE = """<q-td :props="props" class="run-name">
  <a :href="'/runs/' + encodeURIComponent(props.row.name)" class="text-primary">
    {{ props.row.name }}</a>
  <div class="lt-sm quiet">
    <q-badge :color="COLOURS[props.row.state]">{{ props.row.state }}</q-badge>
    {{ props.row.details }}<br>{{ props.row.task }}, best on dev {{ props.row.best_text }},
    gain on test {{ props.row.gain_text }}<br>{{ props.row.when }}</div>
</q-td>"""
STATE_TEMPLATE = """<q-td :props="props" class="run-name">
  <q-badge :color="COLOURS[props.row.state]" class="q-mb-xs">{{ props.row.state }}</q-badge>
  <div class="quiet" style="max-width: 16rem">{{ props.row.details }}</div>
</q-td>"""
CELL_TEMPLATE = '<q-td :props="props">{{ props.row.%s }}</q-td>'

REFRESH_S = 2.0


def register_page(home: AppState) -> None:
    """Register the page at /."""

    @ui.page("/")
    def runs_page() -> None:
        with page_frame("Runs"):
            RunsTable(home)


class RunsTable:
    """Table of the runs in one browser window.

    Args:
        home: State that the pages share.
    """

    def __init__(self, home: AppState) -> None:
        self._home, self._shown = home, [RunSummary("", "", "", "", None, None, "", 0, 0.0)]
        with ui.row().classes("w-full items-center gap-2"):
            filter_field = (
                ui.input(placeholder="Filter")
                .props("dense outlined clearable aria-label=Filter debounce=200")
                .classes("grow min-w-40")
            )
            self._compare = ui.button(
                "Compare", icon="stacked_line_chart", on_click=self._open_comparison
            )
            self._compare.props("outline no-caps").set_enabled(False)
            ui.button(
                "Start a search", icon="add", on_click=lambda: ui.navigate.to("/start")
            ).props("unelevated no-caps")
        columns = [{**one, **_narrow_classes(one["name"])} for one in TABLE_COLUMNS]
        self.table = ui.table(
            columns=columns,
            rows=[],
            row_key="name",
            selection="multiple",
            pagination=25,
            on_select=self._on_selection,
        ).classes("w-full")
        self.table.props("flat bordered")
        self.table.bind_filter_from(filter_field, "value", lambda text: text or "")
        for name, slot in {"name": NAME_TEMPLATE, "state": STATE_TEMPLATE}.items():
            self.table.add_slot(f"body-cell-{name}", slot.replace("COLOURS", str(STATE_COLOURS)))
        for name, shown in {"best": "best_text", "gain": "gain_text", "changed": "when"}.items():
            self.table.add_slot(f"body-cell-{name}", CELL_TEMPLATE % shown)
        self._none = ui.label(
            "There are no runs yet. Start one, or start this page in the "
            "folder that contains search/."
        ).classes("quiet")
        self._none.set_visibility(False)
        ui.timer(REFRESH_S, self._refresh_rows)

    async def _refresh_rows(self) -> None:
        found = await run.io_bound(self._home.run_index.list_runs)
        if found is not None and found != self._shown:
            self._shown = found
            self.table.rows[:] = [line.to_row() for line in found]
            self.table.update()
            self._none.set_visibility(not found)

    def _on_selection(self) -> None:
        ticked = len(self.table.selected)
        self._compare.set_enabled(ticked > 1)
        self._compare.set_text(f"Compare {ticked}" if ticked > 1 else "Compare")

    def _open_comparison(self) -> None:
        names = [row["name"] for row in self.table.selected]
        ui.navigate.to(f"/together?{urlencode({'run': names}, doseq=True)}")


def _narrow_classes(name: str) -> dict[str, str]:
    """Return CSS classes that hide a column on phones, which show its value below the name."""
    return {} if name == "name" else {"classes": "gt-xs", "headerClasses": "gt-xs"}


MAX_RUNS = 8
"""Maximum number of runs compared at once, the number of chart colours."""

ALWAYS_DIFFERENT_KEYS = ("name", "folder")
"""Keys that always differ between runs."""


@dataclass
class RunComparison:
    """Comparison of several runs.

    Attributes:
        chart: Chart of their best so far.
        results: One row per run: name, iterations, dev, test.
        settings: One row per differing key: key, and its value in each run.
        tests: One sentence per run except the first, with which it is compared.
        domains: Test utilities by domain, a header and one row per run; empty without domains.
        warnings: Warnings about bests that always give the same answer in a domain.
    """

    names: list[str]
    chart: dict[str, Any]
    results: list[list[str]]
    settings: list[list[str]]
    tests: list[str] = field(default_factory=list)
    domains: list[list[str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def register_compare_page(home: AppState) -> None:
    """Register the page at /together?run=NAME&run=NAME."""

    @ui.page("/together")
    async def compare_runs_page(names: Annotated[list[str], Query(alias="run")] = []) -> None:  # noqa: B006
        with page_frame("Runs compared", "Runs"):
            try:
                chosen = [home.run_path(name) for name in dict.fromkeys(names)]
                if not 2 <= len(chosen) <= MAX_RUNS:
                    raise UserError(f"choose 2 to {MAX_RUNS} runs to compare")
                found = await run.io_bound(compare_runs, chosen)
            except (UserError, *UNREADABLE_ERRORS) as error:
                message = str(error) if isinstance(error, UserError) else describe_unreadable(error)
                ui.label(message).classes("text text-negative").props("role=alert")
                ui.link("Choose runs", "/")
                return
            if found is not None:
                _draw_comparison(found)


def compare_runs(paths: list[Path]) -> RunComparison:
    """Compare runs.

    Raises:
        UserError: A folder contains no run, or one without an iteration.
    """
    runs = [RunFolder(path) for path in paths]
    names = [run.name for run in runs]
    return RunComparison(
        names,
        charts.run_comparison_chart(runs),
        [_result_row(run) for run in runs],
        differing_settings(runs),
        _describe_tests(runs),
        domain_rows(runs),
        _list_warnings(runs),
    )


def _result_row(run: RunFolder) -> list[str]:
    models = PairedComparison(run)
    cells = [run.name, str(len(run.rounds) - 1)]
    for split in ("dev", "test"):
        found = models.split_result("ending", split)
        cells.append(format_interval(found.utility, found.interval) if found else "–")
    return cells


def domain_rows(runs: list[RunFolder]) -> list[list[str]]:
    """Tabulate test utilities by the domains of the first run, with the best constant answers.

    Returns:
        Header, and one row per run; empty unless the first run has 2 to 12 domains.
    """
    key = "ending_best_single_test_domains"
    names = list(runs[0].metrics.get(key) or ())
    if not 2 <= len(names) <= MAX_DOMAINS:
        return []
    rows = [["best found on test", *map(shorten_text, names)]]
    constant = (runs[0].metrics.get("constant_answers") or {}).get("by_domain", {}).get("test")
    if constant:
        by_domain = constant["domains"]
        rows.append(
            ["best constant answer", *(format_number(by_domain[name]["utility"]) for name in names)]
        )
    for one in runs:
        by_domain = one.metrics.get(key) or {}
        cells = (by_domain.get(name) for name in names)
        formatted = (
            format_interval(cell["utility"], cell["interval"]) if cell else "–" for cell in cells
        )
        rows.append([one.name, *formatted])
    return rows


def _list_warnings(runs: list[RunFolder]) -> list[str]:
    return [
        warning
        for one in runs
        for warning in format_one_answer_warnings(
            one.metrics.get("ending_best_single_test_one_answer", ()),
            f"the best found of {one.name}",
            "test",
        )
    ]


def differing_settings(runs: list[RunFolder]) -> list[list[str]]:
    """Return the keys whose values differ between runs, with their values."""
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
    """Describe the paired test of each run's best found against the first run's."""
    from swarm.studies.ablations import compare_runs

    first, *others = runs
    sentences = []
    for other in others:
        pair = f"{other.name} against {first.name}"
        try:
            by, common_only = compare_runs(first, other)
        except (UserError, *UNREADABLE_ERRORS) as error:
            sentences.append(f"{pair}: not compared ({error}).")
            continue
        points = bool(first.metrics.get("in_points", False))
        item_kind = "common test items" if common_only else "test items"
        description = describe_difference(
            by.difference, (by.low, by.high), by.p, by.n, item_kind, points
        )
        sentences.append(f"{pair}: {format_signed(by.difference)}. {description}")
    return sentences


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
        for sentence in found.warnings:
            ui.label(sentence).classes("text")
    with ui.card().classes("w-full gap-2"):
        draw_heading("Paired test")
        for sentence in found.tests:
            ui.label(sentence).classes("text")
    with ui.card().classes("w-full gap-2"):
        draw_heading("Settings that differ")
        if found.settings:
            draw_plain_table(["key", *found.names], found.settings, "left")
        else:
            ui.label("None.").classes("quiet")
