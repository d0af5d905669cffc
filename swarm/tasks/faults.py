"""What is wrong with the items of a data file, in one line: of each kind how many, and which."""

from collections.abc import Sequence

from swarm.tasks import Item, leak

MAX_LISTED_IDS = 5
"""The most ids that are named of one kind."""


def format_ids(ids: Sequence[object]) -> str:
    """The first few ids, and how many there are beside: "3, 7, 9, 11, 20 and 12 more"."""
    named = ", ".join(map(str, ids[:MAX_LISTED_IDS]))
    return named + (f" and {len(ids) - MAX_LISTED_IDS} more" if len(ids) > MAX_LISTED_IDS else "")


def format_faults(split: str, faults: Sequence[tuple[object, str]], count: int) -> str:
    """All faulty items of a split, in one line without an end.

    Args:
        split: The split's name.
        faults: (id, what is wrong) of at least one item. What stands before a ": " is the kind of
            fault, which is what items are counted by; the rest is about the one item.
        count: How many items the split has.
    """
    if len(faults) == 1:
        ((own, what),) = faults
        return f"{split} item {own!r}: {what}"
    return f"{len(faults)} of {count} {split} items are wrong: {by_kind(faults)}"


def by_kind(faults: Sequence[tuple[object, str]]) -> str:
    """Faults, (id, what is wrong), by their kinds: "its answer is empty (2: 3, 7); ..."."""
    kinds: dict[str, list[object]] = {}
    for own, what in faults:
        kinds.setdefault(what.partition(": ")[0], []).append(own)
    return "; ".join(f"{kind} ({len(ids)}: {format_ids(ids)})" for kind, ids in kinds.items())


def find_repeated_ids(items: Sequence[Item], fields: Sequence[str]) -> list[object]:
    """The ids of items that say the same as an earlier one (see `leak.identity`)."""
    seen: set[leak.ItemIdentity] = set()
    again = []
    for item in items:
        identity = leak.item_identity(item, fields)
        if identity in seen:
            again.append(item["id"])
        seen.add(identity)
    return again
