"""A tracker shows a search outside of its folder; what it shows is read from the run's record."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from swarm._util.files import hash_file
from swarm._util.secrets import clean
from swarm.pool.discovery import find_pool
from swarm.report.analyses import swarm_diversity
from swarm.runs.folder import RunFolder
from swarm.runs.verdict import Verdict, state_verdict

log = logging.getLogger(__name__)

INTERRUPTED_CODE = 130
"""Exit code after an interrupt by Ctrl-C."""

WEIGHTS_FILE = "adapter_model.safetensors"

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Tracker:
    """Tracker that shows nothing; a subclass overrides the hooks that begin with an underscore.

    The first failure of a hook is logged as one warning, and nothing more is shown: a search never
    ends because of its tracker.
    """

    name = "none"
    _first = 0  # the first step that is not logged yet
    _open = False

    def check(self) -> None:
        """Check that runs can be tracked; called before anything is written.

        Raises:
            UserError: They cannot be tracked.
        """

    def start(
        self, folder: Path, config: Mapping[str, Any] = NOTHING, sources: Sequence[Path] = ()
    ) -> None:
        """Start or resume a run.

        Args:
            folder: Run folder, whose name is the run's; trackers store their files in it.
            config: Configuration of the run; secrets are removed before it is logged.
            sources: Folders of the experts it starts from.

        Raises:
            UserError: It cannot be tracked.
        """
        self._first = self._start_run(folder, clean(dict(config)), sources)
        self._open = True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; steps that are already logged are skipped."""
        if step >= self._first:
            self._run_safely(lambda: self._log_values(step, values))

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Log the adapter that the search found: its folder, metadata and table of coefficients."""
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

    def _start_run(self, folder: Path, config: Mapping[str, Any], sources: Sequence[Path]) -> int:
        """Start the run, and return the first step that is not logged yet."""
        return 0

    def _log_values(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def _log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        pass

    def _finish_run(self, summary: Mapping[str, Any], code: int) -> None:
        pass


def coefficient_table(facts: Mapping[str, Any]) -> list[list[Any]]:
    """Return header and rows of the best's coefficients: the mean, and of each of several groups.

    Args:
        facts: As given to `Tracker.log_model`.
    """
    groups = facts.get("groups", {})
    rows = enumerate(facts["experts"].items())
    return [
        ["expert", "coefficient", *groups],
        *(
            [name, one["coefficient"], *(row[k] for row in groups.values())]
            for k, (name, one) in rows
        ),
    ]


class SearchTracker:
    """Logs one search to a tracker.

    Everything is read from the run's record. A resumed search therefore also logs what its tracker
    missed, and a search that ran without a tracker can be logged completely afterwards.
    """

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self.tracker, self.folder = tracker, folder
        self._shows = type(tracker) is not Tracker

    @contextmanager
    def track_search(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
        """Log the search's recorded iterations, and finish the run when the block ends.

        Raises:
            UserError: The run cannot be tracked.
        """
        if not self._shows:
            yield
            return
        self._config, self._summary = dict(config), dict[str, Any]()
        self._state = state
        self._highest, self._lowest = -np.inf, np.inf
        self._personal: dict[int, float] = {}
        self._alternative: float | None = None
        pool = find_pool(self._config.get("pool", {}).get("folder") or self.folder)
        self._sources = {name: pool / name for name in state["experts"] if (pool / name).is_dir()}
        self.tracker.start(self.folder, config, list(self._sources.values()))
        try:
            for number, entry in enumerate(state["rounds"]):
                self.log_iteration(number, entry)
            yield
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            self.tracker.finish(self._summary, INTERRUPTED_CODE if stopped else 1)
            raise
        self.tracker.finish(self._summary)

    def log_iteration(
        self, number: int, entry: Mapping[str, Any], seconds_left: float | None = None
    ) -> None:
        """Log a recorded iteration, without what it did not measure.

        Args:
            seconds_left: Estimate of the running search; `None` if unknown.
        """
        if not self._shows:
            return
        known = {i: u for i, u in enumerate(entry["utilities"]) if u is not None}
        for i, utility in known.items():
            self._personal[i] = max(self._personal.get(i, -np.inf), utility)
        self._highest = max([self._highest, *known.values()])
        self._lowest = min([self._lowest, *known.values()])
        found = {}
        if self._personal:
            found["overview/best"] = self._highest
        alternatives = entry["utilities"][: self._state["own"]] if number == 0 else ()
        constant = (self._state.get("overview") or {}).get("constant")
        given = [self._alternative, constant, *alternatives]
        self._alternative = max((u for u in given if u is not None), default=None)
        if self._alternative is not None:
            found["overview/strongest_alternative"] = self._alternative
        if seconds_left is not None:
            found["overview/minutes_left"] = seconds_left / 60
        # A particle is not evaluated in every iteration: its best so far is known in each.
        found |= {f"particle/{i}": utility for i, utility in self._personal.items()}
        for name in ("scored", "saved", "shared"):
            if (key := f"prompts_{name}") in entry:
                found[f"prompts/{name}"] = entry[key]
        if "seconds" in entry:
            found["speed/seconds"] = entry["seconds"]
        if self._personal:
            found["swarm/worst"] = self._lowest
        shape = (len(entry["positions"]), len(self._state["groups"]), len(self._state["experts"]))
        positions = np.array(entry["positions"], dtype=float).reshape(shape).mean(axis=1)
        found["swarm/diversity"] = float(swarm_diversity(positions[None])[0])
        self.tracker.log(number, found)

    def log_verdict(self, verdict: Verdict) -> None:
        """Log the results and the best of a finished search."""
        if not self._shows:
            return
        words = str(state_verdict(verdict, self.folder))
        self._summary = {"verdict": words, **verdict.original_names()}
        if (strongest := verdict.strongest) and strongest.gain:
            self._summary |= {"gain": strongest.gain.difference, "p": strongest.gain.p}
        self.tracker.log_model(self.folder / "global_best", self._describe_best(verdict))

    def _describe_best(self, verdict: Verdict) -> dict[str, Any]:
        """Return the metadata of the best position's adapter."""
        run = RunFolder(self.folder)
        rows = run.positions[run.find_best()].reshape(len(run.groups), len(run.experts))
        experts = {}
        for name, share in zip(run.experts, rows.mean(axis=0).tolist(), strict=True):
            source = self._sources.get(name)
            weights = source / WEIGHTS_FILE if source else None
            experts[name] = {
                "coefficient": share,
                "folder": str(source) if source else None,
                "sha256": hash_file(weights) if weights and weights.is_file() else None,
            }
        groups = {"groups": dict(zip(run.groups, rows.tolist(), strict=True))}
        model, test = self._config.get("model", {}), verdict.found.test
        return {
            "task": self._config.get("task", {}).get("name"),
            "base": model.get("path") or model.get("name"),
            "seed": run.identity.get("seed"),
            "experts": experts,
            **(groups if len(run.groups) > 1 else {}),
            "pool weights": run.identity.get("pool weights"),
            "dev": verdict.dev.utility,
            "test": test.utility if test else None,
            "test_interval": test.interval if test else None,
            "verdict": self._summary["verdict"],
        }
