"""What a tracker is told, and how one that fails is kept from ending a run."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from swarm.secrets import clean

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)


class TrackerTable(NamedTuple):
    """Rows of texts and numbers; `None` is an empty cell."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


class StackedAreaChart(NamedTuple):
    """Shares that are drawn one on top of the other, those below 0 downwards.

    Attributes:
        names: [K] whose they are.
        values: [T, K], each held until the next.
    """

    title: str
    names: Sequence[str]
    values: "np.ndarray"


LoggedValue = float | TrackerTable | StackedAreaChart


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run that is shown.

    Attributes:
        kind: "search", "evaluation", "moa", "consortium" or "compare".
        folder: Its folder, by which it is called; a tracker keeps its files there.
        config: What it was started with; secrets are taken out of it.
        sources: Folders that its experts come from.
    """

    kind: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Path] = ()


class Tracker(Protocol):
    """Is told what a run does."""

    def check(self) -> None:
        """Whether a run could be shown; called before anything is written.

        Raises:
            UserError: It could not.
        """
        ...

    def start(self, shown: TrackedRun) -> None:
        """A run begins, or goes on, in a folder.

        Raises:
            UserError: It cannot be shown.
        """
        ...

    def log(self, step: int, values: Mapping[str, LoggedValue]) -> None:
        """Numbers, tables and pictures of a step; steps that are there already are left alone."""
        ...

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """A model that the run came to: its folder, and what is known of it."""
        ...

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """The run is over.

        Args:
            summary: What it came to.
            code: 0; another says that it was interrupted or failed.
        """
        ...


class NullTracker:
    """Shows nothing, writes nothing and loads nothing."""

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
    """A tracker that warns once when it fails under way, and is silent from then on."""

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
        except Exception as error:  # whatever a tracker's package raises
            self._open = False
            log.warning("%s shows no more of this run (%s: %s); the run itself goes on, and the "
                        "same command shows all of it later", self.name, type(error).__name__,
                        error)  # fmt: skip

    @abstractmethod
    def _start_run(self, shown: TrackedRun) -> int:
        """Begin; gives the first step that is not there yet."""

    @abstractmethod
    def _log_values(self, step: int, values: Mapping[str, LoggedValue]) -> None: ...

    @abstractmethod
    def _log_model(self, folder: Path, facts: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _finish_run(self, summary: Mapping[str, Any], code: int) -> None: ...


def _clean_value(value: LoggedValue) -> LoggedValue:
    return value._replace(rows=clean(value.rows)) if isinstance(value, TrackerTable) else value
