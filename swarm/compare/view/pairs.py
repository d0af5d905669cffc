"""Two models, groups or other values side by side: the same question, sample against sample."""

from typing import Any, NamedTuple

from swarm.compare.view.finding import Finder, Wanted
from swarm.compare.view.table import Table


class Sides(NamedTuple):
    """What is compared: two labels of a column."""

    column: str
    left: str
    right: str


class Pair(NamedTuple):
    """Two rows that answer the same; `None` where a side has no such sample.

    Attributes:
        sample: Which of a side's answers to the question, from 0.
        left: Number of a row.
        right: Number of a row.
    """

    sample: int
    left: int | None
    right: int | None


def pairs(finder: Finder, wanted: Wanted, sides: Sides) -> list[Pair]:
    """All pairs of which at least one row is wanted, in the order of the rows.

    Args:
        finder: Of the rows.
        wanted: Which; what it says of the compared column does not count.
        sides: What is compared.
    """
    wanted = wanted.without(sides.column)
    key = (wanted, sides, frozenset(finder.flags) if wanted.flagged else None)
    return finder.remembered(key, lambda: _paired(finder, wanted, sides))


def _paired(finder: Finder, wanted: Wanted, sides: Sides) -> list[Pair]:
    table = finder.table
    places = finder.remembered(("places", sides.column), lambda: _places(table, sides.column))
    coded = table.coded(sides.column)
    code = {one: at for at, one in enumerate(coded.labels)}
    codes = coded.codes.tolist()
    found: list[dict[Any, int]] = []
    rows = finder.rows(wanted).tolist()
    for side in (sides.left, sides.right):
        mine = code.get(side)
        at = {places[row]: row for row in range(table.count - 1, -1, -1) if codes[row] == mine}
        at |= {places[row]: row for row in reversed(rows) if codes[row] == mine}
        found.append(at)
    both = {code.get(sides.left), code.get(sides.right)}
    order = dict.fromkeys(places[row] for row in rows if codes[row] in both)
    return [Pair(place[-1], found[0].get(place), found[1].get(place)) for place in order]


def _places(table: Table, column: str) -> list[tuple[Any, ...]]:
    """Per row its question, its paraphrase and the how manieth answer to that it is."""
    labels = table.coded(column).codes.tolist()
    # A model of several groups has a row in each for the same answer.
    again = column == "model" and "group" in table.columns
    groups = table.coded("group").codes.tolist() if again else [0] * table.count
    paraphrases = table.columns.get("paraphrase_ix") or [None] * table.count
    counts: dict[Any, int] = {}
    found = []
    for row, question in enumerate(table.questions):
        place = (question, str(paraphrases[row]))
        key = (labels[row], groups[row], *place)
        counts[key] = counts.get(key, -1) + 1
        found.append((*place, counts[key]))
    return found


def means(table: Table, found: list[Pair]) -> dict[str, tuple[float | None, float | None]]:
    """Of each listed column of numbers the mean of the left and of the right rows."""
    import numpy as np

    def mean(name: str, side: list[int | None]) -> float | None:
        values = table.keys(name)[[row for row in side if row is not None]]
        values = values[~np.isnan(values)]
        return float(values.mean()) if len(values) else None

    left, right = [pair.left for pair in found], [pair.right for pair in found]
    return {
        name: (mean(name, left), mean(name, right))
        for name in dict.fromkeys([*table.listed, "answer"])
        if table.kinds[name] == "number"
    }
