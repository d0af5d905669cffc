"""Overlap of the dev and test items of a file, and the division of items between them."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
