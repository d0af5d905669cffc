"""Numbers as a report's readers take them."""

import math
from collections.abc import Sequence

MINUS_SIGN = "\N{MINUS SIGN}"


def format_number(value: float | None, digits: int = 3) -> str:
    """With three decimals; large ones with fewer, missing ones as a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        digits = max(0, digits - 2)
    return _replace_minus(f"{value:.{digits}f}")


def format_signed(value: float, digits: int = 3) -> str:
    """With its sign."""
    return _replace_minus(f"{value:+.{digits}f}")


def format_interval(value: float, ends: Sequence[float] | None) -> str:
    """With its 95 % interval, if that is known: "0.375 [0.212, 0.573]"."""
    if ends is None:
        return format_number(value)
    return f"{format_number(value)} [{format_number(ends[0])}, {format_number(ends[1])}]"


def format_p_value(p: float) -> str:
    """Three digits, as in the sentences of `swarm.words`."""
    return f"{p:.3g}"


def format_percent(share: float | None) -> str:
    """Without decimals."""
    return "–" if share is None else f"{share:.0%}"


def format_count(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def pluralize(number_: int, noun: str) -> str:
    """A number of things: "1 iteration", "2 iterations"."""
    return f"{number_} {noun}{'s' * (number_ != 1)}"


def format_duration(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _replace_minus(words: str) -> str:
    """A number that rounds to zero has no sign."""
    if not any(digit in words for digit in "123456789"):
        words = words.replace("-", "").replace("+", "")
    return words.replace("-", MINUS_SIGN)
