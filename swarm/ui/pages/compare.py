"""Page Compare: one question to several models, and viewers of answer files."""

import base64

from nicegui import app, ui

from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError
from swarm.models.threaded import run_in_thread
from swarm.ui import chat, compare_worker, expert_mixer
from swarm.ui.compare_worker import VIEWER_PATH, CompareWorker, MountedViewers
from swarm.ui.layout import draw_heading, page_frame
from swarm.ui.state import AppState

REFRESH_S = 0.3
"""Interval between progress updates in seconds."""


def register_page(home: AppState) -> None:
    """Register the page at /compare and mount its viewers."""
    viewers = MountedViewers()
    app.mount(VIEWER_PATH, viewers)

    @ui.page("/compare", response_timeout=60)
    async def compare_page() -> None:
        ui.add_css(chat.STYLE)
        with page_frame("Compare"):
            names = await run_in_thread(expert_mixer.list_model_names, home)
            found = await run_in_thread(compare_worker.list_answer_files, home)
            draw_heading("Compare the answers of several models")
            _CompareForm(home, viewers, names)
            draw_heading("Answer files on this machine")
            _draw_files(home, viewers, found)


class _CompareForm:
    """Form for a question, number of samples and models, with the plot of the answers."""

    def __init__(self, home: AppState, viewers: MountedViewers, names: list[str]) -> None:
        self._home, self._viewers = home, viewers
        with ui.card().classes("w-full gap-2"):
            self._models = ui.select(
                names,
                label="Models, at least two",
                value=[],
                multiple=True,
                with_input=True,
                new_value_mode="add-unique",
            )
            self._models.props("use-chips outlined dense").classes("w-full")
            self._question = ui.textarea("Question").props("autogrow outlined dense rows=1")
            self._question.classes("w-full")
            with ui.element("div").classes("chat-settings w-full"):
                self._samples = ui.number(
                    "Samples per model", value=10, min=1, max=1000, precision=0
                )
                self._temperature = ui.number("Temperature", value=1.0, min=0, step=0.1)
                self._tokens = ui.number("Maximum new tokens", value=32, min=1, precision=0)
            with ui.row().classes("items-center gap-2"):
                self._button = ui.button("Compare", on_click=self._start_comparison)
                self._button.props("unelevated no-caps")
                self._stop = ui.button("Stop", on_click=self._stop_comparison).props(
                    "outline no-caps"
                )
                self._spinner = ui.spinner(size="1.5em")
                self._state = ui.label().classes("quiet text").props("role=status")
            self._wrong = ui.label().classes("chat-wrong text").props("role=alert")
            self._shown = ui.column().classes("w-full gap-2")
        self._comparison: CompareWorker | None = None
        self._refresh_state()
        ui.timer(REFRESH_S, self._refresh_state)
        ui.context.client.on_delete(self._stop_comparison)

    async def _start_comparison(self) -> None:
        samples = int(self._samples.value or 1)
        temperature, tokens = self._temperature.value, int(self._tokens.value or 32)
        question = self._question.value or ""
        self._wrong.set_text("")
        self._shown.clear()
        try:
            self._comparison = CompareWorker(
                self._home,
                list(self._models.value),
                question,
                samples,
                1.0 if temperature is None else float(temperature),
                tokens,
            )
            self._refresh_state()
            df, picture, warnings = await run_in_thread(self._comparison.run)
            url = await run_in_thread(self._viewers.open_viewer, df, "answers")
        except UserError as error:
            self._wrong.set_text(escape_control_chars(str(error)))
            return
        finally:
            self._comparison = None
        with self._shown:
            encoded = base64.b64encode(picture).decode()
            shares = f"alt='Shares of the answers of {len(self._models.value)} models, intervals'"
            with ui.element("div").classes("w-full overflow-x-auto"):
                drawn = ui.element("img").props(f"src=data:image/png;base64,{encoded} {shares}")
                drawn.classes("rounded").style("width: 100%; min-width: 36rem; max-width: 52rem")
            failed = int(df["error"].notna().sum())
            summary = f"{len(df)} answers" + (f", {failed} of them failed" if failed else "")
            ui.label(f"{summary}. Bars: shares with 95 % intervals.").classes("quiet")
            ui.label(escape_control_chars(warnings)).classes("quiet text-sm text")
            ui.link("Browse the answers", url)

    def _stop_comparison(self) -> None:
        if self._comparison:
            self._comparison.stop()

    def _refresh_state(self) -> None:
        """Update the progress."""
        comparison = self._comparison
        summary = f"{comparison.came} of {comparison.wanted} answers" if comparison else ""
        self._state.set_text(summary)
        for element in (self._spinner, self._stop):
            element.set_visibility(comparison is not None)
        self._button.set_enabled(comparison is None)


def _draw_files(home: AppState, viewers: MountedViewers, found: list[str]) -> None:
    """Draw the list of answer files and an input field for other paths."""

    async def show_file(path: str) -> None:
        wrong.set_text("")
        try:
            file = compare_worker.resolve_file(home, path)
            url = await run_in_thread(viewers.open_viewer, file, file.name)
        except UserError as error:
            wrong.set_text(escape_control_chars(str(error)))
            return
        ui.navigate.to(url)

    with ui.card().classes("w-full gap-2"):
        with ui.row().classes("items-center gap-2 w-full no-wrap"):
            field = ui.input("File").props("dense outlined").classes("grow min-w-0")
            ui.button("Open", on_click=lambda: show_file(field.value or "")).props(
                "outline no-caps"
            )
        ui.label(f"A .jsonl, .csv or .parquet file with a column answer in {home.folder}.").classes(
            "quiet text-sm text"
        )
        wrong = ui.label().classes("chat-wrong text").props("role=alert")
        for path in found:
            ui.button(path, on_click=lambda path=path: show_file(path)).props(
                "flat dense no-caps align=left"
            ).classes("text-left text")
        if not found:
            ui.label("There are no results of python -m swarm.compare run yet.").classes("quiet")
