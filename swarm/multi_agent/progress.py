"""Progress of a question to a collaboration, on standard error."""

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from swarm._util.terminal import escape_control_chars
from swarm.multi_agent.types import AgentAnswer, CallStarted


class CallProgress:
    """Prints a line per finished call; in a terminal a last one shows which are pending.

    Args:
        describe: Returns the line of an event, or an empty text.
        quiet: Whether to print nothing.

    Attributes:
        answers: The calls that have ended.
    """

    def __init__(self, describe: Callable[[Any], str], quiet: bool = False) -> None:
        self.answers: list[AgentAnswer] = []
        self._describe, self._quiet = describe, quiet
        self._pending: list[str] = []
        console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # The answer must reach standard output unchanged.
            redirect_stdout=False,
            redirect_stderr=False,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("waiting")

    def __enter__(self) -> "CallProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the last line, before anything else is written to the terminal."""
        self._progress.stop()

    def __call__(self, number: int, event: Any) -> None:
        """Handle an event; see `swarm.multi_agent.types.OnEvent`."""
        if isinstance(event, CallStarted):
            self._pending.append(event.name)
        elif isinstance(event, AgentAnswer):
            self.answers.append(event)
            if event.name in self._pending:
                self._pending.remove(event.name)
        names = escape_control_chars(", ".join(self._pending))
        self._progress.update(self._task, description=f"waiting for {names}")
        if not self._quiet and (line := self._describe(event)):
            self._progress.console.print(escape_control_chars(line), soft_wrap=True)
