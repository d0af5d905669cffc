"""Page of one run: progress, results, log and actions."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from nicegui import app, ui

from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.report.document import ChangedItems
from swarm.report.page import VERDICT_SIGNS, build_report, render_changed_items, render_page
from swarm.runs.folder import RUNS_FOLDER
from swarm.ui.layout import (
    draw_alert,
    draw_command,
    draw_facts,
    draw_heading,
    draw_table,
    draw_text,
    page_frame,
)
from swarm.ui.run_data import (
    POSITION_COLUMNS,
    STATES,
    PositionTable,
    RunSeries,
    RunSnapshot,
    load_changed_items,
    load_position,
    load_run_series,
    positions_csv,
    take_snapshot,
)
from swarm.ui.state import AppState, readable

REFRESH_S = 1.0

CHART_TITLES = {
    "particles": "Best so far, and every particle",
    "coefficients": "Coefficients of the best so far",
    "domains": "Utility by domain",
    "modules": "Coefficients of the best by module",
    "front": "Front of the objectives",
}
"""Charts of the page, in order; those that do not apply to a run are hidden."""

WIDE_CHARTS = ("modules", "front")
"""Charts that take the whole width."""

GROWING_CHARTS = ("domains", "modules")
"""Charts whose height follows the number of their rows."""

MAX_POSITIONS_SHOWN = 1000
"""Maximum number of positions in the table; the CSV has all."""

OPEN_TEMPLATE = """<q-td :props="props">
  <q-btn flat dense round size="sm" icon="open_in_full"
    @click.stop="$parent.$emit('open', props.row)"
    :aria-label="'Details of iteration ' + props.row.c0 + ', particle ' + props.row.c1" />
</q-td>"""


def register_page(home: AppState) -> None:
    """Register the page at /runs/NAME, its report and the CSV of its positions below it."""

    def respond(render: Callable[[Path], Response], name: str) -> Response:
        try:
            with readable():
                return render(home.run_path(name))
        except UserError as error:
            return PlainTextResponse(f"{error}\n", 404)

    @app.get("/runs/{name:path}/report")
    def report_page(name: str) -> Response:
        return respond(lambda path: HTMLResponse(render_page(build_report(path))), name)

    @app.get("/runs/{name:path}/positions.csv")
    def positions_file(name: str) -> Response:
        headers = {"Content-Disposition": 'attachment; filename="positions.csv"'}
        return respond(
            lambda path: PlainTextResponse(positions_csv(path), 200, headers, "text/csv"), name
        )

    @ui.page("/runs/{name:path}")
    def run_page(name: str) -> None:
        with page_frame(name, "Runs"):
            try:
                home.run_path(name)
            except UserError as error:
                draw_alert(str(error))
            else:
                RunPage(home, name)


class PositionsCard:
    """Card with the evaluated positions of a run: a table, details on a click, and a CSV.

    Args:
        path: The run folder.
        file: URL of the CSV.
    """

    def __init__(self, path: Path, file: str) -> None:
        self._path = path
        self._table: ui.table | None = None
        with ui.card().classes("w-full gap-2 min-w-0") as self._card:
            draw_heading("Evaluated positions")
            csv = ui.button("CSV", icon="download", on_click=lambda: ui.download.from_url(file))
            csv.props("outline")
            self._message = ui.label("").classes("quiet text-sm").props("role=status")
        self._card.set_visibility(False)

    def show(self, found: PositionTable) -> None:
        """Show the positions, the highest utilities first."""
        self._card.set_visibility(True)
        if self._table is None:
            with self._card:
                self._table = self._draw_table(found.columns)
        rows = found.rows[(-found.rows[:, 2]).argsort(kind="stable")][:MAX_POSITIONS_SHOWN]
        cut = f", the {len(rows)} with the highest utilities shown" * (len(rows) < len(found.rows))
        self._message.set_text(
            f"{len(found.rows)} positions{cut}. Coefficients are means over the groups of modules "
            "where there are several. A click shows a position in full."
        )
        self._table.rows[:] = [
            {f"c{n}": round(value, 4) for n, value in enumerate(row) if isfinite(value)}
            | {"key": f"{row[0]:.0f} {row[1]:.0f}"}
            for row in rows.tolist()
        ]
        self._table.update()

    def _draw_table(self, names: list[str]) -> ui.table:
        columns: list[dict[str, Any]] = [{"name": "open", "label": "", "field": ""}]
        for n, name in enumerate(names):
            column = {"name": f"c{n}", "label": name, "field": f"c{n}", "sortable": True}
            if n == 2 or n >= len(POSITION_COLUMNS):
                column[":format"] = "value => value.toFixed(3).replace(/^-(?=0\\.0+$)/, '')"
            columns.append(column)
        best_first = {"rowsPerPage": 10, "sortBy": "c2", "descending": True}
        table = ui.table(columns=columns, rows=[], row_key="key", pagination=best_first)
        table.props("flat bordered dense").classes("w-full")
        table.add_slot("body-cell-open", OPEN_TEMPLATE)
        table.on("open", lambda event: self._open_details(event.args))
        shown = [[], ["c0", "c1"], None]
        table.on("rowClick", lambda event: self._open_details(event.args[1]), shown)
        return table

    async def _open_details(self, row: dict[str, Any]) -> None:
        try:
            found = await run_in_thread(load_position, self._path, (int(row["c0"]), int(row["c1"])))
        except UserError as error:
            ui.notify(str(error), type="negative", multi_line=True)
            return
        with ui.dialog(value=True) as dialog, ui.card().classes("w-full gap-2") as card:
            card.style("max-width: 60rem")
            draw_heading(found.title)
            ui.label(found.description)
            with ui.element("div").classes("w-full shrink-0").style("overflow-x: auto"):
                draw_table(found.coefficients)
            if found.answers.rows:
                with ui.expansion("Items, the lowest values first"):
                    draw_table(found.answers, "left")
            ui.button("Close", on_click=dialog.close).props("flat")
        dialog.on("hide", dialog.delete)


class RunPage:
    """Page of a run in one browser window.

    Args:
        home: State that the pages share.
        name: Name of the run.
    """

    def __init__(self, home: AppState, name: str) -> None:
        self._home, self._name, self._path = home, name, home.run_path(name)
        self._stamp: tuple[int, ...] | None = ()
        address = f"/runs/{quote(name, safe='')}"
        talk = f"/talk?{urlencode({'model': f'local/{RUNS_FOLDER}/{name}'})}"
        with ui.row().classes("w-full items-center gap-2"):
            self._state = ui.badge("").props("data-state")
            self._about = ui.label("").classes("quiet grow")
        self._error = draw_alert()
        with ui.column().classes("w-full gap-1") as self._progress:
            self._bar = ui.linear_progress(0.0, show_value=False).props("aria-label=Progress")
            self._told = ui.label("").classes("quiet")
        with ui.row().classes("w-full items-center gap-2"):
            self._stop, self._resume, self._report, self._chat = (
                ui.button(text, icon=icon, on_click=act).props("outline")
                for text, icon, act in (
                    ("Stop", "stop", self._stop_search),
                    ("Resume", "play_arrow", self._resume_search),
                    (
                        "Open report",
                        "description",
                        lambda: ui.navigate.to(f"{address}/report", new_tab=True),
                    ),
                    ("Chat with the best", "chat", lambda: ui.navigate.to(talk)),
                )
            )
        _, self._verdict = _draw_card("Verdict")
        self._charts: dict[str, tuple[ui.card, ui.echart]] = {}
        with ui.element("div").classes("w-full grid grid-cols-1 md:grid-cols-2 gap-4"):
            for key, title in CHART_TITLES.items():
                card, place = _draw_card(title, "md:col-span-2" if key in WIDE_CHARTS else "")
                with place:
                    chart = ui.echart({}).classes("w-full h-80")
                self._charts[key] = card, chart.props(f'role=img aria-label="{title}"')
        self._positions = PositionsCard(self._path, f"{address}/positions.csv")
        self._results, self._tables = _draw_card("Best initial expert and best found")
        self._changed, place = _draw_card("Item by item")
        with place:
            self._baseline = ui.select([], label="Best found compared with").classes("w-full")
            self._baseline.props("options-dense").on("update:model-value", self._show_changed)
            self._items = ui.column().classes("w-full gap-1")
        self._several, self._points = _draw_card("Points of the front")
        for card in (
            self._results,
            self._changed,
            self._several,
            *(one for one, _ in self._charts.values()),
        ):
            card.set_visibility(False)
        with _draw_card("Log")[1]:
            with ui.element("div").classes("log ends").props("role=log tabindex=0"):
                self._said = ui.label("")
            self._command = draw_command()
        ui.timer(REFRESH_S, self._refresh_page)

    async def _refresh_page(self) -> None:
        snapshot = await run_in_thread(take_snapshot, self._home, self._name)
        self._show_snapshot(snapshot)
        if snapshot.stamp == self._stamp:
            return
        self._stamp = snapshot.stamp
        try:
            found = await run_in_thread(load_run_series, self._path)
        except UserError as error:
            self._verdict.clear()
            with self._verdict:
                ui.label(str(error).removeprefix(f"{self._path}: ")).classes("quiet")
        else:
            self._show_series(found)
            await self._show_changed()

    def _show_snapshot(self, now: RunSnapshot) -> None:
        running = now.state in ("running", "starting", "stopping")
        self._state.set_text(now.state)
        self._state.props(f"color={STATES[now.state]}")
        self._about.set_text(now.about)
        failed = now.error and now.state == "failed"
        self._error.set_text(f"It failed: {now.error}" if failed else "")
        progress, share = now.progress
        self._told.set_text(progress)
        self._bar.set_value(share)
        self._said.set_text(now.output or "Nothing yet.")
        self._command.set_text(now.command)
        for element, visible in (
            (self._progress, running),
            (self._stop, running and now.state != "stopping"),
            (self._resume, not running and now.state != "finished" and bool(now.command)),
            (self._report, now.measured),
            (self._chat, now.state == "finished"),
        ):
            element.set_visibility(visible)

    def _show_series(self, found: RunSeries) -> None:
        self._verdict.clear()
        with self._verdict:
            sign = f"{VERDICT_SIGNS[found.verdict.kind]} {found.verdict.headline}"
            ui.label(sign).classes("text-lg font-semibold")
            ui.label(found.verdict.sentence)
            draw_facts(found.figures)
            if found.comparisons:
                draw_table(found.comparisons)
            for sentence in found.notes:
                draw_text(sentence)
        for key, (card, chart) in self._charts.items():
            options = found.charts.get(key, {})
            card.set_visibility(bool(options))
            if key in GROWING_CHARTS and options:
                bars = sum(one["type"] == "bar" for one in options["series"])
                height = 110 + max(24, 20 * bars) * len(options["yAxis"]["data"])
                chart.style(f"height: {height}px")
            chart.options.clear()
            chart.options.update(options)
            chart.update()
        self._positions.show(found.positions)
        for card, place, tables in (
            (self._results, self._tables, found.tables),
            (self._several, self._points, [found.points] if found.points else []),
        ):
            card.set_visibility(bool(tables))
            place.clear()
            with place:
                for table in tables:
                    draw_table(table)
        self._changed.set_visibility(True)
        self._baseline.set_visibility(len(found.baselines) > 1)
        kept = self._baseline.value if self._baseline.value in found.baselines else None
        self._baseline.set_options(found.baselines, value=kept or found.baselines[0])

    async def _show_changed(self) -> None:
        try:
            blocks = await run_in_thread(load_changed_items, self._path, self._baseline.value)
        except UserError as error:
            blocks = [str(error)]
        self._items.clear()
        with self._items:
            for one in blocks:
                if isinstance(one, ChangedItems):
                    draw_heading(one.title)
                    ui.html(render_changed_items(one), sanitize=False).classes("w-full")
                else:
                    draw_text(str(one))

    async def _stop_search(self) -> None:
        await self._act(self._home.launcher.stop_search, "Stopping; finished work is stored.")

    async def _resume_search(self) -> None:
        await self._act(self._home.launcher.resume_search, "Resuming where it stopped.")

    async def _act(self, act: Callable[[Path], None], told: str) -> None:
        try:
            await run_in_thread(act, self._path)
        except UserError as error:
            ui.notify(str(error), type="negative", multi_line=True)
            return
        ui.notify(told)
        await self._refresh_page()


def _draw_card(title: str, classes: str = "") -> tuple[ui.card, ui.column]:
    """Draw a card with a heading; return it, and the place of its content."""
    with ui.card().classes(f"w-full gap-2 min-w-0 {classes}") as card:
        draw_heading(title)
        place = ui.column().classes("w-full gap-2")
    return card, place
