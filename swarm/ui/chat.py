"""A conversation on a page: questions, the answers of one or several models, and how they came."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nicegui import ui

from swarm.moa.session import ChatOptions
from swarm.moa.turns import ChatTurn, turn_to_json
from swarm.models import Model
from swarm.ui.answer import AnswerCard
from swarm.ui.asking import ChatWorker

REFRESH_S = 0.15
"""Between two looks at what has come."""


class ChatColumn(NamedTuple):
    """Who is asked.

    Attributes:
        key: Whose turns the question comes with.
        name: As the page and the stages call it.
        find: Gives the model, or raises a `UserError`; called in a thread.
    """

    key: str
    name: str
    find: Callable[[], Model]


class ChatPanel:
    """Draws the conversation and its field where it is made.

    Args:
        sides: Gives who is asked; none where the page has told why there is nobody.
        manner: Gives how.
    """

    def __init__(self, sides: Callable[[], Sequence[ChatColumn]], manner: Callable[[], ChatOptions]) -> None:
        self._sides, self._manner = sides, manner
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
            ui.button("New conversation", on_click=self.clear_conversation).props("flat dense no-caps")
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
        manner = self._manner()
        self._shown = []
        with self._log:
            ui.label(question).classes("text self-end rounded px-3 py-2 chat-question")
            with ui.element("div").classes("w-full chat-answers"):
                for side in sides:
                    before = self._before.get(side.key, []) if manner.multi_turn else []
                    asking = ChatWorker(side.name, side.find, question, before, manner)
                    self._shown.append((side.key, AnswerCard(asking)))
        told = {"temperature": manner.temperature, "max_tokens": manner.max_tokens,
                "seed": manner.seed, "system": manner.system}  # fmt: skip
        self._all.append({"question": question, **told, "answers": []})
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
            # An endpoint may refuse a conversation with an empty turn in it.
            if turn.text.strip():
                self._before.setdefault(key, []).append(turn)
        self._shown = []

    def stop_answers(self) -> None:
        """Wait for nobody any more."""
        for _, one in self._shown:
            one.asking.stop()

    def clear_conversation(self) -> None:
        """Begin a new conversation."""
        self.stop_answers()
        self._refresh_answers()
        self._before, self._all = {}, []
        self._log.clear()

    def _download_conversation(self) -> None:
        if not self._all:
            ui.notify("nothing was asked yet")
            return
        ui.download.content(json.dumps(self._all, indent=1), "conversation.json")


class ChatSettings:
    """The settings of a conversation, drawn where it is made.

    Args:
        temperature: At first.
    """

    def __init__(self, temperature: float) -> None:
        with ui.element("div").classes("chat-settings w-full"):
            self._temperature = ui.number("Temperature", value=temperature, min=0, step=0.1)
            self._tokens = ui.number("New tokens at most", value=256, min=1, precision=0)
            self._seed = ui.number("Seed", value=None, min=0, precision=0)
            self._turns = ui.switch("With the turns before", value=True)
            self._system = ui.textarea("System", placeholder="What the models are told first")
        self._system.props("autogrow dense rows=1").classes("chat-wide")
        for field in (self._temperature, self._tokens, self._seed):
            field.props("dense")
        self._first = temperature

    def __call__(self) -> ChatOptions:
        """As they are now; a field that was emptied is as it was at first."""
        temperature, tokens, seed = self._temperature.value, self._tokens.value, self._seed.value
        return ChatOptions(
            self._first if temperature is None else max(0.0, float(temperature)),
            256 if tokens is None else max(1, int(tokens)),
            None if seed is None else max(0, int(seed)),
            (self._system.value or "").strip() or None,
            bool(self._turns.value),
        )
