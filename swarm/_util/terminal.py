"""Safe display of text on a terminal and in CSV: control characters are made visible.

Also contains access to the standard streams, a collector of warnings and a progress bar.
"""

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from swarm._util.threads import PeriodicThread

if TYPE_CHECKING:
    from rich.progress import Progress

BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Unicode's bidirectional controls (UAX 9), which display a text in another order."""

CONTROL_REPLACEMENTS = {
    **{code: chr(0x2400 + code) for code in range(32)},
    **dict.fromkeys((*range(0x80, 0xA0), *BIDI_CONTROLS), "\N{REPLACEMENT CHARACTER}"),
    0x7F: "\N{SYMBOL FOR DELETE}",
    ord("\n"): "\n",
    ord("\t"): "\t",
    ord("\r"): None,
}
"""Control character -> its visible replacement.

A tab and a newline are unchanged; a carriage return is removed, as it would overwrite the line.
"""


def escape_control_chars(text: str) -> str:
    """Make a text's control characters visible; may be applied piece by piece."""
    return text.translate(CONTROL_REPLACEMENTS)


def csv_cell(value: Any) -> Any:
    """Return a value for a CSV; an apostrophe is put before text that is a spreadsheet formula.

    That is text which begins with `=`, `+`, `-`, `@`, a tab or a carriage return (OWASP, CSV
    injection). Numbers are unchanged.
    """
    dangerous = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if dangerous else value


def is_tty(stream: TextIO | None) -> bool:
    """Return whether a stream is an interactive terminal."""
    return stream is not None and stream.isatty()


def std_streams() -> tuple[TextIO | None, TextIO, TextIO]:
    """Return standard input, output and error; unencodable characters become question marks."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")
    return sys.stdin, sys.stdout, sys.stderr


class WarningCollector(logging.Handler):
    """Collects logged warnings, to be shown later.

    As a context manager it captures this package's log.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._words: list[str] = []

    def __enter__(self) -> "WarningCollector":
        logging.getLogger("swarm").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("swarm").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Store a warning."""
        self._words.append(record.getMessage())

    def pop_messages(self) -> list[str]:
        """Return the messages since the last call."""
        messages, self._words = self._words, []
        return messages


SHOW_AFTER_S, REFRESH_EVERY_S = 0.5, 0.2
"""Seconds until the bar is shown, and between two updates."""


class SamplingProgressBar:
    """Progress bar as a context; shown in a terminal or a notebook only.

    Args:
        title: Text before the bar.
        count: Returns the numbers of answers received, of answers known to be requested, and of
            failures.
        silent: Never show the bar.
    """

    def __init__(
        self, title: str, count: Callable[[], tuple[int, int, int]], silent: bool = False
    ) -> None:
        self.title, self.count = title, count
        self.shown = not silent and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._bar: Progress | None = None

    def __enter__(self) -> "SamplingProgressBar":
        if self.shown:
            self._updates = PeriodicThread(
                self._update_bar, REFRESH_EVERY_S, "swarm-progress", SHOW_AFTER_S
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown:
            self._updates.close()
        if self._bar:
            self._update_bar()
            self._bar.stop()

    def _update_bar(self) -> None:
        if self._bar is None:
            self._bar = build_sampling_bar()
            self._task = self._bar.add_task(self.title, failures="")
            self._bar.start()
        completed, total, failed = self.count()
        failures = f"{failed} failed" if failed else ""
        self._bar.update(self._task, completed=completed, total=total, failures=failures)


def build_sampling_bar() -> "Progress":
    """Build a progress bar with counts, remaining time and failures, on standard error."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failures]}", style="red"),
        console=Console(stderr=True),
    )
