"""Checksums of a run folder's files: checksums.txt for those that stay, a last line in state.json.

checksums.txt has a line for each file that is written once or replaced whole (answers, saved
bests, configuration), as sha256sum writes and checks it. The line of a file that is about to be
replaced is taken out first, so that a kill leaves a file without a line and never a wrong line:
a file that differs from its line, or is gone, was damaged.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.files import as_json, file_hash, read_bytes, write_whole

NAME = "checksums.txt"

STATE = "state.json"

SEAL = b'\n "checksum": "%s"\n}\n'

KINDS: dict[str, Any] = {
    **dict.fromkeys(("identity", "chosen"), dict),
    **dict.fromkeys(("experts", "rounds", "groups"), list),
    **dict.fromkeys(("optimizer", "metrics"), dict | None),
    "finished": str | None,
    "own": int,
}
"""Types of a state's parts."""

LAST = "# of the lines above: "
"""What begins the last line; sha256sum takes it for a comment."""

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

    def read(self) -> "Manifest":
        """Read the file; gives the manifest itself."""
        try:
            text = read_bytes(self.folder / NAME).decode()
        except (OSError, UnicodeDecodeError):
            text = ""
        lines, mark, seal = text.rpartition(LAST)
        self.lost = not mark or seal != _hash(lines.encode()) + "\n"
        found = () if self.lost else (line.split("  ", 1) for line in lines.splitlines())
        self.sums = {path: digest for digest, path in found}
        return self

    def save(self) -> None:
        """Replace the file, sorted by path: the same files give the same bytes."""
        lines = "".join(f"{self.sums[path]}  {path}\n" for path in sorted(self.sums))
        write_whole(self.folder / NAME, f"{lines}{LAST}{_hash(lines.encode())}\n".encode())

    def under(self, place: str) -> list[str]:
        """The paths with a checksum that are `place` or below it."""
        return [path for path in self.sums if path == place or path.startswith(f"{place}/")]

    def under_any(self, places: Iterable[str]) -> set[str]:
        """As `under`, of any of the places."""
        return {path for place in places for path in self.under(place)}

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


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
