"""Page of one run: progress, results, log and actions."""

from collections.abc import Callable
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from nicegui import app, run, ui

from swarm.errors import UserError
from swarm.runs.run_reader import RUNS_FOLDER
from swarm.ui.charts import load_chart
from swarm.ui.layout import draw_facts, draw_heading, draw_plain_table, page_frame
from swarm.ui.pages.runs import STATE_COLOURS, edit_notes
from swarm.ui.run_data import (
    RunSeries,
    RunSnapshot,
    describe_unreadable,
    format_progress,
    load_run_series,
    take_snapshot,
)
from swarm.ui.state import UNREADABLE_ERRORS, AppState, LoadSample, RunNotes

VERDICT_SIGNS = {"better": "▲", "worse": "▼", "unclear": "◆", "open": "○"}

REFRESH_S = 1.0

CHART_TITLES = {
    "particles": "Best so far, and every particle",
    "coefficients": "Coefficients of the best so far",
    "domains": "Utility by domain",
    "importance": "Importance of each expert",
    "parallel": "Coefficients against utility",
    "modules": "Coefficients of the best by module",
    "front": "Front of the objectives",
}
"""Charts of the page, in order; those that do not apply to a run are hidden."""

WIDE_CHARTS = ("parallel", "modules", "front")
"""Charts that take the whole width."""

GROWING_CHARTS = ("domains", "importance", "parallel", "modules")
"""Charts whose height follows the number of their rows."""

CHART_NOTES = {
    "parallel": "One line per evaluated position, orange for high utilities. Drag along an axis "
    "to select a range; click the axis to clear it.",
}


def register_page(home: AppState) -> None:
    """Register the page at /runs/NAME and its report at /runs/NAME/report."""

    @app.get("/runs/{name:path}/report")
    def report_page(name: str) -> Response:
        from swarm.report.build import build_report as made
        from swarm.report.html import render_page

        try:
            return HTMLResponse(render_page(made(home.run_path(name))))
        except UserError as error:
            return PlainTextResponse(f"{error}\n", 404)
        except UNREADABLE_ERRORS as error:
            return PlainTextResponse(f"{name}: {describe_unreadable(error)}\n", 404)

    @ui.page("/runs/{name:path}")
    def run_page(name: str) -> None:
        with page_frame(name, "Runs"):
            try:
                home.run_path(name)
            except UserError as error:
                ui.label(str(error)).classes("text-negative")
                return
            RunPage(home, name)


class RunPage:
    """Page of a run in one browser window.

    Args:
        home: State that the pages share.
        name: Name of the run.
    """

    def __init__(self, home: AppState, name: str) -> None:
        self._home, self._name = home, name
        self._stamp: tuple[int, int] | None = None
        self._loaded: LoadSample | None = None
        self._draw_head()
        with ui.card().classes("w-full gap-2"):
            draw_heading("Verdict")
            self._verdict = ui.column().classes("w-full gap-2")
        self._charts: dict[str, tuple[ui.card, ui.echart]] = {}
        with ui.element("div").classes("w-full grid grid-cols-1 md:grid-cols-2 gap-4"):
            for key, title in CHART_TITLES.items():
                self._draw_chart(key, title)
        with ui.card().classes("w-full gap-2") as self._results:
            draw_heading("Best initial expert and best found")
            self._models = ui.column().classes("w-full gap-2")
        with ui.card().classes("w-full gap-2") as self._changed:
            draw_heading("Item by item")
            self._items = ui.column().classes("w-full gap-1")
        with ui.card().classes("w-full gap-2") as self._several:
            draw_heading("Points of the front")
            self._points = ui.column().classes("w-full gap-2")
        for card in (self._results, self._changed, self._several):
            card.set_visibility(False)
        with ui.card().classes("w-full gap-2") as self._machine:
            draw_heading("Load of this machine")
            self._load = ui.echart({}).classes("w-full h-56")
            self._load.props('role=img aria-label="Load of this machine"')
        self._machine.set_visibility(False)
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
        self._notes = ui.label("").classes("text")
        self._error = ui.label("").classes("text text-negative").props("role=alert")
        with ui.column().classes("w-full gap-1") as self._progress:
            self._bar = ui.linear_progress(0.0, show_value=False).props("aria-label=Progress")
            self._told = ui.label("").classes("quiet text")
        with ui.row().classes("w-full items-center gap-2"):
            self._stop = self._draw_button("Stop", "stop", self._stop_search)
            self._resume = self._draw_button("Resume", "play_arrow", self._resume_search)
            self._report = self._draw_button("Open report", "description", self._open_report)
            self._draw_button("Edit", "edit", self._edit_notes)
            self._chat = self._draw_button("Chat with the best", "chat", self._open_chat)

    def _draw_button(self, text: str, icon: str, act: Callable[..., Any]) -> ui.button:
        return ui.button(text, icon=icon, on_click=act).props("outline no-caps")

    def _draw_chart(self, key: str, title: str) -> None:
        wide = " md:col-span-2" * (key in WIDE_CHARTS)
        with ui.card().classes(f"w-full gap-2 min-w-0{wide}") as card:
            draw_heading(title)
            chart = ui.echart({}).classes("w-full h-80").props(f'role=img aria-label="{title}"')
            if key in CHART_NOTES:
                ui.label(CHART_NOTES[key]).classes("quiet text text-sm")
            if key == "importance":
                self._method = ui.label("").classes("quiet text text-sm")
        card.set_visibility(False)
        self._charts[key] = card, chart

    async def _refresh_page(self) -> None:
        snapshot = await run.io_bound(take_snapshot, self._home, self._name)
        if snapshot is None:  # the page is closing
            return
        self._show_snapshot(snapshot)
        await self._refresh_load(snapshot.note is not None)
        if snapshot.stamp != self._stamp:
            self._stamp = snapshot.stamp
            found = await run.io_bound(load_run_series, self._home.run_path(self._name))
            if found is not None:
                self._show_series(found)

    async def _refresh_load(self, running: bool) -> None:
        """Show the load of this machine while the search runs."""
        self._machine.set_visibility(running)
        if not running:
            return
        history = await run.io_bound(self._home.load_monitor.sample)
        if history and history[-1] != self._loaded:
            self._loaded = history[-1]
            _set_options(self._load, load_chart(history))

    def _show_snapshot(self, snapshot: RunSnapshot) -> None:
        state = _run_state(snapshot)
        self._state.set_text(state)
        self._state.props(f"color={STATE_COLOURS.get(state, 'grey-7')}")
        line = snapshot.line
        reason = [line.details] if line and state in ("finished", "stopped") else []
        self._about.set_text(", ".join([f"task {line.task}", *reason] if line else []))
        self._show_notes(line.notes if line else RunNotes())
        self._error.set_text(f"It failed: {snapshot.error}" if snapshot.error else "")
        self._error.set_visibility(bool(snapshot.error) and state == "failed")
        running = snapshot.note is not None or snapshot.beginning
        self._progress.set_visibility(running)
        progress, share = format_progress(snapshot.note or {"activity": "the process is starting"})
        self._told.set_text(progress)
        self._bar.set_value(share)
        self._stop.set_visibility(running)
        self._resume.set_visibility(not running and state != "finished" and bool(snapshot.command))
        self._report.set_visibility(bool(line and line.best is not None))
        self._chat.set_visibility(state == "finished")
        self._said.set_text(snapshot.output or "Nothing yet.")
        self._command.set_text(snapshot.command)
        self._typed.set_visibility(bool(snapshot.command))

    def _show_notes(self, notes: RunNotes) -> None:
        parts = [notes.title, ", ".join(f"#{tag}" for tag in notes.tags), notes.note]
        text = "\n".join([*(one for one in parts if one), *["Archived."] * notes.archived])
        self._notes.set_text(text)
        self._notes.set_visibility(bool(text))

    def _show_series(self, found: RunSeries) -> None:
        self._verdict.clear()
        with self._verdict:
            if found.why_not:
                ui.label(found.why_not).classes("quiet text")
            else:
                sign = f"{VERDICT_SIGNS[found.kind]} {found.verdict}"
                ui.label(sign).classes("text text-lg font-semibold")
                for sentence in found.sentences:
                    ui.label(sentence).classes("text")
                draw_facts(found.figures)
        for key, (card, chart) in self._charts.items():
            options = found.charts.get(key, {})
            card.set_visibility(bool(options))
            if key in GROWING_CHARTS and options:
                chart.style(f"height: {_chart_height(options)}px")
            _set_options(chart, options)
        alone = sum(key in found.charts for key in ("domains", "importance")) == 1
        for key in ("domains", "importance"):
            wide = {"add": "md:col-span-2"} if alone else {"remove": "md:col-span-2"}
            self._charts[key][0].classes(**wide)
        self._method.set_text(found.importance)
        self._results.set_visibility(not found.why_not)
        self._several.set_visibility(found.points is not None)
        self._show_changed(found)
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

    def _show_changed(self, found: RunSeries) -> None:
        self._changed.set_visibility(bool(found.changes))
        self._items.clear()
        with self._items:
            for sentence in found.changes:
                ui.label(sentence).classes("text")
            for title, html in found.changed:
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

    def _edit_notes(self) -> None:
        try:
            edit_notes(self._home, self._name, self._refresh_page)
        except UserError as error:
            ui.notify(str(error), type="negative", multi_line=True)

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
    if "parallelAxis" in options:
        return 70 + 30 * len(options["parallelAxis"])
    bars = sum(one["type"] == "bar" for one in options["series"])
    return 110 + max(24, 20 * bars) * len(options["yAxis"]["data"])


def _run_state(snapshot: RunSnapshot) -> str:
    if snapshot.note is not None:
        return "running"
    if snapshot.beginning:
        return "starting"
    if snapshot.line:
        return snapshot.line.state
    if snapshot.error:
        return "failed"
    return "broken" if any(snapshot.stamp) else "no such run"
