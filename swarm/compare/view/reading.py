"""Where the rows of a viewer come from: a data frame, records, or a file of one of three kinds."""

import ast
import csv
import gc
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.compare.errors import WrongValue
from swarm.errors import UserError

Columns = dict[str, list[Any]]
"""By name, all equally long; values are those of JSON, and what is missing is `None`."""

KINDS = ".jsonl, .csv or .parquet"

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
STRUCTURES = re.compile(r"api_kwargs|(.+_)?(raw_answer|probs)")
"""Columns whose values are dictionaries, whatever else a file has in them."""


def columns_of(data: Any, name: str) -> Columns:
    """The columns of a data frame, of a list of records, or of a file by its path.

    Args:
        data: One of these.
        name: What errors call it.

    Raises:
        UserError: It is not there, cannot be read, is empty or has no answers.
        WrongValue: It is something else.
    """
    if isinstance(data, str | Path):
        found = _file(Path(data))
    elif hasattr(data, "columns") and hasattr(data, "iloc"):
        found = _frame(data, name)
    elif isinstance(data, Sequence) and all(isinstance(row, Mapping) for row in data):
        found = _plain_all(_turned(data))
    else:
        raise WrongValue(
            f"view: {type(data).__name__} is nothing to show; give a data frame, a list of "
            f"dictionaries or the path of a {KINDS} file"
        )
    if not next(iter(found.values()), []):
        raise WrongValue(f"{name}: it has no rows")
    if "answer" not in found:
        raise WrongValue(f'{name}: it has no column "answer"; it has {", ".join(found)}')
    return found


def _turned(records: Iterable[Mapping[Any, Any]]) -> Columns:
    """Records as columns, in the order in which their names come up."""
    found: Columns = {}
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


def _frame(data: Any, name: str) -> Columns:
    names = [str(column) for column in data.columns]
    for column in names:
        if names.count(column) > 1:
            raise WrongValue(f"{name}: two of its columns are named {column}")
    return _plain_all({column: data.iloc[:, at].tolist() for at, column in enumerate(names)})


def _plain_all(columns: Columns) -> Columns:
    # Samples of one request share their dictionaries; so do their copies.
    seen: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Mapping | list):
            return plain(value)
        if id(value) not in seen:
            seen[id(value)] = plain(value)
        return seen[id(value)]

    return {name: [copied(value) for value in values] for name, values in columns.items()}


def plain(value: Any) -> Any:
    """A value as JSON has it; what is missing or not a number is `None`."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return None if value != value else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _file(path: Path) -> Columns:
    readers: dict[str, Callable[[Path], Columns]] = {
        ".jsonl": _lines, ".csv": _csv, ".parquet": _parquet
    }  # fmt: skip
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a {KINDS} file")
    if not path.exists():
        raise UserError(f"{path}: there is no such file")
    if path.suffix.lower() not in readers:
        raise UserError(f"{path}: its name has to end in {KINDS}, as its kind is told by that")
    # Much is made and nothing thrown away; to look for that again and again takes most of the time.
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


def _lines(path: Path) -> Columns:
    """A file with one JSON object a line."""
    texts: dict[str, Any] = {}

    def records() -> Iterator[dict[str, Any]]:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line, parse_constant=_constant)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number}: is not JSON: {error}") from None
                if not isinstance(found, dict):
                    raise UserError(f"{path}, line {number}: is no JSON object")
                if isinstance(asked := found.get("api_kwargs"), dict):
                    # Each sample repeats what was asked; one copy in memory is enough.
                    found["api_kwargs"] = texts.setdefault(json.dumps(asked), asked)
                yield found

    return _turned(records())


def _constant(word: str) -> float | None:
    return None if word == "NaN" else float(word)


def _csv(path: Path) -> Columns:
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
                    raise UserError(f"{path}, line {reader.line_num}: {len(row)} fields, where the "
                                    f"first line has {len(names)}")  # fmt: skip
                rows.append(row)
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: is not CSV: {error}") from None
    # A column without a name is the index of a data frame.
    return {
        name: values_of(name, [row[at] for row in rows]) for at, name in enumerate(names) if name
    }


def values_of(name: str, texts: list[str]) -> list[Any]:
    """The values of a column of texts: numbers, or structures, where all of them are such.

    Args:
        name: The column's; an answer is a number only where nothing of its text is lost.
        texts: What the file has; an empty one is `None`.
    """
    there = set(filter(None, texts))
    read: dict[str, Any] = {}
    if there and all(map(NUMBER.fullmatch, there)):
        read = {text: float(text) if set(text) & set(".eE") else int(text) for text in there}
        if name in ("answer", "question") and any(str(read[text]) != text for text in there):
            read = {}
    elif there <= {"True", "False"}:
        read = {text: text == "True" for text in there}
    elif STRUCTURES.fullmatch(name) or all(text[0] in "{[" for text in there):
        read = {text: structure(text) for text in there}
        if not (STRUCTURES.fullmatch(name) or all(map(_structured, read.values()))):
            read = {}
        if name == "answer" and not all(map(_probabilities, read.values())):
            read = {}
    return [read.get(text, text) if text else None for text in texts]


def structure(text: str) -> Any:
    """A dictionary or a list, written as JSON or as Python; of anything else the text."""
    found: Any = None
    try:
        found = json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError):
        try:
            found = plain(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return text
    return found if _structured(found) else text


def _structured(value: Any) -> bool:
    return isinstance(value, dict | list)


def _probabilities(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, float | int) for one in value.values())


def _parquet(path: Path) -> Columns:
    try:
        import pandas
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path}: reading it needs {error.name}: pip install pandas pyarrow; or "
                        "write the data frame as .jsonl") from None  # fmt: skip
    try:
        frame = pandas.read_parquet(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: is not Parquet: {error}") from None
    found = _frame(frame, str(path))
    # Parquet gives each dictionary the keys of all others, without a value.
    return {name: [_without_missing(value) for value in values] for name, values in found.items()}


def _without_missing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_missing(one) for key, one in value.items() if one is not None}
    return [_without_missing(one) for one in value] if isinstance(value, list) else value
