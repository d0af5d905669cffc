"""The cut of a large pool to its best experts, each measured alone, before a search."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm.executors import Executor, Job, JobResult
from swarm.executors.worker import LOSS
from swarm.pool.pool import Pool

MAX_ITEMS = 40
"""Dev items on which each expert is measured; of more searched ones, evenly spaced ones."""


@dataclass(frozen=True)
class Selection:
    """The choice of `most` experts of a pool on dev items, by the loss of the gold answers.

    Without gold answers, or an engine with gradients, by the mean score.

    Attributes:
        pool: The pool of all candidates.
        items: Dev indices.
    """

    pool: Pool
    most: int
    items: Sequence[int]
    by_loss: bool

    @property
    def prompts(self) -> int:
        """Cost in prompts, one for each candidate and item; not part of a search's budget."""
        return len(self.names) * len(self.items)

    @property
    def measure_name(self) -> str:
        """What decides: "loss" or "score"."""
        return "loss" if self.by_loss else "score"

    @property
    def names(self) -> list[str]:
        """Names of the candidates, in order."""
        return self.pool.names[: self.pool.expert_count]

    def measure(
        self, names: Sequence[str], executor: Executor
    ) -> Iterator[tuple[str, float, JobResult]]:
        """Yield the value of each candidate, by a job of its own: a worker holds one at a time."""
        split, items = LOSS if self.by_loss else "dev", tuple(self.items)
        jobs = [
            Job(number, ((1.0,),), split, items, (f"expert {name}",), experts=(name,))
            for number, name in enumerate(names)
        ]
        for result in executor.map(jobs):
            if result.gradient is not None:
                value = result.gradient.loss / len(items)
            else:
                value = float(np.mean([score.value for score in result.scores[0]]))
            yield names[result.number], value, result

    def choose(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Choose the best by the candidates' values; the first of equal ones.

        Returns:
            For the record: the names `chosen`, in the pool's order, `best` and its value, the
            value of the last that is chosen as `cut_off`, and what the choice was made by.
        """
        ranked = sorted(self.names, key=lambda name: values[name] * (1 if self.by_loss else -1))
        chosen = set(ranked[: self.most])
        return {
            "chosen": [name for name in self.names if name in chosen],
            "values": {name: values[name] for name in self.names},
            "by": self.measure_name,
            "items": len(self.items),
            "prompts": self.prompts,
            "best": ranked[0],
            "cut_off": values[ranked[self.most - 1]],
        }


def spaced_items(items: Sequence[int], most: int = MAX_ITEMS) -> list[int]:
    """Return at most this many of the items, evenly spaced."""
    places = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[place] for place in places.tolist()]
