"""Files of JSON lines."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from swarm._util.files import encode_json, write_atomic
from swarm.errors import InvalidArgument, UserError


def read_jsonl(path: str | Path) -> list[Any]:
    """The values of a file's lines; empty lines are skipped.

    Raises:
        UserError: The file cannot be read, or a line is no JSON.
    """
    found, number = [], 0
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig") as file:
            for line in file:
                number += 1
                if line.strip():
                    found.append(json.loads(line))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: line {number or 1} is no JSON: {error}") from None
    return found


def write_jsonl(path: str | Path, data: Iterable[Any]) -> None:
    """Write a file with a line for each value, whole or not at all; its folders are made.

    Args:
        path: The file; what was there is replaced.
        data: JSON values, or the rows of a data frame. What is no number is written as null.

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
    """The value as JSON has it: numbers of numpy as Python's, NaN and infinity as null."""
    if isinstance(value, dict):
        return {key: to_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(one) for one in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and value - value != 0:
        return None
    return value


# Rows in files: questions and answers as others keep them, and a journal that survives a kill.

JsonRow = dict[str, Any]

FieldTypes = Mapping[str, type | tuple[type, ...]]
"""Fields that every row must have, and of which type each is."""

TYPE_NAMES = {str: "text", int: "whole number", float: "number", list: "list", dict: "object"}


def read_json_rows(path: str | Path, needed: FieldTypes | None = None) -> list[JsonRow]:
    """The objects of a JSON list, or of a file with one JSON object a line, in their order.

    Args:
        path: The file; its content, not its name, says which of the two it is.
        needed: Fields that every row must have, and their types.

    Raises:
        UserError: The file cannot be read or holds something else; it names the file, and the line
            or the entry of the list.
    """
    text = _read_text(Path(path))
    rows = (
        _parse_json_list(path, text)
        if text.lstrip().startswith("[")
        else _parse_json_lines(path, text)
    )
    if not rows:
        raise UserError(f"{path}: there is nothing in it; a list of JSON objects is wanted")
    for place, row in rows:
        wrong = _find_row_error(row, needed or {})
        if wrong:
            raise UserError(f"{path}, {place}: {wrong}")
    return [row for _, row in rows]


def index_rows(path: str | Path, rows: Sequence[JsonRow], key: str) -> dict[Any, JsonRow]:
    """The rows by the value of a field.

    Raises:
        UserError: Two rows have the same.
    """
    found: dict[Any, JsonRow] = {}
    for row in rows:
        if row[key] in found:
            raise UserError(
                f'{path}: two rows have the {key} "{shorten_text(row[key])}"; leave one'
            )
        found[row[key]] = row
    return found


def shorten_text(value: Any, longest: int = 60) -> str:
    """A value in one line that fits into a message."""
    text = " ".join(str(value).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


class JsonlJournal:
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
        self.rows: dict[str, JsonRow] = {}
        if self.path.exists():
            data = _read_bytes(self.path)
            text = _decode_utf8(self.path, data[: data.rfind(b"\n") + 1])
            for place, row in _parse_json_lines(self.path, text):
                if wrong := _find_row_error(row, {key: str}):
                    raise UserError(f"{self.path}, {place}: {wrong}; remove the line")
                self.rows[row[key]] = row

    def append_rows(self, rows: Sequence[JsonRow]) -> None:
        """Write rows at the end, and see that they are on the disk.

        Raises:
            UserError: The file cannot be written.
        """
        data = b"".join(encode_json(row) + b"\n" for row in rows)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                # Whoever holds the lock writes; a line without an end is then of one that is dead.
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(_complete_length(file))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self.rows.update((row[self.key], row) for row in rows)


def _complete_length(file: BinaryIO) -> int:
    """Where the last whole line ends."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read() in (b"", b"\n"):
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def write_json_rows(path: Path, rows: Sequence[JsonRow]) -> None:
    """Write a JSONL file whole, or not at all.

    Raises:
        UserError: It cannot be written.
    """
    write_atomic(path, b"".join(encode_json(row) + b"\n" for row in rows))


def sibling_path(output: Path, kind: str) -> Path:
    """A file that belongs to an output, such as FILE.replies.jsonl to FILE.jsonl."""
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
        return [(f"entry {i}", row) for i, row in enumerate(json.loads(text), start=1)]
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: is not JSON: {error.msg}") from None


def _parse_json_lines(path: str | Path, text: str) -> list[tuple[str, Any]]:
    return list(_iter_json_lines(path, text))


def _iter_json_lines(path: str | Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines: JSON may hold a bare U+2028, which is no end of a line there.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: is not JSON: {error.msg}; one object a line is wanted"
                ) from None


def _find_row_error(row: Any, needed: FieldTypes) -> str:
    """What is wrong with a row; empty if nothing is."""
    if not isinstance(row, dict):
        return "is no JSON object"
    for field, kind in needed.items():
        if field not in row:
            return f'has no "{field}"; it has {", ".join(map(str, row)) or "nothing"}'
        if not isinstance(row[field], kind) or isinstance(row[field], bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(TYPE_NAMES.get(one, one.__name__) for one in kinds)
            return f'its "{field}" is no {names}'
    return ""


# Rows that are put into a file in place of earlier ones: by key, sorted, and no row twice.

TIMESTAMP_FIELD = "tstamp"
"""The field that says when a row was made, in seconds since 1970; it alone changes nothing."""


def merge_rows(
    path: Path, fields: Sequence[str], rows: Iterable[JsonRow], gone: Iterable[tuple[Any, ...]] = ()
) -> list[JsonRow]:
    """Put rows into a JSONL file and give all rows that it has then.

    Rows that are known by the same values of `fields` are one row, the last of them; a row that
    says what it said before stays as it is. The file is sorted by these values and written whole.

    Args:
        path: The file; made if it is not there, unless there is nothing to write.
        fields: The names of the fields that tell rows apart.
        rows: What is new.
        gone: Values of the fields, of rows that no longer hold and are left out.

    Raises:
        UserError: The file holds something else, or cannot be written.
    """
    needed: FieldTypes = {field: (int, str) for field in fields if field != "judge"}
    out = set(gone)
    with _lock_folder(path.parent):
        there = path.exists() and path.stat().st_size
        before = rows_by_key(fields, read_json_rows(path, needed)) if there else {}
        found = {key: row for key, row in before.items() if key not in out}
        for key, row in rows_by_key(fields, rows).items():
            found[key] = before[key] if _is_unchanged(before.get(key), row) else row
        ordered = [found[key] for key in sorted(found, key=row_sort_key)]
        if ordered or path.exists():
            write_json_rows(path, ordered)
    return ordered


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Let no other process read a folder's files to write them anew meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def rows_by_key(fields: Sequence[str], rows: Iterable[JsonRow]) -> dict[tuple[Any, ...], JsonRow]:
    """Rows by the values of these fields; of equal ones the last."""
    return {tuple(row.get(field) for field in fields): row for row in rows}


def row_sort_key(values: Sequence[Any]) -> list[tuple[bool, Any]]:
    """A key to sort by: numbers as numbers, all else as text behind them."""
    return [(False, v) if isinstance(v, (int, float)) else (True, str(v)) for v in values]


def _is_unchanged(before: JsonRow | None, now: JsonRow) -> bool:
    return before is not None and {**before, TIMESTAMP_FIELD: 0} == {**now, TIMESTAMP_FIELD: 0}
