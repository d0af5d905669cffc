"""One answer on a page as it comes: its text, what it took, and every call that led to it."""

import time
from collections.abc import Sequence

from nicegui import ui

from swarm.collab import AgentAnswer
from swarm.moa import accounts
from swarm.moa.describing import answer_label, pluralize, format_outcome
from swarm.printing import escape_control_chars
from swarm.ui.asking import ChatWorker

MIXTURE_PREFIX = "mixed: "
"""What the name of a mixture by hand begins with."""

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
    """Draws an answer where it is made; `look` brings it up to what has come.

    All that a model wrote is drawn as text.

    Args:
        asking: What is shown.
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
        """Show what has come since the last time."""
        asking = self.asking
        if self._over:
            return
        self._text.set_text(escape_control_chars(asking.text))
        self._notes.set_text("\n".join(map(escape_control_chars, [*asking.notes, *asking.turn.warnings])))
        self._state.set_text(self._status_text())
        for answer in asking.turn.answers[self._calls :]:
            self._calls += 1
            with self._stages:
                _draw_call(self._calls, answer)
        self._stages.set_visibility(self._calls > 0)
        self._stages.set_text(f"Stages: {pluralize(self._calls, 'call')}")
        if asking.state == "done":
            self._over = True
            self._spinner.set_visibility(False)
            self._wrong.set_text(escape_control_chars(asking.turn.error))
            self._wrong.set_visibility(bool(asking.turn.error))

    def _status_text(self) -> str:
        """What it is doing, or what it took."""
        asking = self.asking
        took = f"{time.monotonic() - self._began:.0f} s"
        if asking.state == "loading":
            return f"loading the model, {took}"
        if asking.state == "answering":
            waiting = ", ".join(map(escape_control_chars, list(asking.waiting)))
            return f"answering, {took}" + (f"; waiting for {waiting}" if waiting else "")
        stages = asking.turn.stages
        if stages is None:
            return took
        account = accounts.sum_usage(asking.turn.answers)
        tokens = f"{account.prompt_tokens} + {account.new_tokens} tokens"
        kept = f", {account.cached} from the cache" if account.cached else ""
        empty = "" if stages.final.text.strip() else "an empty answer; "
        return f"{empty}{stages.final.seconds:.1f} s, {tokens}{kept}{_format_cost(asking.turn.answers)}"


def _draw_call(count: int, answer: AgentAnswer) -> None:
    """One call: who, what it came to, what it was asked and what it said."""
    where = "" if answer.role == "model" else f"layer {answer.layer}, {answer.role} "
    words = f"{count}. {where}{answer_label(answer)}: {format_outcome(answer)}{_format_cost([answer])}"
    with ui.expansion(escape_control_chars(words)).classes("chat-call").props("dense"):
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
    """What answers cost; nothing of this machine's models, which have no price."""
    asked = [one for one in answers if one.completion and not _is_local(one.name)]
    return f", {accounts.sum_usage(asked).format_cost()}" if asked else ""


def _is_local(name: str) -> bool:
    return name.startswith(("local/", MIXTURE_PREFIX))


def _draw_part(name: str, text: str) -> None:
    ui.label(name).classes("quiet text-xs")
    ui.label(escape_control_chars(text)).classes("text text-sm pb-2")
