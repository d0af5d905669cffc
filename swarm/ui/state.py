"""State that all pages share: run folder, search launcher and models."""

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One-line summary of a run.

    Attributes:
        best, gain: Best on dev, and gain over the strongest alternative on test; `None` if unknown.
        gain_text: The gain with its 95 % interval; the suffix "(one answer)" marks a best found
            that gives only one answer in some domain.
        iterations: Number of finished iterations.
        over: Reason of the end; `None` before it.
        changed: Time of the last change, in seconds since 1970.
        state: "running", "finished", "stopped" or "failed".
        details: Details on the state: progress, reason of the end, or error.
    """

    name: str
    task: str
    best: float | None
    gain: float | None
    gain_text: str
    iterations: int
    over: str | None
    changed: float
    state: str
    details: str

    def to_row(self) -> dict[str, Any]:
        """Return the row of a table; `group` is the folder of the run's sweep or study."""
        return asdict(self) | {
            "best_text": format_number(self.best),
            "when": f"{datetime.fromtimestamp(self.changed):%Y-%m-%d %H:%M}",
            "group": self.name.rpartition("/")[0],
            "trials": 0,
        }


class RunIndex:
    """Index of the runs in a folder; only runs that changed since the last call are read.

    Args:
        folder: Folder that contains the runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def list_runs(self) -> list[RunSummary]:
        """List all runs, most recently changed first."""
        with self._lock:
            found = list(filter(None, map(self._load_run, find_run_folders(self.folder))))
        return sorted(found, key=lambda line: (-line.changed, line.name))

    def get_run(self, name: str) -> RunSummary | None:
        """Return one run; `None` if it does not exist."""
        with self._lock:
            return self._load_run(self.folder / name)

    def _load_run(self, path: Path) -> RunSummary | None:
        name, stamp = path.relative_to(self.folder).as_posix(), state_stamp(path)
        if stamp is None:
            return None
        try:
            with readable():
                if name not in self._kept or self._kept[name][0] != stamp:
                    state = read_record(path, strict=False).state
                    self._kept[name] = stamp, _extract_facts(state)
                facts, changed = self._kept[name][1], stamp[0] / 1e9
                word, details = _run_state(path, facts, changed)
        except UserError:
            return None
        return RunSummary(name, **facts, changed=changed, state=word, details=details)


def _extract_facts(state: dict[str, Any]) -> dict[str, Any]:
    """Extract the facts of a summary from a state."""
    verdict = read_verdict(state)
    utilities = [u for entry in state["rounds"] for u in entry["utilities"] if u is not None]
    strongest = verdict.strongest if verdict else None
    gain_text = format_gain(verdict, strongest) if verdict and strongest else "–"
    test = verdict.found.test if verdict else None
    return {
        "task": str(state["identity"].get("task.name") or "–"),
        "best": verdict.dev.utility if verdict else max(utilities, default=None),
        "gain": strongest.gain.difference if strongest and strongest.gain else None,
        "gain_text": gain_text + " (one answer)" * bool(test and test.one_answer),
        "iterations": max(0, len(state["rounds"]) - 1),
        "over": state["finished"] if verdict else None,
    }


def _run_state(path: Path, facts: dict[str, Any], changed: float) -> tuple[str, str]:
    """Return the state of a run and its details, as in `RunSummary`."""
    has_status = (path / STATUS_FILE).exists()
    if has_status and (note := running_info(path)) is not None:
        return "running", describe_progress(note)
    if facts["over"]:
        return "finished", facts["over"]
    if error := read_failure(output_path(path), changed):
        return "failed", error
    # A search that ends in order removes its status file; a killed one leaves it behind.
    return "stopped", f"{'killed ' * has_status}after iteration {facts['iterations']}"


def describe_progress(note: dict[str, Any]) -> str:
    """Describe the progress of a running search in a few words."""
    stage, maximum = str(note.get("activity", "begins")), note.get("max_iterations")
    if maximum:
        limit = f" of at most {maximum}"
        if (spent := note.get("budget_share")) is not None:  # a budget usually ends a search first
            limit = f" ({100 * spent:.0f} % of the budget)"
        stage = re.sub(rf"^iteration {note.get('iteration')}\b", rf"\g<0>{limit}", stage)
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
        self.run_index, self.launcher = RunIndex(self.runs_folder), SearchLauncher()

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
