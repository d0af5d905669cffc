"""What the dev and test items of a file have in common, and how it is divided between them."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from swarm.tasks import Item

Identity = tuple[str, tuple[str, ...], str]
"""Question, choice texts in sorted order (none without choices), text of the right answer."""


def identity(item: Item) -> Identity:
    """What makes two items the same to someone who has seen one of them.

    Ids, letters and the order of the choices do not count; a question that comes back with other
    choices is another item.
    """
    question = str(item.get("question", item.get("prompt")))
    gold: Any = item.get("answer")
    choices = item.get("choices")
    if not isinstance(choices, Mapping):
        return question, (), str(gold)
    return question, tuple(sorted(map(str, choices.values()))), str(choices.get(gold))


def divide(dev: Sequence[Item], test: Sequence[Item]) -> dict[str, set[Identity]]:
    """Who keeps which of the items that are in both splits.

    The shared items are sorted by the text of the right answer, then by domain, then by a hash of
    their content; every second one, from the first on, stays in dev and the others stay in test.
    So each right answer is halved as evenly as its number allows, the hash makes the halves
    unlike the file's order, and the division depends on nothing but the items themselves.

    Returns:
        For "dev" and "test" the shared items that stay there; both are empty if none is shared.
    """
    domains = {identity(item): str(item.get("domain")) for item in dev}
    shared = sorted(
        domains.keys() & {identity(item) for item in test},
        key=lambda one: (one[2], domains[one], _hash(one)),
    )
    return {"dev": set(shared[::2]), "test": set(shared[1::2])}


def without(items: Sequence[Item], gone: Collection[Identity]) -> list[Item]:
    """The items that are not in `gone`, in their order."""
    return [item for item in items if identity(item) not in gone] if gone else list(items)


def _hash(one: Identity) -> str:
    return hashlib.sha256(json.dumps(one).encode()).hexdigest()
