"""Integrity of a run folder: state.json and its journal, and checksums of the other files.

state.json is a snapshot of the state, with its own checksum in its last line. The iterations since
are lines of rounds.jsonl, each with a checksum: an iteration writes the same number of bytes
regardless of the number of earlier ones. `read_state` combines both.

checksums.txt has a line for each file that is written once or replaced completely (answers, saved
bests, configuration), in the format of sha256sum. The line of a file is removed before the file is
replaced, so that a kill leaves a file without a line and never a wrong line: a file that differs
from its line, or is missing, was damaged. The answers of an iteration are appended, with a checksum
of all lines above.

An iteration is written in this order: its answers, its line of the journal, the checksum of its
answers. A kill may thus leave answers without a line, but never a checksum without one: a checksum
without a line shows that the end of the journal was lost.
"""

import hashlib
import marshal
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm._util.files import append, encode_json, hash_file, parse_json, read_bytes, write_atomic
from swarm.errors import UserError

MANIFEST_FILE = "checksums.txt"

STATE_FILE = "state.json"

JOURNAL = "rounds.jsonl"
"""The iterations since state.json was written; absent if there are none."""

SEALED_FILES = (MANIFEST_FILE, JOURNAL)
"""Files that only versions write whose state has a checksum."""

CHECKSUM_LINE = b'\n "checksum": "%s"\n}\n'

LINE_SEAL = b', "checksum": "%s"}'
"""End of a journal line; the checksum is of the line without it."""

KINDS: dict[str, Any] = {
    **dict.fromkeys(("identity", "chosen"), dict),
    **dict.fromkeys(("experts", "rounds", "groups"), list),
    **dict.fromkeys(("optimizer", "verdict"), dict | None),
    "finished": str | None,
    "own": int,
}
"""Types of a state's values, by key."""

MANIFEST_CHECKSUM_PREFIX = "# of the lines above: "
"""Prefix of a line with the checksum of all lines above; a comment for sha256sum."""

RETRY_S = 0.05
"""Seconds after which a reader retries a file that a search may be writing."""

REPAIR_HINT = "rerun the search's command to repair it"


class Manifest:
    """The checksums of a run folder's files.

    Attributes:
        sums: SHA-256 by path relative to the folder.
        lost: Whether the file was missing or damaged when it was read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sums: dict[str, str] = {}
        self.lost = False
        self._depth = 0
        self._above: Any = None  # hash of the file's content; None: not written by this process

    def read(self) -> "Manifest":
        """Read the file; return the manifest itself."""
        self._above = None
        try:
            text = read_bytes(self.folder / MANIFEST_FILE).decode()
        except (OSError, UnicodeDecodeError):
            text = ""
        above, found, sealed_to = hashlib.sha256(), {}, 0
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if line == f"{MANIFEST_CHECKSUM_PREFIX}{above.hexdigest()}\n":
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
        write_atomic(self.folder / MANIFEST_FILE, text)
        self._above = above

    def append(self, path: str) -> None:
        """Compute the checksum of a new file and append it to the file of checksums."""
        new, above, self._above = path not in self.sums, self._above, None
        self.add_checksums(path)
        if above is None or not new:
            self.save()
            return
        append(self.folder / MANIFEST_FILE, _with_seal(above, f"{self.sums[path]}  {path}\n"))
        self._above = above

    def paths_under(self, prefix: str) -> list[str]:
        """Return the paths with a checksum that are `prefix` or below it."""
        return [path for path in self.sums if path == prefix or path.startswith(f"{prefix}/")]

    def paths_under_any(self, prefixes: Iterable[str]) -> set[str]:
        """Return the paths as `paths_under`, for any of the places."""
        wanted = set(prefixes)
        return {path for path in self.sums if path in wanted or not wanted.isdisjoint(_above(path))}

    def add_checksums(self, prefix: str) -> None:
        """Compute the checksum of a file, or of all files in a folder, if it exists."""
        full_path = self.folder / prefix
        files = sorted(full_path.rglob("*")) if full_path.is_dir() else [full_path]
        for file in files:
            if file.is_file():
                self.sums[file.relative_to(self.folder).as_posix()] = hash_file(file)

    def remove_paths(self, *prefixes: str) -> bool:
        """Remove files; return True if any of them had a checksum."""
        known = self.paths_under_any(prefixes)
        for path in known:
            del self.sums[path]
        return bool(known)

    @contextmanager
    def updating_checksums(self, *prefixes: str) -> Iterator[None]:
        """Replace files or folders inside the context; the manifest is saved before and after.

        Nested contexts are saved with the outer one. After an exception the files have no
        checksums.
        """
        if self.remove_paths(*prefixes):
            self.save()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        for prefix in prefixes:
            self.add_checksums(prefix)
        if not self._depth:
            self.save()

    def find_damaged(self, prefix: str = "") -> list[str]:
        """Return the files, all or those of a place, that are missing or have changed."""
        paths = self.paths_under(prefix) if prefix else self.sums
        return sorted(path for path in paths if not self._is_intact(path))

    def _is_intact(self, path: str) -> bool:
        try:
            file = self.folder / path
            # is_file() first: reading a pipe would block forever.
            return file.is_file() and hash_file(file) == self.sums[path]
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return False
        except OSError as error:
            # A temporarily unreadable file may be intact, so do not report it as damaged.
            raise UserError(f"{self.folder / path} cannot be read: {error.strerror}") from None


def verify_run_file(file: Path) -> None:
    """Check that a file or a folder of a run is unchanged; files outside of runs are not checked.

    Raises:
        UserError: It has changed, or the run has lost its checksums.
    """
    full_path = file.absolute()
    # As deep as particle_0/personal_best/ROUTE/adapter_model.safetensors.
    for run in full_path.parents[:4]:
        if (run / STATE_FILE).is_file() or (run / MANIFEST_FILE).is_file():
            relative = full_path.relative_to(run).as_posix()
            if damaged := _load_manifest(run).find_damaged(relative):
                # A running search may have replaced the file in between: read the manifest again.
                damaged = _load_manifest(run).find_damaged(relative)
            if damaged:
                raise UserError(f"{run / damaged[0]} is damaged or missing; {REPAIR_HINT}")
            return


def _load_manifest(run: Path) -> Manifest:
    """Read the manifest of a run.

    Raises:
        UserError: It is lost although the state shows that there was one.
    """
    found = Manifest(run).read()
    if found.lost and (run / MANIFEST_FILE).is_file():
        time.sleep(RETRY_S)
        found.read()
    if found.lost and (read_sealed_state(run / STATE_FILE) or {}).get("versions"):
        if not (run / "answers").exists():
            return found  # before its first iteration a search has nothing to check
        raise UserError(f"{run / MANIFEST_FILE} is damaged or missing; {REPAIR_HINT}")
    return found


def encode_state(state: dict[str, Any]) -> bytes:
    """Encode a state; the last line is the checksum of the preceding text."""
    text = encode_json({key: value for key, value in state.items() if key != "checksum"}, 1)
    return text[:-2] + b"," + CHECKSUM_LINE % _hash_bytes(text).encode()


def read_sealed_state(path: Path) -> dict[str, Any] | None:
    """Read a state file; return `None` if it is missing or damaged.

    Only states of versions that wrote no checksums at all may lack one.
    """
    try:
        data = read_bytes(path)
        state = parse_json(data)
    except (OSError, ValueError):
        return None
    if not isinstance(state, dict):
        return None
    seal = state.pop("checksum", None)
    if seal is None:
        newer = "versions" in state or any((path.parent / name).exists() for name in SEALED_FILES)
        return None if newer or not _has_rounds(state) else state
    tail = b"," + CHECKSUM_LINE % str(seal).encode()
    text = data.removesuffix(tail) + b"\n}"
    complete = data.endswith(tail) and re.fullmatch(r"[0-9a-f]{64}", str(seal))
    return state if complete and _hash_bytes(text) == seal else None


def _has_rounds(state: dict[str, Any]) -> bool:
    """Return whether a state without a checksum has the types that a search writes."""
    if not all(isinstance(state[key], kind) for key, kind in KINDS.items() if key in state):
        return False
    return all(
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), list) for name in ("positions", "utilities"))
        and len(entry["positions"]) == len(entry["utilities"])
        for entry in state.get("rounds", [])
    )


def answers_path(iteration: int) -> str:
    """Return the path of an iteration's answers, relative to the run folder."""
    return f"answers/iteration_{iteration:04d}.json.gz"


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of a run, also of a running one; `None` as for `read_sealed_state`.

    Raises:
        UserError: The journal is damaged.
    """
    state, damage = replay(folder)
    if damage:
        raise UserError(f"{folder / JOURNAL} is damaged or missing ({damage}); {REPAIR_HINT}")
    return state


def replay(folder: Path, limit: int | None = None) -> tuple[dict[str, Any] | None, str]:
    """Return a run's state up to the first bad line of its journal, and the damage there.

    An unterminated last line is being written, or was cut off by a kill, and is not damage.

    Args:
        limit: Number of iterations after which the rest of the journal is ignored, damaged or not.

    Returns:
        The state, `None` as for `read_sealed_state`, and a description of the damage, or "".
    """
    last_iteration, unread = -1, ""
    while True:
        # In the reverse of the order of writing: what an earlier file refers to is in a later one,
        # also while a search writes. A line moves from the journal to the state.
        sums = Manifest(folder).read().sums
        try:
            journal = read_bytes(folder / JOURNAL)
        except FileNotFoundError:
            journal = b""
        except OSError as error:
            journal, unread = b"", error.strerror or str(error)
        state = read_sealed_state(folder / STATE_FILE)
        rounds = (state or {}).get("rounds")
        if state is None or not isinstance(rounds, list):
            return state, ""
        if unread:
            return state, unread
        entries, damage = _entries(journal, len(rounds))
        for entry in entries[: None if limit is None else max(0, limit - len(rounds))]:
            rounds.append(entry["round"])
            state["optimizer"] = state["optimizer"] or {}
            apply_difference(state["optimizer"], entry["optimizer"])
        if limit is not None:
            return state, ""
        # The answers of the iteration after the next are written after the next one's line; if a
        # running search has written both since the journal was read, the second attempt finds it.
        following = (folder / answers_path(len(rounds) + 1)).exists()
        if damage or not (following or answers_path(len(rounds)) in sums):
            return state, damage
        if len(rounds) == last_iteration:
            return state, f"no entry for iteration {last_iteration}, which has answers"
        last_iteration = len(rounds)


def state_stamp(folder: Path) -> tuple[int, int] | None:
    """Return a stamp that changes with the state of a run: modification time (ns), and bytes.

    Returns:
        `None` if there is no state.
    """
    about = []
    for name in (STATE_FILE, JOURNAL):
        try:
            about.append((folder / name).stat())
        except OSError:
            if not about:
                return None
    return max(one.st_mtime_ns for one in about), sum(one.st_size for one in about)


def journal_line(iteration: int, entry: dict[str, Any], change: dict[str, Any]) -> bytes:
    """Encode an iteration as a line of the journal.

    Args:
        entry: The iteration's entry in the state's `rounds`.
        change: Change of the optimizer's state, as returned by `difference`.
    """
    text = encode_json({"iteration": iteration, "round": entry, "optimizer": change})
    return text[:-1] + LINE_SEAL % _hash_bytes(text).encode() + b"\n"


def _entries(journal: bytes, last_iteration: int) -> tuple[list[dict[str, Any]], str]:
    """Return the entries after `last_iteration` iterations, and the first bad line or ""."""
    found: list[dict[str, Any]] = []
    *lines, last = journal.split(b"\n")
    for number, line in enumerate(lines, 1):
        entry = _entry(line)
        if entry is None or entry["iteration"] > last_iteration + len(found):
            return found, f"line {number}"
        if entry["iteration"] == last_iteration + len(found):
            found.append(entry)
    start = encode_json({"iteration": 0}).partition(b"0")[0]
    if last[: len(start)] != start[: len(last)]:  # not the beginning of a line that a kill cut off
        return found, f"line {len(lines) + 1}"
    return found, ""


def _entry(line: bytes) -> dict[str, Any] | None:
    text, seal = line[: -len(LINE_SEAL % bytes(64))] + b"}", line[-len(LINE_SEAL % bytes(64)) :]
    if seal != LINE_SEAL % _hash_bytes(text).encode():
        return None
    found: dict[str, Any] = parse_json(text)
    return found


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the change from `old` to `new`, both JSON data; small if lists only grew.

    Returns:
        `gone` (keys), `set` (values by key), `added` (new items at the end of a list, by key) and
            `inside` (differences of objects, by key), each only if not empty.
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
    """Apply a change returned by `difference` in place."""
    for key in change.get("gone", ()):
        state.pop(key, None)
    state.update(change.get("set", {}))
    for key, tail in change.get("added", {}).items():
        state[key] += tail
    for key, inner in change.get("inside", {}).items():
        apply_difference(state[key], inner)


def _begins(value: Any, before: Any) -> bool:
    """Return whether a value equals the previous one, or is a list that starts with it.

    Compares by marshal, so that 0.0 and -0.0 differ.
    """
    if isinstance(value, list) and isinstance(before, list):
        value = value[: len(before)]
    try:
        return marshal.dumps(value, 2) == marshal.dumps(before, 2)
    except ValueError:
        return False


def _above(path: str) -> list[str]:
    """Return the parent folders of a path."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _with_seal(above: Any, lines: str) -> bytes:
    """Return lines and their checksum line, and update the running hash with both."""
    above.update(lines.encode())
    seal = f"{MANIFEST_CHECKSUM_PREFIX}{above.hexdigest()}\n"
    above.update(seal.encode())
    return f"{lines}{seal}".encode()


def _hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
