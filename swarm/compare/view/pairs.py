"""Two models, groups or other values side by side: the same question, sample against sample."""

from typing import Any, NamedTuple

from swarm.compare.view.finding import QueryEngine, Query
from swarm.compare.view.table import AnswerTable


class ComparedSides(NamedTuple):
    """What is compared: two labels of a column."""

    column: str
    left: str
    right: str


class RowPair(NamedTuple):
    """Two rows that answer the same; `None` where a side has no such sample.

    Attributes:
        sample: Which of a side's answers to the question, from 0.
        left: Number of a row.
        right: Number of a row.
    """

    sample: int
    left: int | None
    right: int | None


def find_pairs(finder: QueryEngine, wanted: Query, sides: ComparedSides) -> list[RowPair]:
    """All pairs of which at least one row is wanted, in the order of the rows.

    Args:
        finder: Of the rows.
        wanted: Which; what it says of the compared column does not count.
        sides: What is compared.
    """
    wanted = wanted.without_column(sides.column)
    key = (wanted, sides, frozenset(finder.flags) if wanted.flagged else None)
    return finder.get_or_compute(key, lambda: _pair_rows(finder, wanted, sides))


def _pair_rows(finder: QueryEngine, wanted: Query, sides: ComparedSides) -> list[RowPair]:
    table = finder.table
    places = finder.get_or_compute(("places", sides.column), lambda: _sample_positions(table, sides.column))
    coded = table.get_categorical(sides.column)
    code = {one: at for at, one in enumerate(coded.labels)}
    codes = coded.codes.tolist()
    found: list[dict[Any, int]] = []
    rows = finder.find_rows(wanted).tolist()
    for side in (sides.left, sides.right):
        mine = code.get(side)
        at = {places[row]: row for row in range(table.count - 1, -1, -1) if codes[row] == mine}
        at |= {places[row]: row for row in reversed(rows) if codes[row] == mine}
        found.append(at)
    both = {code.get(sides.left), code.get(sides.right)}
    order = dict.fromkeys(places[row] for row in rows if codes[row] in both)
    return [RowPair(place[-1], found[0].get(place), found[1].get(place)) for place in order]


def _sample_positions(table: AnswerTable, column: str) -> list[tuple[Any, ...]]:
    """Per row its question, its paraphrase and the how manieth answer to that it is."""
    labels = table.get_categorical(column).codes.tolist()
    # A model of several groups has a row in each for the same answer.
    again = column == "model" and "group" in table.columns
    groups = table.get_categorical("group").codes.tolist() if again else [0] * table.count
    paraphrases = table.columns.get("paraphrase_ix") or [None] * table.count
    counts: dict[Any, int] = {}
    found = []
    for row, question in enumerate(table.questions):
        place = (question, str(paraphrases[row]))
        key = (labels[row], groups[row], *place)
        counts[key] = counts.get(key, -1) + 1
        found.append((*place, counts[key]))
    return found


def column_means(table: AnswerTable, found: list[RowPair]) -> dict[str, tuple[float | None, float | None]]:
    """Of each listed column of numbers the mean of the left and of the right rows."""
    import numpy as np

    def mean_of(name: str, side: list[int | None]) -> float | None:
        values = table.sort_keys(name)[[row for row in side if row is not None]]
        values = values[~np.isnan(values)]
        return float(values.mean()) if len(values) else None

    left, right = [pair.left for pair in found], [pair.right for pair in found]
    return {
        name: (mean_of(name, left), mean_of(name, right))
        for name in dict.fromkeys([*table.listed_columns, "answer"])
        if table.column_kinds[name] == "number"
    }
