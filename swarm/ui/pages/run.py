"""Page of one run: progress, results, log and actions."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from nicegui import app, run, ui

from swarm.errors import UserError
from swarm.runs.run_reader import RUNS_FOLDER
from swarm.ui.layout import draw_facts, draw_heading, draw_plain_table, page_frame
from swarm.ui.pages.runs import STATE_COLOURS
from swarm.ui.run_data import (
    RunSeries,
    RunSnapshot,
    describe_unreadable,
    format_progress,
    load_run_series,
    take_snapshot,
)
from swarm.ui.state import UNREADABLE_ERRORS, AppState

VERDICT_SIGNS = {"better": "▲", "worse": "▼", "unclear": "◆", "open": "○"}

REFRESH_S = 1.0


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
        self._draw_head()
        with ui.card().classes("w-full gap-2"):
            draw_heading("Verdict")
            self._verdict = ui.column().classes("w-full gap-2")
        with ui.element("div").classes("w-full grid grid-cols-1 md:grid-cols-2 gap-4") as grid:
            self._particles = self._draw_chart("Best so far, and every particle")
            self._coefficients = self._draw_chart("Coefficients of the best so far")
        self._drawn = [grid]
        with ui.card().classes("w-full gap-2") as card:
            draw_heading("Best initial expert and best found")
            self._models = ui.column().classes("w-full gap-2")
        self._drawn.append(card)
        with ui.column().classes("w-full gap-4") as self._several:
            self._front = self._draw_chart("Front of the objectives")
            with ui.card().classes("w-full gap-2"):
                draw_heading("Points of the front")
                self._points = ui.column().classes("w-full gap-2")
        self._several.set_visibility(False)
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

    def _draw_chart(self, title: str) -> ui.echart:
        with ui.card().classes("w-full gap-2 min-w-0"):
            draw_heading(title)
            return ui.echart({}).classes("w-full h-80").props(f'role=img aria-label="{title}"')

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
        for element in self._drawn:
            element.set_visibility(not found.why_not)
        for chart, options in (
            (self._particles, found.particles),
            (self._coefficients, found.coefficients),
            (self._front, found.front),
        ):
            chart.options.clear()
            chart.options.update(options)
            chart.update()
        self._several.set_visibility(found.points is not None)
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
