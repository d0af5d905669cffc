"""Page Compare: one question to several models, and viewers of answer files."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi.responses import HTMLResponse
from nicegui import app, ui

from swarm._util.terminal import escape_control_chars, format_interval
from swarm._util.threads import run_in_thread, submit
from swarm.compare import Config, Question
from swarm.compare.dataframe import build_frame
from swarm.compare.question import QuestionPlan
from swarm.compare.sampling import as_completed
from swarm.compare.view import load_rows, render_page
from swarm.errors import UserError
from swarm.models.base import Completion, Model, Request
from swarm.registry.name_resolution import model_identity
from swarm.stats.summary_table import detectable, summary
from swarm.ui import charts, chat, expert_mixer
from swarm.ui.layout import draw_heading, draw_plain_table, draw_when_loaded, page_frame
from swarm.ui.state import AppState

if TYPE_CHECKING:
    import pandas as pd

MAX_FILES_SHOWN = 200
"""Maximum number of answer files listed."""

MAX_ANSWERS = 6
"""Maximum number of answers in the chart; the others are one bar."""

VIEWER_PATH = "/compare/view"
"""Path of the pages of answers, each under a number."""

_models_lock = threading.Lock()


class RosterModel(Model):
    """Model of the page's roster, which loads each base only once.

    Its fingerprint contains everything that its answers depend on, so that cached answers are not
    mixed up between models with the same name.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `Model.generate_each`."""
        return self._model.generate_each(requests)

    def fingerprint(self) -> str:
        """See `swarm.registry.name_resolution.model_identity`."""
        return json.dumps(model_identity(self._model), sort_keys=True)


class CompareWorker:
    """One question to several models, each a group of one, run as by `python -m swarm.compare`.

    Answers are cached like those of the command. `stop` can be called from any thread.

    Args:
        home: State with the roster of models.
        names: Names of two or more models.
        question: The question.
        samples: Number of samples per model.
        temperature: Sampling temperature.
        tokens: Maximum number of new tokens.

    Attributes:
        received, total: Number of answers received, and in total.

    Raises:
        UserError: There are fewer than two models, or the question is empty.
    """

    def __init__(
        self,
        home: AppState,
        names: Sequence[str],
        question: str,
        samples: int,
        temperature: float,
        tokens: int,
    ) -> None:
        if len(set(names)) < 2:
            raise UserError("models: choose at least two to compare")
        if not question.strip():
            raise UserError("the question is empty; type one")
        self._home, self._names = home, names
        self._question: Any = Question.create(
            type="free_form",
            paraphrases=[question.strip()],
            samples_per_paraphrase=samples,
            temperature=temperature,
            max_tokens=tokens,
        )
        self.received, self.total = 0, len(set(names)) * samples
        self._stopped, self._ended = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Stop waiting; sampling ends after the next answer."""
        self._stopped.set()
        self._ended.set()

    def run(self) -> "tuple[pd.DataFrame, list[dict[str, Any]], str]":
        """Run the comparison; return the answers, each model's shares of them, and remarks.

        Raises:
            UserError: It was stopped, a model does not exist, or all answers failed.
        """
        answers = submit(self._collect_answers, name="swarm-page")
        answers.add_done_callback(lambda _: self._ended.set())
        self._ended.wait()
        try:
            df = answers.result() if answers.done() else None
        except UserError:
            raise
        except Exception as error:  # shown on the page instead of a traceback
            raise UserError(f"failed with {type(error).__name__}: {error}") from None
        if df is None:
            raise UserError("stopped; answers so far are stored, and the same comparison resumes")
        if df["error"].notna().all():
            raise UserError(str(df["error"].iloc[0]))
        return df, summarize_answers(df), "\n".join(self._iterate_remarks(df))

    def _collect_answers(self) -> "pd.DataFrame | None":
        """Return the answers; `None` if stopped."""
        found = {name: self._home.roster.model(name) for name in self._names}
        for model in found.values():
            getattr(model, "check", lambda: None)()
        # `Config` is global to the process, which runs nothing but the pages.
        with _models_lock:
            Config.models = {
                **Config.models,
                **{name: RosterModel(one) for name, one in found.items()},
            }
        part = QuestionPlan(self._question, {name: [name] for name in found})
        rows: dict[int, list[Any]] = {}
        with ExitStack() as during:
            scripts = self._question.scripts(part.iter_requests(), during)
            with closing(as_completed(scripts, silent=True)) as coming:
                for number, row in coming:
                    if self._stopped.is_set():
                        return None
                    rows[number] = row if isinstance(row, list) else [row]
                    self.received += len(rows[number])
        ordered = chain.from_iterable(rows[number] for number in sorted(rows))
        return build_frame(self._question.layout, part.groups, part.take_blocks(ordered))

    def _iterate_remarks(self, df: "pd.DataFrame") -> Iterator[str]:
        """Yield remarks on each model with failed answers and on the detectable difference."""
        for model, rows in df.groupby("model", sort=False):
            errors = rows["error"].dropna()
            if len(errors):
                yield f"{model}: {len(errors)} of {len(rows)} answers failed: {errors.iloc[0]}"
        groups = {name: [name] for name in dict.fromkeys(self._names)}
        yield detectable(groups, 1, self._question.samples_per_paraphrase)


def summarize_answers(df: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return each model's shares of the most frequent answers, the most frequent first.

    The columns are those of `swarm.stats.summary_table.summary`, with "model" and "answer" first.
    """
    common = df["answer"].value_counts()
    chosen = list(common.index[:MAX_ANSWERS]) if len(common) > MAX_ANSWERS else None
    found = summary(df, category_column="model", selected_answers=chosen)
    rows = [{str(key): value for key, value in row.items()} for row in found.to_dict("records")]
    rank = {str(answer): n for n, answer in enumerate(common.index)}
    return sorted(rows, key=lambda row: rank.get(str(row["answer"]), len(rank)))


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
    if not path.strip():
        raise UserError("give a .jsonl or .csv file with a column answer")
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
        raise UserError(f"{path}: no such file below {folder}")
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


REFRESH_S = 0.3
"""Interval between progress updates in seconds."""


def register_page(home: AppState) -> None:
    """Register the page at /compare, and those of answers."""
    viewers = AnswerPages()
    app.add_api_route(f"{VIEWER_PATH}/{{number}}", viewers.respond)

    @ui.page("/compare")
    def compare_page() -> None:
        def load() -> tuple[list[str], Any]:
            return expert_mixer.list_model_names(home), list_answer_files(home)

        def draw(found: tuple[list[str], Any]) -> None:
            draw_heading("Compare the answers of several models")
            _CompareForm(home, viewers, found[0])
            draw_heading("Answer files on this machine")
            _draw_files(home, viewers, found[1])

        ui.add_css(chat.STYLE)
        with page_frame("Compare"):
            draw_when_loaded(load, draw)


class _CompareForm:
    """Form for a question, number of samples and models, with the plot of the answers."""

    def __init__(self, home: AppState, viewers: AnswerPages, names: list[str]) -> None:
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
            df, rows, warnings = await run_in_thread(self._comparison.run)
            url = await run_in_thread(self._viewers.open_viewer, df, "answers")
        except UserError as error:
            self._wrong.set_text(escape_control_chars(str(error)))
            return
        finally:
            self._comparison = None
        with self._shown:
            draw_answers(rows)
            failed = int(df["error"].notna().sum())
            counts = f"{len(df)} answers" + (f", {failed} of them failed" if failed else "")
            ui.label(f"{counts}. Bars: shares with 95 % intervals.").classes("quiet")
            ui.label(escape_control_chars(warnings)).classes("quiet text-sm text")
            ui.link("Browse the answers", url)

    def _stop_comparison(self) -> None:
        if self._comparison:
            self._comparison.stop()

    def _refresh_state(self) -> None:
        """Update the progress."""
        comparison = self._comparison
        summary = f"{comparison.received} of {comparison.total} answers" if comparison else ""
        self._state.set_text(summary)
        for element in (self._spinner, self._stop):
            element.set_visibility(comparison is not None)
        self._button.set_enabled(comparison is None)


def draw_answers(rows: list[dict[str, Any]]) -> None:
    """Draw the chart of the answers, and its numbers as a table."""
    options, height = charts.answer_chart(rows)
    models = len({row["model"] for row in rows})
    chart = ui.echart(options).classes("w-full").style(f"height: {height}px")
    chart.props(f'role=img aria-label="Shares of the answers of {models} models"')
    with ui.expansion("Numbers").classes("w-full").props("dense"):
        cells = [
            [
                escape_control_chars(str(row["model"])),
                escape_control_chars(str(row["answer"])),
                format_interval(row["value"], charts.interval_of(row)),
                str(row["n"]),
            ]
            for row in rows
        ]
        draw_plain_table(["model", "answer", "share, 95 %", "n"], cells)


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
            ui.button(path, on_click=lambda path=path: show_file(path)).props(
                "flat dense no-caps align=left"
            ).classes("text-left text")
        if not found:
            ui.label("There are no results of python -m swarm.compare run yet.").classes("quiet")
