"""Tasks with items in files: reading and checking them, and their division into dev and test."""

import csv
import hashlib
import json
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

from swarm._util.files import DATA_SUFFIXES, find_path, parse_json
from swarm._util.jsonl import iter_json_lines, read_utf8
from swarm._util.settings import Count, Positive, Text, checked
from swarm.errors import UserError, install_command
from swarm.tasks.base import SPLITS, Item, SplitTask

log = logging.getLogger(__name__)

MAX_LISTED = 5
"""Maximum number of ids, or of fields of an item, that a message lists."""

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


def _hash_identity(one: ItemIdentity) -> str:
    return hashlib.sha256(json.dumps(one).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class InMemoryItems:
    """Items in memory: a list, which is divided as a file's is, or one list per split.

    Attributes:
        path: Where they are from, for messages.
    """

    items: Sequence[Any] | Mapping[str, Sequence[Any]]
    path: Path = Path("items")


DataFiles = Text | Mapping[str, str] | InMemoryItems
"""Path of one file or folder, or of one per split, {"dev": path, "test": path}; or the items."""

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "dev": "dev",
    "validation": "dev",
    "valid": "dev",
    "val": "dev",
    "eval": "dev",
    "test": "test",
}
"""Split by each name that it has in files of other people."""


class Row(NamedTuple):
    """An item as it stands in a file.

    Attributes:
        place: Its line in JSON lines, from 1 on, else its index in a list, from 0.
    """

    split: str
    path: Path
    place: int
    value: Mapping[str, Any]


def read_rows(file: DataFiles) -> list[Row]:
    """Read items with their splits, empty where none is named; see `divide_rows`.

    - JSON lines (a name in ".jsonl", one object per line), a list of objects in ".json", ".csv",
      ".tsv" or ".parquet", with or without a column "split".
    - An object `{"dev": [...], "test": [...]}`, optionally with an "icl_prompt", which is copied
      into each item.
    - A folder with a file for each split, or saved by `datasets.Dataset.save_to_disk`.
    - `InMemoryItems`: the same without a file.

    Raises:
        UserError: A file is missing, unreadable, or in no such format.
    """
    if isinstance(file, InMemoryItems):
        rows = _rows(file.path, file.items)
    elif isinstance(file, Mapping):
        paths = {str(split): find_path(path) for split, path in file.items()}
        rows = [row for split, path in paths.items() for row in _rows(path, _read(path), split)]
    else:
        path = find_path(file)
        rows = _rows(path, _read(path))
    if any("split" in row.value for row in rows if not row.split):
        rows = [row._replace(split=row.split or str(row.value.get("split"))) for row in rows]
    return rows


def divide_rows(rows: Sequence[Row], fields: Sequence[str]) -> list[Row]:
    """Return the rows of dev and test.

    Splits may be called as in `SPLIT_NAMES`. The last one is test and the one before it dev: of
    train, validation and test, train is not used. A lone train or validation split is divided, and
    so are rows without splits (`split_dev_third`).

    Args:
        fields: The items' fields that identify an item (see `item_identity`).

    Raises:
        UserError: A row has no known split, but another one has.
    """
    kinds = {row.split: SPLIT_NAMES.get(row.split.lower(), "") for row in rows}
    if wrong := [row for row in rows if any(kinds) and not kinds[row.split]]:
        raise UserError(f"""{_place(wrong[0])}: its "split" is
            {wrong[0].value.get("split", "missing")!r}; if one item has a split, all need one:
            train, dev, validation or test""")
    present = [split for split in ("train", *SPLITS) if split in kinds.values()]
    if len(present) > 1:
        meant = {present[-1]: "test", present[-2]: "dev"}
    elif present and {*kinds} <= {*SPLITS}:
        meant = {present[0]: present[0]}
    else:
        dev = split_dev_third([row.value for row in rows], fields)
        pairs = zip(rows, dev, strict=True)
        return [row._replace(split="dev" if first else "test") for row, first in pairs]
    return [row._replace(split=meant[one]) for row in rows if (one := kinds[row.split]) in meant]


def _read(path: Path) -> Any:
    """Return the JSON value of a file; of JSON lines, the values by line number."""
    if not path.exists():
        hint = "check the path (task.file)"
        if path.parent.as_posix().endswith("data/eval"):
            hint = f"run `python -m swarm.fetch_data {path.stem}` if --list names it, or set your "
            hint += "own file by task.file"
        raise UserError(f"{path} is missing: {hint}")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".parquet":
        return _import_reader("pyarrow.parquet", path).read_table(path).to_pylist()
    if path.suffix and path.suffix not in DATA_SUFFIXES:
        raise UserError(f"{path}: unknown format; save it as one of {', '.join(DATA_SUFFIXES)}")
    text = read_utf8(path)
    if path.suffix == ".jsonl":
        return dict(iter_json_lines(path, text))
    if path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(sys.maxsize)
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        return [*csv.DictReader(StringIO(text), delimiter=delimiter)]
    try:
        return parse_json(text)
    except ValueError as error:
        many = "Extra data" in str(error)
        lines = "; if it has one item per line, rename it to .jsonl" if many else ""
        raise UserError(f"{path} is not valid JSON: {error}{lines}") from None


def _read_folder(path: Path) -> Any:
    """Return the rows of a folder: those saved by the datasets library, else a file per split."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        saved = _import_reader("datasets", path).load_from_disk(str(path))
        if hasattr(saved, "to_list"):
            return saved.to_list()
        return {split: part.to_list() for split, part in saved.items()}
    found: dict[str, list[Any]] = {}
    for one in sorted([*path.glob("*.*"), *path.glob("data/*.*")]):
        split = re.split(r"[-_.]", one.name)[0]
        if split in SPLIT_NAMES and one.suffix in DATA_SUFFIXES:
            found.setdefault(split, []).extend(row.value for row in _rows(one, _read(one)))
    if not found:
        raise UserError(f"""{path} has no file of a split, such as train.jsonl and test.jsonl, and
            was not saved by datasets' save_to_disk; allowed: {", ".join(DATA_SUFFIXES)}""")
    return found


def _import_reader(module: str, path: Path) -> Any:
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{path} needs {package}: {install_command('data')}") from None


def _rows(path: Path, values: Any, split: str = "") -> list[Row]:
    """Return the rows of a list, of JSON lines, or of an object with a list for each split."""
    if isinstance(values, Mapping) and values and all(type(key) is int for key in values):
        pairs = list(values.items())
    elif isinstance(values, Mapping) and not split:
        named = [name for name in values if name in SPLIT_NAMES]
        rows = [row for name in named for row in _rows(path, values[name] or [], name)]
        if (shown := values.get("icl_prompt")) and isinstance(shown, str):
            rows = [row._replace(value={"icl_prompt": shown, **row.value}) for row in rows]
        return rows
    elif isinstance(values, Sequence) and not isinstance(values, str):
        pairs = list(enumerate(values))
    else:
        what = f'"{split}"' if split else "the outermost value"
        raise UserError(f"{path}: {what} is not a list of items")
    rows = [Row(split, path, place, value) for place, value in pairs]
    if wrong := [row for row in rows if not isinstance(row.value, Mapping)]:
        raise UserError(f"{_place(wrong[0])}: it is not an object")
    return rows


def _place(row: Row) -> str:
    return f"{row.path}, {'line' if row.path.suffix == '.jsonl' else 'item'} {row.place}"


@checked("task")
@dataclass(eq=False)
class DataTask(SplitTask):
    """A task with the items of one file, or of one file per split (`read_rows`, `divide_rows`).

    Items are ordered so that every prefix has the domains (the items' "domain") in the proportions
    of the complete split, in file order within a domain. A limit takes a prefix: 50 items are the
    first 50 of 100, independent of machine and seed.

    An "icl_prompt" (a worked example) is copied into each item, so that a worker needs nothing but
    the item. Items that occur in both dev and test cause one warning and are divided
    (`assign_shared_items`) before limits apply. Items repeated within a split cause a warning and
    remain.

    Args:
        name: The task's name, which is the file's without ".json" unless `file` is given.
        file: Path of the file, or of one for each split; `None` is data/eval/NAME.json.
        dev_limit: Maximum number of dev items; `None` is all of them.
        test_limit: Maximum number of test items; `None` is all of them.
        ids: "file" takes the items' "id" (without one: the line number in JSON lines, from 1 on,
            else the index in the list, from 0), "position" numbers all items that way, for files
            whose ids repeat.
        dedupe: Divide the items that are in both splits; false leaves them in both, as the original
            does, and a search then selects on some of its test items.
        dev_seed: Shuffles the dev items before the limit, so that each seed draws others; `None` is
            file order. The test split never depends on it.
        max_prompt_tokens: Items with a longer prompt are left out, with a warning; without a limit,
            items that exceed the model's context are an error.
    """

    name: Text
    file: DataFiles | None = None
    dev_limit: Positive | None = None
    test_limit: Positive | None = None
    ids: Literal["file", "position"] = "file"
    dedupe: bool = True
    dev_seed: Count | None = None
    max_prompt_tokens: Positive | None = None

    def __post_init__(self) -> None:
        if self.file is None:
            self.file = f"data/eval/{self.name}.json"  # where swarm.fetch_data puts it
        self.fields: Sequence[str] = ()  # that identify an item; empty: "question" or "prompt"
        super().__post_init__()
        self._warned = False

    def item_error(self, item: Item) -> str | None:
        """Return why an item is not in the task's format, or `None`."""
        return None

    def load_items(self, split: str) -> list[Item]:
        assert self.file is not None
        every = divide_rows(read_rows(self.file), self.fields)
        rows = [row for row in every if row.split == split]
        if not rows:
            shown = self.file.path if isinstance(self.file, InMemoryItems) else self.file
            raise UserError(f'{shown}: "{split}" is not a list of at least one item')
        items = self._check_items(rows)
        different = len({item_identity(item, self.fields) for item in items})
        if different < len(items):
            log.warning(
                "%s: %d of %d %s items are duplicates (question, choices and answer) and are "
                "scored as well",
                *(rows[0].path, len(items) - different, len(items), split),
            )
        # The errors of the other split are its own.
        others = [row for row in every if row.split != split and not self.item_error(row.value)]
        rest = [{"id": row.place, **row.value} for row in others]
        items = self._remove_shared_items(split, items, rest, rows[0].path)
        if split == "dev" and self.dev_seed is not None:
            random.Random(f"{self.dev_seed}/dev").shuffle(items)
        return balance_domains(items)[: self.dev_limit if split == "dev" else self.test_limit]

    def _check_items(self, rows: Sequence[Row]) -> list[Item]:
        """Return the items of a split's rows, all of them valid and with different ids."""
        split, path, *_ = rows[0]
        items: list[Item] = []
        errors = []
        for row in rows:
            item_id = row.place if self.ids == "position" else row.value.get("id", row.place)
            if what := _entry_error(row.value, item_id) or self.item_error(row.value):
                errors.append(f"{row.value.get('id', row.place)!r}: {what}")
            items.append({**row.value, "id": item_id})
        if errors:
            many = f"{len(errors)} of {len(items)} {split} items are wrong; the first: "
            raise UserError(f"{path}: {many * (len(errors) > 1)}{split} item {errors[0]}")
        times = Counter(str(item["id"]) for item in items)
        if repeated := [f'"{item_id}"' for item_id, number in times.items() if number > 1]:
            raise UserError(f"""{path}: {len(repeated)} ids occur more than once in {split}:
                {format_ids(repeated)}; make ids unique, or set task.ids=position""")
        return items

    def _remove_shared_items(
        self, split: str, items: list[Item], rest: Sequence[Item], path: Path
    ) -> list[Item]:
        """Return the items without those that are assigned to the other split, which has `rest`."""
        other = "test" if split == "dev" else "dev"
        dev, test = (items, rest) if split == "dev" else (rest, items)
        kept = assign_shared_items(dev, test, self.fields)
        if not self._warned and kept["dev"]:
            self._warned = True
            what = "they stay in both (task.dedupe=true divides them between the two)"
            if self.dedupe:
                what = f"{len(kept['dev'])} stay in dev, {len(kept['test'])} in test "
                what += "(task.dedupe=false keeps them in both)"
            shared = kept["dev"] | kept["test"]
            ids = [item["id"] for item in dev if item_identity(item, self.fields) in shared]
            log.warning(
                "%s: %d items are in both dev and test; %s. In dev they are %s.",
                *(path, len(shared), what, format_ids(ids)),
            )
        if not self.dedupe:
            return items
        found = [one for one in items if item_identity(one, self.fields) not in kept[other]]
        if not found:
            raise UserError(f"""{path}: all items of {split} are in {other}, too; set
                task.dedupe=false to keep them in both""")
        return found


def format_ids(ids: Sequence[object]) -> str:
    """Format the first few ids and the number of others: "3, 7, 9, 11, 20 and 12 more"."""
    named = ", ".join(map(str, ids[:MAX_LISTED]))
    return named + (f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else "")


def _entry_error(value: Item, item_id: object) -> str | None:
    if type(item_id) not in (int, str):
        return "its id is neither a number nor a string"
    if type(value.get("domain", "")) not in (str, int, type(None)):
        return 'its "domain" is not a string'
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "it contains an unpaired surrogate, which is not a character"
    return None


def text_field_error(item: Item, field: str) -> str | None:
    """Return the error of a field that has to be a text, or `None`."""
    if field not in item:
        return missing_field_error(item, field)
    value = item[field]
    if isinstance(value, str) and not value.strip():
        return f'its "{field}" is empty'
    return None if isinstance(value, str) else f'its "{field}" is not a string'


def missing_field_error(item: Item, field: str) -> str:
    """Return the error of an item without a field, with the fields that it has."""
    has = ", ".join(f'"{name}"' for name in list(item)[:MAX_LISTED])
    return f'it has no "{field}", but {has or "no field"}'


def gold_answer_error(item: Item) -> str | None:
    """Return the error of an "answer" that has to be a text or a number, or `None`."""
    if "answer" not in item:
        return missing_field_error(item, "answer")
    if type(item["answer"]) not in (str, int, float):
        return 'its "answer" is neither a string nor a number'
    return None if str(item["answer"]).strip() else 'its "answer" is empty'
