"""What a mixture is doing, told while it does it: live in a terminal, a line a layer elsewhere."""

import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from swarm.collab import AgentAnswer, CallStarted, AnswerDelta
from swarm.moa.describing import format_layer
from swarm.printing import escape_control_chars, is_tty


class MixtureProgress:
    """Watches one question being answered; a `swarm.collab.Watch`.

    Args:
        notes: Where to tell; a terminal shows who is being waited for.
        quiet: Nothing is told.
        show: Is handed the last answer's text, piece by piece; `None` waits for the whole.

    Attributes:
        answers: Every call that came to an end, as they came.
    """

    def __init__(self, notes: TextIO, quiet: bool, show: Callable[[str], None] | None) -> None:
        self.answers: list[AgentAnswer] = []
        self._notes, self._quiet, self._show = notes, quiet, show
        self._layer = self._layers = 0
        self._asked: list[CallStarted] = []
        self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> "MixtureProgress":
        if not self._quiet and is_tty(self._notes):
            # What goes to standard output is written there as it is.
            self._live = Live(get_renderable=self._render_live, refresh_per_second=8, transient=True,
                              console=Console(file=self._notes), redirect_stdout=False,
                              redirect_stderr=False)  # fmt: skip
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_live()
        self._print_layer()

    def __call__(self, number: int, event: CallStarted | AgentAnswer | AnswerDelta) -> None:
        """Take notice of an event."""
        if isinstance(event, CallStarted):
            self._start_call(event)
        elif isinstance(event, AgentAnswer):
            self.answers.append(event)
        elif self._show and event.delta.text:
            self.stop_live()
            self._show(event.delta.text)

    @property
    def answers_by_layer(self) -> list[AgentAnswer]:
        """The answers, layer by layer."""
        return sorted(self.answers, key=lambda answer: answer.layer)

    def _start_call(self, event: CallStarted) -> None:
        if event.layer != self._layer:
            self._print_layer()
            self._layer, self._layers = event.layer, event.layers
            self._asked, self._began = [], time.monotonic()
        self._asked.append(event)

    def stop_live(self) -> None:
        """Give the terminal back, before anything else is written to it."""
        if self._live:
            self._live.stop()
            self._live = None

    def _print_layer(self) -> None:
        """Say what the layer came to that is over."""
        if self._quiet or not self._asked:
            return
        line = escape_control_chars(format_layer(self._layer, self._layers, len(self._asked), self._current_answers()))
        if self._live:
            self._live.console.print(Text(line), soft_wrap=True)
        else:
            print(line, file=self._notes, flush=True)
        self._asked = []

    def _current_answers(self) -> list[AgentAnswer]:
        return [answer for answer in self.answers if answer.layer == self._layer]

    def _render_live(self) -> Text:
        """The live line; asked for by a thread of the display's own."""
        here, asked = self._current_answers(), list(self._asked)
        waiting = [event.name for event in asked]
        for answer in here:
            if answer.name in waiting:
                waiting.remove(answer.name)
        line = (
            f"layer {self._layer} of {self._layers}: {len(here)} of {len(asked)} are done, "
            f"{time.monotonic() - self._began:.0f} s"
            + (f"; waiting for {', '.join(waiting)}" if waiting else "")
        )
        return Text(escape_control_chars(line) if asked else "...", no_wrap=True, overflow="ellipsis")
