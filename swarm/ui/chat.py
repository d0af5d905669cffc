"""Page Talk and its widgets: panel, settings, and a card per answer with all calls behind it.

Model output is always drawn as text, never as markup.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from nicegui import ui

from swarm._util.terminal import escape_control_chars, pluralize
from swarm._util.threads import Cancelled, start_thread
from swarm.errors import UserError
from swarm.moa.chat import ChatOptions
from swarm.moa.turns import (
    ChatTurn,
    answer_label,
    build_conversation,
    format_answer_cost,
    format_outcome,
    turn_to_json,
)
from swarm.models.base import PROMPT_FORMS, Model, Request, with_prompt_form
from swarm.multi_agent import scheduler
from swarm.multi_agent.collaboration import Collaboration
from swarm.multi_agent.consortium.results import Iteration
from swarm.multi_agent.types import AgentAnswer, AnswerDelta, CallStarted, Transcript
from swarm.ui import expert_mixer
from swarm.ui.layout import draw_when_loaded, page_frame
from swarm.ui.state import AppState

STATES = ("loading", "answering", "done")

EMPTY_ANSWER = "an empty answer"

MIN_LOADING_S = 0.5
"""Seconds of loading from which they are shown."""

LOCAL_MAX_TOKENS, MAX_TOKENS = 128, 512
"""Maximum number of new tokens, unless set: of local models, which may run on a CPU; of others."""


class ChatWorker:
    """A question in progress; its attributes can be read from any thread.

    Args:
        name: Display name of the model.
        find: Returns the model, or raises a `UserError`.
        question: The question.
        before: Previous turns of the conversation; each has an answer.
        manner: Sampling options.

    Attributes:
        state: One of `STATES`.
        text: The answer received so far.
        waiting: Members of a collaboration that have not answered yet.
        notes: Summaries of a consortium's iterations.
        loading_s: Seconds until the model was loaded; 0 before.
        first_s: Seconds from `start` to the first text; NaN before it.
        turn: The question, and its final answer or error.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Model],
        question: str,
        before: Sequence[ChatTurn],
        manner: ChatOptions,
    ) -> None:
        self.name, self._find, self._chat_settings = name, find, manner
        self._prompt = build_conversation(before, question, manner.system)
        self._over = threading.Event()
        self.turn = ChatTurn(question)
        self.state, self.text = STATES[0], ""
        self.waiting: list[str] = []
        self.notes: list[str] = []
        self.loading_s, self.first_s = 0.0, float("nan")
        self._began = time.monotonic()

    def start(self) -> None:
        """Start the thread."""
        self._began = time.monotonic()
        start_thread(self._run_worker, name="swarm-page")

    def stop(self) -> None:
        """Stop waiting; generation ends with the next streamed piece."""
        if self.state != "done":
            self._over.set()
            self._finish_turn(error="stopped")

    def _finish_turn(self, stages: Transcript | None = None, error: str = "") -> None:
        if self.state == "done":
            return
        self.turn.stages, self.turn.error = stages, error
        if stages:
            self.turn.answers, self.turn.warnings = stages.answers, stages.warnings
            self.text = stages.final.text
        self.state = "done"

    def _run_worker(self) -> None:
        try:
            model = self._find()
            for prepare, args in (("check", ()), ("open", (None,))):
                getattr(model, prepare, lambda *_: None)(*args)
            if self._over.is_set():
                return
            self.loading_s = time.monotonic() - self._began
            self.state = "answering"
            self._finish_turn(self._collect_transcript(model))
        except Cancelled:
            self._finish_turn(error="stopped")
        except UserError as error:
            self._finish_turn(error=str(error))
        except Exception as error:  # shown on the page instead of a traceback
            self._finish_turn(error=f"{self.name}: failed with {type(error).__name__}: {error}")

    def _build_request(self, model: Model) -> Request:
        settings = self._chat_settings
        request = Request(
            self._prompt,
            settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            stop_check=lambda text: self._over.is_set(),
        )
        return with_prompt_form(model, request, settings.prompt_form)

    def _collect_transcript(self, model: Model) -> Transcript:
        """Run the model and return its transcript.

        Raises:
            UserError: The model gave no answer.
        """
        if not isinstance(model, Collaboration):
            return self._stream_answer(model)
        (outcome,) = model.run(
            [self._build_request(model)], lambda number, event: self._handle_event(model, event)
        )
        if isinstance(outcome, UserError):
            raise outcome
        stages: Transcript = outcome
        return stages

    def _stream_answer(self, model: Model) -> Transcript:
        request = self._build_request(model)
        with closing(model.stream(request)) as pieces:
            while True:
                try:
                    delta = next(pieces)
                except StopIteration as end:
                    final = end.value
                    break
                self._check_running()
                self._add_text(delta.text)
        error = "" if final.text.strip() else EMPTY_ANSWER
        return Transcript(
            [[AgentAnswer(1, "model", self.name, 0, request.prompt, final, error)]], final
        )

    def _handle_event(self, model: Any, event: Any) -> None:
        """Process an event of a collaboration."""
        self._check_running()
        if isinstance(event, CallStarted):
            self.waiting.append(event.name)
        elif isinstance(event, AgentAnswer):
            self.turn.answers.append(event)
            if event.name in self.waiting:
                self.waiting.remove(event.name)
        elif isinstance(event, AnswerDelta):
            self._add_text(event.delta.text)
        elif isinstance(event, Iteration):
            from swarm.multi_agent.consortium.consortium import format_event

            self.notes.append(format_event(model, event))

    def _add_text(self, text: str) -> None:
        if text and math.isnan(self.first_s):
            self.first_s = time.monotonic() - self._began
        self.text += text

    def _check_running(self) -> None:
        """Check that the answer is still wanted.

        Raises:
            Cancelled: It is not.
        """
        if self._over.is_set():
            raise Cancelled


MIXTURE_PREFIX = "mixed: "
"""Name prefix of mixtures set by hand."""

STYLE = """
.chat-question { background: color-mix(in srgb, var(--q-primary) 14%, transparent);
                 max-width: 85%; }
.chat-answers { display: grid; gap: .75rem;
                grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); }
.chat-answers > * { min-width: 0; }
.chat-settings { display: grid; gap: .25rem 1rem; align-items: center;
                 grid-template-columns: repeat(auto-fit, minmax(min(100%, 9rem), 1fr)); }
.chat-settings > * { min-width: 0; }
.chat-wide { grid-column: 1 / -1; }
.chat-wrong { color: var(--q-negative); }
body.body--dark .chat-wrong { color: #ff8a80; }
.chat-call { border-top: 1px solid var(--line); width: 100%; }
.chat-call .q-item { min-height: 2.2rem; padding: .15rem 0; }
.chat-call .q-item__label { overflow-wrap: anywhere; font-size: .85rem; }
.chat-call .q-expansion-item__content { padding: .25rem 0 .5rem; }
"""


class AnswerCard:
    """Draws an answer in the current container; `refresh_card` updates it with the text received.

    Args:
        asking: Worker of the question.
    """

    def __init__(self, asking: ChatWorker) -> None:
        self.asking, self._began = asking, time.monotonic()
        self._calls = 0
        self._over = False
        with ui.card().classes("gap-1 p-3"):
            ui.label(escape_control_chars(asking.name)).classes("font-semibold text")
            self._text = ui.label().classes("text w-full").props("data-answer")
            with ui.row().classes("items-center gap-2 no-wrap w-full"):
                self._spinner = ui.spinner(size="1em")
                self._state = ui.label().classes("quiet text-sm text").props("role=status")
            self._wrong = ui.label().classes("chat-wrong text").props("role=alert")
            self._wrong.set_visibility(False)
            self._notes = ui.label().classes("quiet text-sm text")
            self._stages = ui.expansion("Stages").classes("w-full").props("dense")
            self._stages.set_visibility(False)

    def refresh_card(self) -> None:
        """Show what was received since the last refresh."""
        worker = self.asking
        if self._over:
            return
        # Read before the texts: what a worker adds while this draws is drawn by the next refresh.
        done = worker.state == "done"
        self._text.set_text(escape_control_chars(worker.text))
        self._notes.set_text(
            "\n".join(map(escape_control_chars, [*worker.notes, *worker.turn.warnings]))
        )
        self._state.set_text(self._status_text())
        for answer in worker.turn.answers[self._calls :]:
            self._calls += 1
            with self._stages:
                _draw_call(self._calls, answer)
        self._stages.set_visibility(self._calls > 0)
        self._stages.set_text(f"Stages: {pluralize(self._calls, 'call')}")
        if done:
            self._over = True
            self._spinner.set_visibility(False)
            self._wrong.set_text(escape_control_chars(worker.turn.error))
            self._wrong.set_visibility(bool(worker.turn.error))

    def _status_text(self) -> str:
        """Return the current activity, or the resources used."""
        worker = self.asking
        took = f"{time.monotonic() - self._began:.0f} s"
        if worker.state == "loading":
            return f"loading the model, {took}"
        if worker.state == "answering":
            pending = ", ".join(map(escape_control_chars, list(worker.waiting)))
            return f"answering, {took}" + (f"; waiting for {pending}" if pending else "")
        stages = worker.turn.stages
        if stages is None:
            return took
        account = scheduler.sum_usage(worker.turn.answers)
        tokens = f"{account.prompt_tokens} + {account.new_tokens} tokens"
        cached = f", {account.cached} from the cache" if account.cached else ""
        empty = "" if stages.final.text.strip() else "an empty answer; "
        cost = _format_cost(worker.turn.answers)
        first = "" if math.isnan(worker.first_s) else f", first text after {worker.first_s:.1f} s"
        if worker.loading_s >= MIN_LOADING_S:
            first += f" ({worker.loading_s:.1f} s of loading)"
        limit = ""
        if stages.final.finish == "length":
            limit = f"; ended at the limit of {stages.final.new_tokens} tokens (Settings)"
        return f"{empty}{stages.final.seconds:.1f} s{first}, {tokens}{cached}{cost}{limit}"


def _draw_call(count: int, answer: AgentAnswer) -> None:
    """Draw one call: model, outcome, prompt and answer."""
    layer_text = "" if answer.role == "model" else f"layer {answer.layer}, {answer.role} "
    title = (
        f"{count}. {layer_text}{answer_label(answer)}: "
        f"{format_outcome(answer)}{_format_cost([answer])}"
    )
    with ui.expansion(escape_control_chars(title)).classes("chat-call").props("dense"):
        if isinstance(answer.prompt, str):
            _draw_part("prompt", answer.prompt)
        else:
            for turn in answer.prompt:
                _draw_part(turn.role, turn.content)
        if answer.completion and answer.completion.reasoning:
            _draw_part("reasoning", answer.completion.reasoning)
        if answer.text or not answer.error:
            _draw_part("answer", answer.text)
        if answer.error:
            _draw_part("error", answer.error)


def _format_cost(answers: Sequence[AgentAnswer]) -> str:
    """Format the cost of answers; empty for local models, which have no price."""
    remote = [one for one in answers if one.completion and not _is_local(one.name)]
    return f", {format_answer_cost(remote)}" if remote else ""


def limit_for(name: str, chosen: int | None) -> int:
    """Return the maximum number of new tokens of a model's answer.

    Args:
        chosen: The setting; `None` if it is empty.
    """
    if chosen is not None:
        return chosen
    return LOCAL_MAX_TOKENS if _is_local(name) else MAX_TOKENS


def _is_local(name: str) -> bool:
    return name.startswith(("local/", MIXTURE_PREFIX))


def _draw_part(name: str, text: str) -> None:
    ui.label(name).classes("quiet text-xs")
    ui.label(escape_control_chars(text)).classes("text text-sm pb-2")


REFRESH_S = 0.15
"""Interval between refreshes in seconds."""


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


class ChatPanel:
    """Draws a conversation and its input field in the current container.

    Args:
        sides: Returns the models to query; empty if the page already showed a message.
        manner: Returns the sampling options of a model by its name.
    """

    def __init__(
        self, sides: Callable[[], Sequence[ChatColumn]], manner: Callable[[str], ChatOptions]
    ) -> None:
        self._sides, self._chat_settings = sides, manner
        self._before: dict[str, list[ChatTurn]] = {}
        self._all: list[dict[str, Any]] = []
        self._shown: list[tuple[str, AnswerCard]] = []
        self._draw_panel()
        self._timer = ui.timer(REFRESH_S, self._refresh_answers, active=False)
        ui.context.client.on_delete(self.stop_answers)

    def _draw_panel(self) -> None:
        self._log = ui.column().classes("w-full gap-3").props("role=log aria-label=Conversation")
        with ui.row().classes("w-full items-end gap-2"):
            field = ui.textarea(placeholder="Ask something").props(
                "autogrow outlined dense aria-label=Question rows=1"
            )
            self._field = field.classes("grow min-w-0")
            field.on("keydown.enter.exact.prevent", self._send_question)
            self._ask = ui.button("Ask", on_click=self._send_question).props("unelevated no-caps")
            self._stop = ui.button("Stop", on_click=self.stop_answers).props("outline no-caps")
        with ui.row().classes("gap-2"):
            ui.button("New conversation", on_click=self.clear_conversation).props(
                "flat dense no-caps"
            )
            ui.button("Download", on_click=self._download_conversation).props("flat dense no-caps")
        self._set_busy(False)

    def _set_busy(self, busy: bool) -> None:
        self._ask.set_visibility(not busy)
        self._stop.set_visibility(busy)

    def _send_question(self) -> None:
        question = (self._field.value or "").strip()
        if not question or self._timer.active or not (sides := self._sides()):
            return
        self._field.value = ""
        settings = self._chat_settings("")
        self._shown = []
        with self._log:
            ui.label(question).classes("text self-end rounded px-3 py-2 chat-question")
            with ui.element("div").classes("w-full chat-answers"):
                for side in sides:
                    previous = self._before.get(side.key, []) if settings.multi_turn else []
                    options = self._chat_settings(side.name)
                    worker = ChatWorker(side.name, side.find, question, previous, options)
                    self._shown.append((side.key, AnswerCard(worker)))
        fields = {
            "temperature": settings.temperature,
            "max_tokens": {side.name: self._chat_settings(side.name).max_tokens for side in sides},
            "seed": settings.seed,
            "system": settings.system,
        }
        self._all.append({"question": question, **fields, "answers": []})
        for _, one in self._shown:
            one.asking.start()
        self._set_busy(True)
        self._timer.active = True

    def _refresh_answers(self) -> None:
        for _, one in self._shown:
            one.refresh_card()
        if any(one.asking.state != "done" for _, one in self._shown):
            return
        self._timer.active = False
        self._set_busy(False)
        for key, one in self._shown:
            turn = one.asking.turn
            one.refresh_card()
            self._all[-1]["answers"].append({"name": one.asking.name, **turn_to_json(turn)})
            # Some endpoints reject conversations that contain an empty turn.
            if turn.text.strip():
                self._before.setdefault(key, []).append(turn)
        self._shown = []

    def stop_answers(self) -> None:
        """Stop waiting for all answers."""
        for _, one in self._shown:
            one.asking.stop()

    def clear_conversation(self) -> None:
        """Start a new conversation."""
        self.stop_answers()
        self._refresh_answers()
        self._before, self._all = {}, []
        self._log.clear()

    def _download_conversation(self) -> None:
        if not self._all:
            ui.notify("there is no question yet")
            return
        ui.download.content(json.dumps(self._all, indent=1), "conversation.json")


class ChatSettings:
    """Settings of a conversation, drawn in the current container.

    Args:
        temperature: Initial temperature.
    """

    def __init__(self, temperature: float) -> None:
        with ui.element("div").classes("chat-settings w-full"):
            self._temperature = ui.number("Temperature", value=temperature, min=0, step=0.1)
            self._tokens = ui.number("Maximum new tokens", value=None, min=1, precision=0)
            hint = f"local {LOCAL_MAX_TOKENS}, else {MAX_TOKENS}"
            self._tokens.props["placeholder"] = hint
            self._tokens.props("stack-label")
            self._seed = ui.number("Seed", value=None, min=0, precision=0)
            forms = {
                "": "as the model's task",
                **dict(zip(PROMPT_FORMS, PROMPT_FORMS, strict=True)),
            }
            self._form = ui.select(forms, value="", label="Prompt")
            self._turns = ui.switch("Include previous turns", value=True)
            self._system = ui.textarea("System", placeholder="System prompt of all models")
        self._system.props("autogrow dense rows=1").classes("chat-wide")
        for field in (self._temperature, self._tokens, self._seed, self._form):
            field.props("dense")
        self._first = temperature

    def __call__(self, name: str) -> ChatOptions:
        """Return the current settings for a model; empty fields have their initial values."""
        temperature, tokens, seed = self._temperature.value, self._tokens.value, self._seed.value
        return ChatOptions(
            self._first if temperature is None else max(0.0, float(temperature)),
            limit_for(name, None if tokens is None else max(1, int(tokens))),
            None if seed is None else max(0, int(seed)),
            (self._system.value or "").strip() or None,
            bool(self._turns.value),
            prompt_form=self._form.value or None,
        )


MODEL_NAME_HELP = """\
Any model name: local/base, an expert, a run's best, PROVIDER/MODEL, moa/PRESET,
consortium/NAME. Several models answer independently."""

MISSING_HELP = "Text only: there are no tools and no pictures or other attachments here."


def register_page(home: AppState) -> None:
    """Register the page at /talk."""

    @ui.page("/talk")
    def chat_page(model: str = "") -> None:
        ui.add_css(STYLE)
        with page_frame("Talk"):
            draw_when_loaded(
                lambda: expert_mixer.list_model_names(home),
                lambda names: _draw_chat(home, names, [one for one in (model,) if one]),
            )


def _draw_chat(home: AppState, names: list[str], chosen: list[str]) -> None:
    with ui.card().classes("w-full gap-2"):
        field = ui.select(
            list(dict.fromkeys([*names, *chosen])),
            label="Models",
            value=chosen,
            multiple=True,
            with_input=True,
            new_value_mode="add-unique",
        )
        field.props("use-chips outlined dense hint='search, or type a name and press Enter'")
        field.classes("w-full")
        ui.label(MODEL_NAME_HELP).classes("quiet text-sm")
        ui.label(MISSING_HELP).classes("quiet text-sm")
        with ui.expansion("Settings").classes("w-full").props("dense"):
            manners = ChatSettings(0.7)

    def selected_columns() -> list[ChatColumn]:
        picked = [name.strip() for name in field.value if name.strip()]
        if not picked:
            ui.notify("choose a model first", type="warning")
        return [ChatColumn(name, name, partial(home.roster.model, name)) for name in picked]

    ChatPanel(selected_columns, manners)
