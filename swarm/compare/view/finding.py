"""Which rows are wanted, and in which order: what the page's address says, read and done."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from swarm.compare.view.table import Table
from swarm.errors import UserError

T = TypeVar("T")

RANDOM = "__random__"
"""Instead of a column's name: in an order by chance, the same for the same seed."""

KEPT = 24
"""Results that are remembered, so that a page more costs nothing."""


class Term(NamedTuple):
    """What an answer or its question has to contain, or must not."""

    text: str
    excluded: bool = False


class Sort(NamedTuple):
    """A column by which is ordered."""

    column: str
    down: bool = False


class Wanted(NamedTuple):
    """What is to be shown.

    Attributes:
        terms: See `terms`.
        choices: Columns, each with the labels that are allowed there.
        ranges: Columns, each with the least and the greatest number that is allowed, or `None`.
        errors: "only", "none" or "" for both.
        flagged: Flagged rows alone.
        sorts: The first decides, the next where that has equals; without any as in the file.
        seed: Of the order by chance.
    """

    terms: tuple[Term, ...] = ()
    choices: tuple[tuple[str, frozenset[str]], ...] = ()
    ranges: tuple[tuple[str, float | None, float | None], ...] = ()
    errors: str = ""
    flagged: bool = False
    sorts: tuple[Sort, ...] = ()
    seed: int = 0

    def without(self, column: str) -> "Wanted":
        """The same, with all labels of a column allowed."""
        return self._replace(choices=tuple(one for one in self.choices if one[0] != column))


def terms(search: str) -> tuple[Term, ...]:
    """Words, -words that must not be there, and "several words" in quotes, with or without -."""
    found = re.findall(r'(-?)(?:"([^"]*)"?|(\S+))', search.lower())
    return tuple(
        Term(phrase or word, bool(minus)) for minus, phrase, word in found if phrase or word
    )


def read(table: Table, given: Iterable[tuple[str, str]]) -> Wanted:
    """What an address asks for, by its parameters.

    Args:
        table: Whose columns are meant.
        given: "search", "is.COLUMN" for each label, "min.COLUMN", "max.COLUMN", "errors",
            "flagged", "sort" and "then" (a column, with "-" before it for descending), "seed".

    Raises:
        UserError: There is no such column, or it is no number.
    """
    one: dict[str, str] = {}
    choices: dict[str, set[str]] = {}
    for key, value in given:
        if key.startswith("is."):
            choices.setdefault(_column(table, key[3:]), set()).add(value)
        else:
            one[key] = value
    bounds = {_column(table, key[4:]) for key in one if key.startswith(("min.", "max."))}
    for name in bounds:
        if table.kinds[name] != "number":
            raise UserError(f"{name}: is no column of numbers")
    return Wanted(
        terms(one.get("search", "")),
        tuple(sorted((name, frozenset(labels)) for name, labels in choices.items())),
        tuple((name, _number(one, f"min.{name}"), _number(one, f"max.{name}"))
              for name in sorted(bounds)),
        one.get("errors", ""),
        "flagged" in one,
        tuple(_sort(table, one[key]) for key in ("sort", "then") if one.get(key)),
        int(_number(one, "seed") or 0),
    )  # fmt: skip


def _column(table: Table, name: str) -> str:
    if name not in table.columns:
        raise UserError(f"{name}: there is no such column; there are {', '.join(table.columns)}")
    return name


def _sort(table: Table, word: str) -> Sort:
    if word == RANDOM or word in table.columns:
        return Sort(word)
    return Sort(_column(table, word.removeprefix("-")), True)


def _number(given: dict[str, str], key: str) -> float | None:
    text = given.get(key, "")
    try:
        found = float(text) if text else None
    except ValueError:
        raise UserError(f"{key}: {text!r:.40} is no number") from None
    if found is not None and not abs(found) < 2**53:
        raise UserError(f"{key}: {text!r:.40} is too large")
    return found


class Finder:
    """Finds rows, and remembers what it found last.

    Args:
        table: Where.

    Attributes:
        flags: The rows that a person has flagged.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.flags: set[int] = set()
        self._last: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, wanted: Wanted) -> np.ndarray:
        """The numbers of the rows that are wanted, in order."""
        key = (wanted, frozenset(self.flags) if wanted.flagged else None)
        return self.remembered(key, lambda: ordered(self.table, wanted, self._fitting(wanted)))

    def remembered(self, key: Any, find: Callable[[], T]) -> T:
        """What was found for a key before, or else what is found now."""
        with self._lock:
            if key in self._last:
                self._last.move_to_end(key)
                return self._last[key]  # type: ignore[no-any-return]
        found = find()
        with self._lock:
            self._last[key] = found
            while len(self._last) > KEPT:
                self._last.popitem(last=False)
        return found

    def _fitting(self, wanted: Wanted) -> np.ndarray:
        table = self.table
        fits = np.ones(table.count, dtype=bool)
        if wanted.flagged:
            fits[:] = False
            fits[sorted(self.flags)] = True
        if wanted.errors and "error" in table.columns:
            wrong = np.array([one is not None for one in table.columns["error"]])
            fits &= wrong if wanted.errors == "only" else ~wrong
        for name, labels in wanted.choices:
            coded = table.coded(name)
            allowed = np.array([one in labels for one in coded.labels], dtype=bool)
            fits &= allowed[coded.codes]
        for name, least, most in wanted.ranges:
            keys = table.keys(name)
            fits &= (keys >= (-np.inf if least is None else least)) & (
                keys <= (np.inf if most is None else most)
            )
        rows = np.flatnonzero(fits)
        for term in wanted.terms:
            rows = _searched(table, term, rows)
        return rows


def _searched(table: Table, term: Term, rows: np.ndarray) -> np.ndarray:
    text, asked, said = term.text, table.asked, table.said
    # What was asked is the same for many rows, and looked into once.
    there = [text in one for one in table.conversations]
    hits = (there[asked[row]] or text in said[row] for row in rows.tolist())
    return rows[np.fromiter(hits, dtype=bool, count=len(rows)) != term.excluded]


def ordered(table: Table, wanted: Wanted, rows: np.ndarray) -> np.ndarray:
    """Rows in the order that is wanted; what is missing comes last, up and down."""
    keys = []
    for column, down in wanted.sorts:
        if column == RANDOM:
            key = np.random.default_rng(abs(wanted.seed)).permutation(table.count)[rows]
        else:
            key = table.keys(column)[rows]
        keys.append(-key if down else key)
    return rows[np.lexsort(keys[::-1])] if keys else rows
