"""One answer on a page as it comes: its text, what it took, and every call that led to it."""

import time
from collections.abc import Sequence

from nicegui import ui

from swarm.collab import Answer
from swarm.moa import accounts
from swarm.moa.describing import named, number, outcome
from swarm.printing import harmless
from swarm.ui.asking import Asking

MIXED = "mixed: "
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


class Shown:
    """Draws an answer where it is made; `look` brings it up to what has come.

    All that a model wrote is drawn as text.

    Args:
        asking: What is shown.
    """

    def __init__(self, asking: Asking) -> None:
        self.asking, self._began = asking, time.monotonic()
        self._calls = 0
        self._over = False
        with ui.card().classes("gap-1 p-3"):
            ui.label(harmless(asking.name)).classes("font-semibold text")
            self._text = ui.label().classes("text w-full").props("data-answer")
            with ui.row().classes("items-center gap-2 no-wrap w-full"):
                self._spinner = ui.spinner(size="1em")
                self._state = ui.label().classes("quiet text-sm text").props("role=status")
            self._wrong = ui.label().classes("chat-wrong text").props("role=alert")
            self._wrong.set_visibility(False)
            self._notes = ui.label().classes("quiet text-sm text")
            self._stages = ui.expansion("Stages").classes("w-full").props("dense")
            self._stages.set_visibility(False)

    def look(self) -> None:
        """Show what has come since the last time."""
        asking = self.asking
        if self._over:
            return
        self._text.set_text(harmless(asking.text))
        self._notes.set_text("\n".join(map(harmless, [*asking.notes, *asking.turn.warnings])))
        self._state.set_text(self._words())
        for answer in asking.turn.answers[self._calls :]:
            self._calls += 1
            with self._stages:
                _call(self._calls, answer)
        self._stages.set_visibility(self._calls > 0)
        self._stages.set_text(f"Stages: {number(self._calls, 'call')}")
        if asking.state == "done":
            self._over = True
            self._spinner.set_visibility(False)
            self._wrong.set_text(harmless(asking.turn.error))
            self._wrong.set_visibility(bool(asking.turn.error))

    def _words(self) -> str:
        """What it is doing, or what it took."""
        asking = self.asking
        took = f"{time.monotonic() - self._began:.0f} s"
        if asking.state == "loading":
            return f"loading the model, {took}"
        if asking.state == "answering":
            waiting = ", ".join(map(harmless, list(asking.waiting)))
            return f"answering, {took}" + (f"; waiting for {waiting}" if waiting else "")
        stages = asking.turn.stages
        if stages is None:
            return took
        account = accounts.total(asking.turn.answers)
        tokens = f"{account.prompt_tokens} + {account.new_tokens} tokens"
        kept = f", {account.cached} from the cache" if account.cached else ""
        empty = "" if stages.final.text.strip() else "an empty answer; "
        return f"{empty}{stages.final.seconds:.1f} s, {tokens}{kept}{_cost(asking.turn.answers)}"


def _call(count: int, answer: Answer) -> None:
    """One call: who, what it came to, what it was asked and what it said."""
    where = "" if answer.role == "model" else f"layer {answer.layer}, {answer.role} "
    words = f"{count}. {where}{named(answer)}: {outcome(answer)}{_cost([answer])}"
    with ui.expansion(harmless(words)).classes("chat-call").props("dense"):
        if isinstance(answer.prompt, str):
            _part("prompt", answer.prompt)
        else:
            for turn in answer.prompt:
                _part(turn.role, turn.content)
        if answer.completion and answer.completion.reasoning:
            _part("reasoning", answer.completion.reasoning)
        if answer.text or not answer.error:
            _part("answer", answer.text)
        if answer.error:
            _part("error", answer.error)


def _cost(answers: Sequence[Answer]) -> str:
    """What answers cost; nothing of this machine's models, which have no price."""
    asked = [one for one in answers if one.completion and not _here(one.name)]
    return f", {accounts.total(asked).told()}" if asked else ""


def _here(name: str) -> bool:
    return name.startswith(("local/", MIXED))


def _part(name: str, text: str) -> None:
    ui.label(name).classes("quiet text-xs")
    ui.label(harmless(text)).classes("text text-sm pb-2")
