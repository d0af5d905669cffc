"""Page Compare: one question to several models, and pages of their answers."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastapi.responses import HTMLResponse
from nicegui import app, ui

from swarm._util.threads import run_in_thread, shared_event_loop
from swarm.compare import Config, Question
from swarm.compare.dataframe import build_frame
from swarm.compare.question import QuestionPlan
from swarm.compare.report import ColumnSection, compare_column, count_rows, draw_column
from swarm.compare.sampling import ScriptRun
from swarm.compare.view import load_rows, render_page
from swarm.errors import UserError
from swarm.ui import expert_mixer
from swarm.ui.layout import (
    JobButton,
    draw_model_field,
    draw_table,
    draw_text,
    draw_when_loaded,
    page_frame,
)
from swarm.ui.state import AppState

if TYPE_CHECKING:
    import pandas as pd

VIEWER_PATH = "/compare/view"
"""Path of the pages of answers, each under a number."""

Viewer = Callable[[Any, str], str]
"""Renders a page of answers with a name; returns its address."""


class Comparison:
    """One question to several models, each a group of one, run as by `python -m swarm.compare`.

    Args:
        names: Names of the models.
        question: Text of the question.
        settings: Settings of `swarm.compare.question_types.FreeForm`.

    Attributes:
        run: Run, which counts the answers received.
        total: Number of answers in total.

    Raises:
        UserError: There is no model, or the question is empty.
    """

    def __init__(self, names: Sequence[str], question: str, **settings: Any) -> None:
        if not names:
            raise UserError("models: choose at least one")
        if not question:
            raise UserError("the question is empty; type one")
        self._question = Question.create(type="free_form", paraphrases=[question], **settings)
        self._plan = QuestionPlan(self._question, {name: [name] for name in names})
        self._rows: dict[int, Any] = {}
        self._during = ExitStack()
        scripts: Any = self._question.scripts(self._plan.iter_requests(), self._during)
        self.run = ScriptRun(scripts, self._rows.__setitem__)
        self.total = len(self._plan.models) * self._question.samples_per_paraphrase
        self.work: Future[None] | None = None

    async def sample(self) -> None:
        """Sample the answers; `stop` ends it.

        Raises:
            UserError: It was stopped.
        """
        self.work = shared_event_loop().start(self.run.run_all())
        try:
            await asyncio.wrap_future(self.work)
        except asyncio.CancelledError:
            words = "stopped; answers so far are stored, and the same comparison resumes"
            raise UserError(words) from None

    def summarize(self) -> "tuple[pd.DataFrame, ColumnSection, list[str]]":
        """Return the answers, their figure and tables, and remarks; call this after the end.

        Raises:
            UserError: All answers failed.
        """
        from swarm.compare.statistics import detectable

        self._during.close()
        found = (self._rows[number] for number in sorted(self._rows))
        rows = chain.from_iterable(one if isinstance(one, list) else [one] for one in found)
        df = build_frame(self._question.layout, self._plan.groups, self._plan.take_blocks(rows))
        if df["error"].notna().all():
            raise UserError(str(df["error"].iloc[0]))
        section, _ = compare_column(df, "answer")
        section.figure = draw_column(df, section)
        samples = self._question.samples_per_paraphrase
        remarks = [*section.lines, *count_rows(df), detectable(self._plan.groups, 1, samples)]
        return df, section, remarks


def register_page(home: AppState) -> None:
    """Register the page at /compare, and those of answers."""
    pages: list[str] = []  # of answers that were opened, in HTML

    @app.get(f"{VIEWER_PATH}/{{number}}")
    def view_page(number: int) -> HTMLResponse:
        if 0 <= number < len(pages):
            return HTMLResponse(pages[number])
        return HTMLResponse("this page has ended; compare again at /compare", 404)

    def open_viewer(data: Any, name: str) -> str:
        pages.append(render_page(load_rows(data), name))
        return f"{VIEWER_PATH}/{len(pages) - 1}"

    @ui.page("/compare")
    def compare_page() -> None:
        def load() -> dict[str, str]:
            # `Config` is global to the process, which runs nothing but the pages.
            Config.roster = home.roster
            return expert_mixer.label_models(home)

        with page_frame("Compare"):
            draw_when_loaded(load, lambda labels: _CompareForm(open_viewer, labels))


class _CompareForm:
    """Form for a question, number of samples and models, with the plot of the answers."""

    def __init__(self, open_viewer: Viewer, labels: dict[str, str]) -> None:
        self._open_viewer = open_viewer
        self._comparison: Comparison | None = None
        with ui.card().classes("w-full gap-2"):
            self._models = draw_model_field(labels, "Models")
            self._question = ui.textarea("Question").props("autogrow rows=1").classes("w-full")
            with ui.element("div").classes("fields w-full"):
                self._samples = ui.number("Samples per model", value=10, min=1, max=1000)
                self._temperature = ui.number("Temperature", value=1.0, min=0, step=0.1)
                self._tokens = ui.number("Maximum new tokens", value=32, min=1, precision=0)
            JobButton("Compare", self._compare, self._describe_progress, self._stop)

    async def _compare(self) -> None:
        temperature = self._temperature.value
        self._comparison = Comparison(
            self._models.value,
            (self._question.value or "").strip(),
            samples_per_paraphrase=int(self._samples.value or 1),
            temperature=1.0 if temperature is None else float(temperature),
            max_tokens=int(self._tokens.value or 32),
        )
        await self._comparison.sample()
        df, section, remarks = await run_in_thread(self._comparison.summarize)
        url = await run_in_thread(self._open_viewer, df, "answers")
        figure = ui.html(section.figure, sanitize=False).classes("w-full bg-white answers")
        figure.props('role=img aria-label="Shares of the answers of each model"')
        with ui.expansion("Numbers"):
            for table in section.tables:
                draw_table(table)
        for line in remarks:
            draw_text(line, "quiet text-sm")
        ui.link("Browse the answers", url)

    def _stop(self) -> None:
        if self._comparison and self._comparison.work:
            self._comparison.work.cancel()

    def _describe_progress(self) -> str:
        found = self._comparison
        return f"{found.run.received} of {found.total} answers" if found else ""
