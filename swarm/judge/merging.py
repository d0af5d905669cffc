"""Rows that are put into a file in place of earlier ones: by key, sorted, and no row twice."""

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.judge.files import FieldTypes, JsonRow, read_json_rows, write_json_rows

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
