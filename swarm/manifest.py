"""What a run folder's files have to be: state.json and its journal, and checksums of the others.

state.json is a snapshot of the state, with its own checksum in its last line. The iterations since
are lines of rounds.jsonl, each with a checksum: an iteration writes the same number of bytes
however many there were before. `read_state` puts both together.

checksums.txt has a line for each file that is written once or replaced whole (answers, saved
bests, configuration), as sha256sum writes and checks it. The line of a file that is about to be
replaced is taken out first, so that a kill leaves a file without a line and never a wrong line:
a file that differs from its line, or is gone, was damaged. The answers of an iteration are
appended, with a checksum of all lines above.
"""

import hashlib
import json
import marshal
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.files import append, as_json, file_hash, read_bytes, write_whole

NAME = "checksums.txt"

STATE = "state.json"

JOURNAL = "rounds.jsonl"
"""The iterations since state.json was written; absent where there are none."""

SEAL = b'\n "checksum": "%s"\n}\n'

LINE_SEAL = b', "checksum": "%s"}'
"""What ends a line of the journal; the checksum is of the line without it."""

KINDS: dict[str, Any] = {
    **dict.fromkeys(("identity", "chosen"), dict),
    **dict.fromkeys(("experts", "rounds", "groups"), list),
    **dict.fromkeys(("optimizer", "metrics"), dict | None),
    "finished": str | None,
    "own": int,
}
"""Types of a state's parts."""

LAST = "# of the lines above: "
"""What begins a line with the checksum of all lines above; sha256sum takes it for a comment."""

RETRY_S = 0.05
"""Seconds after which a reader looks again at a file that a search may be writing to."""

MEND = "the command that began the search mends what can be mended"


class Manifest:
    """The checksums of a run folder's files.

    Attributes:
        sums: SHA-256 by path from the folder.
        lost: Whether the file was missing or damaged when it was read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sums: dict[str, str] = {}
        self.lost = False
        self._depth = 0
        self._above: Any = None  # hashlib's, of what is in the file; None: not written by us

    def read(self) -> "Manifest":
        """Read the file; gives the manifest itself."""
        self._above = None
        try:
            text = read_bytes(self.folder / NAME).decode()
        except (OSError, UnicodeDecodeError):
            text = ""
        above, found, sealed_to = hashlib.sha256(), {}, 0
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if line == f"{LAST}{above.hexdigest()}\n":
                sealed_to = number
            elif not line.startswith("#"):
                digest, _, path = line.rstrip("\n").partition("  ")
                found[path] = digest
            above.update(line.encode())
        self.lost = not lines or sealed_to < len(lines)
        self.sums = {} if self.lost else found
        return self

    def save(self) -> None:
        """Replace the file, sorted by path: the same files give the same bytes."""
        above = hashlib.sha256()
        lines = "".join(f"{self.sums[path]}  {path}\n" for path in sorted(self.sums))
        text = _with_seal(above, lines)
        self._above = None
        write_whole(self.folder / NAME, text)
        self._above = above

    def append(self, place: str) -> None:
        """Take the checksum of a new file and add it at the end of the checksums."""
        new, above, self._above = place not in self.sums, self._above, None
        self.add(place)
        if above is None or not new:
            self.save()
            return
        append(self.folder / NAME, _with_seal(above, f"{self.sums[place]}  {place}\n"))
        self._above = above

    def under(self, place: str) -> list[str]:
        """The paths with a checksum that are `place` or below it."""
        return [path for path in self.sums if path == place or path.startswith(f"{place}/")]

    def under_any(self, places: Iterable[str]) -> set[str]:
        """As `under`, of any of the places."""
        wanted = set(places)
        return {path for path in self.sums if path in wanted or not wanted.isdisjoint(_above(path))}

    def add(self, place: str) -> None:
        """Take the checksum of a file, or of all files in a folder, if it is there."""
        whole = self.folder / place
        files = sorted(whole.iterdir()) if whole.is_dir() else [whole]
        for file in files:
            if file.is_file():
                self.sums[file.relative_to(self.folder).as_posix()] = file_hash(file)

    def drop(self, *places: str) -> bool:
        """Forget files; True if any of them had a checksum."""
        known = self.under_any(places)
        for path in known:
            del self.sums[path]
        return bool(known)

    @contextmanager
    def rewriting(self, *places: str) -> Iterator[None]:
        """Files or folders are replaced inside; saved before and after, inner ones with the outer.

        What is raised inside leaves them without checksums.
        """
        if self.drop(*places):
            self.save()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        for place in places:
            self.add(place)
        if not self._depth:
            self.save()

    def damaged(self, place: str = "") -> list[str]:
        """The files, all or those of a place, that are gone or have another content."""
        paths = self.under(place) if place else self.sums
        return sorted(path for path in paths if not self._intact(path))

    def _intact(self, path: str) -> bool:
        try:
            file = self.folder / path
            # A pipe in its place would never end.
            return file.is_file() and file_hash(file) == self.sums[path]
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return False
        except OSError as error:
            # A file that cannot be read at the moment may be whole.
            raise UserError(f"{self.folder / path} cannot be read: {error.strerror}") from None


def verify(file: Path) -> None:
    """See that a file or a folder of a run is as the search wrote it; others are let pass.

    Raises:
        UserError: It is not, or the run has lost its checksums.
    """
    whole = file.absolute()
    for run in (whole.parent, whole.parent.parent):
        if (run / STATE).is_file() or (run / NAME).is_file():
            place = whole.relative_to(run).as_posix()
            if wrong := _manifest(run).damaged(place):
                # A search at work may have replaced it since.
                wrong = _manifest(run).damaged(place)
            if wrong:
                raise UserError(f"{run / wrong[0]} is damaged or missing; {MEND}")
            return


def _manifest(run: Path) -> Manifest:
    """The manifest of a run.

    Raises:
        UserError: It is lost, and the state says that there has been one.
    """
    found = Manifest(run).read()
    if found.lost and (run / NAME).is_file():
        time.sleep(RETRY_S)
        found.read()
    if found.lost and (unsealed(run / STATE) or {}).get("versions"):
        if not (run / "answers").exists():
            return found  # before its first round a search has nothing to check
        raise UserError(f"{run / NAME} is damaged or missing; {MEND}")
    return found


def sealed(state: dict[str, Any]) -> bytes:
    """A state as the text of its file, whose last line is the checksum of what is before it."""
    text = as_json({key: value for key, value in state.items() if key != "checksum"}, 1)
    return text[:-2] + b"," + SEAL % _hash(text).encode()


def unsealed(path: Path) -> dict[str, Any] | None:
    """The state in a file; `None` where there is none, or what there is was damaged.

    A state without `versions` was not written by a search of this version, and has no checksum.
    """
    try:
        data = read_bytes(path)
        state = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(state, dict):
        return None
    seal = state.pop("checksum", None)
    if seal is None:
        return None if "versions" in state or not _has_rounds(state) else state
    tail = b"," + SEAL % str(seal).encode()
    text = data.removesuffix(tail) + b"\n}"
    whole = data.endswith(tail) and re.fullmatch(r"[0-9a-f]{64}", str(seal))
    return state if whole and _hash(text) == seal else None


def _has_rounds(state: dict[str, Any]) -> bool:
    """Whether a state without a checksum has the types that a search writes."""
    if not all(isinstance(state[key], kind) for key, kind in KINDS.items() if key in state):
        return False
    return all(
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), list) for name in ("positions", "utilities"))
        and len(entry["positions"]) == len(entry["utilities"])
        for entry in state.get("rounds", [])
    )


def answers_place(iteration: int) -> str:
    """Where the answers of an iteration are, from the run folder."""
    return f"answers/iteration_{iteration:04d}.json.gz"


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state of a run, of a search under way too; `None` as `unsealed` has it.

    Raises:
        UserError: The journal is damaged.
    """
    state, damage = replay(folder)
    if damage:
        raise UserError(f"{folder / JOURNAL} is damaged or missing ({damage}); {MEND}")
    return state


def replay(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The state of a run up to the first bad line of its journal, and what is wrong there.

    A last line without an end is one that is being written, or that a kill cut off, and no damage.

    Returns:
        The state, `None` as `unsealed` has it, and the damage in words, empty where there is none.
    """
    done, unread = -1, ""
    while True:
        # The journal first: lines that a search takes into its state meanwhile are in both.
        try:
            journal = read_bytes(folder / JOURNAL)
        except FileNotFoundError:
            journal = b""
        except OSError as error:
            journal, unread = b"", error.strerror or str(error)
        state = unsealed(folder / STATE)
        rounds = (state or {}).get("rounds")
        if state is None or not isinstance(rounds, list) or not rounds:
            return state, ""
        if unread:
            return state, unread
        entries, damage = _entries(journal, len(rounds))
        for entry in entries:
            rounds.append(entry["round"])
            apply_difference(state["optimizer"], entry["optimizer"])
        # The answers of an iteration are written after the line of the one before. Where a search
        # at work has written both since, more rounds are read the next time.
        if damage or not (folder / answers_place(len(rounds) + 1)).exists():
            return state, damage
        if len(rounds) == done:
            return state, f"no line of iteration {done}, which has answers"
        done = len(rounds)


def state_stamp(folder: Path) -> tuple[int, int] | None:
    """What changes with the state of a run: nanoseconds of its last change, and bytes.

    Returns:
        `None` where there is no state.
    """
    about = []
    for name in (STATE, JOURNAL):
        try:
            about.append((folder / name).stat())
        except OSError:
            if not about:
                return None
    return max(one.st_mtime_ns for one in about), sum(one.st_size for one in about)


def journal_line(iteration: int, entry: dict[str, Any], change: dict[str, Any]) -> bytes:
    """An iteration as a line of the journal.

    Args:
        entry: What the state's `rounds` has of it.
        change: Of the optimizer's state, as `difference` gives it.
    """
    text = as_json({"iteration": iteration, "round": entry, "optimizer": change})
    return text[:-1] + LINE_SEAL % _hash(text).encode() + b"\n"


def _entries(journal: bytes, done: int) -> tuple[list[dict[str, Any]], str]:
    """The lines of a journal that follow `done` iterations, up to the first bad one, and that."""
    found: list[dict[str, Any]] = []
    *lines, _ = journal.split(b"\n")
    for number, line in enumerate(lines, 1):
        entry = _entry(line)
        if entry is None or entry["iteration"] > done + len(found):
            return found, f"line {number}"
        if entry["iteration"] == done + len(found):
            found.append(entry)
    return found, ""


def _entry(line: bytes) -> dict[str, Any] | None:
    text, seal = line[: -len(LINE_SEAL % bytes(64))] + b"}", line[-len(LINE_SEAL % bytes(64)) :]
    if seal != LINE_SEAL % _hash(text).encode():
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What makes `new` of `old`, both as JSON has them; small where lists grew at their ends.

    Returns:
        `gone` (keys), `set` (values by key), `added` (what is new at the end of a list, by key)
        and `inside` (differences of objects, by key), each only where there is one.
    """
    gone = [key for key in old if key not in new]
    changed: dict[str, Any] = {}
    added: dict[str, Any] = {}
    inside: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := difference(before, value):
                inside[key] = inner
        elif key not in old or not _begins(value, before):
            changed[key] = value
        elif isinstance(value, list) and len(value) > len(before or ()):
            added[key] = value[len(before or ()) :]
    parts = {"gone": gone, "set": changed, "added": added, "inside": inside}
    return {name: part for name, part in parts.items() if part}


def apply_difference(state: dict[str, Any], change: dict[str, Any]) -> None:
    """Change a state in place, as `difference` says."""
    for key in change.get("gone", ()):
        state.pop(key, None)
    state.update(change.get("set", {}))
    for key, tail in change.get("added", {}).items():
        state[key] += tail
    for key, inner in change.get("inside", {}).items():
        apply_difference(state[key], inner)


def _begins(value: Any, before: Any) -> bool:
    """Whether a value is the one before, or a list that begins with it; 0.0 and -0.0 differ."""
    if isinstance(value, list) and isinstance(before, list):
        value = value[: len(before)]
    try:
        return marshal.dumps(value, 2) == marshal.dumps(before, 2)
    except ValueError:
        return False


def _above(path: str) -> list[str]:
    """The folders that a path is in."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _with_seal(above: Any, lines: str) -> bytes:
    """Lines and their seal, which are added to the hash of what is above."""
    above.update(lines.encode())
    seal = f"{LAST}{above.hexdigest()}\n"
    above.update(seal.encode())
    return f"{lines}{seal}".encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
