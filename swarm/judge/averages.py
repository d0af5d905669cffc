"""Averages of what a judge said, with their intervals and with what could not be read of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from swarm.report.statistics import utility_interval


class Average(NamedTuple):
    """A mean with its 95 % interval.

    Attributes:
        mean: `None` where there is nothing to take the mean of.
        low, high: The bootstrap's over questions; `None` with fewer than two questions.
        n: Values in the mean.
        unparsed: Verdicts that could not be read, which are in none of the other numbers.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int
    unparsed: int = 0

    def __str__(self) -> str:
        if self.mean is None:
            return f"- n=0{self._unparsed_note}"
        within = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.mean:.2f}{within} n={self.n}{self._unparsed_note}"

    @property
    def _unparsed_note(self) -> str:
        return f", {self.unparsed} unparsed" if self.unparsed else ""

    def to_row(self) -> dict[str, Any]:
        """For JSON and CSV."""
        return {"average": self.mean, **{key: getattr(self, key) for key in self._fields[1:]}}


def average_scores(questions: Sequence[Sequence[float | None]]) -> Average:
    """The mean of all values of all questions.

    A question's values (of its turns, or its skills) hang together, so that the bootstrap draws
    questions and not values.

    Args:
        questions: Of each its values; `None` is one that could not be read.
    """
    unparsed = sum(value is None for values in questions for value in values)
    read = [[value for value in values if value is not None] for values in questions]
    read = [values for values in read if values]
    if not read:
        return Average(None, None, None, 0, unparsed)
    sums = np.array([sum(values) for values in read], dtype=np.float64)
    counts = np.array([len(values) for values in read])
    n = int(counts.sum())
    if len(read) == 1:
        return Average(float(sums[0] / n), None, None, n, unparsed)

    def mean_of(places: Sequence[int]) -> float:
        return float(sums[places].sum() / counts[places].sum())

    found = utility_interval(mean_of, [""] * len(read))
    return Average(found.mean, found.low, found.high, n, unparsed)
