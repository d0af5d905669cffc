"""One evaluation file: items of two splits, read and checked at first use."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.places import find
from swarm.tasks import Item, keys, leak

log = logging.getLogger(__name__)

SPLITS = ("dev", "test")
FETCHED = "data/eval"
"""Where scripts/fetch_data.py puts its files."""


class DataFile:
    """A JSON file `{"dataset", "dev": [...], "test": [...]}`, optionally with "icl_prompt".

    Items come in an order of which every beginning has the domains (the items' "domain") in the
    proportions of the whole split, and in the file's order within a domain. A limit is a
    beginning of that order: 50 items are the first 50 of 100, whatever the machine or the seed.

    An "icl_prompt" (a worked example) is put into each item, so that an item is all that a
    worker needs to ask about it.

    Items that are in dev and in test alike (swarm/tasks/leak.py) are warned of, once, and stay in
    one of the two: one half in dev, the other in test. Limits are taken of what remains.

    Args:
        name: The task's name, which is the file's without ".json" unless `file` says otherwise.
        file: Path of the file; `None` is data/eval/NAME.json.
        dev_limit: The most items of the dev split; `None` is all of them.
        test_limit: The most items of the test split; `None` is all of them.
        ids: "file" takes the items' own "id" (their position where they have none), "position"
            numbers them from 0, for files whose ids repeat.
        check: Says what is wrong with an item, or `None`.
        dedupe: Divide the items that are in both splits; false leaves them in both, as the
            original does, and a search then selects on some of its test items.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        name: str,
        file: str | None,
        dev_limit: int | None,
        test_limit: int | None,
        ids: str,
        check: Callable[[Item], str | None],
        dedupe: bool = True,
    ) -> None:
        self.name = keys.words("name", name)
        self.file = keys.optional_words("file", file) or f"{FETCHED}/{self.name}.json"
        self.limits = {
            "dev": keys.optional_number("dev_limit", dev_limit),
            "test": keys.optional_number("test_limit", test_limit),
        }
        self.ids = keys.one_of("ids", ids, ("file", "position"))
        self.check = check
        self.dedupe = keys.switch("dedupe", dedupe)
        self._splits: dict[str, tuple[Item, ...]] = {}
        self._warned = False

    def items(self, split: str) -> tuple[Item, ...]:
        """The items of "dev" or "test".

        Raises:
            UserError: There is no such file or split, the split is empty, or an item is wrong;
                the message names the file and the item. Of the other split only the sound
                items are looked at.
        """
        if split not in SPLITS:
            raise UserError(f"split: {split!r} is not one of {', '.join(SPLITS)}.")
        if split not in self._splits:
            items = balanced(self._read(split))
            self._splits[split] = tuple(items[: self.limits[split]])
        return self._splits[split]

    def _read(self, split: str) -> list[Item]:
        path = find(self.file)
        content = read_object(path, self._remedy(path))
        entries = content.get(split)
        if not isinstance(entries, list) or not entries:
            raise UserError(f'{path}: "{split}" is not a list of at least one item.')
        shown = content.get("icl_prompt")
        common = {"icl_prompt": shown} if isinstance(shown, str) and shown else {}
        items = [self._item(path, split, n, entry, common) for n, entry in enumerate(entries)]
        repeated = [i for i, times in Counter(str(i["id"]) for i in items).items() if times > 1]
        if repeated:
            raise UserError(
                f'{path}: id "{repeated[0]}" occurs more than once in {split};'
                " make ids unique, or set task.ids=position."
            )
        return self._apart(path, content, split, items)

    def _apart(
        self, path: Path, content: Mapping[str, Any], split: str, items: list[Item]
    ) -> list[Item]:
        """The items without those that the other split keeps."""
        other = "test" if split == "dev" else "dev"
        entries = content.get(other)
        rest = [e for e in entries if self._sound(e)] if isinstance(entries, list) else []
        kept = leak.divide(items, rest) if split == "dev" else leak.divide(rest, items)
        self._warn(path, kept)
        if not self.dedupe:
            return items
        left = leak.without(items, kept[other])
        if not left:
            raise UserError(
                f"{path}: {split} has no item that is not in {other} too;"
                " task.dedupe=false leaves it in both."
            )
        return left

    def _sound(self, entry: object) -> bool:
        return isinstance(entry, Mapping) and self.check(entry) is None

    def _warn(self, path: Path, kept: Mapping[str, set[leak.Identity]]) -> None:
        dev, test = len(kept["dev"]), len(kept["test"])
        if self._warned or not dev:
            return
        self._warned = True
        if self.dedupe:
            what = f"{dev} stay in dev, {test} in test (task.dedupe=false leaves them in both)"
        else:
            what = "they stay in both (task.dedupe=true divides them)"
        log.warning("%s: %d items are in dev and in test alike; %s.", path, dev + test, what)

    def _item(
        self, path: Path, split: str, position: int, entry: object, common: Mapping[str, str]
    ) -> Item:
        if not isinstance(entry, Mapping):
            raise UserError(f"{path}: {split} item {position}: it is not an object.")
        own = entry.get("id", position)
        item = {**common, **entry, "id": position if self.ids == "position" else own}
        if isinstance(own, bool) or not isinstance(own, (int, str)):
            raise UserError(f"{path}: {split} item {position}: its id is no number and no text.")
        if (wrong := self.check(item)) is not None:
            raise UserError(f"{path}: {split} item {own!r}: {wrong}.")
        return item

    def _remedy(self, path: Path) -> str:
        if Path(self.file) == Path(FETCHED) / path.name:
            return f"run `python scripts/fetch_data.py {path.stem}`"
        return "see task.file"


def read_object(path: Path, remedy: str) -> Mapping[str, Any]:
    """The JSON object in the file at `path`.

    Raises:
        UserError: The file is missing (the message ends in `remedy`), unreadable, or something
            else than a JSON object.
    """
    if not path.exists():
        raise UserError(f"{path} is missing: {remedy}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: the outermost value is not an object.")
    return content


def balanced(items: Sequence[Item]) -> list[Item]:
    """The items so ordered that every beginning has the domains in the whole's proportions.

    The k-th of a domain's n items stands at (k - 1/2)/n of the way; ties go by position.
    """
    sizes = Counter(str(item.get("domain")) for item in items)
    seen: Counter[str] = Counter()
    places = []
    for position, item in enumerate(items):
        domain = str(item.get("domain"))
        places.append(((seen[domain] + 0.5) / sizes[domain], position))
        seen[domain] += 1
    return [items[position] for _, position in sorted(places)]


def wrong_text(item: Item, field: str) -> str | None:
    """What is wrong with a field that has to be a text, or `None`."""
    if field not in item:
        return f'it has no "{field}"'
    value = item[field]
    return None if isinstance(value, str) and value.strip() else f'its "{field}" is not a text'
