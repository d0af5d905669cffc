"""How often a model is asked, where its name says so: "qwen2:7b:3"."""

from collections.abc import Iterable

from swarm.errors import UserError

MAX_SAMPLE_COUNT = 99
"""Samples that a name may ask for."""


def split_sample_count(name: str) -> tuple[str, int]:
    """A name, and how often its model is asked: "qwen2:7b:3" is ("qwen2:7b", 3).

    A last part of digits alone is a number of samples; other tags belong to the name, and
    "name:8:1" says that 8 is one too.

    Raises:
        UserError: The number is not from 1 to `MOST`.
    """
    head, colon, tail = name.rpartition(":")
    if not colon or not (tail.isascii() and tail.isdigit()):
        return name, 1
    if not head or not 1 <= int(tail) <= MAX_SAMPLE_COUNT:
        raise UserError(
            f"{name}: a model is asked from 1 to {MAX_SAMPLE_COUNT} times; if :{tail} belongs to its name, "
            f"write {name}:1"
        )
    return head, int(tail)


def parse_counted_names(lists: Iterable[str]) -> list[tuple[str, int]]:
    """Names and counts in lists with commas: ["a,b:3", "c"] is [("a", 1), ("b", 3), ("c", 1)].

    Raises:
        UserError: A name is missing, or a number is not allowed.
    """
    lists = list(lists)
    names = [name.strip() for one in lists for name in one.split(",")]
    if not all(names):
        raise UserError(f"--reference_models {','.join(lists)}: a name is missing", 2)
    return [split_sample_count(name) for name in names]
