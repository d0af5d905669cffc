"""Text as text: what a model wrote is shown whole, and cannot steer the terminal."""

import logging
import sys
from collections.abc import Sequence
from typing import Any, TextIO

BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Unicode's bidirectional controls (UAX 9), which show a text in another order than it has."""

CONTROL_REPLACEMENTS = {
    **{code: chr(0x2400 + code) for code in range(32)},
    **dict.fromkeys((*range(0x80, 0xA0), *BIDI_CONTROLS), "\N{REPLACEMENT CHARACTER}"),
    0x7F: "\N{SYMBOL FOR DELETE}",
    ord("\n"): "\n",
    ord("\t"): "\t",
    ord("\r"): None,
}
"""Control characters, and what stands for each of them: a picture of it. A tab and a newline stay,
a carriage return goes, as it would write over the line."""


def escape_control_chars(text: str) -> str:
    """The text with its control characters made visible; piece by piece it comes to the same."""
    return text.translate(CONTROL_REPLACEMENTS)


def csv_cell(value: Any) -> Any:
    """A value for a CSV: text that a spreadsheet would run as a formula begins with an apostrophe.

    That is text which begins with `=`, `+`, `-`, `@`, a tab or a carriage return (OWASP, CSV
    injection). Numbers are left alone.
    """
    dangerous = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if dangerous else value


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns, the first and the last to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]))
    return lines


def is_tty(stream: TextIO | None) -> bool:
    """Whether a person is there."""
    return stream is not None and stream.isatty()


def std_streams() -> tuple[TextIO | None, TextIO, TextIO]:
    """Standard input, output and error; what their encoding lacks is a question mark there."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")
    return sys.stdin, sys.stdout, sys.stderr


class WarningCollector(logging.Handler):
    """Gathers what is logged as a warning, to be told where it disturbs nothing.

    As a context it takes what this toolkit logs meanwhile.
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
        """Keep one."""
        self._words.append(record.getMessage())

    def pop_messages(self) -> list[str]:
        """What has come since the last time."""
        words, self._words = self._words, []
        return words
