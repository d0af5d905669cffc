"""Page of all runs in a live table."""

import math
from collections import Counter
from typing import Any

from nicegui import run, ui

from swarm._util.terminal import pluralize
from swarm.errors import UserError
from swarm.ui.layout import draw_heading, page_frame
from swarm.ui.state import (
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
        with ui.row().classes("w-full items-center gap-2"):
            self._filter = (
                ui.input(placeholder="Filter", on_change=self._draw_rows)
                .props("dense outlined clearable aria-label=Filter debounce=200")
                .classes("grow min-w-40")
            )
            ui.button(
                "Start a search", icon="add", on_click=lambda: ui.navigate.to("/start")
            ).props("unelevated no-caps")
            self._delete = ui.button("Delete", icon="delete", on_click=self._ask_to_delete)
            self._delete.props("outline no-caps")
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
        self._on_selection()
        ui.timer(REFRESH_S, self._refresh_rows)

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
        # The searches of a sweep are not deleted, see `delete_run`.
        deletable = not any(row["trials"] or row["group"] for row in self.table.selected)
        self._delete.set_enabled(deletable and bool(self.table.selected))

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
