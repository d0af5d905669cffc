"""Page Compare: one question to several models, and viewers of answer files."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi.responses import HTMLResponse
from nicegui import app, ui

from swarm._util.terminal import escape_control_chars
from swarm._util.threads import run_in_thread, shared_event_loop
from swarm.compare import Config, Question
from swarm.compare.dataframe import build_frame
from swarm.compare.power import detectable
from swarm.compare.question import QuestionPlan
from swarm.compare.report import ColumnSection, compare_column, count_rows, draw_column
from swarm.compare.sampling import ScriptRun
from swarm.compare.view import load_rows, render_page
from swarm.errors import UserError
from swarm.ui import chat, expert_mixer
from swarm.ui.layout import draw_heading, draw_plain_table, draw_when_loaded, page_frame
from swarm.ui.state import AppState

if TYPE_CHECKING:
    import pandas as pd

MAX_FILES_SHOWN = 200
"""Maximum number of answer files listed."""

VIEWER_PATH = "/compare/view"
"""Path of the pages of answers, each under a number."""

REFRESH_S = 0.3
"""Interval between progress updates in seconds."""


class Comparison:
    """One question to several models, each a group of one, run as by `python -m swarm.compare`.

    Args:
        names: Names of two or more models.
        question: Text of the question.
        settings: Settings of `swarm.compare.question_types.FreeForm`.

    Attributes:
        run: Run, which counts the answers received.
        total: Number of answers in total.

    Raises:
        UserError: There are fewer than two models, or the question is empty.
    """

    def __init__(self, names: Sequence[str], question: str, **settings: Any) -> None:
        if len(set(names)) < 2:
            raise UserError("models: choose at least two to compare")
        if not question:
            raise UserError("the question is empty; type one")
        self._question = Question.create(type="free_form", paraphrases=[question], **settings)
        self._plan = QuestionPlan(self._question, {name: [name] for name in names})
        self._rows: dict[int, Any] = {}
        self._during = ExitStack()
        scripts: Any = self._question.scripts(self._plan.iter_requests(), self._during)
        self.run = ScriptRun(scripts, self._rows.__setitem__)
        self.total = len(self._plan.models) * self._question.samples_per_paraphrase

    def start(self) -> "Future[None]":
        """Start sampling; cancel the future to stop."""
        return shared_event_loop().start(self.run.run_all())

    def summarize(self) -> "tuple[pd.DataFrame, ColumnSection, list[str]]":
        """Return the answers, their figure and tables, and remarks; call this after the end.

        Raises:
            UserError: All answers failed.
        """
        self._during.close()
        found = (self._rows[number] for number in sorted(self._rows))
        rows = chain.from_iterable(one if isinstance(one, list) else [one] for one in found)
        df = build_frame(self._question.layout, self._plan.groups, self._plan.take_blocks(rows))
        if df["error"].notna().all():
            raise UserError(str(df["error"].iloc[0]))
        section, _ = compare_column(df, "answer")
        section.figure = draw_column(df, section)
        samples = self._question.samples_per_paraphrase
        return df, section, [*count_rows(df), detectable(self._plan.groups, 1, samples)]


def list_answer_files(home: AppState) -> list[str]:
    """List the answer files written by compare runs, newest first, relative to the folder."""
    found: Iterator[Path] = (home.folder / "compare").glob("**/data.jsonl")
    newest = sorted(found, key=lambda file: -file.stat().st_mtime)
    return [str(file.relative_to(home.folder)) for file in newest[:MAX_FILES_SHOWN]]


def resolve_file(home: AppState, path: str) -> Path:
    """Resolve a path below the folder in which the application was started.

    Raises:
        UserError: The path is outside of the folder, or does not exist.
    """
    folder = home.folder.resolve()
    try:
        file = (folder / path.strip()).resolve()
        exists = file.is_file()
    except (OSError, ValueError) as error:
        raise UserError(f"{path!r:.80} is not a path: {error}") from None
    if not file.is_relative_to(folder):
        raise UserError(
            f"{path}: is outside of the folder where the page was started, {folder}; "
            "start the page there, or open the file with python -m swarm.compare view"
        )
    if not exists:
        raise UserError(f"{path}: no such file below {folder}; give a .jsonl or .csv file")
    return file


class AnswerPages:
    """Pages of answers that were opened, in HTML, each under a number."""

    def __init__(self) -> None:
        self._pages: list[str] = []

    def open_viewer(self, data: Any, name: str) -> str:
        """Render a page and return its URL.

        Raises:
            UserError: The data cannot be shown.
        """
        self._pages.append(render_page(load_rows(data), name))
        return f"{VIEWER_PATH}/{len(self._pages) - 1}"

    def respond(self, number: int) -> HTMLResponse:
        """Return a page."""
        if number < len(self._pages):
            return HTMLResponse(self._pages[number])
        return HTMLResponse("this page has ended; open the file again at /compare", 404)


def register_page(home: AppState) -> None:
    """Register the page at /compare, and those of answers."""
    viewers = AnswerPages()
    app.add_api_route(f"{VIEWER_PATH}/{{number}}", viewers.respond)

    @ui.page("/compare")
    def compare_page() -> None:
        def load() -> tuple[list[str], Any]:
            # `Config` is global to the process, which runs nothing but the pages.
            Config.roster = home.roster
            return expert_mixer.list_model_names(home), list_answer_files(home)

        def draw(found: tuple[list[str], Any]) -> None:
            draw_heading("Compare the answers of several models")
            _CompareForm(viewers, found[0])
            draw_heading("Answer files on this machine")
            _draw_files(home, viewers, found[1])

        ui.add_css(chat.STYLE)
        with page_frame("Compare"):
            draw_when_loaded(load, draw)


class _CompareForm:
    """Form for a question, number of samples and models, with the plot of the answers."""

    def __init__(self, viewers: AnswerPages, names: list[str]) -> None:
        self._viewers = viewers
        number = partial(ui.number, precision=0)
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
                self._samples = number("Samples per model", value=10, min=1, max=1000)
                self._temperature = ui.number("Temperature", value=1.0, min=0, step=0.1)
                self._tokens = number("Maximum new tokens", value=32, min=1)
            with ui.row().classes("items-center gap-2"):
                self._button = ui.button("Compare", on_click=self._start_comparison)
                self._button.props("unelevated no-caps")
                self._stop = ui.button("Stop", on_click=self._stop_comparison)
                self._stop.props("outline no-caps")
                self._spinner = ui.spinner(size="1.5em")
                self._state = ui.label().classes("quiet text").props("role=status")
            self._wrong = ui.label().classes("chat-wrong text").props("role=alert")
            self._shown = ui.column().classes("w-full gap-2")
        self._comparison: Comparison | None = None
        self._work: Future[None] | None = None
        self._refresh_state()
        ui.timer(REFRESH_S, self._refresh_state)
        ui.context.client.on_delete(self._stop_comparison)

    async def _start_comparison(self) -> None:
        temperature = self._temperature.value
        self._wrong.set_text("")
        self._shown.clear()
        try:
            self._comparison = Comparison(
                self._models.value,
                (self._question.value or "").strip(),
                samples_per_paraphrase=int(self._samples.value or 1),
                temperature=1.0 if temperature is None else float(temperature),
                max_tokens=int(self._tokens.value or 32),
            )
            self._work = self._comparison.start()
            self._refresh_state()
            await asyncio.wrap_future(self._work)
            df, section, remarks = await run_in_thread(self._comparison.summarize)
            url = await run_in_thread(self._viewers.open_viewer, df, "answers")
        except asyncio.CancelledError:
            stopped = "stopped; answers so far are stored, and the same comparison resumes"
            self._wrong.set_text(stopped)
            return
        except UserError as error:
            self._wrong.set_text(escape_control_chars(str(error)))
            return
        finally:
            self._comparison = self._work = None
        with self._shown:
            _draw_section(section)
            for line in (*section.lines, *remarks):
                ui.label(escape_control_chars(line)).classes("quiet text-sm text")
            ui.link("Browse the answers", url)

    def _stop_comparison(self) -> None:
        if self._work:
            self._work.cancel()

    def _refresh_state(self) -> None:
        """Update the progress."""
        comparison = self._comparison
        summary = f"{comparison.run.received} of {comparison.total} answers" if comparison else ""
        self._state.set_text(summary)
        for element in (self._spinner, self._stop):
            element.set_visibility(comparison is not None)
        self._button.set_enabled(comparison is None)


def _draw_section(section: ColumnSection) -> None:
    """Draw the figure of the answers, and its numbers as tables."""
    figure = ui.html(section.figure, sanitize=False).classes("w-full bg-white answers")
    figure.props('role=img aria-label="Shares of the answers of each model"')
    with ui.expansion("Numbers").classes("w-full").props("dense"):
        for table in section.tables:
            rows = [[escape_control_chars(cell) for cell in row] for row in table.rows]
            draw_plain_table(table.header, rows)


def _draw_files(home: AppState, viewers: AnswerPages, found: list[str]) -> None:
    """Draw the list of answer files and an input field for other paths."""

    async def show_file(path: str) -> None:
        wrong.set_text("")
        try:
            file = resolve_file(home, path)
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
        ui.label(f"A .jsonl or .csv file with a column answer in {home.folder}.").classes(
            "quiet text-sm text"
        )
        wrong = ui.label().classes("chat-wrong text").props("role=alert")
        for path in found:
            ui.button(path, on_click=partial(show_file, path)).props(
                "flat dense no-caps align=left"
            ).classes("text-left text")
        if not found:
            ui.label("There are no results of python -m swarm.compare run yet.").classes("quiet")
