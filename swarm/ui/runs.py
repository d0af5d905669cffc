"""Runs: all searches of the folder in a table that follows them."""

from typing import Any
from urllib.parse import urlencode

from nicegui import run, ui

from swarm.ui.frame import page_frame
from swarm.ui.home import AppState
from swarm.ui.shelf import RunSummary

STATE_COLOURS = {"running": "primary", "finished": "green-9", "stopped": "grey-7", "failed": "negative"}

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
    {{ props.row.why }}<br>{{ props.row.task }}, best on dev {{ props.row.best_text }},
    gain on test {{ props.row.gain_text }}<br>{{ props.row.when }}</div>
</q-td>"""
STATE_TEMPLATE = """<q-td :props="props" class="run-name">
  <q-badge :color="COLOURS[props.row.state]" class="q-mb-xs">{{ props.row.state }}</q-badge>
  <div class="quiet" style="max-width: 16rem">{{ props.row.why }}</div>
</q-td>"""
CELL_TEMPLATE = '<q-td :props="props">{{ props.row.%s }}</q-td>'

REFRESH_S = 2.0


def register_page(home: AppState) -> None:
    """Put the page at /."""

    @ui.page("/")
    def runs_page() -> None:
        with page_frame("Runs"):
            RunsTable(home)


class RunsTable:
    """The table of one browser window.

    Args:
        home: Whose runs they are.
    """

    def __init__(self, home: AppState) -> None:
        self._home, self._shown = home, [RunSummary("", "", "", "", None, None, "", 0, 0.0)]
        with ui.row().classes("w-full items-center gap-2"):
            wanted = ui.input(placeholder="Filter").props(
                "dense outlined clearable aria-label=Filter debounce=200"
            ).classes("grow min-w-40")  # fmt: skip
            self._compare = ui.button("Compare", icon="stacked_line_chart", on_click=self._open_comparison)
            self._compare.props("outline no-caps").set_enabled(False)
            ui.button(
                "Start a search", icon="add", on_click=lambda: ui.navigate.to("/start")
            ).props("unelevated no-caps")
        columns = [{**one, **_narrow_classes(one["name"])} for one in TABLE_COLUMNS]
        self.table = ui.table(columns=columns, rows=[], row_key="name", selection="multiple",
                              pagination=25, on_select=self._on_selection).classes("w-full")  # fmt: skip
        self.table.props("flat bordered")
        self.table.bind_filter_from(wanted, "value", lambda text: text or "")
        for name, slot in {"name": NAME_TEMPLATE, "state": STATE_TEMPLATE}.items():
            self.table.add_slot(f"body-cell-{name}", slot.replace("COLOURS", str(STATE_COLOURS)))
        for name, field in {"best": "best_text", "gain": "gain_text", "changed": "when"}.items():
            self.table.add_slot(f"body-cell-{name}", CELL_TEMPLATE % field)
        self._none = ui.label("There are no runs here yet. Start one, or open this page in the "
                              "folder where search/ is.").classes("quiet")  # fmt: skip
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
    """A telephone shows all below the name."""
    return {} if name == "name" else {"classes": "gt-xs", "headerClasses": "gt-xs"}
