"""Numbers as a report's readers take them."""

import math
from collections.abc import Sequence

MINUS = "\N{MINUS SIGN}"


def number(value: float | None, digits: int = 3) -> str:
    """With three decimals; large ones with fewer, missing ones as a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        digits = max(0, digits - 2)
    return _true_minus(f"{value:.{digits}f}")


def signed(value: float, digits: int = 3) -> str:
    """With its sign."""
    return _true_minus(f"{value:+.{digits}f}")


def interval(value: float, ends: Sequence[float] | None) -> str:
    """With its 95 % interval, if that is known: "0.375 [0.212, 0.573]"."""
    if ends is None:
        return number(value)
    return f"{number(value)} [{number(ends[0])}, {number(ends[1])}]"


def p_value(p: float) -> str:
    """Three digits, as in the sentences of `swarm.words`."""
    return f"{p:.3g}"


def percent(share: float | None) -> str:
    """Without decimals."""
    return "–" if share is None else f"{share:.0%}"


def count(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def counted(number_: int, noun: str) -> str:
    """A number of things: "1 iteration", "2 iterations"."""
    return f"{number_} {noun}{'s' * (number_ != 1)}"


def duration(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _true_minus(words: str) -> str:
    """A number that rounds to zero has no sign."""
    if not any(digit in words for digit in "123456789"):
        words = words.replace("-", "").replace("+", "")
    return words.replace("-", MINUS)
