"""Safe display of text on a terminal and in CSV: control characters are made visible.

Also contains access to the standard streams, a collector of warnings and a progress bar.
"""

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

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
        self._ended = threading.Event()

    def __enter__(self) -> "SamplingProgressBar":
        if self.shown:
            self._thread = threading.Thread(target=self._update_bar, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self.shown:
            self._thread.join()

    def _update_bar(self) -> None:
        if self._ended.wait(SHOW_AFTER_S):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        failures = TextColumn("{task.fields[failures]}", style="red")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            failures,
        )
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(self.title, failures="")
            while True:
                ended = self._ended.wait(REFRESH_EVERY_S)
                completed, total, failed = self.count()
                failure_text = f"{failed} failed" if failed else ""
                bar.update(task, completed=completed, total=total, failures=failure_text)
                if ended:
                    return
