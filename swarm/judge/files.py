"""Rows in files: questions and answers as others keep them, and a journal that survives a kill."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from swarm.errors import UserError
from swarm.files import as_json, write_whole

Row = dict[str, Any]

Kinds = Mapping[str, type | tuple[type, ...]]
"""Fields that every row must have, and of which type each is."""

NAMES = {str: "text", int: "whole number", float: "number", list: "list", dict: "object"}


def read_rows(path: str | Path, needed: Kinds | None = None) -> list[Row]:
    """The objects of a JSON list, or of a file with one JSON object a line, in their order.

    Args:
        path: The file; its content, not its name, says which of the two it is.
        needed: Fields that every row must have, and their types.

    Raises:
        UserError: The file cannot be read or holds something else; it names the file, and the line
            or the entry of the list.
    """
    text = _text(Path(path))
    rows = _listed(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    if not rows:
        raise UserError(f"{path}: there is nothing in it; a list of JSON objects is wanted")
    for place, row in rows:
        wrong = _wrong(row, needed or {})
        if wrong:
            raise UserError(f"{path}, {place}: {wrong}")
    return [row for _, row in rows]


def keyed(path: str | Path, rows: Sequence[Row], key: str) -> dict[Any, Row]:
    """The rows by the value of a field.

    Raises:
        UserError: Two rows have the same.
    """
    found: dict[Any, Row] = {}
    for row in rows:
        if row[key] in found:
            raise UserError(f'{path}: two rows have the {key} "{short(row[key])}"; leave one')
        found[row[key]] = row
    return found


def short(value: Any, longest: int = 60) -> str:
    """A value in one line that fits into a message."""
    text = " ".join(str(value).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


class Journal:
    """Rows in a JSONL file that only grows: what was written stays, whatever ends the process.

    A line that a kill left unfinished is dropped. Of rows with the same key the last one counts.
    Several processes may add to a file at once; each sees what was there when it began.

    Args:
        path: The file; it and its folder are made when the first row is added.
        key: The field that tells rows apart, a text.

    Attributes:
        rows: By key, as the file has them.

    Raises:
        UserError: The file holds something else; it names the line.
    """

    def __init__(self, path: str | Path, key: str = "key") -> None:
        self.path, self.key = Path(path), key
        self.rows: dict[str, Row] = {}
        if self.path.exists():
            data = _bytes(self.path)
            text = _decoded(self.path, data[: data.rfind(b"\n") + 1])
            for place, row in _lines(self.path, text):
                if wrong := _wrong(row, {key: str}):
                    raise UserError(f"{self.path}, {place}: {wrong}; remove the line")
                self.rows[row[key]] = row

    def add(self, rows: Sequence[Row]) -> None:
        """Write rows at the end, and see that they are on the disk.

        Raises:
            UserError: The file cannot be written.
        """
        data = b"".join(as_json(row) + b"\n" for row in rows)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                # Whoever holds the lock writes; a line without an end is then of one that is dead.
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(_end_of_lines(file))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self.rows.update((row[self.key], row) for row in rows)


def _end_of_lines(file: BinaryIO) -> int:
    """Where the last whole line ends."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read() in (b"", b"\n"):
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def write_lines(path: Path, rows: Sequence[Row]) -> None:
    """Write a JSONL file whole, or not at all.

    Raises:
        UserError: It cannot be written.
    """
    write_whole(path, b"".join(as_json(row) + b"\n" for row in rows))


def beside(output: Path, kind: str) -> Path:
    """A file that belongs to an output, such as FILE.replies.jsonl to FILE.jsonl."""
    return output.with_name(f"{output.stem}.{kind}")


def _text(path: Path) -> str:
    return _decoded(path, _bytes(path))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: is not UTF-8; save the file as UTF-8") from None


def _listed(path: str | Path, text: str) -> list[tuple[str, Any]]:
    try:
        return [(f"entry {i}", row) for i, row in enumerate(json.loads(text), start=1)]
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: is not JSON: {error.msg}") from None


def _lines(path: str | Path, text: str) -> list[tuple[str, Any]]:
    return list(_parsed(path, text))


def _parsed(path: str | Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines: JSON may hold a bare U+2028, which is no end of a line there.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: is not JSON: {error.msg}; one object a line is wanted"
                ) from None


def _wrong(row: Any, needed: Kinds) -> str:
    """What is wrong with a row; empty if nothing is."""
    if not isinstance(row, dict):
        return "is no JSON object"
    for field, kind in needed.items():
        if field not in row:
            return f'has no "{field}"; it has {", ".join(map(str, row)) or "nothing"}'
        if not isinstance(row[field], kind) or isinstance(row[field], bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(NAMES.get(one, one.__name__) for one in kinds)
            return f'its "{field}" is no {names}'
    return ""
