"""Queries of the viewer: URL parameters, filtered and sorted rows, and pairs of rows."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from swarm.compare.view.table import AnswerTable
from swarm.errors import UserError

T = TypeVar("T")

RANDOM_ORDER = "__random__"
"""Sorts in a random order that depends only on the seed."""

RESULT_CACHE_SIZE = 24
"""Number of cached results, so that another page of the same query is free."""


class SearchTerm(NamedTuple):
    """A text that an answer or its question must or must not contain."""

    text: str
    excluded: bool = False


class SortColumn(NamedTuple):
    """A column to sort by."""

    column: str
    down: bool = False


class Query(NamedTuple):
    """A query of rows.

    Attributes:
        terms: See `parse_terms`.
        choices: Columns, each with the allowed labels.
        ranges: Columns, each with the minimum and maximum, or `None`.
        errors: "only", "none" or "" for both.
        flagged: Only flagged rows.
        sorts: Sort columns by priority; without any, the order of the file.
        seed: Seed of the random order.
    """

    terms: tuple[SearchTerm, ...] = ()
    choices: tuple[tuple[str, frozenset[str]], ...] = ()
    ranges: tuple[tuple[str, float | None, float | None], ...] = ()
    errors: str = ""
    flagged: bool = False
    sorts: tuple[SortColumn, ...] = ()
    seed: int = 0

    def without_column(self, column: str) -> "Query":
        """Return the query without restrictions on a column's labels."""
        return self._replace(choices=tuple(one for one in self.choices if one[0] != column))


def parse_terms(search: str) -> tuple[SearchTerm, ...]:
    """Parse words, excluded -words, and quoted phrases with or without "-"."""
    found = re.findall(r'(-?)(?:"([^"]*)"?|(\S+))', search.lower())
    return tuple(
        SearchTerm(phrase or single, bool(minus))
        for minus, phrase, single in found
        if phrase or single
    )


def parse_query(table: AnswerTable, given: Iterable[tuple[str, str]]) -> Query:
    """Parse the parameters of a URL.

    Args:
        table: Table with the columns.
        given: "search", "is.COLUMN" for each label, "min.COLUMN", "max.COLUMN", "errors",
            "flagged", "sort" and "then" (a column, with "-" before it for descending), "seed".

    Raises:
        UserError: A column does not exist, or a value is not a number.
    """
    one: dict[str, str] = {}
    choices: dict[str, set[str]] = {}
    for key, value in given:
        if key.startswith("is."):
            choices.setdefault(_require_column(table, key[3:]), set()).add(value)
        else:
            one[key] = value
    bounds = {_require_column(table, key[4:]) for key in one if key.startswith(("min.", "max."))}
    for name in bounds:
        if table.column_kinds[name] != "number":
            raise UserError(f"{name}: is not a column of numbers")
    return Query(
        parse_terms(one.get("search", "")),
        tuple(sorted((name, frozenset(labels)) for name, labels in choices.items())),
        tuple(
            (name, _parse_number(one, f"min.{name}"), _parse_number(one, f"max.{name}"))
            for name in sorted(bounds)
        ),
        one.get("errors", ""),
        "flagged" in one,
        tuple(_parse_sort(table, one[key]) for key in ("sort", "then") if one.get(key)),
        int(_parse_number(one, "seed") or 0),
    )


def _require_column(table: AnswerTable, name: str) -> str:
    if name not in table.columns:
        raise UserError(f"{name}: no such column; there are {', '.join(table.columns)}")
    return name


def _parse_sort(table: AnswerTable, column: str) -> SortColumn:
    if column == RANDOM_ORDER or column in table.columns:
        return SortColumn(column)
    return SortColumn(_require_column(table, column.removeprefix("-")), True)


def _parse_number(params: dict[str, str], key: str) -> float | None:
    text = params.get(key, "")
    try:
        found = float(text) if text else None
    except ValueError:
        raise UserError(f"{key}: {text!r:.40} is not a number") from None
    if found is not None and not abs(found) < 2**53:
        raise UserError(f"{key}: {text!r:.40} is too large")
    return found


class QueryEngine:
    """Runs queries and caches the latest results.

    Args:
        table: Table to query.

    Attributes:
        flags: Numbers of the rows flagged by the user.
    """

    def __init__(self, table: AnswerTable) -> None:
        self.table = table
        self.flags: set[int] = set()
        self._last: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def find_rows(self, wanted: Query) -> np.ndarray:
        """Return the numbers of the matching rows in order."""
        key = (wanted, frozenset(self.flags) if wanted.flagged else None)
        return self.get_or_compute(
            key, lambda: sort_rows(self.table, wanted, self._matching_rows(wanted))
        )

    def get_or_compute(self, key: Any, find: Callable[[], T]) -> T:
        """Return the cached result of a key, or compute and cache it."""
        with self._lock:
            if key in self._last:
                self._last.move_to_end(key)
                return self._last[key]  # type: ignore[no-any-return]
        found = find()
        with self._lock:
            self._last[key] = found
            while len(self._last) > RESULT_CACHE_SIZE:
                self._last.popitem(last=False)
        return found

    def _matching_rows(self, query: Query) -> np.ndarray:
        table = self.table
        fits = np.ones(table.count, dtype=bool)
        if query.flagged:
            fits[:] = False
            fits[sorted(self.flags)] = True
        if query.errors and "error" in table.columns:
            wrong = np.array([one is not None for one in table.columns["error"]])
            fits &= wrong if query.errors == "only" else ~wrong
        for name, labels in query.choices:
            coded = table.get_categorical(name)
            allowed = np.array([one in labels for one in coded.labels], dtype=bool)
            fits &= allowed[coded.codes]
        for name, lowest, highest in query.ranges:
            keys = table.sort_keys(name)
            fits &= (keys >= (-np.inf if lowest is None else lowest)) & (
                keys <= (np.inf if highest is None else highest)
            )
        rows = np.flatnonzero(fits)
        for term in query.terms:
            rows = _search_rows(table, term, rows)
        return rows


def _search_rows(table: AnswerTable, term: SearchTerm, rows: np.ndarray) -> np.ndarray:
    text, prompts, answers = term.text, table.conversation_indices, table.answers_lower
    # Many rows share a conversation, which is searched once.
    matches = [text in one for one in table.conversations]
    hits = (matches[prompts[row]] or text in answers[row] for row in rows.tolist())
    return rows[np.fromiter(hits, dtype=bool, count=len(rows)) != term.excluded]


def sort_rows(table: AnswerTable, wanted: Query, rows: np.ndarray) -> np.ndarray:
    """Sort rows; missing values come last in both directions."""
    keys = []
    for column, down in wanted.sorts:
        if column == RANDOM_ORDER:
            key = np.random.default_rng(abs(wanted.seed)).permutation(table.count)[rows]
        else:
            key = table.sort_keys(column)[rows]
        keys.append(-key if down else key)
    return rows[np.lexsort(keys[::-1])] if keys else rows


class ComparedSides(NamedTuple):
    """Two labels of a column that are compared."""

    column: str
    left: str
    right: str


class RowPair(NamedTuple):
    """Two rows with the same question and sample index; `None` if a side has no such row.

    Attributes:
        sample: Index among a side's answers to the question, from 0.
        left: Row number.
        right: Row number.
    """

    sample: int
    left: int | None
    right: int | None


def find_pairs(finder: QueryEngine, wanted: Query, sides: ComparedSides) -> list[RowPair]:
    """Return all pairs with at least one matching row, in the order of the rows.

    Args:
        finder: Query engine.
        wanted: Query; its restrictions on the compared column are ignored.
        sides: Labels to compare.
    """
    wanted = wanted.without_column(sides.column)
    key = (wanted, sides, frozenset(finder.flags) if wanted.flagged else None)
    return finder.get_or_compute(key, lambda: _pair_rows(finder, wanted, sides))


def _pair_rows(finder: QueryEngine, query: Query, sides: ComparedSides) -> list[RowPair]:
    table = finder.table
    positions = finder.get_or_compute(
        ("places", sides.column), lambda: _sample_positions(table, sides.column)
    )
    coded = table.get_categorical(sides.column)
    code = {one: row_of for row_of, one in enumerate(coded.labels)}
    codes = coded.codes.tolist()
    found: list[dict[Any, int]] = []
    rows = finder.find_rows(query).tolist()
    for side in (sides.left, sides.right):
        side_code = code.get(side)
        row_of = {
            positions[row]: row for row in range(table.count - 1, -1, -1) if codes[row] == side_code
        }
        row_of |= {positions[row]: row for row in reversed(rows) if codes[row] == side_code}
        found.append(row_of)
    both = {code.get(sides.left), code.get(sides.right)}
    order = dict.fromkeys(positions[row] for row in rows if codes[row] in both)
    return [
        RowPair(position[-1], found[0].get(position), found[1].get(position)) for position in order
    ]


def _sample_positions(table: AnswerTable, column: str) -> list[tuple[Any, ...]]:
    """Return for each row its question, its paraphrase, and its index among their answers."""
    labels = table.get_categorical(column).codes.tolist()
    # A model in several groups has a row in each of them for the same answer.
    per_group = column == "model" and "group" in table.columns
    groups = table.get_categorical("group").codes.tolist() if per_group else [0] * table.count
    paraphrases = table.columns.get("paraphrase_ix") or [None] * table.count
    counts: dict[Any, int] = {}
    found = []
    for row, question in enumerate(table.questions):
        position = (question, str(paraphrases[row]))
        key = (labels[row], groups[row], *position)
        counts[key] = counts.get(key, -1) + 1
        found.append((*position, counts[key]))
    return found


def column_means(
    table: AnswerTable, found: list[RowPair]
) -> dict[str, tuple[float | None, float | None]]:
    """Return the means of the left and the right rows for each listed numeric column."""
    import numpy as np

    def mean_of(name: str, side: list[int | None]) -> float | None:
        values = table.sort_keys(name)[[row for row in side if row is not None]]
        values = values[~np.isnan(values)]
        return float(values.mean()) if len(values) else None

    left_rows, right_rows = [pair.left for pair in found], [pair.right for pair in found]
    return {
        name: (mean_of(name, left_rows), mean_of(name, right_rows))
        for name in dict.fromkeys([*table.listed_columns, "answer"])
        if table.column_kinds[name] == "number"
    }
