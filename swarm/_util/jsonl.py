"""JSON lines: reading, writing, an append-only journal, and merging of rows by key."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from swarm._util.files import acquire_lock, encode_json, parse_json, sync_folder, write_atomic
from swarm.errors import InvalidArgument, UserError


def read_jsonl(path: str | Path) -> list[Any]:
    """Return the values of a file's lines; empty lines are skipped.

    Raises:
        UserError: The file cannot be read, or a line is not JSON.
    """
    return [row for _, row in _iter_json_lines(path, _read_text(Path(path).expanduser()))]


def write_jsonl(path: str | Path, data: Iterable[Any]) -> None:
    """Write a file with a line per value, atomically; its folders are created.

    Args:
        path: The file; replaced if it exists.
        data: JSON values, or the rows of a data frame. Non-finite numbers are written as null.

    Raises:
        UserError: A value is not JSON, or the file cannot be written.
    """
    if hasattr(data, "to_dict"):
        data = data.to_dict("records")
    lines = []
    for number, value in enumerate(data):
        try:
            lines.append(json.dumps(to_json_value(value), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"write_jsonl: value {number} is not JSON: {error}") from None
    write_atomic(Path(path).expanduser(), "".join(line + "\n" for line in lines).encode())


def to_json_value(value: Any) -> Any:
    """Return the JSON value: numbers of numpy as Python's, NaN and infinity as null."""
    if isinstance(value, dict):
        return {key: to_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(one) for one in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and value - value != 0:
        return None
    return value


JsonRow = dict[str, Any]

FieldTypes = Mapping[str, type | tuple[type, ...]]
"""Required fields of every row, and their types."""

TYPE_NAMES = {str: "text", int: "integer", float: "number", list: "list", dict: "object"}


def read_json_rows(path: str | Path, needed: FieldTypes | None = None) -> list[JsonRow]:
    """Read the objects of a JSON list, or of a file with one JSON object per line.

    Args:
        path: The file; its format is detected from the content, not the name.
        needed: Required fields of every row, and their types.

    Raises:
        UserError: The file is unreadable or has other content; names the file, and the line or list
            entry.
    """
    text = _read_text(Path(path))
    parse = _parse_json_list if text.lstrip().startswith("[") else _iter_json_lines
    rows = list(parse(path, text))
    if not rows:
        raise UserError(f"{path}: is empty; expected a list of JSON objects")
    for location, row in rows:
        wrong = _find_row_error(row, needed or {})
        if wrong:
            raise UserError(f"{path}, {location}: {wrong}")
    return [row for _, row in rows]


def index_rows(path: str | Path, rows: Sequence[JsonRow], key: str) -> dict[Any, JsonRow]:
    """Return the rows by the value of a field.

    Raises:
        UserError: The value is not unique.
    """
    found: dict[Any, JsonRow] = {}
    for row in rows:
        if row[key] in found:
            raise UserError(
                f'{path}: two rows have the {key} "{shorten_text(row[key])}"; remove one'
            )
        found[row[key]] = row
    return found


def shorten_text(value: Any, longest: int = 60) -> str:
    """Return a value as one line that fits into a message."""
    text = " ".join(str(value).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


class JsonlJournal:
    """Rows in an append-only JSONL file, which survive the end of the process.

    A line left incomplete by a kill is dropped. Of rows with the same key the last one counts.
    Several processes may append to a file at once; each reads what was there when it started.

    Args:
        path: The file; it and its folder are created when the first row is added.
        key: The field that identifies a row, a string.

    Attributes:
        rows: Rows by key, as in the file.

    Raises:
        UserError: The file has other content; the message names the line.
    """

    def __init__(self, path: str | Path, key: str = "key") -> None:
        self.path, self.key = Path(path), key
        self.rows: dict[str, JsonRow] = {}
        if self.path.exists():
            data = _read_bytes(self.path)
            text = _decode_utf8(self.path, data[: data.rfind(b"\n") + 1])
            for location, row in _iter_json_lines(self.path, text):
                if wrong := _find_row_error(row, {key: str}):
                    raise UserError(f"{self.path}, {location}: {wrong}; remove the line")
                self.rows[row[key]] = row

    def append_rows(self, rows: Sequence[JsonRow]) -> None:
        """Append rows and sync them to the disk.

        Raises:
            UserError: The file cannot be written.
        """
        data = b"".join(encode_json(row) + b"\n" for row in rows)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                # Under the lock, an unterminated line can only be from a dead process, so truncate
                # it.
                acquire_lock(file.fileno())
                size = _complete_length(file)
                file.truncate(size)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if not size:
                    sync_folder(self.path.parent)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self.rows.update((row[self.key], row) for row in rows)


def _complete_length(file: BinaryIO) -> int:
    """Return the position after the last complete line."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read() in (b"", b"\n"):
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def write_json_rows(path: Path, rows: Sequence[JsonRow]) -> None:
    """Write a JSONL file atomically.

    Raises:
        UserError: It cannot be written.
    """
    write_atomic(path, b"".join(encode_json(row) + b"\n" for row in rows))


def sibling_path(output: Path, kind: str) -> Path:
    """Return the path of an output's companion, as FILE.replies.jsonl for FILE.jsonl."""
    return output.with_name(f"{output.stem}.{kind}")


def _read_text(path: Path) -> str:
    return _decode_utf8(path, _read_bytes(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _decode_utf8(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: is not UTF-8; save the file as UTF-8") from None


def _parse_json_list(path: str | Path, text: str) -> list[tuple[str, Any]]:
    try:
        return [(f"entry {i}", row) for i, row in enumerate(parse_json(text), start=1)]
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: is not JSON: {error.msg}") from None


def _iter_json_lines(path: str | Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines: JSON may contain a bare U+2028, which is no line end there.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"line {number}", parse_json(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: is not JSON: {error.msg}; expected one object per line"
                ) from None


def _find_row_error(row: Any, needed: FieldTypes) -> str:
    """Return the error in a row; empty if there is none."""
    if not isinstance(row, dict):
        return "is not a JSON object"
    for field, kind in needed.items():
        if field not in row:
            return f'has no "{field}"; it has {", ".join(map(str, row)) or "nothing"}'
        if not isinstance(row[field], kind) or isinstance(row[field], bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(TYPE_NAMES.get(one, one.__name__) for one in kinds)
            return f'its "{field}" is no {names}'
    return ""


TIMESTAMP_FIELD = "tstamp"
"""Field with a row's creation time, in seconds since 1970; ignored in comparisons."""


def merge_rows(
    path: Path, fields: Sequence[str], rows: Iterable[JsonRow], gone: Iterable[tuple[Any, ...]] = ()
) -> list[JsonRow]:
    """Merge rows into a JSONL file and return all its rows.

    Rows with the same values of `fields` are the same row, of which the last counts; a row with
    unchanged content is left as it is. The file is sorted by these values and replaced atomically.

    Args:
        path: The file; created if missing, unless there is nothing to write.
        fields: Names of the fields that identify a row.
        rows: New rows.
        gone: Values of the fields of rows to remove.

    Raises:
        UserError: The file has other content, or cannot be written.
    """
    needed: FieldTypes = {field: (int, str) for field in fields if field != "judge"}
    out = set(gone)
    with _lock_folder(path.parent):
        has_rows = path.exists() and path.stat().st_size
        previous = rows_by_key(fields, read_json_rows(path, needed)) if has_rows else {}
        found = {key: row for key, row in previous.items() if key not in out}
        for key, row in rows_by_key(fields, rows).items():
            found[key] = previous[key] if _is_unchanged(previous.get(key), row) else row
        ordered = [found[key] for key in sorted(found, key=row_sort_key)]
        if ordered or path.exists():
            write_json_rows(path, ordered)
    return ordered


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against concurrent read-modify-write by other processes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from None
    try:
        acquire_lock(handle)
        yield
    finally:
        os.close(handle)


def rows_by_key(fields: Sequence[str], rows: Iterable[JsonRow]) -> dict[tuple[Any, ...], JsonRow]:
    """Return rows by the values of these fields; of equal ones the last."""
    return {tuple(row.get(field) for field in fields): row for row in rows}


def row_sort_key(values: Sequence[Any]) -> list[tuple[bool, Any]]:
    """Return a sort key: numbers as numbers, then everything else as text."""
    return [(False, v) if isinstance(v, (int, float)) else (True, str(v)) for v in values]


def _is_unchanged(old: JsonRow | None, new: JsonRow) -> bool:
    return old is not None and {**old, TIMESTAMP_FIELD: 0} == {**new, TIMESTAMP_FIELD: 0}
