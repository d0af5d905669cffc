"""The entries of a data file by split: JSON or JSON lines, with the splits named or not."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from swarm.errors import UserError
from swarm.files import read_text
from swarm.places import find_path
from swarm.tasks import faults, leak

SPLITS = ("dev", "test")


@dataclass(frozen=True, slots=True)
class InMemoryItems:
    """Items that a program holds: a list, which is divided as a file's is, or one of each split."""

    items: Sequence[Any] | Mapping[str, Sequence[Any]]


DataFiles = str | Mapping[str, str] | InMemoryItems
"""The path of one file, or of one for each split, {"dev": path, "test": path}; or the items."""

MissingFileHint = Callable[[Path], str]
"""What to do about a file that is missing."""


class DataEntry(NamedTuple):
    """What stands at a place: a line from 1 on of JSON lines, else a position in a list from 0."""

    place: int
    value: Any


@dataclass(frozen=True, slots=True)
class DataContent:
    """What a data file holds.

    Attributes:
        path: The file that holds a split, for messages.
        entries: The entries of a split; empty where there are none.
        common: Fields that all items have.
    """

    path: Mapping[str, Path]
    entries: Mapping[str, Sequence[DataEntry]]
    common: Mapping[str, str] = field(default_factory=dict)


def read_data(file: DataFiles, remedy: MissingFileHint, fields: Sequence[str]) -> DataContent:
    """The content of one file or of two.

    - An object `{"dev": [...], "test": [...]}`, optionally with an "icl_prompt".
    - JSON lines (a name in ".jsonl", one object a line) or a list of objects: each says its
      "split", "dev" or "test"; or none does, and they are divided (`leak.thirds`).
    - One file of JSON lines, or with a list, for each split.
    - `Given`: the same of items, without a file.

    Args:
        fields: The items' fields that tell one from another (see `leak.identity`).

    Raises:
        UserError: A file is missing, unreadable, or of no such format.
    """
    if isinstance(file, InMemoryItems):
        return _read_in_memory(file, fields)
    if isinstance(file, Mapping):
        paths = {split: find_path(path) for split, path in file.items()}
        return DataContent(paths, {split: _read_single_split(path, remedy) for split, path in paths.items()})
    path = find_path(file)
    both = dict.fromkeys(SPLITS, path)
    if path.suffix == ".jsonl":
        return DataContent(both, _divide_entries(path, _read_jsonl(path, remedy), fields))
    value = _read_json(path, remedy)
    if isinstance(value, list):
        return DataContent(both, _divide_entries(path, _number_entries(path, value), fields))
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: the outermost value is not an object and not a list.")
    entries = {split: _list_entries(path, split, value.get(split)) for split in SPLITS}
    shown = value.get("icl_prompt")
    return DataContent(both, entries, {"icl_prompt": shown} if shown and type(shown) is str else {})


def _read_in_memory(given: InMemoryItems, fields: Sequence[str]) -> DataContent:
    path = Path("items")
    both = dict.fromkeys(SPLITS, path)
    if isinstance(given.items, Mapping):
        split = {name: _list_entries(path, name, values) for name, values in given.items.items()}
        return DataContent(both, split)
    return DataContent(both, _divide_entries(path, _number_entries(path, given.items), fields))


def _list_entries(path: Path, split: str, values: object) -> list[DataEntry]:
    if values is None:
        return []
    if not isinstance(values, list):
        raise UserError(f'{path}: "{split}" is not a list of at least one item.')
    return [DataEntry(place, value) for place, value in enumerate(values)]


def _read_single_split(path: Path, remedy: MissingFileHint) -> list[DataEntry]:
    """The entries of a file that is of one split."""
    if path.suffix == ".jsonl":
        return _read_jsonl(path, remedy)
    value = _read_json(path, remedy)
    if not isinstance(value, list):
        raise UserError(f"{path}: the outermost value is not a list, as one split's has to be.")
    return _number_entries(path, value)


def _read_json(path: Path, remedy: MissingFileHint) -> Any:
    try:
        return json.loads(_read_text(path, remedy))
    except (ValueError, RecursionError) as error:
        lines = "; is it one item a line? Then name it .jsonl" if "Extra data" in str(error) else ""
        raise UserError(f"{path} is not readable JSON: {error}{lines}.") from error


def _read_jsonl(path: Path, remedy: MissingFileHint) -> list[DataEntry]:
    # Not splitlines(): JSON texts may hold U+2028 and other ends of lines as they are.
    entries, wrong = [], []
    for number, line in enumerate(_read_text(path, remedy).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            wrong.append((number, f"it is not readable JSON: {error}"))
            continue
        if not isinstance(value, Mapping):
            wrong.append((number, "it is not an object"))
            continue
        entries.append(DataEntry(number, value))
    _refuse(path, "line", wrong, len(entries) + len(wrong))
    return entries


def _number_entries(path: Path, values: Sequence[Any]) -> list[DataEntry]:
    wrong = [
        (place, "it is not an object")
        for place, value in enumerate(values)
        if not isinstance(value, Mapping)
    ]
    _refuse(path, "item", wrong, len(values))
    return [DataEntry(place, value) for place, value in enumerate(values)]


def _refuse(path: Path, unit: str, wrong: Sequence[tuple[int, str]], count: int) -> None:
    """Raise UserError where lines or items of a file are wrong: of each kind how many, and which.

    Args:
        wrong: (place, what is wrong) of each; the kind is what stands before a ": ".
        count: How many there are in all.
    """
    if len(wrong) == 1:
        ((place, what),) = wrong
        raise UserError(f"{path} {unit} {place}: {what}.")
    if wrong:
        kinds = faults.by_kind(wrong)
        raise UserError(f"{path}: {len(wrong)} of {count} {unit}s are wrong: {kinds}.")


def _read_text(path: Path, remedy: MissingFileHint) -> str:
    try:
        return read_text(path, "utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing: {remedy(path)}.") from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path} is not readable: {why}.") from error


def _divide_entries(path: Path, entries: Sequence[DataEntry], fields: Sequence[str]) -> dict[str, list[DataEntry]]:
    """The entries by their "split", else by a hash of their content."""
    named = [entry for entry in entries if "split" in entry.value]
    if not named:
        dev = leak.split_dev_third([entry.value for entry in entries], fields)
        return {
            "dev": [e for e, first in zip(entries, dev, strict=True) if first],
            "test": [e for e, first in zip(entries, dev, strict=True) if not first],
        }
    where = "line" if path.suffix == ".jsonl" else "item"
    wrong = []
    for place, value in entries:
        if value.get("split") not in SPLITS:
            said = repr(value["split"]) if "split" in value else "missing"
            rule = "where one item says its split, each has to: dev or test"
            wrong.append((place, f'its "split" is {said}; {rule}'))
    _refuse(path, where, wrong, len(entries))
    return {split: [e for e in entries if e.value["split"] == split] for split in SPLITS}
