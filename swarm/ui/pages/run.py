"""Page of one run in tabs: one answer first, then items, mixtures and the log."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from nicegui import app, ui

from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.report.document import Block, ChangedItems, Chart, ListBlock, TableBlock
from swarm.report.page import VERDICT_SIGNS, build_report, render_changed_items, render_page
from swarm.runs.folder import RUNS_FOLDER
from swarm.ui.charts import THEME, chart_options
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
    PositionTable,
    RunSeries,
    RunSnapshot,
    load_changed_items,
    load_position,
    load_run_series,
    positions_csv,
    take_snapshot,
)
from swarm.ui.state import STATES, AppState, readable

REFRESH_S = 1.0

TABS = ("Overview", "Items", "Mixtures", "Log")

MAX_POSITIONS_SHOWN = 1000
"""Maximum number of positions in the table; the CSV has all."""

OPEN_TEMPLATE = """<q-td :props="props">
  <q-btn flat dense round size="sm" icon="open_in_full"
    @click.stop="$parent.$emit('open', props.row)"
    :aria-label="'Details of round ' + props.row.c0 + ', mixture ' + props.row.c1" />
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


class PositionsTable:
    """The evaluated positions of a run: a table, details on a click, and a CSV.

    Args:
        path: The run folder.
        file: URL of the CSV.
    """

    def __init__(self, path: Path, file: str) -> None:
        self._path = path
        best_first = {"rowsPerPage": 10, "sortBy": "c2", "descending": True}
        self._message = ui.label("").classes("quiet text-sm").props("role=status")
        self._table = ui.table(rows=[], row_key="key", pagination=best_first).classes("w-full")
        csv = ui.button("CSV", icon="download", on_click=lambda: ui.download.from_url(file))
        csv.props("outline")
        self._table.props("flat bordered dense").add_slot("body-cell-open", OPEN_TEMPLATE)
        self._table.on("open", lambda event: self._open_details(event.args))
        shown = [[], ["c0", "c1"], None]
        self._table.on("rowClick", lambda event: self._open_details(event.args[1]), shown)

    def show(self, found: PositionTable) -> None:
        """Show the positions, the highest utilities first."""
        rows = found.rows[(-found.rows[:, 2]).argsort(kind="stable")][:MAX_POSITIONS_SHOWN]
        cut = f", the best {len(rows)} shown" * (len(rows) < len(found.rows))
        self._message.set_text(
            f"{len(found.rows)} evaluated mixtures{cut}, with the weight of each adapter (the mean "
            "over modules where they differ). A click shows a mixture in full."
        )
        columns: list[dict[str, Any]] = [
            {"name": f"c{n}", "label": name, "field": f"c{n}", "sortable": True}
            for n, name in enumerate(found.columns)
        ]
        for column in (columns[2], *columns[len(POSITION_COLUMNS) :]):
            column[":format"] = "value => value.toFixed(3).replace(/^-(?=0\\.0+$)/, '')"
        self._table.columns = [{"name": "open", "label": "", "field": ""}, *columns]
        self._table.rows = [
            {f"c{n}": round(value, 4) for n, value in enumerate(row) if isfinite(value)}
            | {"key": f"{row[0]:.0f} {row[1]:.0f}"}
            for row in rows.tolist()
        ]

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
        sliders = f"/models?{urlencode({'run': name})}"
        self._drawn: list[list[str]] = []
        with ui.row().classes("w-full items-center gap-2"):
            self._state = ui.badge("").props("data-state")
            self._about = ui.label("").classes("quiet grow")
        self._error, self._damage = draw_alert(), draw_alert()
        with ui.column().classes("w-full gap-1") as self._progress:
            self._left = ui.label("").classes("text-3xl font-semibold").props("data-left")
            self._bar = ui.linear_progress(0.0, show_value=False).props("aria-label=Progress")
            self._told = ui.label("").classes("quiet")
        stop, resume = home.launcher.stop_search, home.launcher.resume_search
        self._buttons: dict[str, ui.button] = {}
        with ui.row().classes("w-full items-center gap-2"):
            for text, icon, act in (
                ("Stop", "stop", partial(self._act, stop, "Stopping; finished work is stored.")),
                ("Resume", "play_arrow", partial(self._act, resume, "Resuming where it stopped.")),
                ("Open report", "description", partial(ui.navigate.to, f"{address}/report", True)),
                ("Chat with the best", "chat", partial(ui.navigate.to, talk)),
                ("Mix it by hand", "tune", partial(ui.navigate.to, sliders)),
            ):
                self._buttons[text] = ui.button(text, icon=icon, on_click=act).props("outline")
        with ui.tabs().classes("w-full").props("align=left no-caps dense") as tabs:
            for tab in TABS:
                ui.tab(tab)
        with ui.tab_panels(tabs, value=TABS[0]).classes("w-full bg-transparent"):
            with ui.tab_panel(TABS[0]).classes("p-0 gap-4"):
                self._draw_overview()
            with ui.tab_panel(TABS[1]).classes("p-0 gap-3"):
                self._baseline = ui.select([], label="Best found compared with").classes("w-full")
                self._baseline.props("options-dense").on("update:model-value", self._show_changed)
                self._items = ui.column().classes("w-full gap-1")
            with ui.tab_panel(TABS[2]).classes("p-0 gap-3"):
                self._positions = PositionsTable(self._path, f"{address}/positions.csv")
            with ui.tab_panel(TABS[3]).classes("p-0 gap-3"):
                with ui.element("div").classes("log ends").props("role=log tabindex=0"):
                    self._said = ui.label("")
                self._command = draw_command()
        ui.timer(REFRESH_S, self._refresh_page)

    def _draw_overview(self) -> None:
        with ui.card().classes("w-full gap-2") as self._answer:
            with ui.row().classes("items-baseline gap-x-3 gap-y-0"):
                self._number = ui.label("").classes("text-4xl font-semibold text-primary")
                self._number.props("data-number")
                self._number_of = ui.label("").classes("quiet")
            self._verdict = ui.label("").classes("text-lg")
            self._use = draw_command()
            self._chart = ui.echart({}, theme=THEME).classes("w-full h-72")
            self._chart.props("role=img aria-label='Best so far'")
        with ui.card().classes("w-full gap-2") as self._coming:
            draw_heading("Answers as they come in")
            self._answers = ui.column().classes("w-full")
        with ui.card().classes("w-full gap-2") as self._first:
            draw_heading("What each adapter has")
            self._overview = ui.column().classes("w-full gap-2")
        with ui.expansion("All numbers and charts") as self._more:
            self._details = ui.column().classes("w-full gap-3")
        for one in (self._answer, self._coming, self._first, self._more):
            one.set_visibility(False)

    async def _refresh_page(self) -> None:
        snapshot = await run_in_thread(take_snapshot, self._home, self._name)
        self._show_snapshot(snapshot)
        if snapshot.stamp == self._stamp:
            return
        self._stamp = snapshot.stamp
        try:
            found = await run_in_thread(load_run_series, self._path)
        except UserError as error:
            if snapshot.measured or snapshot.state == "broken":  # else there is nothing to show yet
                self._damage.set_text(str(error).removeprefix(f"{self._path}: "))
        else:
            self._damage.set_text("")
            self._show_series(found)
            await self._show_changed()

    def _show_snapshot(self, now: RunSnapshot) -> None:
        running = now.state in ("running", "starting", "stopping")
        self._state.set_text(now.state)
        self._state.props(f"color={STATES[now.state]}")
        self._about.set_text(now.about)
        self._error.set_text(f"It failed: {now.error}" if now.state == "failed" else "")
        self._progress.set_visibility(running)
        self._left.set_text(f"{now.left} left at most" if now.left else "")
        self._told.set_text(now.progress[0])
        self._bar.set_value(now.progress[1])
        self._coming.set_visibility(bool(now.answers))
        if now.answers != self._drawn:
            self._drawn = now.answers
            self._answers.clear()
            with self._answers:
                draw_table(TableBlock("", ["adapter", "answer", "score"], now.answers), "left")
        self._said.set_text(now.output or "Nothing yet.")
        self._command.set_text(now.command)
        for name, possible in {
            "Stop": running and now.state != "stopping",
            "Resume": not running and now.state != "finished" and bool(now.command),
            "Open report": now.measured,
            "Chat with the best": now.state == "finished",
            "Mix it by hand": now.state == "finished",
        }.items():
            self._buttons[name].set_visibility(possible)

    def _show_series(self, found: RunSeries) -> None:
        for card, shown in (
            (self._answer, True),
            (self._first, bool(found.overview)),
            (self._more, True),
        ):
            card.set_visibility(shown)
        number, of = found.number
        self._number.set_text(number)
        self._number_of.set_text(of)
        said, sign = found.verdict, VERDICT_SIGNS[found.verdict.kind]
        finding = f"{said.finding[:1].upper()}{said.finding[1:]} {said.advice}"
        self._verdict.set_text(f"{sign} {said.headline}. {finding}".strip())
        # As it is typed in the folder where the page was started.
        self._use.set_text(said.command.replace(str(self._path), f"{RUNS_FOLDER}/{self._name}"))
        self._chart.options.clear()
        self._chart.options.update(chart_options(found.chart))
        self._chart.update()
        self._overview.clear()
        with self._overview:
            _draw_blocks(found.overview)
        self._details.clear()
        with self._details:
            draw_facts(found.figures)
            _draw_blocks(found.details)
        self._positions.show(found.positions)
        kept = self._baseline.value if self._baseline.value in found.baselines else None
        self._baseline.set_options(found.baselines, value=kept or found.baselines[0])

    async def _show_changed(self) -> None:
        try:
            blocks = await run_in_thread(load_changed_items, self._path, self._baseline.value)
        except UserError as error:
            blocks = [str(error)]
        self._items.clear()
        with self._items:
            _draw_blocks(blocks)

    async def _act(self, act: Callable[[Path], None], told: str) -> None:
        try:
            await run_in_thread(act, self._path)
        except UserError as error:
            ui.notify(str(error), type="negative", multi_line=True)
        else:
            ui.notify(told)
            await self._refresh_page()


def _draw_blocks(blocks: Sequence[Block]) -> None:
    """Draw blocks of the report."""
    for one in blocks:
        if isinstance(one, TableBlock):
            draw_table(one)
        elif isinstance(one, ChangedItems):
            draw_heading(one.title)
            ui.html(render_changed_items(one), sanitize=False).classes("w-full")
        elif isinstance(one, ListBlock):
            _draw_blocks(one.lines)
        elif isinstance(one, Chart):
            draw_heading(one.title)
            chart = ui.echart(chart_options(one), theme=THEME).classes("w-full h-80")
            chart.props["role"], chart.props["aria-label"] = "img", one.title
        else:
            draw_text(one)
