"""The items of a task's two splits, read and checked at first use."""

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from swarm._util import validation
from swarm._util.files import find_path, parse_json, read_text
from swarm.errors import UserError
from swarm.tasks.base import Item

ItemIdentity = tuple[str, tuple[str, ...], str]
"""Question, choice texts in sorted order (empty without choices), text of the right answer."""


def item_identity(item: Item, fields: Sequence[str] = ()) -> ItemIdentity:
    """Return the content by which two items count as the same.

    Ids, letters and the order of the choices do not count; the same question with other choices is
    another item.

    Args:
        fields: The item's fields that are its question; empty is "question", else "prompt".
    """
    question = "\n".join(str(item.get(field)) for field in fields)
    if not fields:
        question = str(item.get("question", item.get("prompt")))
    gold: Any = item.get("answer")
    choices = item.get("choices")
    if not isinstance(choices, Mapping):
        return question, (), str(gold)
    right = choices.get(gold) if isinstance(gold, str) else None
    return question, tuple(sorted(map(str, choices.values()))), str(right)


def assign_shared_items(
    dev: Sequence[Item], test: Sequence[Item], fields: Sequence[str] = ()
) -> dict[str, set[ItemIdentity]]:
    """Assign each item that occurs in both splits to one of them.

    The shared items are sorted by the text of the right answer, then by domain, then by a hash of
    their content; every second one, from the first on, stays in dev and the others stay in test. So
    each right answer is halved as evenly as its number allows, the halves are independent of the
    file's order, and the division depends on nothing but the items themselves.

    Returns:
        For "dev" and "test" the shared items that stay there; both are empty if none is shared.
    """
    domains = {item_identity(item, fields): str(item.get("domain")) for item in dev}
    shared = sorted(
        domains.keys() & {item_identity(item, fields) for item in test},
        key=lambda one: (one[2], domains[one], _hash_identity(one)),
    )
    return {"dev": set(shared[::2]), "test": set(shared[1::2])}


def split_dev_third(items: Sequence[Item], fields: Sequence[str] = ()) -> list[bool]:
    """Return for each item whether it is a dev item, for a file without splits.

    Dev is the third, rounded up, of the different items whose content has the lowest hashes. So
    equal items are in one split, the file's order does not count, and one more item moves at most
    one other across.
    """
    identities = [item_identity(item, fields) for item in items]
    ranked = sorted(set(identities), key=_hash_identity)
    dev = set(ranked[: -(-len(ranked) // 3)])
    return [one in dev for one in identities]


def exclude_items(
    items: Sequence[Item], gone: Collection[ItemIdentity], fields: Sequence[str] = ()
) -> list[Item]:
    """Return the items that are not in `gone`, in their order."""
    return (
        [item for item in items if item_identity(item, fields) not in gone] if gone else list(items)
    )


def _hash_identity(one: ItemIdentity) -> str:
    return hashlib.sha256(json.dumps(one).encode()).hexdigest()


MAX_LISTED_FIELDS = 12
"""Maximum number of an item's fields listed in an error."""

MAX_LISTED_IDS = 5
"""Maximum number of ids listed per kind of error."""


def format_ids(ids: Sequence[object]) -> str:
    """Format the first few ids and the number of others: "3, 7, 9, 11, 20 and 12 more"."""
    named = ", ".join(map(str, ids[:MAX_LISTED_IDS]))
    return named + (f" and {len(ids) - MAX_LISTED_IDS} more" if len(ids) > MAX_LISTED_IDS else "")


def format_places(
    path: Path, entries: Sequence["DataEntry"], ids: Sequence[object], by_position: bool = False
) -> str:
    """Format the ids of a file's items: "lines 3, 7", or "ids 3, 7" if items have ids of their own.

    Args:
        entries: All entries of the split.
        by_position: Ids are places although items may have their own.
    """
    place = "line" if path.suffix == ".jsonl" else "item"
    own = any(isinstance(e.value, Mapping) and "id" in e.value for e in entries)
    unit = "id" if own and not by_position else place
    return f"{unit}{'s' * (len(ids) > 1)} {format_ids(ids)}"


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
    """Return the ids of items that repeat an earlier one (see `item_identity`)."""
    seen: set[ItemIdentity] = set()
    again = []
    for item in items:
        identity = item_identity(item, fields)
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
      (`split_dev_third`).
    - For each split, one file of JSON lines or with a list.
    - `InMemoryItems`: the same without a file.

    Args:
        fields: The items' fields that identify an item (see `item_identity`).

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
        return parse_json(_read_text(path, remedy))
    except ValueError as error:
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
            value = parse_json(line)
        except ValueError as error:
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
        dev = split_dev_third([entry.value for entry in entries], fields)
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


log = logging.getLogger(__name__)

FETCHED_FOLDER = "data/eval"
"""Output folder of scripts/fetch_data.py."""


class DataFile:
    """Items of one file, or of one file per split, in the formats of `swarm.tasks.dataset`.

    Items are ordered so that every prefix has the domains (the items' "domain") in the proportions
    of the complete split, in file order within a domain. A limit takes a prefix: 50 items are the
    first 50 of 100, independent of machine and seed. With `dev_seed` the dev split is shuffled
    first, so that each seed draws other items; for one seed, 50 items are again the first 50 of
    100.

    An "icl_prompt" (a worked example) is copied into each item, so that a worker needs nothing but
    the item.

    Items that occur in both dev and test (`swarm.tasks.dataset`) cause one warning and are
    divided, half to dev and half to test, before limits apply. Items repeated within a split cause
    a warning and remain.

    Args:
        name: The task's name, which is the file's without ".json" unless `file` is given.
        file: Path of the file, or of one for each split; `None` is data/eval/NAME.json.
        dev_limit: Maximum number of dev items; `None` is all of them.
        test_limit: Maximum number of test items; `None` is all of them.
        ids: "file" takes the items' "id" (without one: the line number in JSON lines, from 1 on,
            else the index in the list, from 0), "position" numbers all items that way, for files
            whose ids repeat.
        check: Returns an item's error, or `None`. Errors are counted by the text before ": ".
        dedupe: Divide the items that are in both splits; false leaves them in both, as the original
            does, and a search then selects on some of its test items.
        fields: The items' fields that identify an item; empty is "question" or "prompt".
        dev_seed: Seed of the draw of the dev items; `None` is file order. The test split never
            depends on it.
        too_long: Treatment of items that exceed the model's context: "refuse", "drop" or "truncate"
            (`swarm.loop.prompt_stats.fit_to_context`).

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        name: str,
        file: DataFiles | None,
        dev_limit: int | None,
        test_limit: int | None,
        ids: str,
        check: Callable[[Item], str | None],
        dedupe: bool = True,
        fields: Sequence[str] = (),
        dev_seed: int | None = None,
        too_long: str = "refuse",
    ) -> None:
        self.name = validation.check_text("name", name)
        self.file = _check_files(file) or f"{FETCHED_FOLDER}/{self.name}.json"
        self.limits = {
            "dev": validation.check_optional_int("dev_limit", dev_limit),
            "test": validation.check_optional_int("test_limit", test_limit),
        }
        self.ids = validation.check_one_of("ids", ids, ("file", "position"))
        self.check = check
        self.dedupe = validation.check_bool("dedupe", dedupe)
        self.fields = tuple(fields)
        self.dev_seed = (
            None if dev_seed is None else validation.check_non_negative_int("dev_seed", dev_seed)
        )
        self.too_long = validation.check_one_of("too_long", too_long, validation.TOO_LONG)
        self._splits: dict[str, tuple[Item, ...]] = {}
        self._warned = False

    def items(self, split: str) -> tuple[Item, ...]:
        """Return the items of "dev" or "test".

        Raises:
            UserError: The file or split is missing, the split is empty, or items are invalid; the
                message names the file and the items. Of the other split only the valid items are
                read.
        """
        if split not in SPLITS:
            raise UserError(f"split: {split!r} is not one of {', '.join(SPLITS)}.")
        if split not in self._splits:
            items = self._load_split(split)
            if split == "dev" and self.dev_seed is not None:
                random.Random(f"{self.dev_seed}/dev").shuffle(items)
            items = balance_domains(items)
            self._splits[split] = tuple(items[: self.limits[split]])
        return self._splits[split]

    def replace_items(self, split: str, items: Sequence[Item]) -> None:
        """Replace a split's items from now on."""
        self._splits[split] = tuple(items)

    def _load_split(self, split: str) -> list[Item]:
        content = read_data(self.file, self._missing_file_hint, self.fields)
        if not content.entries.get(split):
            path = content.path.get(split) or f"task.file={self.file}"
            raise UserError(f'{path}: "{split}" is not a list of at least one item.')
        path = content.path[split]
        items = self._validate_items(path, split, content)
        if again := find_repeated_ids(items, self.fields):
            log.warning(
                "%s: %d of %d %s items are duplicates (question, choices and answer) and are "
                "scored as well: %s.",
                *(path, len(again), len(items), split),
                format_places(path, content.entries[split], again, self.ids == "position"),
            )
        return self._remove_shared_items(path, content, split, items)

    def _describe_fields(self, entry: Mapping[str, Any] | None) -> str:
        """Name the fields of the first entry that lacks one; "" if there is none."""
        if entry is None:
            return ""
        named = ", ".join(f'"{name}"' for name in list(map(str, entry))[:MAX_LISTED_FIELDS])
        if hasattr(self, "template"):
            advice = "task.template names the fields of the prompt in braces"
        else:
            advice = "no option maps names, so rename them in the file"
        return f"; the first of them has {named or 'no field'}: {advice}"

    def _validate_items(self, path: Path, split: str, content: DataContent) -> list[Item]:
        """Return the split's items, all of them valid and with different ids."""
        items: list[Item] = []
        errors: list[tuple[object, str]] = []
        lacking: Mapping[str, Any] | None = None
        for index, value in content.entries[split]:
            item_id = value.get("id", index) if isinstance(value, Mapping) else index
            if (what := self._entry_error(value, item_id)) is not None:
                errors.append((item_id, what))
                if lacking is None and what.startswith('it has no "'):
                    lacking = value
                continue
            item_id = index if self.ids == "position" else item_id
            items.append({**content.common, **value, "id": item_id})
        if errors:
            entries = content.entries[split]
            message = format_faults(split, errors, len(entries))
            raise UserError(f"{path}: {message}{self._describe_fields(lacking)}.")
        times = Counter(str(item["id"]) for item in items)
        if repeated := [f'"{item_id}"' for item_id, number in times.items() if number > 1]:
            raise UserError(
                f"{path}: {len(repeated)} ids occur more than once in {split}:"
                f" {format_ids(repeated)}; make ids unique, or set "
                "task.ids=position."
            )
        return items

    def _entry_error(self, value: object, item_id: object) -> str | None:
        if not isinstance(value, Mapping):
            return "it is not an object"
        if isinstance(item_id, bool) or not isinstance(item_id, (int, str)):
            return "its id is neither a number nor a string"
        domain = value.get("domain")
        if domain is not None and (isinstance(domain, bool) or not isinstance(domain, str | int)):
            return 'its "domain" is not a string'
        if not _is_text(value):
            return "it contains an unpaired surrogate, which is not a character"
        return self.check(value)

    def _remove_shared_items(
        self, path: Path, content: DataContent, split: str, items: list[Item]
    ) -> list[Item]:
        """Return the items without those that are assigned to the other split."""
        other = "test" if split == "dev" else "dev"
        rest = [
            {"id": entry.place, **entry.value}
            for entry in content.entries.get(other, ())
            if isinstance(entry.value, Mapping) and self.check(entry.value) is None
        ]
        dev, test = (items, rest) if split == "dev" else (rest, items)
        kept = assign_shared_items(dev, test, self.fields)
        by_position = self.ids == "position" and split == "dev"
        self._warn_shared_items(content, kept, dev, by_position)
        if not self.dedupe:
            return items
        remaining = exclude_items(items, kept[other], self.fields)
        if not remaining:
            raise UserError(
                f"{path}: all items of {split} are in {other}, too; set task.dedupe=false to "
                "keep them in both."
            )
        return remaining

    def _warn_shared_items(
        self,
        content: DataContent,
        kept: Mapping[str, set[ItemIdentity]],
        items: Sequence[Item],
        by_position: bool,
    ) -> None:
        """Warn once of items shared by dev and test; `items` are those of dev."""
        dev, test = len(kept["dev"]), len(kept["test"])
        if self._warned or not dev:
            return
        self._warned = True
        if self.dedupe:
            what = f"{dev} stay in dev, {test} in test (task.dedupe=false keeps them in both)"
        else:
            what = "they stay in both (task.dedupe=true divides them between the two)"
        shared = kept["dev"] | kept["test"]
        ids = [i["id"] for i in items if item_identity(i, self.fields) in shared]
        path = content.path["dev"]
        log.warning(
            "%s: %d items are in both dev and test; %s. In dev they are %s.",
            *(path, dev + test, what),
            format_places(path, content.entries["dev"], ids, by_position),
        )

    def _missing_file_hint(self, path: Path) -> str:
        if isinstance(self.file, str) and Path(self.file) == Path(FETCHED_FOLDER) / path.name:
            fetch = f"run `python -m swarm.fetch_data {path.stem}` if --list names it"
            return f"{fetch}, or set your own file by task.file"
        return "see task.file"


class DataFileTask:
    """A task whose items are those of a `DataFile`.

    Attributes:
        data: The file.
    """

    data: DataFile

    def items(self, split: str) -> Sequence[Item]:
        """Return the items of "dev" or "test"; see `Task.items`."""
        return self.data.items(split)

    @property
    def too_long(self) -> str:
        """Treatment of items that exceed the model's context (see `DataFile`)."""
        return self.data.too_long

    def replace_items(self, split: str, items: Sequence[Item]) -> None:
        """See `DataFile.replace_items`."""
        self.data.replace_items(split, items)


def _is_text(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_files(file: object) -> DataFiles | None:
    if isinstance(file, InMemoryItems):
        return file
    if not isinstance(file, Mapping):
        return validation.check_optional_text("file", file)
    if not file or not set(file) <= set(SPLITS):
        raise UserError(f"task.file: {dict(file)} is not a file for each of {', '.join(SPLITS)}.")
    return {split: validation.check_text(f"file.{split}", path) for split, path in file.items()}


def balance_domains(items: Sequence[Item]) -> list[Item]:
    """Return the items ordered so that every prefix has the domains in the overall proportions.

    The k-th of a domain's n items is sorted at (k - 1/2)/n; ties are in index order.
    """
    sizes = Counter(str(item.get("domain")) for item in items)
    seen: Counter[str] = Counter()
    order = []
    for position, item in enumerate(items):
        domain = str(item.get("domain"))
        order.append(((seen[domain] + 0.5) / sizes[domain], position))
        seen[domain] += 1
    return [items[position] for _, position in sorted(order)]


def text_field_error(item: Item, field: str) -> str | None:
    """Return the error of a field that has to be a text, or `None`."""
    if field not in item:
        return f'it has no "{field}"'
    value = item[field]
    if isinstance(value, str) and not value.strip():
        return f'its "{field}" is empty'
    return None if isinstance(value, str) else f'its "{field}" is not a string'


def gold_answer_error(answer: object) -> str | None:
    """Return the error of an answer that has to be a text or a number, or `None`."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return 'its "answer" is neither a string nor a number'
    return None if str(answer).strip() else 'its "answer" is empty'
