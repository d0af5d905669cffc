"""The items of a task's two splits, read and checked at first use."""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from swarm._util import validation
from swarm.errors import UserError
from swarm.tasks import dataset_formats, split_overlap
from swarm.tasks.base import Item
from swarm.tasks.dataset_formats import SPLITS, DataContent, DataFiles, InMemoryItems, read_data

log = logging.getLogger(__name__)

FETCHED_FOLDER = "data/eval"
"""Output folder of scripts/fetch_data.py."""


class DataFile:
    """Items of one file, or of one file per split, in the formats of `swarm.tasks.dataset_formats`.

    Items are ordered so that every prefix has the domains (the items' "domain") in the proportions
    of the complete split, in file order within a domain. A limit takes a prefix: 50 items are the
    first 50 of 100, independent of machine and seed. With `dev_seed` the dev split is shuffled
    first, so that each seed draws other items; for one seed, 50 items are again the first 50 of
    100.

    An "icl_prompt" (a worked example) is copied into each item, so that a worker needs nothing but
    the item.

    Items that occur in both dev and test (`swarm.tasks.split_overlap`) cause one warning and are
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
        if again := dataset_formats.find_repeated_ids(items, self.fields):
            log.warning(
                "%s: %d of %d %s items are duplicates (question, choices and answer) and are "
                "scored as well: %s.",
                *(path, len(again), len(items), split, dataset_formats.format_ids(again)),
            )
        return self._remove_shared_items(path, content, split, items)

    def _validate_items(self, path: Path, split: str, content: DataContent) -> list[Item]:
        """Return the split's items, all of them valid and with different ids."""
        items: list[Item] = []
        errors: list[tuple[object, str]] = []
        for index, value in content.entries[split]:
            item_id = value.get("id", index) if isinstance(value, Mapping) else index
            if (what := self._entry_error(value, item_id)) is not None:
                errors.append((item_id, what))
                continue
            item_id = index if self.ids == "position" else item_id
            items.append({**content.common, **value, "id": item_id})
        if errors:
            message = dataset_formats.format_faults(split, errors, len(content.entries[split]))
            raise UserError(f"{path}: {message}.")
        times = Counter(str(item["id"]) for item in items)
        if repeated := [f'"{item_id}"' for item_id, number in times.items() if number > 1]:
            raise UserError(
                f"{path}: {len(repeated)} ids occur more than once in {split}:"
                f" {dataset_formats.format_ids(repeated)}; make ids unique, or set "
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
        kept = split_overlap.assign_shared_items(dev, test, self.fields)
        self._warn_shared_items(path, kept, dev)
        if not self.dedupe:
            return items
        remaining = split_overlap.exclude_items(items, kept[other], self.fields)
        if not remaining:
            raise UserError(
                f"{path}: all items of {split} are in {other}, too; set task.dedupe=false to "
                "keep them in both."
            )
        return remaining

    def _warn_shared_items(
        self, path: Path, kept: Mapping[str, set[split_overlap.ItemIdentity]], items: Sequence[Item]
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
        ids = dataset_formats.format_ids(
            [i["id"] for i in items if split_overlap.item_identity(i, self.fields) in shared]
        )
        log.warning(
            "%s: %d items are in both dev and test; %s. Their ids in dev: %s.",
            *(path, dev + test, what, ids),
        )

    def _missing_file_hint(self, path: Path) -> str:
        if isinstance(self.file, str) and Path(self.file) == Path(FETCHED_FOLDER) / path.name:
            fetch = f"run `python -m swarm.fetch_data {path.stem}` if --list names it"
            return f"{fetch}, or set your own file by task.file"
        return "see task.file"


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
