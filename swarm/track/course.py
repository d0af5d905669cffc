"""The series of a search, iteration by iteration, as its record has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swarm.report.trajectories import swarm_diversity


class SearchSeries:
    """What the iterations come to, told one after the other.

    Args:
        experts: The K names.
        groups: How many groups of modules have coefficients of their own; of several, coefficients
            are their mean.

    Attributes:
        best: [T, K] the coefficients of the best so far.
    """

    def __init__(self, experts: Sequence[str], groups: int) -> None:
        self.experts, self.groups = experts, groups
        self.best: list[np.ndarray] = []
        self._highest, self._lowest = -np.inf, np.inf
        self._personal: dict[int, float] = {}

    def add_iteration(self, entry: Mapping[str, Any]) -> dict[str, float]:
        """The series' values after one more round; what is not measured is left out."""
        shape = (len(entry["positions"]), self.groups, len(self.experts))
        positions = np.array(entry["positions"], dtype=float).reshape(shape).mean(axis=1)
        known = {i: u for i, u in enumerate(entry["utilities"]) if u is not None}
        held = self.best[-1] if self.best else positions[0]
        for i, utility in known.items():
            if utility > self._highest:
                self._highest, held = utility, positions[i]
            self._lowest = min(self._lowest, utility)
            self._personal[i] = max(self._personal.get(i, -np.inf), utility)
        self.best.append(held)
        found = {"g": self._highest, "g_worst": self._lowest} if self._personal else {}
        found |= {f"particle_{i}_now": utility for i, utility in known.items()}
        found |= {f"particle_{i}_best": utility for i, utility in self._personal.items()}
        found["diversity"] = float(swarm_diversity(positions[None])[0])
        for name in ("prompts_asked", "prompts_saved", "prompts_shared"):
            found |= {name: entry[name]} if name in entry else {}
        names = zip(self.experts, held.tolist(), strict=True)
        return found | {f"coefficient/{name}": share for name, share in names}
