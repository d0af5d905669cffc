"""State that all pages share: run folder, search launcher and models."""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.terminal import format_duration, format_number
from swarm.errors import UserError
from swarm.merging.positions import describe_position
from swarm.runs.folder import (
    RUNS_FOLDER,
    find_run_folders,
    is_run_folder,
    read_record,
    state_stamp,
)
from swarm.runs.lock import STATUS_FILE, STUDY_LOCK_FILE, running_info
from swarm.runs.verdict import format_gain, read_verdict
from swarm.ui.launcher import SearchLauncher, output_path, read_failure

if TYPE_CHECKING:
    from swarm.registry.registry import Roster

RUN_NAME_PATTERN = re.compile(r"(?!\.)[^/\\\x00-\x1f]+")


@contextmanager
def readable() -> Iterator[None]:
    """Read a run folder inside the context, or in a decorated function.

    Raises:
        UserError: Its files are missing, damaged, or in another format than expected.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        cause = f"{type(error).__name__}: {error}"
        words = f"the files of this run are damaged or incompatible ({cause:.200})"
        raise UserError(words) from error


def delete_run(run: Path) -> None:
    """Delete a run folder, and the output of its process.

    Raises:
        UserError: It is not a run folder, a search holds it, it belongs to a sweep, or it cannot be
            deleted.
    """
    if run.is_symlink() or not is_run_folder(run):
        raise UserError(f"{run.name} is not a run folder; nothing was deleted")
    if running_info(run) is not None:
        raise UserError(f"{run.name} is running; stop it first")
    # A sweep may itself be named as the folder of all runs is.
    if run.parent.name != RUNS_FOLDER or (run.parent / STUDY_LOCK_FILE).exists():
        raise UserError(f"{run.name} belongs to {run.parent.name}, whose results need it")
    try:
        shutil.rmtree(run)
    except OSError as error:
        raise UserError(f"{run.name} cannot be deleted: {error.strerror}") from None
    output_path(run).unlink(missing_ok=True)


STATES = {
    "running": "primary",
    "starting": "primary",
    "stopping": "warning",
    "finished": "positive",
    "stopped": "grey-7",
    "failed": "negative",
    "broken": "grey-7",
    "no such run": "grey-7",
}
"""Colours of the states of a run; the first three are those of a process."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One-line summary of a run.

    Attributes:
        score: Utility of the best on dev; `None` if unknown.
        gain: Gain over the strongest alternative on test; `None` if unknown.
        gain_text: The gain with its 95 % interval; the suffix "(one answer)" marks a best found
            that gives only one answer in some domain.
        best: The best in words.
        trail: Best on dev after each iteration.
        seconds: From its beginning to the last change.
        iterations: Number of finished iterations.
        over: Reason of the end; `None` before it.
        changed: Time of the last change, in seconds since 1970.
        state: One of `STATES`.
        details: Details on the state: progress, reason of the end, or error.
    """

    name: str
    task: str
    score: float | None
    gain: float | None
    gain_text: str
    best: str
    trail: tuple[float, ...]
    seconds: float
    iterations: int
    over: str | None
    changed: float
    state: str
    details: str

    def to_row(self) -> dict[str, Any]:
        """Return the row of a table; `group` is the folder of the run's sweep or study."""
        row = asdict(self)
        low, high = min(self.trail, default=0.0), max(self.trail, default=0.0)
        steps = enumerate(self.trail)
        width, height = max(1, len(self.trail) - 1), high - low or 1.0
        points = [f"{60 * n / width:.1f},{17 - 15 * (y - low) / height:.1f}" for n, y in steps]
        return row | {
            "trail": " ".join(points) if len(points) > 1 else "",
            "score_text": format_number(self.score),
            "duration": format_duration(self.seconds) if self.seconds >= 1 else "–",
            "when": format_age(time.time() - self.changed),
            "group": self.name.rpartition("/")[0],
            "trials": 0,
        }


def format_age(seconds: float) -> str:
    """Format how long ago something was, in its largest unit: "2 min ago"."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "min")):
        if seconds >= size:
            count = round(seconds / size)
            return f"{count} {unit}{'s' * (count > 1 and unit != 'min')} ago"
    return "just now"


class RunIndex:
    """Index of the runs in a folder; only runs that changed since the last call are read.

    Args:
        folder: Folder that contains the runs.
        launcher: Knows the processes that were started and signalled from here.
    """

    def __init__(self, folder: Path, launcher: SearchLauncher | None = None) -> None:
        self.folder, self._launcher = folder, launcher or SearchLauncher()
        self._kept: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def list_runs(self) -> list[RunSummary]:
        """List all runs, most recently changed first."""
        with self._lock:
            found = list(filter(None, map(self._load_run, find_run_folders(self.folder))))
        return sorted(found, key=lambda line: (-line.changed, line.name))

    def get_run(self, name: str) -> RunSummary | None:
        """Return one run; `None` if it does not exist, or cannot be read."""
        with self._lock:
            return self._load_run(self.folder / name)

    def _load_run(self, path: Path) -> RunSummary | None:
        name, stamp = path.relative_to(self.folder).as_posix(), state_stamp(path)
        if stamp is None:
            return None
        try:
            with readable():
                if name not in self._kept or self._kept[name][0] != stamp:
                    self._kept[name] = stamp, _extract_facts(path)
                facts, changed = self._kept[name][1], stamp[0] / 1e9
                word, details = self.find_state(path, facts)
        except UserError:
            return None
        return RunSummary(name, **facts, changed=changed, state=word, details=details)

    def find_state(self, path: Path, facts: dict[str, Any] | None = None) -> tuple[str, str]:
        """Return the state of a run and its details, as in `RunSummary`.

        Args:
            facts: Of its summary; `None` if there is none, or it cannot be read.
        """
        has_status, stamp, over = (path / STATUS_FILE).exists(), state_stamp(path), None
        if self._launcher.is_stopping(path):
            return "stopping", "finished work is stored"
        if (note := running_info(path) if has_status else None) is not None:
            return "running", describe_progress(note)
        if facts and (over := facts["over"]):
            return "finished", over
        # The process of a finished search takes a moment to end.
        if self._launcher.is_starting(path):
            return "starting", ""
        if error := read_failure(output_path(path), stamp[0] / 1e9 if stamp else 0.0):
            return "failed", error
        if facts is None:
            return ("broken" if stamp else "no such run"), ""
        # A search that ends in order removes its status file; a killed one leaves it behind.
        return "stopped", f"{'killed ' * has_status}after round {facts['iterations']}"


def _extract_facts(path: Path) -> dict[str, Any]:
    """Extract the facts of a summary from a run folder."""
    record, began = read_record(path, strict=False), path / "config.json"
    state, rounds = record.state, record.rounds
    verdict = read_verdict(state)
    highest = [max((u for u in one["utilities"] if u is not None), default=None) for one in rounds]
    trail = tuple(accumulate((u for u in highest if u is not None), max))
    strongest = verdict.strongest if verdict else None
    gain_text = format_gain(verdict, strongest) if verdict and strongest else "–"
    test = verdict.found.test if verdict else None
    position = verdict.found.position if verdict else None
    if position is None and record.highest:
        _, (t, i) = min(record.highest.values(), key=lambda one: (-one[0], one[1]))
        position = rounds[t]["positions"][i]
    return {
        "task": str(state["identity"].get("task.name") or "–"),
        "score": verdict.dev.utility if verdict else trail[-1] if trail else None,
        "gain": strongest.gain.difference if strongest and strongest.gain else None,
        "gain_text": gain_text + " (one answer)" * bool(test and test.one_answer),
        "best": describe_position(state["experts"], position, state["groups"]) if position else "",
        "trail": trail,
        "seconds": record.path.stat().st_mtime - began.stat().st_mtime if began.is_file() else 0.0,
        "iterations": max(0, len(rounds) - 1),
        "over": state["finished"] if verdict else None,
    }


def describe_progress(note: dict[str, Any]) -> str:
    """Describe the progress of a running search in a few words."""
    stage, maximum = str(note.get("activity", "begins")), note.get("max_iterations")
    if maximum:
        limit = f" of at most {maximum}"
        if (spent := note.get("budget_share")) is not None:  # a budget usually ends a search first
            limit = f" ({100 * spent:.0f} % of the budget)"
        stage = re.sub(rf"^round {note.get('iteration')}\b", rf"\g<0>{limit}", stage)
    done, total = note.get("done"), note.get("total")
    return f"{stage}, {done} of {total} items" if total else stage


@dataclass
class AppState:
    """State that all pages share.

    Attributes:
        folder: Folder in which the application was started; searches start in it, too.
        pool, base, device: For local model names, as in `swarm.registry.registry.Roster`.
        config_dir: Folder of further configuration options, such as tasks, of searches.
    """

    folder: Path
    pool: str = "initial_experts"
    base: str | None = None
    device: str | None = None
    config_dir: Path | None = None

    def __post_init__(self) -> None:
        self.runs_folder = self.folder / RUNS_FOLDER
        self.launcher = SearchLauncher()
        self.run_index = RunIndex(self.runs_folder, self.launcher)

    @cached_property
    def roster(self) -> "Roster":
        """Models by name, shared by all pages so that each is loaded only once."""
        from swarm.registry.registry import Roster

        return Roster(base=self.base, pool=self.pool, device=self.device)

    def run_path(self, name: str) -> Path:
        """Return the folder of a run, which may not exist.

        Args:
            name: Name of the run folder; for a search in a sweep, "SWEEP/SEARCH".

        Raises:
            UserError: The name is not valid for a folder.
        """
        parts = name.split("/")
        if len(parts) > 2 or not all(map(RUN_NAME_PATTERN.fullmatch, parts)):
            raise UserError(f"{name!r:.80} is not a run name; allowed: the name of a folder")
        return self.runs_folder / name
