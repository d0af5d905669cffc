"""Safe display of text on a terminal and in CSV: control characters are made visible.

Also contains access to the standard streams, and a collector of warnings.
"""

import logging
import sys
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
