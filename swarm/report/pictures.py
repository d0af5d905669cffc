"""What a chart shows, whoever draws it: swarm/report/svg.py or swarm/report/png.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Numbers = Sequence[float] | np.ndarray

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6d00")
"""Okabe and Ito's, which readers who see fewer colours can tell apart; their yellow, which is
too light for a line on paper, darkened, and no black, which is the axes' and the text's."""

GREY = "#9aa1a9"

MARKER_SHAPES = ("o", "s", "^", "D", "v", "P", "X")
"""The marker that goes with each colour, in matplotlib's letters: colour alone tells nothing."""

DASH_PATTERNS = ("", "7 3", "2 3")
"""How lines are drawn when all colours are taken once, twice, and three times."""

MAX_MARKERS = 12
"""About as many of a line's points have a marker."""


class Series(NamedTuple):
    """Points (x, y) and how they hang together; one with a NaN is left out.

    Attributes:
        kind: "line" joins the points, "steps" holds each y until the next x, "points" are single.
        weight: "strong" stands out, "faint" is background: grey, without marker and legend.
        labels: What each point is, beside its numbers; empty is nothing.
        spans: The ends of each point's interval on x; empty is none.
    """

    name: str
    x: Numbers
    y: Numbers
    kind: str = "line"
    weight: str = "normal"
    labels: Sequence[str] = ()
    spans: Sequence[tuple[float, float]] = ()


def style_of_series(style: int) -> tuple[int, str]:
    """The place in COLOURS and SHAPES of a series with a `Chart.style`, and its dashes."""
    rounds, place = divmod(style, len(COLOURS))
    return place, DASH_PATTERNS[rounds % len(DASH_PATTERNS)]


@dataclass(frozen=True, slots=True)
class Chart:
    """Series on two axes.

    Attributes:
        key: Names its file.
        told: What it shows, in a sentence, for who does not see it.
        marks: Horizontal lines at a value, by name.
        rows: Names of y = 0, 1, ... from above; empty where y is a number.
        whole: The x are whole numbers, and so are its ticks.
        log: The x axis of a file of its own is logarithmic, with a tick at each x; all are above 0.
    """

    key: str
    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    told: str = ""
    marks: Sequence[tuple[str, float]] = ()
    rows: Sequence[str] = ()
    whole: bool = False
    log: bool = False

    def series_style(self, number: int) -> int | None:
        """The number of a series among those that are not faint; `None` for a faint one."""
        if self.series[number].weight == "faint":
            return None
        shown = [one for one in self.series[:number] if one.weight != "faint"]
        return len(shown)

    def x_range(self) -> tuple[float, float]:
        """The lowest and the highest x, the ends of intervals too."""
        ends = [end for one in self.series for span in one.spans for end in span]
        return _padded_range([*(v for one in self.series for v in one.x), *ends])

    def y_range(self) -> tuple[float, float]:
        """The lowest and the highest y, the marks too."""
        marks = [value for _, value in self.marks]
        return _padded_range([*(v for one in self.series for v in one.y), *marks])


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    known = [float(v) for v in values if math.isfinite(v)] or [0.0]
    low, high = min(known), max(known)
    # What differs by rounding alone is one value.
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        half = abs(low) * 0.1 if abs(low) > 1e-9 else 0.5
        return low - half, high + half
    return low, high


def axis_ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, `most` of them or fewer.

    Args:
        most: At least 3.
        whole: The numbers are whole.
    """
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    if whole:
        step = max(1.0, step)
    for factor in (1, 2, 5, 10, 20, 50, 100):
        first = math.floor(low / (step * factor) + 1e-9)
        last = math.ceil(high / (step * factor) - 1e-9)
        if last - first < most:
            break
    return [float(f"{n * step * factor:.12g}") for n in range(first, last + 1)]


def tick_label(value: float, among: Sequence[float]) -> str:
    """A tick with as many decimals as tell it from its neighbours."""
    step = among[1] - among[0] if len(among) > 1 else abs(value) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if step >= 1e6 or decimals > 5:
        return f"{value:.3g}"
    return f"{value + 0.0:,.{decimals}f}".replace("-", "\N{MINUS SIGN}")
