"""The positions that a search has met: none of them is evaluated twice."""

from collections.abc import Sequence

import numpy as np

from swarm.evaluation import records_to_scores
from swarm.record import ParticleIndex, RunRecord, position_key
from swarm.tasks import Score


class EvaluatedPositions:
    """Where in a record each position was first scored on all its items."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._places: dict[str, ParticleIndex] = {}

    def __contains__(self, position: Sequence[float] | np.ndarray) -> bool:
        return position_key(position) in self._places

    def add_iteration(
        self,
        number: int,
        positions: Sequence[Sequence[float]],
        utilities: Sequence[float | None],
    ) -> None:
        """Take a round of the record."""
        for i, (row, utility) in enumerate(zip(positions, utilities, strict=True)):
            if utility is not None:
                self._places.setdefault(position_key(row), (number, i))

    def fill_known_scores(
        self, scores: dict[int, dict[int, Score]], positions: np.ndarray, wanted: Sequence[int]
    ) -> None:
        """Add, to the scores of a round's new particles, those of the wanted ones met before."""
        for i in wanted:
            if i not in scores:
                rows = self._record.load_iteration_answers(*self._places[position_key(positions[i])])
                scores[i] = dict(enumerate(records_to_scores(rows)))
