"""Pages of all runs in a live table, and of several runs compared side by side.

The comparison shows best so far, differing settings and the paired test on shared test items.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query
from nicegui import run, ui

from swarm._util.secrets import clean
from swarm._util.terminal import format_number, format_signed, pluralize
from swarm.errors import UserError
from swarm.report.paired_comparison import PairedComparison
from swarm.report.sections import flatten_keys
from swarm.runs.run_reader import RunFolder
from swarm.runs.verdict import (
    MAX_DOMAINS,
    describe_difference,
    format_measured,
    format_one_answer_warnings,
    shorten_text,
)
from swarm.ui import charts
from swarm.ui.layout import draw_heading, draw_plain_table, draw_when_loaded, page_frame
from swarm.ui.state import (
    UNREADABLE_ERRORS,
    AppState,
    RunSummary,
    delete_run,
)

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
    {
        "name": "gain",
        "label": "Gain over the best alternative",
        "field": "gain",
        "sortable": True,
    },
    {"name": "iterations", "label": "Iterations", "field": "iterations", "sortable": True},
    {"name": "changed", "label": "Changed", "field": "changed", "align": "left", "sortable": True},
]

NAME_TEMPLATE = """<q-td :props="props" class="run-name" :class="props.row.group && 'q-pl-lg'">
  <q-btn v-if="props.row.trials" flat dense no-caps class="text-left" color="primary"
    :icon="props.row.open ? 'expand_more' : 'chevron_right'" :aria-expanded="props.row.open"
    @click="$parent.$emit('toggle', props.row.name)">
    {{ props.row.name }} ({{ props.row.trials > 1 ? props.row.trials + ' trials' : '1 trial' }})
  </q-btn>
  <a v-else :href="'/runs/' + encodeURIComponent(props.row.name)" class="text-primary">
    {{ props.row.name }}</a>
  <div v-if="!props.row.trials" class="lt-sm quiet">
    <q-badge :color="COLOURS[props.row.state]">{{ props.row.state }}</q-badge>
    {{ props.row.details }}<br>{{ props.row.task }}, best on dev {{ props.row.best_text }},
    gain {{ props.row.gain_text }}<br>{{ props.row.when }}</div>
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
        self._home = home
        self._found: list[RunSummary] | None = None
        self._open: set[str] = set()
        self._shown: list[dict[str, Any]] | None = None
        self._restored = False
        with ui.row().classes("w-full items-center gap-2"):
            self._filter = (
                ui.input(placeholder="Filter", on_change=self._draw_rows)
                .props("dense outlined clearable aria-label=Filter debounce=200")
                .classes("grow min-w-40")
            )
            columns_button = ui.button("Columns", icon="view_column").props("outline no-caps")
            # A phone shows all values below the name instead.
            with columns_button.classes("gt-xs"), ui.menu(), ui.column().classes("gap-0"):
                self._draw_column_choice()
            ui.button(
                "Start a search", icon="add", on_click=lambda: ui.navigate.to("/start")
            ).props("unelevated no-caps")
        with ui.row().classes("w-full items-center gap-2"):
            self._compare = self._draw_action(
                "Compare", "stacked_line_chart", self._open_comparison
            )
            self._delete = self._draw_action("Delete", "delete", self._ask_to_delete)
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
        self.table.on("toggle", lambda event: self._toggle_group(str(event.args)))
        for name, slot in {"name": NAME_TEMPLATE, "state": STATE_TEMPLATE}.items():
            self.table.add_slot(f"body-cell-{name}", slot.replace("COLOURS", str(STATE_COLOURS)))
        for name, shown in {"best": "best_text", "gain": "gain_text", "changed": "when"}.items():
            self.table.add_slot(f"body-cell-{name}", CELL_TEMPLATE % shown)
        self._none = ui.label(
            "There are no runs yet. Start one, or start this page in the "
            "folder that contains search/."
        ).classes("quiet")
        self._none.set_visibility(False)
        self._show_columns()
        self._on_selection()
        ui.timer(0.1, self._restore_columns, once=True)
        ui.timer(REFRESH_S, self._refresh_rows)

    def _draw_action(self, text: str, icon: str, act: Callable[[], Any]) -> ui.button:
        return ui.button(text, icon=icon, on_click=act).props(
            "outline no-caps dense padding='xs sm'"
        )

    def _draw_column_choice(self) -> None:
        self._columns: dict[str, ui.checkbox] = {}
        for column in TABLE_COLUMNS[1:]:
            box = ui.checkbox(column["label"], value=True)
            box.classes("q-px-md").on_value_change(self._show_columns)
            self._columns[column["name"]] = box

    def _show_columns(self) -> None:
        chosen = [name for name, box in self._columns.items() if box.value]
        self.table.props["visible-columns"] = ["name", *chosen]
        self.table.update()
        if self._restored:
            ui.run_javascript(f"localStorage.setItem('columns', {' '.join(chosen)!r})")

    async def _restore_columns(self) -> None:
        """Show the columns that were chosen in this browser before."""
        with contextlib.suppress(TimeoutError):  # the page was closed meanwhile
            kept = await ui.run_javascript("localStorage.getItem('columns')", timeout=10)
            if isinstance(kept, str):
                for name, box in self._columns.items():
                    box.set_value(name in kept.split())
        self._restored = True

    async def _refresh_rows(self) -> None:
        found = await run.io_bound(self._home.run_index.list_runs)
        if found is not None and found != self._found:
            self._found = found
            self._draw_rows()

    def _draw_rows(self) -> None:
        if self._found is None:
            return
        rows = group_rows(self._found, self._filter.value or "", self._open)
        if rows != self._shown:
            self._shown = rows
            self.table.rows[:] = rows
            by_name = {row["name"]: row for row in rows}
            chosen = [one["name"] for one in self.table.selected if one["name"] in by_name]
            self.table.selected[:] = [by_name[name] for name in chosen]
            self.table.update()
            self._on_selection()
        self._none.set_visibility(not self._found)

    def _toggle_group(self, name: str) -> None:
        self._open ^= {name}
        self._draw_rows()

    def _selected_names(self) -> list[str]:
        """Return the selected runs; a selected sweep stands for its trials that are listed."""
        names: dict[str, None] = {}
        for row in self.table.selected:
            names |= dict.fromkeys(row["members"] or [row["name"]])
        return list(names)

    def _on_selection(self) -> None:
        ticked = len(self._selected_names())
        self._compare.set_enabled(1 < ticked <= MAX_RUNS)
        self._compare.set_text(f"Compare {ticked}" if ticked > 1 else "Compare")
        # The searches of a sweep are not deleted, see `delete_run`.
        deletable = not any(row["trials"] or row["group"] for row in self.table.selected)
        self._delete.set_enabled(ticked > 0 and deletable)

    def _open_comparison(self) -> None:
        names = self._selected_names()
        ui.navigate.to(f"/together?{urlencode({'run': names}, doseq=True)}")

    def _ask_to_delete(self) -> None:
        names = self._selected_names()
        with ui.dialog(value=True) as dialog, ui.card().classes("gap-3"):
            draw_heading(f"Delete {pluralize(len(names), 'run')}?")
            ui.label("\n".join(names)).classes("text log")
            ui.label("The folders are removed from the disk. This cannot be undone.")
            with ui.row().classes("w-full justify-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat no-caps autofocus")
                ui.button("Delete", on_click=lambda: self._delete_runs(names, dialog)).props(
                    "unelevated no-caps color=negative"
                )

    async def _delete_runs(self, names: list[str], dialog: ui.dialog) -> None:
        dialog.close()
        for name in names:
            try:
                path = self._home.run_path(name)
                if self._home.launcher.is_starting(path):  # not locked yet
                    raise UserError(f"{name} is starting; stop it first")
                await run.io_bound(delete_run, path)
            except UserError as error:
                ui.notify(str(error), type="negative", multi_line=True)
        self.table.selected.clear()
        await self._refresh_rows()


def group_rows(runs: list[RunSummary], words: str, opened: set[str]) -> list[dict[str, Any]]:
    """Return the rows of the table: one per run, and one per sweep, followed by its trials if open.

    Args:
        runs: Most recently changed first.
        words: Filter: only runs in whose row every word occurs. Trials that match are shown.
        opened: Names of the sweeps whose trials are shown.
    """
    wanted = words.lower().split()
    rows = [one.to_row() | {"members": []} for one in runs]
    rows = [row for row in rows if all(word in _searched_text(row) for word in wanted)]
    trials: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["group"]:
            trials.setdefault(row["group"], []).append(row)
    found: list[dict[str, Any]] = []
    for row in rows:
        group = row["group"]
        if not group:
            found.append(row)
        elif row is trials[group][0]:  # in the place of its most recent trial
            shown = bool(wanted) or group in opened
            found.append({**_group_row(group, trials[group]), "open": shown})
            found += sorted(trials[group], key=lambda one: one["name"]) * shown
    return found


def _searched_text(row: dict[str, Any]) -> str:
    keys = ("name", "task", "state", "details")
    return " ".join(str(row[key]) for key in keys).lower()


def _group_row(name: str, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a sweep: names, states and best of those of its trials that are listed."""
    best = max(trials, key=lambda one: -math.inf if one["best"] is None else one["best"])
    counts = Counter(one["state"] for one in trials)
    state = next((one for one in STATE_COLOURS if counts[one]), "stopped")
    return best | {
        "name": name,
        "group": "",
        "trials": len(trials),
        "members": [one["name"] for one in trials],
        "state": state,
        "details": ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        "iterations": sum(one["iterations"] for one in trials),
        "changed": trials[0]["changed"],
        "when": trials[0]["when"],
    }


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
    def compare_runs_page(names: Annotated[list[str], Query(alias="run")] = []) -> None:  # noqa: B006
        def load() -> RunComparison:
            chosen = [home.run_path(name) for name in dict.fromkeys(names)]
            if not 2 <= len(chosen) <= MAX_RUNS:
                raise UserError(f"choose 2 to {MAX_RUNS} runs to compare")
            return compare_runs(chosen)

        with page_frame("Runs compared", "Runs"):
            draw_when_loaded(load, _draw_comparison)


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
        cells.append(format_measured(found))
    return cells


def domain_rows(runs: list[RunFolder]) -> list[list[str]]:
    """Tabulate test utilities by the domains of the first run, with the best constant answers.

    Returns:
        Header, and one row per run; empty unless the first run has 2 to 12 domains.
    """
    tests = [one.verdict.found.test if one.verdict else None for one in runs]
    names = list(tests[0].domains) if tests[0] else []
    if not 2 <= len(names) <= MAX_DOMAINS:
        return []
    rows = [["best found on test", *map(shorten_text, names)]]
    constant = runs[0].verdict.constant if runs[0].verdict else None
    if constant and constant.test:
        by_domain = constant.test.domains
        cells = (format_number(by_domain[name].utility) for name in names)
        rows.append(["best constant answer", *cells])
    for one, test in zip(runs, tests, strict=True):
        mine = test.domains if test else {}
        rows.append([one.name, *(format_measured(mine.get(name)) for name in names)])
    return rows


def _list_warnings(runs: list[RunFolder]) -> list[str]:
    return [
        warning
        for one in runs
        if one.verdict and one.verdict.found.test
        for warning in format_one_answer_warnings(
            one.verdict.found.test.one_answer,
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
        points = first.verdict is not None and first.verdict.in_points
        item_kind = "common test items" if common_only else "test items"
        description = describe_difference(by, item_kind, points)
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
