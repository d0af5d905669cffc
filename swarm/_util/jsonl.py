"""JSON lines: reading, writing, an append-only journal, and merging of rows by key."""

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm._util.files import (
    acquire_lock,
    encode_json,
    make_folder,
    parse_json,
    read_bytes,
    sync_folder,
    write_atomic,
)
from swarm.errors import InvalidArgument, UserError

JsonRow = dict[str, Any]

FieldTypes = Mapping[str, type | tuple[type, ...]]
"""Required fields of every row, and their types."""

TYPE_NAMES = {str: "text", int: "integer", float: "number", list: "list", dict: "object"}

TIMESTAMP_FIELD = "tstamp"
"""Field with a row's creation time, in seconds since 1970; ignored in comparisons."""


def read_utf8(path: Path, whole_lines: bool = False) -> str:
    """Return the text of a file, with all line ends converted to newlines.

    Args:
        whole_lines: Leave out what follows the last line end.

    Raises:
        UserError: It cannot be read, or is not UTF-8.
    """
    try:
        data = read_bytes(path)
        # A write that was cut may end within a character: what is left out is not decoded.
        text = data[: data.rfind(b"\n") + 1 if whole_lines else None].decode("utf-8-sig")
        return io.StringIO(text, newline=None).read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: is not UTF-8; save the file as UTF-8") from None


def iter_json_lines(path: str | Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1 on, and the value of each line that is not blank.

    Raises:
        UserError: A line is not JSON.
    """
    # Not splitlines: JSON may contain a bare U+2028, which is no line end there.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except json.JSONDecodeError as error:
                raise UserError(f"""{path}, line {number}: is not JSON: {error.msg}; expected one
                    object per line""") from None


def read_jsonl(path: str | Path) -> list[Any]:
    """Return the values of a file's lines; empty lines are skipped.

    Raises:
        UserError: The file cannot be read, or a line is not JSON.
    """
    return [row for _, row in iter_json_lines(path, read_utf8(Path(path).expanduser()))]


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
            lines.append(json.dumps(to_json_value(value), allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"write_jsonl: value {number} is not JSON: {error}") from None
    write_atomic(Path(path).expanduser(), "".join(lines).encode())


def to_json_value(value: Any) -> Any:
    """Return the JSON value: numbers of numpy as Python's, NaN and infinity as null."""
    if isinstance(value, dict):
        return {key: to_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(one) for one in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
    # NaN and infinity are the floats whose difference with themselves is not 0.
    return None if isinstance(value, float) and value - value != 0 else value


def read_json_rows(path: str | Path, needed: FieldTypes | None = None) -> list[JsonRow]:
    """Read the objects of a JSON list, or of a file with one JSON object per line.

    Args:
        path: The file; its format is detected from the content, not the name.
        needed: Required fields of every row, and their types.

    Raises:
        UserError: The file is unreadable or has other content; names the file, and the line or list
            entry.
    """
    text, place = read_utf8(Path(path)), "line"
    if text.lstrip().startswith("["):
        place = "entry"
        try:
            rows = list(enumerate(parse_json(text), start=1))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {error.lineno}: is not JSON: {error.msg}") from None
    else:
        rows = list(iter_json_lines(path, text))
    if not rows:
        raise UserError(f"{path}: is empty; expected a list of JSON objects")
    for number, row in rows:
        if wrong := _find_row_error(row, needed or {}):
            raise UserError(f"{path}, {place} {number}: {wrong}")
    return [row for _, row in rows]


def _find_row_error(row: Any, needed: FieldTypes) -> str:
    """Return the error in a row; empty if there is none."""
    if not isinstance(row, dict):
        return "is not a JSON object"
    for field, kind in needed.items():
        if field not in row:
            return f'has no "{field}"; it has {", ".join(map(str, row)) or "nothing"}'
        if not isinstance(row[field], kind) or isinstance(row[field], bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            return f'its "{field}" is no {" or ".join(TYPE_NAMES[one] for one in kinds)}'
    return ""


def index_rows(path: str | Path, rows: Sequence[JsonRow], key: str) -> dict[Any, JsonRow]:
    """Return the rows by the value of a field.

    Raises:
        UserError: The value is not unique.
    """
    found: dict[Any, JsonRow] = {}
    for row in rows:
        if row[key] in found:
            shown = shorten_text(row[key])
            raise UserError(f'{path}: two rows have the {key} "{shown}"; remove one')
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
            for number, row in iter_json_lines(self.path, read_utf8(self.path, whole_lines=True)):
                if wrong := _find_row_error(row, {key: str}):
                    raise UserError(f"{self.path}, line {number}: {wrong}; remove the line")
                self.rows[row[key]] = row

    def append_rows(self, rows: Sequence[JsonRow]) -> None:
        """Append rows and sync them to the disk.

        Raises:
            UserError: The file cannot be written.
        """
        try:
            make_folder(self.path.parent)
            with self.path.open("ab+") as file:
                # Under the lock, an incomplete last line can only be of a dead process.
                acquire_lock(file.fileno())
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                if file.read() not in (b"", b"\n"):
                    file.seek(0)
                    size = file.read().rfind(b"\n") + 1
                    file.truncate(size)
                file.write(b"".join(encode_json(row) + b"\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())
                if not size:
                    sync_folder(self.path.parent)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self.rows.update((row[self.key], row) for row in rows)


def write_json_rows(path: Path, rows: Sequence[JsonRow]) -> None:
    """Write a JSONL file atomically.

    Raises:
        UserError: It cannot be written.
    """
    write_atomic(path, b"".join(encode_json(row) + b"\n" for row in rows))


def sibling_path(output: Path, kind: str) -> Path:
    """Return the path of an output's companion, as FILE.summary.json for FILE.jsonl."""
    return output.with_name(f"{output.stem}.{kind}")


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
    removed = set(gone)
    needed: FieldTypes = {field: (int, str) for field in fields if field != "judge"}
    try:
        make_folder(path.parent)
        lock = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write into {path.parent}: {error.strerror}") from None
    try:
        acquire_lock(lock)  # against another process that reads, merges and writes
        has_rows = path.exists() and path.stat().st_size
        previous = rows_by_key(fields, read_json_rows(path, needed)) if has_rows else {}
        found = {key: row for key, row in previous.items() if key not in removed}
        for key, row in rows_by_key(fields, rows).items():
            old = previous.get(key)
            same = old is not None and {**old, TIMESTAMP_FIELD: 0} == {**row, TIMESTAMP_FIELD: 0}
            found[key] = old if old is not None and same else row
        ordered = [found[key] for key in sorted(found, key=row_sort_key)]
        if ordered or path.exists():
            write_json_rows(path, ordered)
    finally:
        os.close(lock)
    return ordered


def rows_by_key(fields: Sequence[str], rows: Iterable[JsonRow]) -> dict[tuple[Any, ...], JsonRow]:
    """Return rows by the values of these fields; of equal ones the last."""
    return {tuple(row.get(field) for field in fields): row for row in rows}


def row_sort_key(values: Sequence[Any]) -> list[tuple[bool, Any]]:
    """Return a sort key: numbers as numbers, then everything else as text."""
    return [(False, v) if isinstance(v, (int, float)) else (True, str(v)) for v in values]
