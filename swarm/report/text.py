"""Numbers as text that reads well in a terminal, a pipe and a Markdown page."""

import math
from collections.abc import Sequence

from swarm.report.statistics import MeanInterval

SPARK_BLOCKS = "▁▂▃▄▅▆▇█"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table with aligned columns: the first to the left, all others to the right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [
        "| " + " | ".join(c.rjust(w) if i else c.ljust(w)
                          for i, (c, w) in enumerate(zip(row, widths, strict=True))) + " |"
        for row in (header, rule, *rows)
    ]  # fmt: skip


def format_sparkline(values: Sequence[float]) -> str:
    """One block a value, from the lowest to the highest; a space where there is none."""
    known = [value for value in values if not math.isnan(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(SPARK_BLOCKS) - 1) or 1.0
    return "".join(" " if math.isnan(v) else SPARK_BLOCKS[round((v - low) / step)] for v in values)


def format_share(interval: MeanInterval) -> str:
    """A share with its 95 % interval and n, short: ".48 [.41, .55] n=200"."""
    return f"{format_span(*interval[:3])} n={interval.n}"


def format_span(mean: float, low: float, high: float) -> str:
    """A number with its interval, short: ".48 [.41, .55]"."""
    return f"{_format_short(mean)} [{_format_short(low)}, {_format_short(high)}]"


def _format_short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"
