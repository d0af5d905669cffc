"""Page of one run: progress, results, log and actions."""

from collections.abc import Callable
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from nicegui import app, run, ui

from swarm.errors import UserError
from swarm.runs.folder import RUNS_FOLDER, RunFolder
from swarm.ui.layout import draw_facts, draw_heading, draw_plain_table, page_frame
from swarm.ui.pages.runs import STATE_COLOURS
from swarm.ui.run_data import (
    POSITION_COLUMNS,
    PositionTable,
    RunSeries,
    RunSnapshot,
    describe_unreadable,
    format_progress,
    load_changed_items,
    load_position,
    load_run_series,
    positions_csv,
    take_snapshot,
)
from swarm.ui.state import UNREADABLE_ERRORS, AppState

VERDICT_SIGNS = {"better": "▲", "worse": "▼", "unclear": "◆", "open": "○"}

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


def register_page(home: AppState) -> None:
    """Register the page at /runs/NAME and its report at /runs/NAME/report."""

    @app.get("/runs/{name:path}/report")
    def report_page(name: str) -> Response:
        from swarm.report.page import build_report as made
        from swarm.report.page import render_page

        try:
            return HTMLResponse(render_page(made(home.run_path(name))))
        except UserError as error:
            return PlainTextResponse(f"{error}\n", 404)
        except UNREADABLE_ERRORS as error:
            return PlainTextResponse(f"{name}: {describe_unreadable(error)}\n", 404)

    @app.get("/runs/{name:path}/positions.csv")
    def positions_file(name: str) -> Response:
        try:
            text = positions_csv(RunFolder(home.run_path(name)))
        except UserError as error:
            return PlainTextResponse(f"{error}\n", 404)
        except UNREADABLE_ERRORS as error:
            return PlainTextResponse(f"{name}: {describe_unreadable(error)}\n", 404)
        headers = {"Content-Disposition": 'attachment; filename="positions.csv"'}
        return PlainTextResponse(text, headers=headers, media_type="text/csv")

    @ui.page("/runs/{name:path}")
    def run_page(name: str) -> None:
        with page_frame(name, "Runs"):
            try:
                home.run_path(name)
            except UserError as error:
                ui.label(str(error)).classes("text-negative")
                return
            RunPage(home, name)


MAX_POSITIONS_SHOWN = 1000
"""Maximum number of positions in the table; the CSV has all."""

MAX_ANSWERS_SHOWN = 200
"""Maximum number of answers in the details of a position, wrong ones first."""

OPEN_TEMPLATE = """<q-td :props="props">
  <q-btn flat dense round size="sm" icon="open_in_full"
    @click.stop="$parent.$emit('open', props.row)"
    :aria-label="'Details of iteration ' + props.row.c0 + ', particle ' + props.row.c1" />
</q-td>"""


class PositionsCard:
    """Card with the evaluated positions of a run: a table, its filter, details and a CSV.

    Args:
        path: The run folder.
        file: URL of the CSV.
    """

    def __init__(self, path: Path, file: str) -> None:
        self._path = path
        self._found: PositionTable | None = None
        with ui.card().classes("w-full gap-2 min-w-0") as self._card:
            draw_heading("Evaluated positions")
            with ui.row().classes("w-full items-start gap-2"):
                ui.button(
                    "CSV", icon="download", on_click=lambda: ui.download.from_url(file)
                ).props("outline no-caps")
            self._message = ui.label("").classes("quiet text text-sm").props("role=status")
            self._place = ui.element("div").classes("w-full min-w-0")
        self._table: ui.table | None = None
        self._card.set_visibility(False)

    def show(self, found: PositionTable | None) -> None:
        """Show the positions; `None` hides the card."""
        self._card.set_visibility(found is not None)
        self._found = found
        if found is not None and self._table is None:
            with self._place:
                self._table = self._draw_table(found)
        self._draw_rows()

    def _draw_table(self, found: PositionTable) -> ui.table:
        columns: list[dict[str, Any]] = [
            {"name": "open", "label": "", "field": "", "align": "left"}
        ]
        for n, name in enumerate(found.columns):
            column = {"name": f"c{n}", "label": name, "field": f"c{n}", "sortable": True}
            if n == 2 or n >= len(POSITION_COLUMNS):
                column[":format"] = "value => value.toFixed(3).replace(/^-(?=0\\.0+$)/, '')"
            columns.append(column)
        table = ui.table(
            columns=columns,
            rows=[],
            row_key="key",
            pagination={"rowsPerPage": 10, "sortBy": "c2", "descending": True},
        )
        table.props("flat bordered dense").classes("w-full")
        table.add_slot("body-cell-open", OPEN_TEMPLATE)
        table.on("open", lambda event: self._open_details(event.args))
        table.on(
            "rowClick", lambda event: self._open_details(event.args[1]), [[], ["c0", "c1"], None]
        )
        return table

    def _draw_rows(self) -> None:
        if self._found is None or self._table is None:
            return
        rows = self._found.sorted_rows()
        shown = min(len(rows), MAX_POSITIONS_SHOWN)
        words = f"{len(rows)} positions"
        words += f", the {shown} with the highest utilities shown" * (shown < len(rows))
        groups = "Coefficients are means over the groups of modules where there are several."
        self._message.set_text(f"{words}. {groups} A click shows a position in full.")
        self._table.rows[:] = [
            {
                "key": f"{row[0]:.0f} {row[1]:.0f}",
                **{
                    f"c{n}": int(value) if n in (0, 1, 3) and isfinite(value) else round(value, 4)
                    for n, value in enumerate(row)
                    if isfinite(value)
                },
            }
            for row in rows[:shown].tolist()
        ]
        self._table.update()

    async def _open_details(self, row: dict[str, Any]) -> None:
        try:
            found = await run.io_bound(load_position, self._path, (int(row["c0"]), int(row["c1"])))
        except (UserError, *UNREADABLE_ERRORS) as error:
            ui.notify(str(error), type="negative", multi_line=True)
            return
        if found is None:  # the page is closing
            return
        with (
            ui.dialog(value=True) as dialog,
            ui.card().classes("w-full gap-2").style("max-width: 60rem"),
        ):
            draw_heading(found.title)
            ui.label(found.description).classes("text")
            with ui.element("div").classes("w-full shrink-0").style("overflow-x: auto"):
                draw_plain_table(found.coefficients.header, found.coefficients.rows)
            if found.answers:
                with ui.expansion(f"Items, the lowest values first ({len(found.answers)})").classes(
                    "w-full"
                ):
                    draw_plain_table(
                        ["item", "value", "answer"], found.answers[:MAX_ANSWERS_SHOWN], "left"
                    )
                    if (more := len(found.answers) - MAX_ANSWERS_SHOWN) > 0:
                        ui.label(f"{more} more are not shown.").classes("quiet text")
            ui.button("Close", on_click=dialog.close).props("flat no-caps")
        dialog.on("hide", dialog.delete)


class RunPage:
    """Page of a run in one browser window.

    Args:
        home: State that the pages share.
        name: Name of the run.
    """

    def __init__(self, home: AppState, name: str) -> None:
        self._home, self._name = home, name
        self._stamp: tuple[int, int] | None = None
        self._shown: Any = None
        self._draw_head()
        with ui.card().classes("w-full gap-2"):
            draw_heading("Verdict")
            self._verdict = ui.column().classes("w-full gap-2")
        self._charts: dict[str, tuple[ui.card, ui.echart]] = {}
        with ui.element("div").classes("w-full grid grid-cols-1 md:grid-cols-2 gap-4"):
            for key, title in CHART_TITLES.items():
                self._draw_chart(key, title)
        self._positions = PositionsCard(
            home.run_path(name), f"/runs/{quote(name, safe='')}/positions.csv"
        )
        with ui.card().classes("w-full gap-2") as self._results:
            draw_heading("Best initial expert and best found")
            self._models = ui.column().classes("w-full gap-2")
        with ui.card().classes("w-full gap-2") as self._changed:
            draw_heading("Item by item")
            self._baseline = ui.select([], label="Best found compared with").classes("w-full")
            self._baseline.props("dense outlined options-dense")
            self._baseline.on_value_change(self._choose_baseline)
            self._items = ui.column().classes("w-full gap-1")
        with ui.card().classes("w-full gap-2") as self._several:
            draw_heading("Points of the front")
            self._points = ui.column().classes("w-full gap-2")
        for card in (self._results, self._changed, self._several):
            card.set_visibility(False)
        with ui.card().classes("w-full gap-2"):
            draw_heading("Log")
            with ui.element("div").classes("log ends").props("role=log tabindex=0"):
                self._said = ui.label("")
            with ui.row().classes("w-full items-start no-wrap gap-2") as self._typed:
                self._command = ui.label("").classes("log grow min-w-0").style("max-height: 8rem")
                ui.button(icon="content_copy", on_click=self._copy_command).props(
                    "flat dense aria-label='Copy the command'"
                )
        ui.timer(REFRESH_S, self._refresh_page)

    def _draw_head(self) -> None:
        with ui.row().classes("w-full items-center gap-2"):
            self._state = ui.badge("").props("data-state")
            self._about = ui.label("").classes("quiet text grow")
        self._error = ui.label("").classes("text text-negative").props("role=alert")
        with ui.column().classes("w-full gap-1") as self._progress:
            self._bar = ui.linear_progress(0.0, show_value=False).props("aria-label=Progress")
            self._told = ui.label("").classes("quiet text")
        with ui.row().classes("w-full items-center gap-2"):
            self._stop = self._draw_button("Stop", "stop", self._stop_search)
            self._resume = self._draw_button("Resume", "play_arrow", self._resume_search)
            self._report = self._draw_button("Open report", "description", self._open_report)
            self._chat = self._draw_button("Chat with the best", "chat", self._open_chat)

    def _draw_button(self, text: str, icon: str, act: Callable[..., Any]) -> ui.button:
        return ui.button(text, icon=icon, on_click=act).props("outline no-caps")

    def _draw_chart(self, key: str, title: str) -> None:
        wide = " md:col-span-2" * (key in WIDE_CHARTS)
        with ui.card().classes(f"w-full gap-2 min-w-0{wide}") as card:
            draw_heading(title)
            chart = ui.echart({}).classes("w-full h-80").props(f'role=img aria-label="{title}"')
        card.set_visibility(False)
        self._charts[key] = card, chart

    async def _refresh_page(self) -> None:
        snapshot = await run.io_bound(take_snapshot, self._home, self._name)
        if snapshot is None:  # the page is closing
            return
        self._show_snapshot(snapshot)
        if snapshot.stamp != self._stamp:
            self._stamp = snapshot.stamp
            found = await run.io_bound(load_run_series, self._home.run_path(self._name))
            if found is not None:
                self._show_series(found)

    def _show_snapshot(self, snapshot: RunSnapshot) -> None:
        state = _run_state(snapshot)
        self._state.set_text(state)
        self._state.props(f"color={STATE_COLOURS.get(state, 'grey-7')}")
        line = snapshot.line
        reason = [line.details] if line and state in ("finished", "stopped") else []
        self._about.set_text(", ".join([f"task {line.task}", *reason] if line else []))
        self._error.set_text(f"It failed: {snapshot.error}" if snapshot.error else "")
        self._error.set_visibility(bool(snapshot.error) and state == "failed")
        running = state in ("running", "starting", "stopping")
        self._progress.set_visibility(running)
        begun = {"activity": f"the process is {'stopping' if snapshot.stopping else 'starting'}"}
        progress, share = format_progress(snapshot.note or begun)
        self._told.set_text(progress)
        self._bar.set_value(share)
        self._stop.set_visibility(running and not snapshot.stopping)
        self._resume.set_visibility(not running and state != "finished" and bool(snapshot.command))
        self._report.set_visibility(bool(line and line.best is not None))
        self._chat.set_visibility(state == "finished")
        self._said.set_text(snapshot.output or "Nothing yet.")
        self._command.set_text(snapshot.command)
        self._typed.set_visibility(bool(snapshot.command))

    def _show_series(self, found: RunSeries) -> None:
        self._verdict.clear()
        with self._verdict:
            if found.why_not:
                ui.label(found.why_not).classes("quiet text")
            else:
                sign = f"{VERDICT_SIGNS[found.kind]} {found.verdict}"
                ui.label(sign).classes("text text-lg font-semibold")
                first, *more = found.sentences
                ui.label(first).classes("text")
                draw_facts(found.figures)
                if found.comparisons:
                    draw_plain_table(found.comparisons.header, found.comparisons.rows)
                for sentence in more:
                    ui.label(sentence).classes("text")
        for key, (card, chart) in self._charts.items():
            options = found.charts.get(key, {})
            card.set_visibility(bool(options))
            chart.set_visibility(bool(options))
            if key in GROWING_CHARTS and options:
                chart.style(f"height: {_chart_height(options)}px")
            _set_options(chart, options)
        self._results.set_visibility(not found.why_not)
        self._several.set_visibility(found.points is not None)
        self._positions.show(found.positions)
        self._show_baselines(found)
        self._points.clear()
        if found.points is not None:
            with self._points:
                draw_plain_table(found.points.header, found.points.rows)
                ui.label(f"{found.points.caption}.").classes("quiet text")
        self._models.clear()
        with self._models:
            if found.models:
                draw_plain_table(found.models.header, found.models.rows)
                ui.label(f"{found.models.caption}.").classes("quiet text")
            for table in found.domains:
                draw_plain_table(table.header, table.rows)
                ui.label(f"{table.caption}.").classes("quiet text")

    def _show_baselines(self, found: RunSeries) -> None:
        """Show the items of the chosen baseline, or of the first if none was chosen."""
        self._changed.set_visibility(bool(found.changes))
        kept = self._baseline.value
        if found.baselines and kept not in found.baselines:
            kept = found.baselines[0]
        self._shown = kept
        self._baseline.set_options(found.baselines, value=kept)
        self._baseline.set_visibility(len(found.baselines) > 1)
        if not found.baselines or kept == found.baselines[0]:
            self._show_changed(found.changes, found.changed)
        else:
            ui.timer(0, self._load_changed, once=True)

    async def _choose_baseline(self) -> None:
        if self._baseline.value and self._baseline.value != self._shown:
            self._shown = self._baseline.value
            await self._load_changed()

    async def _load_changed(self) -> None:
        path = self._home.run_path(self._name)
        found = await run.io_bound(load_changed_items, path, str(self._shown))
        if found is not None:
            self._show_changed(*found)

    def _show_changed(self, sentences: list[str], changed: list[tuple[str, str]]) -> None:
        self._items.clear()
        with self._items:
            for sentence in sentences:
                ui.label(sentence).classes("text")
            for title, html in changed:
                ui.html(f"<h3>{escape(title)}</h3>{html}", sanitize=False).classes("w-full")

    async def _stop_search(self) -> None:
        if await self._try_action(self._home.launcher.stop_search):
            ui.notify("Stopping; finished work is stored.")

    async def _resume_search(self) -> None:
        if await self._try_action(self._home.launcher.resume_search):
            ui.notify("Resuming where it stopped.")

    async def _try_action(self, act: Callable[..., None]) -> bool:
        try:
            await run.io_bound(act, self._home.run_path(self._name))
        except UserError as error:
            ui.notify(str(error), type="negative", multi_line=True)
            return False
        await self._refresh_page()
        return True

    def _open_report(self) -> None:
        ui.navigate.to(f"/runs/{quote(self._name, safe='')}/report", new_tab=True)

    def _open_chat(self) -> None:
        ui.navigate.to(f"/talk?{urlencode({'model': f'local/{RUNS_FOLDER}/{self._name}'})}")

    def _copy_command(self) -> None:
        ui.clipboard.write(self._command.text)
        ui.notify("Copied.")


def _set_options(chart: ui.echart, options: dict[str, Any]) -> None:
    chart.options.clear()
    chart.options.update(options)
    chart.update()


def _chart_height(options: dict[str, Any]) -> int:
    """Return the height in pixels of a chart with a row per expert or domain."""
    bars = sum(one["type"] == "bar" for one in options["series"])
    return 110 + max(24, 20 * bars) * len(options["yAxis"]["data"])


def _run_state(snapshot: RunSnapshot) -> str:
    if snapshot.stopping:
        return "stopping"
    if snapshot.note is not None:
        return "running"
    # The process of a finished search takes a moment to end.
    if snapshot.beginning and not (snapshot.line and snapshot.line.state == "finished"):
        return "starting"
    if snapshot.line:
        return snapshot.line.state
    if snapshot.error:
        return "failed"
    return "broken" if any(snapshot.stamp) else "no such run"
