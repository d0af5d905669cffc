"""Text for terminals, tables and CSV: numbers, columns, and control characters made visible.

Also contains access to the standard streams, a collector of warnings and a progress bar.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from io import TextIOWrapper
from typing import Any, TextIO

MINUS_SIGN = "\N{MINUS SIGN}"

NO_PRICE = "no price known"


def format_number(value: float | None, digits: int = 3) -> str:
    """Format with three decimals; large numbers with fewer, missing ones as a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        digits = max(0, digits - 2)
    return _replace_minus(f"{value:.{digits}f}")


def format_signed(value: float, digits: int = 3) -> str:
    """Format with a sign."""
    return _replace_minus(f"{value:+.{digits}f}")


def format_interval(value: float, ends: Sequence[float] | None) -> str:
    """Format with the 95 % interval, if known: "0.375 [0.212, 0.573]"."""
    if ends is None:
        return format_number(value)
    return f"{format_number(value)} [{format_number(ends[0])}, {format_number(ends[1])}]"


def format_p_value(p: float) -> str:
    """Format a p-value for a table: three digits, and "< 0.001" below."""
    return "< 0.001" if p < 0.001 else f"{p:.3g}"


def format_p(p: float) -> str:
    """Format a p-value for a sentence: "p = 0.0123", "p < 0.001"."""
    words = format_p_value(p)
    return f"p {words}" if words.startswith("<") else f"p = {words}"


def format_percent(share: float | None) -> str:
    """Format as a percentage without decimals."""
    return "–" if share is None else f"{share:.0%}"


def format_count(value: float) -> str:
    """Format an integer with thousands separators."""
    return f"{value:,.0f}"


def pluralize(count: int, noun: str) -> str:
    """Format a number of things: "1 iteration", "2 iterations"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def format_duration(seconds: float, minutes: bool = False) -> str:
    """Format in two units: "1 h 02 min", "3 min 07 s"; below a minute with two digits: "0.12 s".

    Args:
        minutes: Round to minutes, for estimates that are no better.
    """
    if minutes and seconds < 3570:
        return f"{max(0, round(seconds / 60))} min"
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    whole, rest = divmod(round(seconds), 60)
    if minutes or whole >= 60:
        hours, whole = divmod(round(seconds / 60) if minutes else whole, 60)
        return f"{hours} h {whole:02d} min"
    return f"{whole} min {rest:02d} s"


def format_amount(number: float, unit: str = "") -> str:
    """Format a number with three digits and k, M, G, T or P before the unit."""
    letters = iter(("", "k", "M", "G", "T", "P"))
    letter = next(letters)
    while number >= 999.5:
        number, letter = number / 1000, next(letters)
    return f"{number:.3g} {letter}{unit}".rstrip()


def format_cost(cost: float | None, unpriced: int = 0, noun: str = "call") -> str:
    """Format a cost in the currency of the prices, and what it lacks.

    Args:
        cost: `None` if no price is known.
        unpriced: Number of calls that `cost` does not include, as their price is unknown.
        noun: What was paid for.
    """
    rest = f" and {pluralize(unpriced, noun)}, {NO_PRICE}" if unpriced else ""
    return NO_PRICE if cost is None else f"{cost:.6f}{rest}"


def _replace_minus(words: str) -> str:
    """Use the minus sign; a number that rounds to zero has no sign."""
    if not any(digit in words for digit in "123456789"):
        words = words.replace("-", "").replace("+", "")
    return words.replace("-", MINUS_SIGN)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table with aligned columns: the first left, all others right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [
        "| "
        + " | ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in (header, rule, *rows)
    ]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of rows, the first and the last to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]))
    return lines


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


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "did you mean X? " with the known word that is most similar; empty if none is."""
    matches = get_close_matches(word, list(known), 1)
    return f"did you mean {prefix}{matches[0]}? " if matches else ""


def is_tty(stream: TextIO | None) -> bool:
    """Return whether a stream is an interactive terminal."""
    return stream is not None and stream.isatty()


def escape_unencodable() -> None:
    """Let the standard streams escape characters that their encoding lacks."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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


@contextmanager
def show_sampling(
    title: str, count: Callable[[], tuple[int, int, int]], silent: bool = False
) -> Iterator[None]:
    """Show a progress bar meanwhile, in a terminal or a notebook.

    Args:
        title: Text before the bar.
        count: Returns the numbers of answers received, of answers known to be requested, and of
            failures.
        silent: Never show the bar.
    """
    if silent or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield
        return
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    class CountingProgress(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            completed, total, failed = count()
            failures = f"{failed} failed" if failed else ""
            for task in self.tasks:
                self.update(task.id, completed=completed, total=total, failures=failures)
            return super().get_renderables()

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    failures = TextColumn("{task.fields[failures]}", style="red")
    with CountingProgress(
        *columns, TimeRemainingColumn(), failures, console=Console(stderr=True)
    ) as bar:
        bar.add_task(title, failures="")
        yield
