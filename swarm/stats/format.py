"""Format numbers, tables and sparklines for reports, terminals and Markdown pages."""

import math
from collections.abc import Sequence

from swarm.stats.tests import MeanInterval

MINUS_SIGN = "\N{MINUS SIGN}"


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
    """Format with three digits, as in the sentences of `swarm.runs.describe`."""
    return f"{p:.3g}"


def format_percent(share: float | None) -> str:
    """Format as a percentage without decimals."""
    return "–" if share is None else f"{share:.0%}"


def format_count(value: float) -> str:
    """Format an integer with thousands separators."""
    return f"{value:,.0f}"


def pluralize(number_: int, noun: str) -> str:
    """Format a number of things: "1 iteration", "2 iterations"."""
    return f"{number_} {noun}{'s' * (number_ != 1)}"


def format_duration(seconds: float) -> str:
    """Format as hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _replace_minus(words: str) -> str:
    """Use the minus sign; a number that rounds to zero has no sign."""
    if not any(digit in words for digit in "123456789"):
        words = words.replace("-", "").replace("+", "")
    return words.replace("-", MINUS_SIGN)


SPARK_BLOCKS = "▁▂▃▄▅▆▇█"


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


def format_sparkline(values: Sequence[float]) -> str:
    """Return one block per value, scaled from the lowest to the highest; a space for NaN."""
    known = [value for value in values if not math.isnan(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(SPARK_BLOCKS) - 1) or 1.0
    return "".join(" " if math.isnan(v) else SPARK_BLOCKS[round((v - low) / step)] for v in values)


def format_share(interval: MeanInterval) -> str:
    """Format a share with its 95 % interval and n, short: ".48 [.41, .55] n=200"."""
    return f"{format_span(*interval[:3])} n={interval.n}"


def format_span(mean: float, low: float, high: float) -> str:
    """Format a number with its interval, short: ".48 [.41, .55]"."""
    return f"{_format_short(mean)} [{_format_short(low)}, {_format_short(high)}]"


def _format_short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"
