"""Tracker protocol, a base class that isolates runs from tracker failures, stacked charts."""

import io
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from swarm._util.secrets import clean
from swarm.report.charts import (
    STANDALONE_STYLE,
    WIDE_SIZE,
    ChartFrame,
    render_axes,
    shorten_text,
)
from swarm.report.document import COLOURS, Chart, Series, escape_text

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)


class TrackerTable(NamedTuple):
    """Rows of strings and numbers; `None` is an empty cell."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


class StackedAreaChart(NamedTuple):
    """Shares stacked on top of each other; negative ones are stacked downwards.

    Attributes:
        names: Names of the K series.
        values: Shares, [T, K], each held until the next.
    """

    title: str
    names: Sequence[str]
    values: "np.ndarray"


LoggedValue = float | TrackerTable | StackedAreaChart


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run that is tracked.

    Attributes:
        kind: "search", "evaluation", "moa", "consortium" or "compare".
        folder: Run folder, whose name is the run's; trackers store their files in it.
        config: Configuration of the run; secrets are removed before it is logged.
        sources: Folders of its experts.
    """

    kind: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Path] = ()


class Tracker(Protocol):
    """Receives the progress and the results of a run."""

    def check(self) -> None:
        """Check that runs can be tracked; called before anything is written.

        Raises:
            UserError: They cannot be tracked.
        """
        ...

    def start(self, shown: TrackedRun) -> None:
        """Start or resume the run in its folder.

        Raises:
            UserError: It cannot be tracked.
        """
        ...

    def log(self, step: int, values: Mapping[str, LoggedValue]) -> None:
        """Log numbers, tables and charts of a step; steps that are already logged are skipped."""
        ...

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Log a model that the run produced, with its folder and metadata."""
        ...

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """Finish the run.

        Args:
            summary: Final results.
            code: Exit code; not 0 if the run was interrupted or failed.
        """
        ...


class NullTracker:
    """Tracker that logs nothing, writes nothing and imports nothing."""

    def check(self) -> None:
        """See `Tracker`."""

    def start(self, shown: TrackedRun) -> None:
        """See `Tracker`."""

    def log(self, step: int, values: Mapping[str, LoggedValue]) -> None:
        """See `Tracker`."""

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """See `Tracker`."""

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """See `Tracker`."""


class SafeTracker(ABC):
    """Base class of trackers that log one warning on their first failure and then do nothing."""

    name: str
    _first = 0
    _open = False

    @abstractmethod
    def check(self) -> None:
        """See `Tracker`."""

    def start(self, shown: TrackedRun) -> None:
        """See `Tracker`."""
        self._first = self._start_run(shown)
        self._open = True

    def log(self, step: int, values: Mapping[str, LoggedValue]) -> None:
        """See `Tracker`."""
        if step >= self._first:
            kept = {name: _clean_value(value) for name, value in values.items()}
            self._run_safely(lambda: self._log_values(step, kept))

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        self._run_safely(lambda: self._log_model(folder, clean(facts)))

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """See `Tracker`."""
        self._run_safely(lambda: self._finish_run(clean(summary), code))
        self._open = False

    def _run_safely(self, work: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            work()
        except Exception as error:  # trackers' packages raise any type
            self._open = False
            log.warning(
                "%s shows no more of this run (%s: %s); the run itself goes on, and the "
                "same command shows all of it later",
                self.name,
                type(error).__name__,
                error,
            )

    @abstractmethod
    def _start_run(self, shown: TrackedRun) -> int:
        """Start the run, and return the first step that is not logged yet."""

    @abstractmethod
    def _log_values(self, step: int, values: Mapping[str, LoggedValue]) -> None: ...

    @abstractmethod
    def _log_model(self, folder: Path, facts: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _finish_run(self, summary: Mapping[str, Any], code: int) -> None: ...


def _clean_value(value: LoggedValue) -> LoggedValue:
    return value._replace(rows=clean(value.rows)) if isinstance(value, TrackerTable) else value


INTERRUPTED_CODE = 130
"""Exit code after an interrupt by Ctrl-C."""


@contextmanager
def track_run(tracker: Tracker, shown: TrackedRun) -> Iterator[dict[str, Any]]:
    """Track a run: start it, and finish it with the summary that the block fills.

    If the block raises, the run is finished as interrupted or failed.

    Raises:
        UserError: The run cannot be tracked.
    """
    tracker.start(shown)
    summary: dict[str, Any] = {}
    try:
        yield summary
    except BaseException as error:
        tracker.finish(summary, INTERRUPTED_CODE if isinstance(error, KeyboardInterrupt) else 1)
        raise
    tracker.finish(summary)


PICTURE_SIZE = (1000, 560)
"""Width and height of the PNG in pixels."""


def band_edges(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper edges [T, K] of shares [T, K], negative ones stacked downwards."""
    up, down = np.maximum(values, 0), np.minimum(values, 0)
    high, low = up.cumsum(axis=1), down.cumsum(axis=1)
    return np.where(values < 0, low, high - up), np.where(values < 0, low - down, high)


def render_svg(stacked: StackedAreaChart) -> str:
    """Render the chart as SVG with a legend, on white; hovering over a band shows its name."""
    low, high = band_edges(stacked.values)
    x = np.arange(len(low) + 1)  # the last value is held for one iteration
    ends = [Series("", x, np.append(one, one[-1])) for one in (low.min(axis=1), high.max(axis=1))]
    chart = Chart("stacked", stacked.title, "iteration", "coefficient", ends, whole=True)
    frame = ChartFrame(chart, WIDE_SIZE)
    width, bottom = frame.size
    height = bottom + 40 + 18 * ((len(stacked.names) + 1) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -30 {width} {height}">',
        f'<style>{STANDALONE_STYLE}</style><rect y="-30" width="{width}" height="{height}" '
        'fill="#fff"/>',
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
    """Return the fill of the k-th band; repeated colours are more transparent."""
    return f'style="fill:{COLOURS[k % len(COLOURS)]};opacity:{0.85 / (1 + k // len(COLOURS)):.2f}"'


def _band_path(low: np.ndarray, high: np.ndarray, frame: ChartFrame) -> str:
    """Return the path of a band in steps: its upper edge forwards, its lower edge backwards."""
    there = "".join(f"L{frame.x(t)} {frame.y(v)}H{frame.x(t + 1)}" for t, v in enumerate(high))
    back = "".join(
        f"L{frame.x(t + 1)} {frame.y(low[t])}H{frame.x(t)}" for t in range(len(low) - 1, -1, -1)
    )
    return re.sub("^L", "M", there) + back + "Z"


def render_png(stacked: StackedAreaChart) -> bytes:
    """Render the chart as a PNG of `PICTURE_SIZE`."""
    from matplotlib.figure import Figure

    low, high = band_edges(stacked.values)
    x = np.arange(len(low) + 1)
    figure = Figure(
        figsize=(PICTURE_SIZE[0] / 100, PICTURE_SIZE[1] / 100), dpi=100, layout="constrained"
    )
    plot = figure.add_subplot()
    for k, name in enumerate(stacked.names):
        lower, upper = (np.append(one[:, k], one[-1, k]) for one in (low, high))
        plot.fill_between(
            x,
            lower,
            upper,
            step="post",
            linewidth=0,
            color=COLOURS[k % len(COLOURS)],
            alpha=0.85 / (1 + k // len(COLOURS)),
            label=" " + shorten_text(name, 32).replace("$", r"\$"),
        )
    plot.set_title(stacked.title, loc="left")
    plot.set_xlabel("iteration")
    plot.set_ylabel("coefficient")
    plot.axhline(0, color="#555", linewidth=0.8)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()
