"""Shares one on top of the other, as SVG for a page and as PNG where that is all one takes."""

import io
import re

import numpy as np

from swarm.report.markup import escape_text
from swarm.report.pictures import COLOURS, Chart, Series
from swarm.report.svg import STANDALONE_STYLE, WIDE_SIZE, ChartFrame, render_axes, shorten_text
from swarm.track.base import StackedAreaChart

PICTURE_SIZE = (1000, 560)
"""Width and height of the PNG."""


def band_edges(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper edges [T, K] of shares [T, K]: those above 0 stacked up, the rest down."""
    up, down = np.maximum(values, 0), np.minimum(values, 0)
    high, low = up.cumsum(axis=1), down.cumsum(axis=1)
    return np.where(values < 0, low, high - up), np.where(values < 0, low - down, high)


def render_svg(stacked: StackedAreaChart) -> str:
    """The picture with a legend, on white; a name is told where the pointer is, too."""
    low, high = band_edges(stacked.values)
    x = np.arange(len(low) + 1)  # the last value is held for one iteration
    ends = [Series("", x, np.append(one, one[-1])) for one in (low.min(axis=1), high.max(axis=1))]
    chart = Chart("stacked", stacked.title, "iteration", "coefficient", ends, whole=True)
    frame = ChartFrame(chart, WIDE_SIZE)
    width, bottom = frame.size
    height = bottom + 40 + 18 * ((len(stacked.names) + 1) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -30 {width} {height}">',
        f'<style>{STANDALONE_STYLE}</style><rect y="-30" width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="14" y="-10">{escape_text(stacked.title)}</text>',
        *render_axes(chart, frame),
    ]
    for k, name in enumerate(stacked.names):
        left, down = 14 + k % 2 * 240, bottom + 12 + k // 2 * 18
        parts.append(
            f'<path d="{_band_path(low[:, k], high[:, k], frame)}" {_band_style(k)}>'
            f"<title>{escape_text(name)}</title></path>"
            f'<rect x="{left}" y="{down - 8}" width="22" height="12" {_band_style(k)}/>'
            f'<text x="{left + 30}" y="{down + 3}">{escape_text(shorten_text(name, 26))}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _band_style(k: int) -> str:
    """The fill of the k-th band; a colour that comes again is fainter."""
    return f'style="fill:{COLOURS[k % len(COLOURS)]};opacity:{0.85 / (1 + k // len(COLOURS)):.2f}"'


def _band_path(low: np.ndarray, high: np.ndarray, frame: ChartFrame) -> str:
    """A band as steps: its upper edge to the right, its lower edge back."""
    there = "".join(f"L{frame.x(t)} {frame.y(v)}H{frame.x(t + 1)}" for t, v in enumerate(high))
    back = "".join(f"L{frame.x(t + 1)} {frame.y(low[t])}H{frame.x(t)}"
                   for t in range(len(low) - 1, -1, -1))  # fmt: skip
    return re.sub("^L", "M", there) + back + "Z"


def render_png(stacked: StackedAreaChart) -> bytes:
    """The picture, `PIXELS` large."""
    from matplotlib.figure import Figure

    low, high = band_edges(stacked.values)
    x = np.arange(len(low) + 1)
    figure = Figure(figsize=(PICTURE_SIZE[0] / 100, PICTURE_SIZE[1] / 100), dpi=100, layout="constrained")
    plot = figure.add_subplot()
    for k, name in enumerate(stacked.names):
        lower, upper = (np.append(one[:, k], one[-1, k]) for one in (low, high))
        plot.fill_between(x, lower, upper, step="post", linewidth=0,
                          color=COLOURS[k % len(COLOURS)], alpha=0.85 / (1 + k // len(COLOURS)),
                          label=" " + shorten_text(name, 32).replace("$", r"\$"))  # fmt: skip
    plot.set_title(stacked.title, loc="left")
    plot.set_xlabel("iteration")
    plot.set_ylabel("coefficient")
    plot.axhline(0, color="#555", linewidth=0.8)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()
