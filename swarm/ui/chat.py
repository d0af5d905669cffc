"""Page Talk and its widgets: panel, settings, and a card per answer with all calls behind it.

Answers are drawn as Markdown without HTML, links and pictures, which stay text.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from nicegui import ui

from swarm._util.terminal import escape_control_chars, pluralize
from swarm._util.threads import Cancelled, forward_items, run_in_thread, start_thread
from swarm.errors import UserError
from swarm.moa.chat import ChatOptions
from swarm.moa.turns import ChatTurn, build_conversation, format_answer_cost, turn_to_json
from swarm.models.base import PROMPT_FORMS, Delta, Model, Request, with_prompt_form
from swarm.multi_agent.collaboration import Collaboration
from swarm.multi_agent.consortium.consortium import format_event
from swarm.multi_agent.consortium.results import Iteration
from swarm.multi_agent.scheduler import sum_usage
from swarm.multi_agent.types import (
    AgentAnswer,
    CallStarted,
    Transcript,
    answer_label,
    format_outcome,
)
from swarm.ui import expert_mixer
from swarm.ui.layout import (
    describe_error,
    draw_alert,
    draw_model_field,
    draw_text,
    draw_when_loaded,
    page_frame,
)
from swarm.ui.state import AppState

LOCAL_MAX_TOKENS, MAX_TOKENS = 128, 512
"""Maximum number of new tokens, unless set: of local models, which may run on a CPU; of others."""

MIXTURE_PREFIX = "mixed: "
"""Name prefix of mixtures set by hand."""

MARKDOWN = MarkdownIt("js-default", {"breaks": True}).disable(["link", "image", "reference"])
"""Renders answers: HTML, links and pictures of a model stay text."""

REFRESH_S = 0.15
"""Interval between refreshes in seconds."""

MODEL_NAME_HELP = """\
Any model name: local/base, an expert, a run's best, PROVIDER/MODEL, moa/PRESET,
consortium/NAME. Several models answer independently. Text only: there are no tools and no
pictures or other attachments here."""


class ChatColumn(NamedTuple):
    """A model of a conversation and its column.

    Attributes:
        key: Key of the previous turns that are sent with a question.
        name: Display name of the model.
        find: Returns the model, or raises a `UserError`; called in a thread.
    """

    key: str
    name: str
    find: Callable[[], Model]


class AnswerCard:
    """A question to one model: a thread that answers it, and its card in the current container.

    The thread only sets attributes; `refresh` draws what they have.

    Args:
        column: The model.
        question: The question.
        before: Previous turns of the conversation; each has an answer.
        options: Sampling options.
        again: Called by the button that asks for another answer.

    Attributes:
        state: "loading", "answering" or "done".
        again: That button.
        turn: The question, and its final answer or error.
    """

    def __init__(
        self,
        column: ChatColumn,
        question: str,
        before: Sequence[ChatTurn],
        options: ChatOptions,
        again: Callable[["AnswerCard"], None],
    ) -> None:
        self.column, self._question, self._options = column, question, options
        self._prompt = build_conversation(before, question, options.system)
        self._attempts = 0
        with ui.card().classes("gap-1 p-3"):
            with ui.row().classes("w-full items-center no-wrap gap-0"):
                draw_text(column.name, "font-semibold grow min-w-0")
                copy = ui.button(icon="content_copy", on_click=self._copy)
                copy.props("flat dense round size=sm aria-label='Copy the answer'")
                self.again = ui.button(icon="refresh", on_click=lambda: again(self))
                self.again.props("flat dense round size=sm aria-label='Answer again'")
            self._answer = ui.html("", sanitize=False).classes("w-full answer-text")
            self._answer.props("data-answer")
            with ui.row().classes("items-center gap-2 no-wrap w-full"):
                self._spinner = ui.spinner(size="1em")
                self._status = ui.label().classes("quiet text-sm").props("role=status")
            self._error = draw_alert()
            self._remarks = ui.label().classes("quiet text-sm")
            self._stages = ui.expansion("Stages")
        self.start()

    def start(self) -> None:
        """Ask the question, or ask it once more for another answer."""
        self.turn, self.state, self._text = ChatTurn(self._question), "loading", ""
        self._waiting: list[str] = []  # members of a collaboration
        self._notes: list[str] = []  # summaries of a consortium's iterations
        self._began, self._first_s = time.monotonic(), math.nan
        self._over = threading.Event()  # of this attempt: what its thread still sends is dropped
        self._drawn, self._complete = 0, False
        self._stages.clear()
        self._attempts += 1
        start_thread(self._run, self._over, name="swarm-page")

    def _copy(self) -> None:
        ui.clipboard.write(self._text)
        ui.notify("Copied.")

    def stop(self) -> None:
        """Stop waiting; generation ends with the next streamed piece."""
        self._finish(self._over, error="stopped")

    def _finish(
        self, over: threading.Event, stages: Transcript | None = None, error: str = ""
    ) -> None:
        if over.is_set():  # it was stopped meanwhile
            return
        over.set()
        self.turn.stages, self.turn.error = stages, error
        if stages:
            self.turn.answers, self.turn.warnings = stages.answers, stages.warnings
            self._text = stages.final.text
        self.state = "done"

    def _run(self, over: threading.Event) -> None:
        try:
            model = self.column.find()
            model.check()
            model.open(None)  # type: ignore[arg-type]  # on the roster's device
            _check_running(over)
            self.state = "answering"
            self._finish(over, self._collect_transcript(model, over))
        except Cancelled:
            pass
        except Exception as error:  # shown on the page instead of a traceback
            self._finish(over, error=describe_error(error))

    def _collect_transcript(self, model: Model, over: threading.Event) -> Transcript:
        options, sample = self._options, self._attempts - 1
        local = _is_local(self.column.name)  # draws by the seed, others by their own
        request = Request(
            self._prompt,
            options.max_tokens,
            temperature=options.temperature,
            seed=(options.seed or 0) + sample if sample and local else options.seed,
            sample=sample,
            stop_check=lambda text: over.is_set(),
        )
        request = with_prompt_form(model, request, options.prompt_form)
        if not isinstance(model, Collaboration):
            with closing(model.stream(request)) as pieces:
                final = forward_items(pieces, partial(self._add_delta, over))
            error = "" if final.text.strip() else "an empty answer"
            call = AgentAnswer(1, "model", self.column.name, 0, request.prompt, final, error)
            return Transcript([[call]], final)
        (outcome,) = model.run([request], lambda _, event: self._handle_event(model, event, over))
        if isinstance(outcome, UserError):
            raise outcome
        stages: Transcript = outcome
        return stages

    def _handle_event(self, model: Any, event: Any, over: threading.Event) -> None:
        """Process an event of a collaboration."""
        _check_running(over)
        if isinstance(event, CallStarted):
            self._waiting.append(event.name)
        elif isinstance(event, AgentAnswer):
            self.turn.answers.append(event)
            if event.name in self._waiting:
                self._waiting.remove(event.name)
        elif isinstance(event, Delta):
            self._add_delta(over, event)
        elif isinstance(event, Iteration):
            self._notes.append(format_event(model, event))

    def _add_delta(self, over: threading.Event, delta: Delta) -> None:
        _check_running(over)
        if delta.text and math.isnan(self._first_s):
            self._first_s = time.monotonic() - self._began
        self._text += delta.text

    def refresh(self) -> None:
        """Draw what was received since the last refresh."""
        if self._complete:
            return
        # Read first: what the thread adds while this draws is drawn by the next refresh.
        self._complete = self.state == "done"
        self._answer.set_content(MARKDOWN.render(escape_control_chars(self._text)))
        self._remarks.set_text(escape_control_chars("\n".join([*self._notes, *self.turn.warnings])))
        self._status.set_text(escape_control_chars(self._describe_status()))
        for answer in self.turn.answers[self._drawn :]:
            self._drawn += 1
            with self._stages:
                _draw_call(self._drawn, answer)
        self._stages.set_text(f"Stages: {pluralize(self._drawn, 'call')}")
        self._spinner.set_visibility(not self._complete)
        self._error.set_text(escape_control_chars(self.turn.error if self._complete else ""))

    def _describe_status(self) -> str:
        """Return the current activity, or the resources used."""
        took, stages = f"{time.monotonic() - self._began:.0f} s", self.turn.stages
        if self.state == "loading":
            return f"loading the model, {took}"
        if self.state == "answering":
            pending = ", ".join(self._waiting)
            return f"answering, {took}" + f"; waiting for {pending}" * bool(pending)
        if not stages:
            return took
        usage, final = sum_usage(self.turn.answers), stages.final
        facts = [f"{final.seconds:.1f} s"]
        if not math.isnan(self._first_s):
            facts.append(f"first text after {self._first_s:.1f} s")
        facts.append(f"{usage.prompt_tokens} + {usage.new_tokens} tokens")
        if usage.cached:
            facts.append(f"{usage.cached} from the cache")
        words = ", ".join(facts) + _format_cost(self.turn.answers)
        if final.finish == "length":
            words += f"; ended at the limit of {final.new_tokens} tokens (Settings)"
        return words if final.text.strip() else f"an empty answer; {words}"


def _check_running(over: threading.Event) -> None:
    if over.is_set():
        raise Cancelled


def _draw_call(count: int, answer: AgentAnswer) -> None:
    """Draw one call: model, outcome, prompt and answer."""
    role = "" if answer.role == "model" else f"layer {answer.layer}, {answer.role} "
    outcome = f"{format_outcome(answer)}{_format_cost([answer])}"
    prompt = answer.prompt
    parts = [("prompt", prompt)] if isinstance(prompt, str) else [(*turn,) for turn in prompt]
    if answer.completion and answer.completion.reasoning:
        parts.append(("reasoning", answer.completion.reasoning))
    if answer.text or not answer.error:
        parts.append(("answer", answer.text))
    if answer.error:
        parts.append(("error", answer.error))
    title = escape_control_chars(f"{count}. {role}{answer_label(answer)}: {outcome}")
    with ui.expansion(title).classes("chat-call"):
        for name, text in parts:
            ui.label(name).classes("quiet text-xs")
            draw_text(text, "text-sm pb-2")


def _format_cost(answers: Sequence[AgentAnswer]) -> str:
    """Format the cost of answers; empty for local models, which have no price."""
    remote = [one for one in answers if one.completion and not _is_local(one.name)]
    return f", {format_answer_cost(remote)}" if remote else ""


def _is_local(name: str) -> bool:
    return name.startswith(("local/", MIXTURE_PREFIX))


class ChatPanel:
    """Draws a conversation and its input field in the current container.

    Args:
        columns: Returns the models to query; empty if the page already showed a message.
        settings: Returns the sampling options of a model by its name.
        example: Returns an example question; called in a thread.
    """

    def __init__(
        self,
        columns: Callable[[], Sequence[ChatColumn]],
        settings: Callable[[str], ChatOptions],
        example: Callable[[], str],
    ) -> None:
        self._columns, self._settings, self._example = columns, settings, example
        self._before: dict[str, list[ChatTurn]] = {}
        self._all: list[dict[str, Any]] = []
        self._shown: list[AnswerCard] = []  # that are answering
        self._latest: list[AnswerCard] = []  # of the last question
        self._log = ui.column().classes("w-full gap-3").props("role=log aria-label=Conversation")
        with ui.row().classes("w-full items-end gap-2"):
            self._field = ui.textarea(placeholder="Ask something").classes("grow min-w-0")
            self._field.props("autogrow aria-label=Question rows=1")
            self._field.on("keydown.enter.exact.prevent", self._send_question)
            self._ask = ui.button("Ask", on_click=self._send_question).props("unelevated")
            self._stop = ui.button("Stop", on_click=self.stop_answers).props("outline")
        with ui.row().classes("gap-2"):
            for label, act in (
                ("Example question", self._fill_example),
                ("New conversation", self._clear),
                ("Download", self._download),
            ):
                ui.button(label, on_click=act).props("flat dense")
        self._timer = ui.timer(REFRESH_S, self._refresh_answers, active=False)
        self._set_busy(False)
        ui.context.client.on_delete(self.stop_answers)

    def _set_busy(self, busy: bool) -> None:
        self._ask.set_visibility(not busy)
        self._stop.set_visibility(busy)
        self._timer.active = busy

    def _send_question(self) -> None:
        question = (self._field.value or "").strip()
        if not question or self._timer.active or not (columns := self._columns()):
            return
        self._field.value = ""
        options = {column.name: self._settings(column.name) for column in columns}
        for card in self._latest:  # what followed an answer would no longer fit another one
            card.again.set_visibility(False)
        with self._log:
            ui.label(question).classes("self-end rounded px-3 py-2 chat-question")
            with ui.element("div").classes("w-full chat-answers"):
                for column in columns:
                    mine = options[column.name]
                    before = self._before.get(column.key, []) if mine.multi_turn else []
                    card = AnswerCard(column, question, before, mine, self._ask_again)
                    self._shown.append(card)
        self._latest = list(self._shown)
        settings = {name: asdict(one) for name, one in options.items()}
        self._all.append({"question": question, "settings": settings, "answers": []})
        self._set_busy(True)

    def _refresh_answers(self) -> None:
        finished = all(card.state == "done" for card in self._shown)
        for card in self._shown:
            card.refresh()
        if not finished:
            return
        self._set_busy(False)
        for column, turn in ((card.column, card.turn) for card in self._shown):
            self._all[-1]["answers"].append({"name": column.name, **turn_to_json(turn)})
            # Some endpoints reject conversations that contain an empty turn.
            if turn.text.strip():
                self._before.setdefault(column.key, []).append(turn)
        self._shown = []

    def _ask_again(self, card: AnswerCard) -> None:
        if self._timer.active:
            return
        kept = self._before.get(card.column.key, [])
        kept[:] = [turn for turn in kept if turn is not card.turn]
        card.start()
        self._shown = [card]
        self._set_busy(True)

    async def _fill_example(self) -> None:
        try:
            self._field.value = await run_in_thread(self._example)
        except UserError as error:
            ui.notify(str(error), type="negative", multi_line=True)

    def stop_answers(self) -> None:
        """Stop waiting for all answers."""
        for card in self._shown:
            card.stop()

    def _clear(self) -> None:
        self.stop_answers()
        self._refresh_answers()
        self._before, self._all, self._latest = {}, [], []
        self._log.clear()

    def _download(self) -> None:
        if self._all:
            ui.download.content(json.dumps(self._all, indent=1), "conversation.json")
        else:
            ui.notify("there is no question yet")


class ChatSettings:
    """Settings of a conversation, drawn in the current container.

    Args:
        temperature: Initial temperature.
    """

    def __init__(self, temperature: float) -> None:
        forms = {"": "as the model's task", **{name: name for name in PROMPT_FORMS}}
        hint = f"local {LOCAL_MAX_TOKENS}, else {MAX_TOKENS}"
        with ui.expansion("Settings"), ui.element("div").classes("fields w-full"):
            self._temperature = ui.number("Temperature", value=temperature, min=0, step=0.1)
            self._tokens = ui.number("Maximum new tokens", min=1, precision=0, placeholder=hint)
            self._tokens.props("stack-label")
            self._seed = ui.number("Seed", min=0, precision=0)
            self._form = ui.select(forms, value="", label="Prompt")
            self._turns = ui.switch("Include previous turns", value=True)
            self._system = ui.textarea("System", placeholder="System prompt of all models")
            self._system.props("autogrow rows=1").classes("wide")

    def __call__(self, name: str) -> ChatOptions:
        """Return the current settings for a model."""
        seed, usual = self._seed.value, LOCAL_MAX_TOKENS if _is_local(name) else MAX_TOKENS
        return ChatOptions(
            max(0.0, float(self._temperature.value or 0.0)),
            max(1, int(self._tokens.value or usual)),
            None if seed is None else max(0, int(seed)),
            (self._system.value or "").strip() or None,
            bool(self._turns.value),
            prompt_form=self._form.value or None,
        )


def register_page(home: AppState) -> None:
    """Register the page at /talk."""

    @ui.page("/talk")
    def chat_page(model: str = "") -> None:
        with page_frame("Talk"):
            draw_when_loaded(
                lambda: (expert_mixer.label_models(home), model or expert_mixer.newest_best(home)),
                lambda found: _draw_chat(home, *found),
            )


def _draw_chat(home: AppState, labels: Mapping[str, str], chosen: str) -> None:
    with ui.card().classes("w-full gap-2"):
        field = draw_model_field(labels, "Models, side by side", [chosen])
        ui.label(MODEL_NAME_HELP.replace("\n", " ")).classes("quiet text-sm")
        settings = ChatSettings(0.7)

    def selected_names() -> list[str]:
        return [name.strip() for name in field.value if name.strip()]

    def selected_columns() -> list[ChatColumn]:
        picked = selected_names()
        if not picked:
            ui.notify("choose a model first", type="warning")
        return [ChatColumn(name, name, partial(home.roster.model, name)) for name in picked]

    ChatPanel(
        selected_columns, settings, lambda: expert_mixer.example_question(home, selected_names())
    )
