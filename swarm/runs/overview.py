"""What a pool has: every expert on every kind of dev items, from the first iteration's answers.

`Overview` is computed once, stored in the record, and shown by terminal, report and page.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from swarm._util.terminal import format_number
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.metrics import (
    KIND_PREFIX,
    best_constant_answers,
    domain_scores,
    group_items_by_domain,
)

MAX_ROWS = 40
"""Maximum number of rows of a table in the terminal."""

MAX_NAMES = 4
"""Maximum number of experts named in a sentence."""

BEST, WEAK = "{}*", "({})"
"""Formats of a cell: the best of its kind, and one that is no better than a constant answer."""

LEGEND = "* best of its kind, ( ) no better than a constant answer"


@dataclass(frozen=True)
class Overview:
    """K experts on D kinds of dev items.

    Attributes:
        experts, kinds: Their names; a kind is the items' domain, else the kind of gold answer.
        items: [D] number of items of each kind.
        utilities, overall: [K][D] and [K] utility of each expert, on each kind and on all items.
        best_of_each: Utility on all items, each answered by the best expert of its kind; at most
            what a perfect router reaches, as the experts were chosen on the same items.
        constants, constant: [D] utility of the best constant answer of each kind, and that of all
            of them on all items; empty and `None` if answers cannot be graded.
    """

    experts: list[str]
    kinds: list[str]
    items: list[int]
    utilities: list[list[float]]
    overall: list[float]
    best_of_each: float
    constants: list[float]
    constant: float | None

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Overview | None":
        """Read the overview in a run's state; `None` before the end of the first iteration."""
        return cls(**state["overview"]) if state.get("overview") else None

    def sentences(self) -> list[str]:
        """Say what the best has alone, what all have together, and which are of no use alone."""
        first = self.experts[self.overall.index(max(self.overall))]
        alone, most, least = (
            "" if one is None else format_number(one, 2)
            for one in (max(self.overall), self.best_of_each, self.constant)
        )
        found = [f"Alone, {first} is best: {alone} on {sum(self.items)} dev items."]
        if len(self.kinds) > 1:
            beside = f", constant answers {least}" * bool(least)
            found.append(f"The right adapter for each kind would have at most {most}{beside}.")
        elif least:
            found.append(f"A constant answer has {least}.")
        if not least:
            return found
        weak = [
            name
            for name, row in zip(self.experts, self.utilities, strict=True)
            if all(one <= least for one, least in zip(row, self.constants, strict=True))
        ]
        if len(weak) == len(self.experts):
            found.append(
                "None of them beats a constant answer: are the prompts in their form "
                "(task.chat=auto)? If so, it takes a mixture, or training."
            )
        elif weak:
            more = f" and {len(weak) - MAX_NAMES} more" * (len(weak) > MAX_NAMES)
            verb, them = ("beats", "it") if len(weak) == 1 else ("beat", "them")
            found.append(
                f"{', '.join(weak[:MAX_NAMES])}{more} never {verb} a constant answer: leave {them} "
                "out (pool.experts), unless a mixture gains by it."
            )
        return found

    def table(self, width: int | None = None) -> tuple[list[str], list[list[str]]]:
        """Return header and rows: experts down and kinds across, the best expert first.

        Args:
            width: Maximum width in columns, with two spaces between columns. A larger table is
                transposed, or names only the best expert of each kind. `None` is no limit.
        """
        order = sorted(range(len(self.experts)), key=lambda k: -self.overall[k])
        kinds = [*(one.removeprefix(KIND_PREFIX) for one in self.kinds), "all"]
        values = [[*self.utilities[k], self.overall[k]] for k in order]
        limits = [] if self.constant is None else [*self.constants, self.constant]
        counts = [*self.items, sum(self.items)]
        if len(self.kinds) == 1:  # the same as all
            kinds, limits, counts = kinds[1:], limits[1:], counts[1:]
            values = [row[1:] for row in values]
        best = [max(column) for column in zip(*values, strict=True)]
        rows = [["adapter", *kinds]]
        for k, row in zip(order, values, strict=True):
            rows.append([self.experts[k]])
            for value, high, low in zip_longest(row, best, limits, fillvalue=-math.inf):
                cell = format_number(value, 2)
                cell = WEAK.format(cell) if value <= low else cell
                rows[-1].append(BEST.format(cell) if value == high else cell)
        if limits:
            rows.append(["constant answer", *(format_number(one, 2) for one in limits)])
        rows.append(["items", *map(str, counts)])
        across = [["kind", *rows[0][1:]], *rows[1:]]
        across = [list(column) for column in zip(*across, strict=True)]
        for limit in (math.inf, 16, 12, 9):
            for shape in (rows, across):
                cut = [[_shorten(name, limit) for name in shape[0]], *shape[1:]]
                if width is None or (len(cut) <= MAX_ROWS and _width(cut) <= width):
                    return cut[0], cut[1:]
        short = [["kind", "best adapter", "it has", *["a constant"] * bool(limits)]]
        for column in across[1:MAX_ROWS]:
            n = next(n for n, cell in enumerate(column) if cell.endswith("*"))
            short.append([column[0], across[0][n], column[n], *[column[-2]] * bool(limits)])
        room = ((width or 0) - _width([row[2:] for row in short]) - 4) // 2
        short = [[*(_shorten(name, room) for name in row[:2]), *row[2:]] for row in short]
        more = len(across) - len(short)
        short += [[f"{more} more", *[""] * (len(short[0]) - 1)]] * bool(more)
        return short[0], short[1:]


def survey_experts(
    task: Task, items: Sequence[Item], experts: Mapping[str, Sequence[Score]]
) -> Overview:
    """Compute the overview from the experts' scores of the same items."""
    kinds = group_items_by_domain(items)

    def measure(scores: Sequence[Score]) -> list[float]:
        found = domain_scores(task, items, scores)
        return [leaf.utility(mine) for leaf, mine in found.values()]

    utilities = [measure(scores) for scores in experts.values()]
    merged: dict[int, Score] = {}
    for d, indices in enumerate(kinds.values()):
        best = max(zip(utilities, experts.values(), strict=True), key=lambda one: one[0][d])[1]
        merged |= {index: best[index] for index in indices}
    # A signal has another scale than the grade of an answer.
    found = best_constant_answers(task, items) if task.metric_task is task else None
    constant = found.score_items(task, items) if found else []
    return Overview(
        list(experts),
        list(kinds),
        [len(indices) for indices in kinds.values()],
        utilities,
        [task.utility(list(scores)) for scores in experts.values()],
        task.utility([merged[index] for index in sorted(merged)]),
        measure(constant) if constant else [],
        task.utility(constant) if constant else None,
    )


def _shorten(name: str, limit: float) -> str:
    """Leave out the middle of a long name, as names often differ at their ends."""
    half = int(min(limit, len(name))) // 2
    return name if len(name) <= limit else f"{name[: half - 1]}…{name[-half:]}"


def _width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2
