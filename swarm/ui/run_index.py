"""The runs of a folder, read again only where they changed; no widgets here."""

import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from swarm.runs.lock import STATUS_FILE, running_info
from swarm.runs.manifest import replay, state_stamp
from swarm.stats.format import format_number, format_signed
from swarm.ui.launcher import output_path, read_failure

FileStamp = tuple[int, int]

UNREADABLE_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What reading a folder raises whose files are not what a search writes."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What is told of a run in one line.

    Attributes:
        state: "running", "finished", "stopped" or "failed".
        why: What the search says of that: how far it is, why it ended, its error.
        best, gain: On dev, and of the best found over the best expert on test; `None`: not known.
        gain_text: The gain with its 95 % interval; "(one answer)" behind it says that the best
            found gives one answer throughout a domain.
        iterations: Done.
        changed: Seconds since 1970.
    """

    name: str
    task: str
    state: str
    why: str
    best: float | None
    gain: float | None
    gain_text: str
    iterations: int
    changed: float

    def to_row(self) -> dict[str, Any]:
        """As a table takes it."""
        when = datetime.fromtimestamp(self.changed).strftime("%Y-%m-%d %H:%M")
        return {
            "name": self.name,
            "task": self.task,
            "state": self.state,
            "why": self.why,
            "best": self.best,
            "best_text": format_number(self.best),
            "gain": self.gain,
            "gain_text": self.gain_text,
            "iterations": self.iterations,
            "changed": self.changed,
            "when": when,
        }


class RunIndex:
    """The runs in a folder; of hundreds, only those are read that changed since the last time.

    Args:
        folder: Where the runs lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[str, tuple[FileStamp, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def list_runs(self) -> list[RunSummary]:
        """All runs, the one that changed last first."""
        with self._lock:
            found = [line for path in self._candidate_folders() if (line := self._load_run(path))]
        return sorted(found, key=lambda line: (-line.changed, line.name))

    def get_run(self, name: str) -> RunSummary | None:
        """One run; `None` where there is none."""
        with self._lock:
            return self._load_run(self.folder / name)

    def _candidate_folders(self) -> list[Path]:
        """The folders that may be runs: those here, and of one that is none, those in it."""
        found = []
        for one in _visible_entries(self.folder):
            found += [one] if (one / "state.json").exists() else _visible_entries(one)
        return found

    def _load_run(self, path: Path) -> RunSummary | None:
        name = path.relative_to(self.folder).as_posix()
        if (stamp := state_stamp(path)) is None:
            return None
        try:
            if name not in self._kept or self._kept[name][0] != stamp:
                self._kept[name] = stamp, _extract_facts(replay(path)[0] or {})
        except UNREADABLE_ERRORS:
            return None
        return RunSummary(name=name, **_run_state(path, self._kept[name][1], stamp[0] / 1e9))


def _visible_entries(folder: Path) -> list[Path]:
    try:
        return [one for one in folder.iterdir() if not one.name.startswith(".")]
    except OSError:
        return []


def _extract_facts(state: dict[str, Any]) -> dict[str, Any]:
    """What a line needs of a state."""
    metrics = state["metrics"] or {}
    known = [u for entry in state["rounds"] for u in entry["utilities"] if u is not None]
    gain, ends = metrics.get("test_gain"), metrics.get("test_gain_interval", (0.0, 0.0))
    told = (
        "–"
        if gain is None
        else f"{format_signed(gain)} [{format_signed(ends[0])}, {format_signed(ends[1])}]"
    )
    told += " (one answer)" * bool(metrics.get("ending_best_single_test_one_answer"))
    return {
        "task": str(state["identity"].get("task.name") or "–"),
        "best": metrics.get("ending_best_validation_utility", max(known, default=None)),
        "gain": gain,
        "gain_text": told,
        "iterations": max(0, len(state["rounds"]) - 1),
        "over": state["finished"] if metrics else None,
    }


def _run_state(path: Path, facts: dict[str, Any], changed: float) -> dict[str, Any]:
    """What is known of a run besides: whether somebody works on it."""
    rest = {key: value for key, value in facts.items() if key != "over"}
    rest["changed"] = changed
    left = (path / STATUS_FILE).exists()
    note = running_info(path) if left else None
    if note is not None:
        return {**rest, "state": "running", "why": describe_progress(note)}
    if facts["over"]:
        return {**rest, "state": "finished", "why": facts["over"]}
    if error := read_failure(output_path(path), changed):
        return {**rest, "state": "failed", "why": error}
    # Who ends in order takes its note along.
    after = f"{'killed ' if left else ''}after iteration {facts['iterations']}"
    return {**rest, "state": "stopped", "why": after}


def describe_progress(note: dict[str, Any]) -> str:
    """How far a running search is, in a few words."""
    what, most = str(note.get("what", "begins")), note.get("most")
    if most and what == f"iteration {note.get('iteration')}":
        what += f" of at most {most}"
    done, total = note.get("done"), note.get("total")
    return f"{what}, {done} of {total} items" if total else what
