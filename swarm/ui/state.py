"""State that all pages share: run folder, search launcher and models."""

import re
import shutil
import threading
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.terminal import format_number
from swarm.errors import UserError
from swarm.runs.folder import RUNS_FOLDER, find_run_folders, is_run_folder, read_record, state_stamp
from swarm.runs.lock import STATUS_FILE, STUDY_LOCK_FILE, running_info
from swarm.runs.verdict import format_gain, read_verdict
from swarm.ui.launcher import SearchLauncher, output_path, read_failure

if TYPE_CHECKING:
    from swarm.registry.registry import Roster

FileStamp = tuple[int, int]

UNREADABLE_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""Exceptions raised by reading a folder whose files are not in the expected format."""


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
        raise UserError(
            f"{run.parent.name}/{run.name} belongs to {run.parent.name}, whose results need it"
        )
    try:
        shutil.rmtree(run)
    except OSError as error:
        raise UserError(f"{run.name} cannot be deleted: {error.strerror}") from None
    output_path(run).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One-line summary of a run.

    Attributes:
        state: "running", "finished", "stopped" or "failed".
        details: Details on the state: progress, reason of the end, or error.
        best, gain: Best on dev, and gain over the strongest alternative on test; `None` if unknown.
        gain_text: The gain with its 95 % interval; the suffix "(one answer)" marks a best found
            that gives only one answer in some domain.
        iterations: Number of finished iterations.
        changed: Time of the last change, in seconds since 1970.
    """

    name: str
    task: str
    state: str
    details: str
    best: float | None
    gain: float | None
    gain_text: str
    iterations: int
    changed: float

    @property
    def group(self) -> str:
        """Folder of the sweep, study or comparison that the run belongs to; empty for none."""
        return self.name.rpartition("/")[0]

    def to_row(self) -> dict[str, Any]:
        """Return the row of a table."""
        changed = datetime.fromtimestamp(self.changed).strftime("%Y-%m-%d %H:%M")
        return {
            "name": self.name,
            "task": self.task,
            "state": self.state,
            "details": self.details,
            "best": self.best,
            "best_text": format_number(self.best),
            "gain": self.gain,
            "gain_text": self.gain_text,
            "iterations": self.iterations,
            "changed": self.changed,
            "when": changed,
            "group": self.group,
            "trials": 0,
        }


class RunIndex:
    """Index of the runs in a folder; only runs that changed since the last call are read.

    Args:
        folder: Folder that contains the runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[str, tuple[FileStamp, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def list_runs(self) -> list[RunSummary]:
        """List all runs, most recently changed first."""
        with self._lock:
            found = [
                line for path in find_run_folders(self.folder) if (line := self._load_run(path))
            ]
        return sorted(found, key=lambda line: (-line.changed, line.name))

    def get_run(self, name: str) -> RunSummary | None:
        """Return one run; `None` if it does not exist."""
        with self._lock:
            return self._load_run(self.folder / name)

    def _load_run(self, path: Path) -> RunSummary | None:
        name = path.relative_to(self.folder).as_posix()
        if (stamp := state_stamp(path)) is None:
            return None
        try:
            if name not in self._kept or self._kept[name][0] != stamp:
                state = read_record(path, strict=False).state
                if "identity" not in state:
                    return None
                self._kept[name] = stamp, _extract_facts(state)
        except UNREADABLE_ERRORS:
            return None
        state = _run_state(path, self._kept[name][1], stamp[0] / 1e9)
        return RunSummary(name=name, **state)


def _extract_facts(state: dict[str, Any]) -> dict[str, Any]:
    """Extract the facts of a summary from a state."""
    verdict = read_verdict(state)
    utilities = [u for entry in state["rounds"] for u in entry["utilities"] if u is not None]
    strongest = verdict.strongest if verdict else None
    gain_text = format_gain(verdict, strongest) if verdict and strongest else "–"
    test = verdict.found.test if verdict else None
    gain_text += " (one answer)" * bool(test and test.one_answer)
    return {
        "task": str(state["identity"].get("task.name") or "–"),
        "best": verdict.dev.utility if verdict else max(utilities, default=None),
        "gain": strongest.gain.difference if strongest and strongest.gain else None,
        "gain_text": gain_text,
        "iterations": max(0, len(state["rounds"]) - 1),
        "over": state["finished"] if verdict else None,
    }


def _run_state(path: Path, facts: dict[str, Any], changed: float) -> dict[str, Any]:
    """Add the state of a run to its facts: running, finished, failed or stopped."""
    rest = {key: value for key, value in facts.items() if key != "over"}
    rest["changed"] = changed
    has_status = (path / STATUS_FILE).exists()
    note = running_info(path) if has_status else None
    if note is not None:
        return {**rest, "state": "running", "details": describe_progress(note)}
    if facts["over"]:
        return {**rest, "state": "finished", "details": facts["over"]}
    if error := read_failure(output_path(path), changed):
        return {**rest, "state": "failed", "details": error}
    # A search that ends in order removes its status file; a killed one leaves it behind.
    after = f"{'killed ' if has_status else ''}after iteration {facts['iterations']}"
    return {**rest, "state": "stopped", "details": after}


def describe_progress(note: dict[str, Any]) -> str:
    """Describe the progress of a running search in a few words."""
    stage, maximum = str(note.get("activity", "begins")), note.get("max_iterations")
    if maximum:
        number = f"iteration {note.get('iteration')}"
        spent = note.get("budget_share")
        limit = f" of at most {maximum}"
        if isinstance(spent, int | float):  # a budget usually ends a search first
            limit = f" ({100 * spent:.0f} % of the budget)"
        stage = re.sub(rf"^{number}\b", f"{number}{limit}", stage)
    done, total = note.get("done"), note.get("total")
    return f"{stage}, {done} of {total} items" if total else stage


RUN_NAME_PATTERN = re.compile(r"[^/\\\x00-\x1f]+")


class AppState:
    """State that all pages share.

    Args:
        folder: Folder in which the application was started; searches start in it, too.
        pool, base, device: For local model names, as in `swarm.registry.registry.Roster`.
        config_dir: Folder of further configuration options, such as tasks, of searches.
    """

    def __init__(
        self,
        folder: Path,
        pool: str = "initial_experts",
        base: str | None = None,
        device: str | None = None,
        config_dir: Path | None = None,
    ) -> None:
        self.folder, self.pool, self.base, self.device = folder, pool, base, device
        self.config_dir = config_dir

    @property
    def runs_folder(self) -> Path:
        """Folder of the runs."""
        return self.folder / RUNS_FOLDER

    @cached_property
    def run_index(self) -> RunIndex:
        """Index of the runs."""
        return RunIndex(self.runs_folder)

    @cached_property
    def launcher(self) -> SearchLauncher:
        """Launcher of searches."""
        return SearchLauncher()

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
        if len(parts) > 2 or not all(
            RUN_NAME_PATTERN.fullmatch(one) and one[0] != "." for one in parts
        ):
            raise UserError(f"{name!r:.80} is not a run name; allowed: the name of a folder")
        return self.runs_folder / name
