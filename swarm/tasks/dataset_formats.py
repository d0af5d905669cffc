"""Read data files (JSON or JSON lines) into entries by split, and format their errors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from swarm._util.files import find_path, read_text
from swarm.errors import UserError
from swarm.tasks import split_overlap
from swarm.tasks.base import Item

MAX_LISTED_IDS = 5
"""Maximum number of ids listed per kind of error."""


def format_ids(ids: Sequence[object]) -> str:
    """Format the first few ids and the number of others: "3, 7, 9, 11, 20 and 12 more"."""
    named = ", ".join(map(str, ids[:MAX_LISTED_IDS]))
    return named + (f" and {len(ids) - MAX_LISTED_IDS} more" if len(ids) > MAX_LISTED_IDS else "")


def format_faults(split: str, faults: Sequence[tuple[object, str]], count: int) -> str:
    """Format all faulty items of a split in one line, without a full stop.

    Args:
        split: The split's name.
        faults: (id, error) of at least one item. The text before ": " is the kind of error, by
            which items are counted; the rest concerns the one item.
        count: Number of items of the split.
    """
    if len(faults) == 1:
        ((item_id, what),) = faults
        return f"{split} item {item_id!r}: {what}"
    return f"{len(faults)} of {count} {split} items are wrong: {by_kind(faults)}"


def by_kind(faults: Sequence[tuple[object, str]]) -> str:
    """Group faults, (id, error), by kind: "its answer is empty (2: 3, 7); ..."."""
    kinds: dict[str, list[object]] = {}
    for item_id, what in faults:
        kinds.setdefault(what.partition(": ")[0], []).append(item_id)
    return "; ".join(f"{kind} ({len(ids)}: {format_ids(ids)})" for kind, ids in kinds.items())


def find_repeated_ids(items: Sequence[Item], fields: Sequence[str]) -> list[object]:
    """Return the ids of items that repeat an earlier one (see `split_overlap.item_identity`)."""
    seen: set[split_overlap.ItemIdentity] = set()
    again = []
    for item in items:
        identity = split_overlap.item_identity(item, fields)
        if identity in seen:
            again.append(item["id"])
        seen.add(identity)
    return again


SPLITS = ("dev", "test")


@dataclass(frozen=True, slots=True)
class InMemoryItems:
    """Items in memory: a list, which is divided as a file's is, or one list per split."""

    items: Sequence[Any] | Mapping[str, Sequence[Any]]


DataFiles = str | Mapping[str, str] | InMemoryItems
"""Path of one file, or of one per split, {"dev": path, "test": path}; or the items."""

MissingFileHint = Callable[[Path], str]
"""Return a remedy for a missing file."""


class DataEntry(NamedTuple):
    """An entry with its place: a line from 1 on in JSON lines, else an index in a list from 0."""

    place: int
    value: Any


@dataclass(frozen=True, slots=True)
class DataContent:
    """Content of a data file.

    Attributes:
        path: The file of each split, for messages.
        entries: The entries of each split; empty where there are none.
        common: Fields that all items share.
    """

    path: Mapping[str, Path]
    entries: Mapping[str, Sequence[DataEntry]]
    common: Mapping[str, str] = field(default_factory=dict)


def read_data(file: DataFiles, remedy: MissingFileHint, fields: Sequence[str]) -> DataContent:
    """Read the content of one or two files.

    - An object `{"dev": [...], "test": [...]}`, optionally with an "icl_prompt".
    - JSON lines (a name in ".jsonl", one object per line) or a list of objects: either each has a
      "split", "dev" or "test", or none does, and they are divided
      (`split_overlap.split_dev_third`).
    - For each split, one file of JSON lines or with a list.
    - `InMemoryItems`: the same without a file.

    Args:
        fields: The items' fields that identify an item (see `split_overlap.item_identity`).

    Raises:
        UserError: A file is missing, unreadable, or in no such format.
    """
    if isinstance(file, InMemoryItems):
        return _read_in_memory(file, fields)
    if isinstance(file, Mapping):
        paths = {split: find_path(path) for split, path in file.items()}
        return DataContent(
            paths, {split: _read_single_split(path, remedy) for split, path in paths.items()}
        )
    path = find_path(file)
    both = dict.fromkeys(SPLITS, path)
    if path.suffix == ".jsonl":
        return DataContent(both, _divide_entries(path, _read_jsonl(path, remedy), fields))
    value = _read_json(path, remedy)
    if isinstance(value, list):
        return DataContent(both, _divide_entries(path, _number_entries(path, value), fields))
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: the outermost value is neither an object nor a list.")
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
    return [DataEntry(index, value) for index, value in enumerate(values)]


def _read_single_split(path: Path, remedy: MissingFileHint) -> list[DataEntry]:
    """Return the entries of a file that contains a single split."""
    if path.suffix == ".jsonl":
        return _read_jsonl(path, remedy)
    value = _read_json(path, remedy)
    if not isinstance(value, list):
        raise UserError(f"{path}: the outermost value must be a list, as this file is one split.")
    return _number_entries(path, value)


def _read_json(path: Path, remedy: MissingFileHint) -> Any:
    try:
        return json.loads(_read_text(path, remedy))
    except (ValueError, RecursionError) as error:
        lines = (
            "; if it has one item per line, rename it to .jsonl"
            if "Extra data" in str(error)
            else ""
        )
        raise UserError(f"{path} is not valid JSON: {error}{lines}.") from error


def _read_jsonl(path: Path, remedy: MissingFileHint) -> list[DataEntry]:
    # Not splitlines(): JSON texts may contain an unescaped U+2028 or another line separator.
    entries, errors = [], []
    for number, line in enumerate(_read_text(path, remedy).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            errors.append((number, f"it is not valid JSON: {error}"))
            continue
        if not isinstance(value, Mapping):
            errors.append((number, "it is not an object"))
            continue
        entries.append(DataEntry(number, value))
    _refuse(path, "line", errors, len(entries) + len(errors))
    return entries


def _number_entries(path: Path, values: Sequence[Any]) -> list[DataEntry]:
    errors = [
        (index, "it is not an object")
        for index, value in enumerate(values)
        if not isinstance(value, Mapping)
    ]
    _refuse(path, "item", errors, len(values))
    return [DataEntry(index, value) for index, value in enumerate(values)]


def _refuse(path: Path, unit: str, errors: Sequence[tuple[int, str]], count: int) -> None:
    """Raise UserError if a file has invalid lines or items, counted and listed by kind.

    Args:
        errors: (place, error) of each; the kind is the text before ": ".
        count: Number of lines or items in total.
    """
    if len(errors) == 1:
        ((index, what),) = errors
        raise UserError(f"{path} {unit} {index}: {what}.")
    if errors:
        kinds = by_kind(errors)
        raise UserError(f"{path}: {len(errors)} of {count} {unit}s are wrong: {kinds}.")


def _read_text(path: Path, remedy: MissingFileHint) -> str:
    try:
        return read_text(path, "utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing: {remedy(path)}.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} is not readable: {reason}.") from error


def _divide_entries(
    path: Path, entries: Sequence[DataEntry], fields: Sequence[str]
) -> dict[str, list[DataEntry]]:
    """Divide entries by their "split", else by a hash of their content."""
    named = [entry for entry in entries if "split" in entry.value]
    if not named:
        dev = split_overlap.split_dev_third([entry.value for entry in entries], fields)
        return {
            "dev": [e for e, first in zip(entries, dev, strict=True) if first],
            "test": [e for e, first in zip(entries, dev, strict=True) if not first],
        }
    where = "line" if path.suffix == ".jsonl" else "item"
    errors = []
    for index, value in entries:
        if value.get("split") not in SPLITS:
            split_value = repr(value["split"]) if "split" in value else "missing"
            rule = "if one item has a split, all need one: dev or test"
            errors.append((index, f'its "split" is {split_value}; {rule}'))
    _refuse(path, where, errors, len(entries))
    return {split: [e for e in entries if e.value["split"] == split] for split in SPLITS}
