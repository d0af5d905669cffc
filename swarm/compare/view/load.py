"""Input of a viewer: a data frame, records, or a .jsonl, .csv or .parquet file."""

import ast
import csv
import gc
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm._util.files import parse_json
from swarm.errors import InvalidArgument, UserError

ColumnData = dict[str, list[Any]]
"""Columns by name, of equal length; values are JSON values, missing ones `None`."""

FILE_KINDS = ".jsonl, .csv or .parquet"

NUMBER_PATTERN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
STRUCTURED_COLUMNS = re.compile(r"api_kwargs|(.+_)?(raw_answer|probs)")
"""Columns whose values are dictionaries, whatever other texts they contain."""


def load_columns(data: Any, name: str) -> ColumnData:
    """Load the columns of a data frame, a list of records, or a file.

    Args:
        data: One of these.
        name: Name in errors.

    Raises:
        UserError: The file does not exist, cannot be read, is empty or has no answers.
        InvalidArgument: The data is something else.
    """
    if isinstance(data, str | Path):
        found = _read_file(Path(data))
    elif hasattr(data, "columns") and hasattr(data, "iloc"):
        found = _frame_to_columns(data, name)
    elif isinstance(data, Sequence) and all(isinstance(row, Mapping) for row in data):
        found = _plain_columns(_records_to_columns(data))
    else:
        raise InvalidArgument(
            f"view: {type(data).__name__} cannot be shown; give a data frame, a list of "
            f"dictionaries or the path of a {FILE_KINDS} file"
        )
    if not next(iter(found.values()), []):
        raise InvalidArgument(f"{name}: has no rows")
    if "answer" not in found:
        raise InvalidArgument(f'{name}: has no column "answer"; it has {", ".join(found)}')
    return found


def _records_to_columns(records: Iterable[Mapping[Any, Any]]) -> ColumnData:
    """Convert records to columns, in order of first occurrence."""
    found: ColumnData = {}
    for count, record in enumerate(records, 1):
        for key, value in record.items():
            if (name := str(key)) not in found:
                found[name] = [None] * (count - 1)
            found[name].append(value)
        if len(record) < len(found):
            for values in found.values():
                if len(values) < count:
                    values.append(None)
    return found


def _frame_to_columns(data: Any, name: str) -> ColumnData:
    names = [str(column) for column in data.columns]
    for column in names:
        if names.count(column) > 1:
            raise InvalidArgument(f"{name}: two of its columns are named {column}")
    return _plain_columns(
        {column: data.iloc[:, index].tolist() for index, column in enumerate(names)}
    )


def _plain_columns(columns: ColumnData) -> ColumnData:
    # Samples of one request share their dictionaries; so do the copies.
    seen: dict[int, Any] = {}

    def convert_once(value: Any) -> Any:
        if not isinstance(value, Mapping | list):
            return to_plain(value)
        if id(value) not in seen:
            seen[id(value)] = to_plain(value)
        return seen[id(value)]

    return {name: [convert_once(value) for value in values] for name, values in columns.items()}


def to_plain(value: Any) -> Any:
    """Convert a value to JSON types; missing values and NaN become `None`."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return None if value != value else float(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(one) for one in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _read_file(path: Path) -> ColumnData:
    readers: dict[str, Callable[[Path], ColumnData]] = {
        ".jsonl": _read_jsonl,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a {FILE_KINDS} file")
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.suffix.lower() not in readers:
        raise UserError(f"{path}: its name must end in {FILE_KINDS}")
    # Reading creates many objects and no garbage; garbage collection would take most of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return readers[path.suffix.lower()](path)
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    finally:
        if collects:
            gc.enable()


def _read_jsonl(path: Path) -> ColumnData:
    """Read a file with one JSON object per line."""
    texts: dict[str, Any] = {}

    def iter_records() -> Iterator[dict[str, Any]]:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = parse_json(line, parse_constant=_parse_constant)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: is not JSON: {error}") from None
                if not isinstance(found, dict):
                    raise UserError(f"{path}, line {number}: is not a JSON object")
                if isinstance(api_kwargs := found.get("api_kwargs"), dict):
                    # Each sample repeats the request; one copy in memory is enough.
                    found["api_kwargs"] = texts.setdefault(json.dumps(api_kwargs), api_kwargs)
                yield found

    return _records_to_columns(iter_records())


def _parse_constant(constant: str) -> float | None:
    return None if constant == "NaN" else float(constant)


def _read_csv(path: Path) -> ColumnData:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            names = next(reader, [])
            if twice := [name for name in names if name and names.count(name) > 1]:
                raise UserError(f"{path}: two of its columns are named {twice[0]}")
            rows: list[list[str]] = []
            for row in filter(None, reader):
                if len(row) != len(names):
                    raise UserError(
                        f"{path}, line {reader.line_num}: {len(row)} fields, where the "
                        f"first line has {len(names)}"
                    )
                rows.append(row)
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: is not CSV: {error}") from None
    # A column without a name is the index of a data frame.
    return {
        name: parse_values(name, [row[index] for row in rows])
        for index, name in enumerate(names)
        if name
    }


def parse_values(name: str, texts: list[str]) -> list[Any]:
    """Parse a column of texts as numbers or structures if all of its values are such.

    Args:
        name: Name of the column; answers become numbers only if their text can be restored.
        texts: Texts of the file; an empty one is `None`.
    """
    distinct = set(filter(None, texts))
    parsed: dict[str, Any] = {}
    if distinct and all(map(NUMBER_PATTERN.fullmatch, distinct)):
        parsed = {text: float(text) if set(text) & set(".eE") else int(text) for text in distinct}
        if name in ("answer", "question") and any(str(parsed[text]) != text for text in distinct):
            parsed = {}
    elif distinct <= {"True", "False"}:
        parsed = {text: text == "True" for text in distinct}
    elif STRUCTURED_COLUMNS.fullmatch(name) or all(text[0] in "{[" for text in distinct):
        parsed = {text: parse_structure(text) for text in distinct}
        if not (STRUCTURED_COLUMNS.fullmatch(name) or all(map(_is_structured, parsed.values()))):
            parsed = {}
        if name == "answer" and not all(map(_is_probabilities, parsed.values())):
            parsed = {}
    return [parsed.get(text, text) if text else None for text in texts]


def parse_structure(text: str) -> Any:
    """Parse a dictionary or a list in JSON or Python syntax; return anything else unchanged."""
    found: Any = None
    try:
        found = parse_json(text, parse_constant=_parse_constant)
    except ValueError:
        try:
            found = to_plain(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return text
    return found if _is_structured(found) else text


def _is_structured(value: Any) -> bool:
    return isinstance(value, dict | list)


def _is_probabilities(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, float | int) for one in value.values())


def _read_parquet(path: Path) -> ColumnData:
    try:
        import pandas
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{path}: reading it needs {error.name}: pip install pandas pyarrow; or "
            "write the data frame as .jsonl"
        ) from None
    try:
        frame = pandas.read_parquet(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: is not Parquet: {error}") from None
    found = _frame_to_columns(frame, str(path))
    # Parquet gives each dictionary the keys of all others, with null values.
    return {name: [_drop_missing(value) for value in values] for name, values in found.items()}


def _drop_missing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_missing(one) for key, one in value.items() if one is not None}
    return [_drop_missing(one) for one in value] if isinstance(value, list) else value
