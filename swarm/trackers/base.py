"""Tracker protocol, a base class that isolates runs from tracker failures, stacked charts."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from swarm._util.secrets import clean
from swarm.report.charts import draw_bands, figure_to_bytes
from swarm.report.document import escape_text

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


class SeriesChart(NamedTuple):
    """A line chart of several series, for trackers whose page is laid out by the run.

    Attributes:
        section: Title of the group of charts.
        title: Title of the chart.
        series: Regular expressions that match the names of its series from their beginning.
    """

    section: str
    title: str
    series: Sequence[str]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run that is tracked.

    Attributes:
        kind: "search", "evaluation", "moa", "consortium" or "compare".
        folder: Run folder, whose name is the run's; trackers store their files in it.
        config: Configuration of the run; secrets are removed before it is logged.
        sources: Folders of the models it starts from: experts, or what is evaluated.
        charts: Default layout of its series.
    """

    kind: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Path] = ()
    charts: Sequence[SeriesChart] = ()


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


def render_stacked(stacked: StackedAreaChart, kind: str) -> bytes:
    """Render the chart as a PNG of `PICTURE_SIZE`, or as an SVG with tooltips (`kind`)."""
    from matplotlib.figure import Figure

    size = (PICTURE_SIZE[0] / 100, PICTURE_SIZE[1] / 100)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    axes = figure.add_subplot()
    draw_bands(axes, stacked.names, stacked.values)
    axes.set_title(stacked.title, loc="left")
    axes.set_xlabel("iteration")
    axes.set_ylabel("coefficient")
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    image = figure_to_bytes(figure, kind)
    if kind == "svg":
        for k, name in enumerate(stacked.names):
            group = f'<g id="band-{k}">'
            titled = f"{group}<title>{escape_text(name)}</title>"
            image = image.replace(group.encode(), titled.encode("utf-8", "replace"))
    return image
