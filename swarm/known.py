"""The positions that a search has met: none of them is evaluated twice."""

from collections.abc import Sequence

import numpy as np

from swarm.evaluation import as_scores
from swarm.record import Place, Record, key
from swarm.tasks import Score


class Known:
    """Where in a record each position was first scored on all its items."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._places: dict[str, Place] = {}

    def __contains__(self, position: Sequence[float] | np.ndarray) -> bool:
        return key(position) in self._places

    def remember(
        self,
        number: int,
        positions: Sequence[Sequence[float]],
        utilities: Sequence[float | None],
    ) -> None:
        """Take a round of the record."""
        for i, (row, utility) in enumerate(zip(positions, utilities, strict=True)):
            if utility is not None:
                self._places.setdefault(key(row), (number, i))

    def add(
        self, scores: dict[int, dict[int, Score]], positions: np.ndarray, wanted: Sequence[int]
    ) -> None:
        """Add, to the scores of a round's new particles, those of the wanted ones met before."""
        for i in wanted:
            if i not in scores:
                rows = self._record.answers(*self._places[key(positions[i])])
                scores[i] = dict(enumerate(as_scores(rows)))
