"""Page of all runs in a live table."""

import math
from collections import Counter
from typing import Any

from nicegui import ui

from swarm._util.terminal import format_duration, pluralize
from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.ui.layout import draw_empty, draw_heading, page_frame
from swarm.ui.state import STATES, AppState, RunSummary, delete_run

COLUMNS = {
    "name": ("Run", "left"),
    "state": ("State", "left"),
    "gain": ("Gain over the strongest alternative", "left"),
    "score": ("Best on dev", "left"),
    "trail": ("Course", "left"),
    "seconds": ("Duration", "right"),
    "changed": ("Changed", "right"),
}
"""Label and alignment of each column; all are sorted by their values."""

NAME_TEMPLATE = """<q-td :props="props" class="run-name" :class="props.row.group && 'q-pl-lg'">
  <q-btn v-if="props.row.trials" flat dense no-caps class="text-left" color="primary"
    :icon="props.row.open ? 'expand_more' : 'chevron_right'" :aria-expanded="props.row.open"
    @click="$parent.$emit('toggle', props.row.name)">
    {{ props.row.name }} ({{ props.row.trials > 1 ? props.row.trials + ' trials' : '1 trial' }})
  </q-btn>
  <a v-else :href="'/runs/' + encodeURIComponent(props.row.name)" class="text-primary">
    {{ props.row.name }}</a>
  <div class="quiet gt-xs" style="white-space: nowrap">{{ props.row.task }}</div>
  <div v-if="!props.row.trials" class="lt-sm quiet">
    <q-badge :color="COLOURS[props.row.state]">{{ props.row.state }}</q-badge>
    {{ props.row.details }}<br>{{ props.row.task }}, best on dev {{ props.row.score_text }},
    gain {{ props.row.gain_text }}<br>{{ props.row.duration }}, {{ props.row.when }}</div>
</q-td>"""
STATE_TEMPLATE = """<q-td :props="props" class="run-name">
  <q-badge :color="COLOURS[props.row.state]" class="q-mb-xs">{{ props.row.state }}</q-badge>
  <div v-if="props.row.state !== 'finished'" class="quiet" style="max-width: 12rem">
    {{ props.row.details }}</div>
</q-td>"""
BEST_TEMPLATE = """<q-td :props="props" class="run-name">{{ props.row.score_text }}
  <div class="quiet shortened">{{ props.row.best }}<q-tooltip>{{ props.row.best }}</q-tooltip></div>
</q-td>"""
TRAIL_TEMPLATE = """<q-td :props="props"><svg v-if="props.row.trail" width="60" height="18"
  role="img" aria-label="Best on dev by round"><polyline :points="props.row.trail" fill="none"
  stroke="var(--q-primary)" stroke-width="1.5" /></svg></q-td>"""
CELL_TEMPLATE = '<q-td :props="props" class="run-name">{{ props.row.%s }}</q-td>'

TEMPLATES = {
    "name": NAME_TEMPLATE.replace("COLOURS", str(STATES)),
    "state": STATE_TEMPLATE.replace("COLOURS", str(STATES)),
    "score": BEST_TEMPLATE,
    "trail": TRAIL_TEMPLATE,
    "gain": CELL_TEMPLATE % "gain_text",
    "seconds": CELL_TEMPLATE % "duration",
    "changed": CELL_TEMPLATE % "when",
}

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
        with ui.row().classes("w-full items-center gap-2") as self._tools:
            self._filter = ui.input(placeholder="Filter", on_change=self._draw_rows)
            self._filter.props("clearable aria-label=Filter debounce=200").classes("grow min-w-40")
            start = ui.button("Start a search", icon="add")
            start.on_click(lambda: ui.navigate.to("/start")).props("unelevated")
            self._delete = ui.button("Delete", icon="delete", on_click=self._ask_to_delete)
            self._delete.props("outline")
        # Phones show one column, which has the values of the others below the name.
        wide = {"classes": "gt-xs", "headerClasses": "gt-xs"}
        columns = [
            {"name": name, "field": name, "label": label, "align": align, "sortable": True}
            | (wide if name != "name" else {})
            for name, (label, align) in COLUMNS.items()
        ]
        self.table = ui.table(
            columns=columns,
            rows=[],
            row_key="name",
            selection="multiple",
            pagination=25,
            on_select=self._on_selection,
        )
        self.table.props("flat bordered").classes("w-full")
        self.table.on("toggle", lambda event: self._toggle_group(str(event.args)))
        for name, template in TEMPLATES.items():
            self.table.add_slot(f"body-cell-{name}", template)
        with self.table.add_slot("no-data"):
            ui.label("No search matches the filter.").classes("quiet")
        with ui.column().classes("w-full") as self._none:
            draw_empty("No search yet.", "Start a search", "/start")
        self._show_empty(False)
        self._on_selection()
        ui.timer(REFRESH_S, self._refresh_rows)

    async def _refresh_rows(self) -> None:
        self._found = await run_in_thread(self._home.run_index.list_runs)
        self._draw_rows()

    def _draw_rows(self) -> None:
        if self._found is None:
            return
        self._show_empty(not self._found)
        rows = group_rows(self._found, self._filter.value or "", self._open)
        if rows == self.table.rows:
            return
        chosen = {one["name"] for one in self.table.selected}
        self.table.rows[:] = rows
        self.table.selected[:] = [row for row in rows if row["name"] in chosen]
        self.table.update()
        self._on_selection()

    def _show_empty(self, empty: bool) -> None:
        self._none.set_visibility(empty)
        for one in (self._tools, self.table):
            one.set_visibility(not empty)

    def _toggle_group(self, name: str) -> None:
        self._open ^= {name}
        self._draw_rows()

    def _on_selection(self) -> None:
        # The searches of a sweep are not deleted, see `delete_run`.
        rows = self.table.selected
        self._delete.set_enabled(bool(rows) and not any(r["trials"] or r["group"] for r in rows))

    def _ask_to_delete(self) -> None:
        names = [row["name"] for row in self.table.selected]
        with ui.dialog(value=True) as dialog, ui.card().classes("gap-3"):
            draw_heading(f"Delete {pluralize(len(names), 'run')}?")
            ui.label("\n".join(names)).classes("log")
            ui.label("The folders are removed from the disk. This cannot be undone.")
            with ui.row().classes("w-full justify-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat autofocus")
                delete = ui.button("Delete", on_click=lambda: self._delete_runs(names, dialog))
                delete.props("unelevated color=negative")

    async def _delete_runs(self, names: list[str], dialog: ui.dialog) -> None:
        dialog.close()
        for name in names:
            try:
                path = self._home.run_path(name)
                if self._home.launcher.is_starting(path):  # not locked yet
                    raise UserError(f"{name} is starting; stop it first")
                await run_in_thread(delete_run, path)
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
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in (one.to_row() for one in runs):
        text = " ".join(row[key] for key in ("name", "task", "state", "details")).lower()
        if all(word in text for word in wanted):
            groups.setdefault(row["group"] or row["name"], []).append(row)
    found: list[dict[str, Any]] = []
    for name, rows in groups.items():  # a sweep in the place of its most recent trial
        if not rows[0]["group"]:
            found += rows
            continue
        shown = bool(wanted) or name in opened
        found.append({**_group_row(name, rows), "open": shown})
        found += sorted(rows, key=lambda row: row["name"]) * shown
    return found


def _group_row(name: str, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a sweep: names, states and best of those of its trials that are listed."""
    best = max(trials, key=lambda one: -math.inf if one["score"] is None else one["score"])
    counts = Counter(one["state"] for one in trials)
    return best | {
        "name": name,
        "group": "",
        "trials": len(trials),
        "state": next(one for one in STATES if counts[one]),
        "details": ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        "seconds": sum(one["seconds"] for one in trials),
        "duration": format_duration(sum(one["seconds"] for one in trials)),
        "changed": trials[0]["changed"],
        "when": trials[0]["when"],
    }
