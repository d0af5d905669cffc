"""A tracker shows a search outside of its folder; what it shows is read from the run's record."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.secrets import clean
from swarm.report.analyses import swarm_diversity
from swarm.runs.folder import RunFolder
from swarm.runs.verdict import Verdict, state_verdict

log = logging.getLogger(__name__)

INTERRUPTED_CODE = 130
"""Exit code after an interrupt by Ctrl-C."""

WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A search that is tracked.

    Attributes:
        folder: Run folder, whose name is the run's; trackers store their files in it.
        config: Configuration of the run; secrets are removed before it is logged.
        sources: Folders of the experts it starts from.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Path] = ()


class Tracker:
    """Tracker that shows nothing; a subclass overrides the hooks that begin with an underscore.

    The first failure of a hook is logged as one warning, and nothing more is shown: a search never
    ends because of its tracker.
    """

    name = "none"
    _first = 0
    _open = False

    @property
    def shows(self) -> bool:
        """Whether anything is shown."""
        return type(self) is not Tracker

    def check(self) -> None:
        """Check that runs can be tracked; called before anything is written.

        Raises:
            UserError: They cannot be tracked.
        """

    def start(self, run: TrackedRun) -> None:
        """Start or resume the run in its folder.

        Raises:
            UserError: It cannot be tracked.
        """
        self._first = self._start_run(run)
        self._open = True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; steps that are already logged are skipped."""
        if step >= self._first:
            self._run_safely(lambda: self._log_values(step, values))

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Log the adapter that the search found, with its folder and metadata."""
        self._run_safely(lambda: self._log_model(folder, clean(facts)))

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """Finish the run.

        Args:
            summary: Final results.
            code: Exit code; not 0 if the run was interrupted or failed.
        """
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
                "%s shows no more of this run (%s: %s); the search continues, and the same "
                "command shows all of it later",
                self.name,
                type(error).__name__,
                error,
            )

    def _start_run(self, run: TrackedRun) -> int:
        """Start the run, and return the first step that is not logged yet."""
        return 0

    def _log_values(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def _log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        pass

    def _finish_run(self, summary: Mapping[str, Any], code: int) -> None:
        pass


class SearchTracker:
    """Logs one search to a tracker.

    Everything is read from the run's record. A resumed search therefore also logs what its tracker
    missed, and a search that ran without a tracker can be logged completely afterwards.
    """

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self.tracker, self.folder = tracker, folder

    @contextmanager
    def track_search(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
        """Log the search's recorded iterations, and finish the run when the block ends.

        Raises:
            UserError: The run cannot be tracked.
        """
        if not self.tracker.shows:
            yield
            return
        self._config = dict(config)
        self._summary: dict[str, Any] = {}
        self._series = SearchSeries(state["experts"], len(state["groups"]))
        pool = Path(str(self._config.get("pool", {}).get("folder") or self.folder))
        sources = [pool / name for name in state["experts"] if (pool / name).is_dir()]
        self._sources = {source.name: source for source in sources}
        self.tracker.start(TrackedRun(self.folder, config, sources))
        try:
            for number, entry in enumerate(state["rounds"]):
                self.log_iteration(number, entry)
            yield
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            self.tracker.finish(self._summary, INTERRUPTED_CODE if stopped else 1)
            raise
        self.tracker.finish(self._summary)

    def log_iteration(self, number: int, entry: Mapping[str, Any]) -> None:
        """Log a recorded iteration."""
        if self.tracker.shows:
            self.tracker.log(number, self._series.add_iteration(entry))

    def log_verdict(self, verdict: Verdict) -> None:
        """Log the results and the best of a finished search."""
        if self.tracker.shows:
            words = str(state_verdict(verdict, self.folder))
            self._summary = {"verdict": words, **verdict.original_names()}
            if (strongest := verdict.strongest) and strongest.gain:
                self._summary |= {"gain": strongest.gain.difference, "p": strongest.gain.p}
            self.tracker.log_model(self.folder / "global_best", self._describe_best(verdict))

    def _describe_best(self, verdict: Verdict) -> dict[str, Any]:
        """Return the metadata of the best position's adapter."""
        run = RunFolder(self.folder)
        names, groups = run.experts, run.groups
        rows = run.positions[run.find_best()].reshape(len(groups), len(names))
        experts = {}
        for name, share in zip(names, rows.mean(axis=0).tolist(), strict=True):
            source = self._sources.get(name)
            weights = source / WEIGHTS_FILE if source else None
            experts[name] = {
                "coefficient": share,
                "folder": str(source) if source else None,
                "sha256": _file_sha256(weights) if weights and weights.is_file() else None,
            }
        several = {"groups": dict(zip(groups, rows.tolist(), strict=True))}
        model, identity = self._config.get("model", {}), run.identity
        test = verdict.found.test
        return {
            "task": self._config.get("task", {}).get("name"),
            "base": model.get("path") or model.get("name"),
            "seed": identity.get("seed"),
            "experts": experts,
            **(several if len(groups) > 1 else {}),
            "pool weights": identity.get("pool weights"),
            "dev": verdict.dev.utility,
            "test": test.utility if test else None,
            "test_interval": test.interval if test else None,
            "verdict": self._summary["verdict"],
        }


class SearchSeries:
    """Converts the iterations of a search, one after the other, into values of time series.

    Args:
        experts: Names of the K experts.
        groups: Number of groups of modules with separate coefficients; their mean is logged.
    """

    def __init__(self, experts: Sequence[str], groups: int) -> None:
        self.experts, self.groups = experts, groups
        self._best: np.ndarray | None = None  # [K], the mean over groups
        self._highest, self._lowest = -np.inf, np.inf
        self._personal: dict[int, float] = {}

    def add_iteration(self, entry: Mapping[str, Any]) -> dict[str, float]:
        """Add an iteration and return the values of the series, without those not measured."""
        shape = (len(entry["positions"]), self.groups, len(self.experts))
        positions = np.array(entry["positions"], dtype=float).reshape(shape).mean(axis=1)
        known = {i: u for i, u in enumerate(entry["utilities"]) if u is not None}
        held = positions[0] if self._best is None else self._best
        for i, utility in known.items():
            if utility > self._highest:
                self._highest, held = utility, positions[i]
            self._lowest = min(self._lowest, utility)
            self._personal[i] = max(self._personal.get(i, -np.inf), utility)
        self._best = held
        found: dict[str, float] = {}
        if self._personal:
            found |= {"swarm/best": self._highest, "swarm/worst": self._lowest}
        found |= {f"particle/{i}_now": utility for i, utility in known.items()}
        found |= {f"particle/{i}_best": utility for i, utility in self._personal.items()}
        found["swarm/diversity"] = float(swarm_diversity(positions[None])[0])
        for name in ("scored", "saved", "shared"):
            if (key := f"prompts_{name}") in entry:
                found[f"prompts/{name}"] = entry[key]
        if "seconds" in entry:
            found["speed/seconds"] = entry["seconds"]
        names = zip(self.experts, held.tolist(), strict=True)
        return found | {f"coefficient/{name}": share for name, share in names}


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
