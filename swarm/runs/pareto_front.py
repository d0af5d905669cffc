"""The Pareto front of a search on a task of several parts, its hypervolume and its constraints."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from swarm.errors import UserError
from swarm.merging.positions import describe_position
from swarm.optimizers.base import Optimizer
from swarm.optimizers.multi_objective import BASE_BOUND, NSGA2Search
from swarm.tasks.base import Score, Task

ParticleIndex = tuple[int, int]
"""(iteration, particle)."""


def check_objectives(optimizer: Optimizer, task: Task) -> None:
    """Name the objectives of a started multi-objective optimizer.

    Raises:
        UserError: The task has no parts, or an option does not fit them.
    """
    if not isinstance(optimizer, NSGA2Search):
        return
    if not task.tasks:
        raise UserError(
            f"optimizer={optimizer.NAME}: task {task.name} has one objective; use task=mixture "
            "with two tasks (docs/objectives.md#several-objectives), or optimizer=pso"
        )
    optimizer.name_objectives(list(task.tasks))
    for name, bound in (optimizer.constraints or {}).items():
        if bound != BASE_BOUND and task.metric_task is not task:
            raise UserError(
                f"optimizer.constraints.{name}={bound}: a number is ambiguous if the search "
                "maximizes another signal than the task's metric; use base, or signal=accuracy "
                "for every part"
            )


def compute_objectives(
    task: Task, scores: Mapping[int, Sequence[Score]], particles: int
) -> np.ndarray | None:
    """Return the utility of each of M parts, [N, M], NaN for particles without scores.

    Args:
        scores: Scores of each particle that was scored on all items.
        particles: N.

    Returns:
        `None` if the task has no parts, or no particle has scores.
    """
    if not task.tasks or not scores:
        return None
    values = np.full((particles, len(task.tasks)), np.nan)
    for i, mine in scores.items():
        values[i] = list(task.subtask_utilities(mine).values())  # type: ignore[attr-defined]
    return values


def objectives_to_lists(values: np.ndarray) -> list[list[float] | None]:
    """Return objectives [N, M] in the record's format, `None` for a particle without."""
    return [row.tolist() if np.isfinite(row).all() else None for row in values]


def count_items_by_subtask(task: Task, scores: Sequence[Score]) -> dict[str, int]:
    """Return the number of items of each part."""
    counts = Counter(score.part.partition("/")[0] for score in scores)
    return {part: counts[part] for part in task.tasks}


def find_non_dominated(values: np.ndarray, violations: np.ndarray | None = None) -> np.ndarray:
    """Return a mask [P] of the rows of [P, M] values, higher is better, that none dominates.

    Args:
        violations: [P], 0 if all constraints are met. If given, only rows with the smallest
            violation count (Deb's rules).
    """
    if violations is not None and len(values):
        best = np.flatnonzero(violations == violations.min())
        chosen = best[find_non_dominated(values[best])]
        return np.isin(np.arange(len(values)), chosen)
    least = (values[:, None] >= values[None]).all(axis=2)
    more = (values[:, None] > values[None]).any(axis=2)
    return np.logical_not((least & more).any(axis=0))


def compute_hypervolume(values: np.ndarray, reference: np.ndarray) -> float:
    """Return the volume that points [P, M] dominate above a reference [M], higher is better.

    Exact, by slicing along the last objective (Zitzler 2001's HSO); points that do not exceed the
    reference in every objective add nothing.
    """
    above = values[(values > reference).all(axis=1)]
    return _sliced_volume(above[find_non_dominated(above)] - reference)


def _sliced_volume(points: np.ndarray) -> float:
    if not len(points) or points.shape[1] == 1:
        return float(points.max(initial=0.0))
    points = points[np.argsort(-points[:, -1], kind="stable")]
    depths = points[:, -1] - np.append(points[1:, -1], 0.0)
    return sum(
        float(depth) * _sliced_volume(points[: n + 1, :-1])
        for n, depth in enumerate(depths)
        if depth > 0
    )


@dataclass(frozen=True)
class ParetoFront:
    """All positions that a search has measured, and those that form its front on dev.

    A repeated position counts once, at its first index. Of positions with equal objectives the
    first is a point of the front; a point's number is its rank by the first objective, from the
    highest.

    Args:
        parts: Number of dev items of each of M parts, by name.
        objectives: The parts that are objectives; the others can only be constrained.
        constraints: Lower bounds by part, a number or `base`.
        experts: The number of experts, the first particles of iteration 0.
        rounds: The record's iterations.
    """

    parts: Mapping[str, int]
    objectives: Sequence[str]
    constraints: Mapping[str, Any]
    experts: int
    rounds: Sequence[Mapping[str, Any]]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ParetoFront | None":
        """Return the front of a record's state; `None` for a task without parts.

        Args:
            state: Its `objectives` (items by part), `rounds`, `own`, `optimizer`.
        """
        items, optimizer = state.get("objectives"), state["optimizer"] or {}
        if not items or not state["rounds"]:
            return None
        aims = optimizer.get("objectives") or list(items)
        constraints = optimizer.get("constraints") or {}
        return cls(items, aims, constraints, state["own"], state["rounds"])

    @property
    def names(self) -> list[str]:
        """Names of the M parts."""
        return list(self.parts)

    @property
    def items(self) -> list[int]:
        """Dev items of each part."""
        return list(self.parts.values())

    @cached_property
    def measured_indices(self) -> list[ParticleIndex]:
        """(iteration, particle) of the P measured positions."""
        found: dict[tuple[float, ...], ParticleIndex] = {}
        for number, entry in enumerate(self.rounds):
            for i, values in enumerate(entry.get("objectives") or ()):
                if values is not None:
                    found.setdefault(tuple(entry["positions"][i]), (number, i))
        return list(found.values())

    @cached_property
    def objective_values(self) -> np.ndarray:
        """Utilities [P, M] on dev, all parts."""
        found = [self.rounds[number]["objectives"][i] for number, i in self.measured_indices]
        return np.array(found, dtype=float).reshape(-1, len(self.parts))

    def _values_of(self, part: str) -> np.ndarray:
        return self.objective_values[:, self.names.index(part)]

    @cached_property
    def aim_values(self) -> np.ndarray:
        """Utilities [P, aims] on dev, the objectives alone."""
        return np.stack([self._values_of(name) for name in self.objectives], axis=1)

    @cached_property
    def base_index(self) -> ParticleIndex | None:
        """Index of the base model's (position zero) first measurement; `None` if there is none."""
        for number, i in self.measured_indices:
            if not any(self.rounds[number]["positions"][i]):
                return number, i
        return None

    @cached_property
    def constraint_bounds(self) -> dict[str, float]:
        """The lower bounds by part; without `base` ones as long as the base is not measured."""
        found = {}
        for name, bound in self.constraints.items():
            if bound != BASE_BOUND:
                found[name] = float(bound)
            elif self.base_index is not None:
                base = self.measured_indices.index(self.base_index)
                found[name] = float(self._values_of(name)[base])
        return found

    @cached_property
    def constraint_violations(self) -> np.ndarray:
        """Sums [P] of the constrained parts' violations of their bounds."""
        violations = np.zeros(len(self.measured_indices))
        for name, bound in self.constraint_bounds.items():
            violations += np.maximum(bound - self._values_of(name), 0.0)
        return violations

    @cached_property
    def front_indices(self) -> list[ParticleIndex]:
        """The indices of the front's points, in order of their numbers."""
        mask = find_non_dominated(self.aim_values, self.constraint_violations)
        found: dict[tuple[float, ...], int] = {}
        for index in np.flatnonzero(mask).tolist():
            found.setdefault(tuple(self.aim_values[index]), index)
        order = sorted(found.values(), key=lambda index: (-self.aim_values[index, 0], index))
        return [self.measured_indices[index] for index in order]

    @cached_property
    def reference_point(self) -> np.ndarray:
        """The worst of the experts in each objective, [aims]."""
        places = enumerate(self.measured_indices)
        experts = [n for n, (number, i) in places if number == 0 and i < self.experts]
        return self.aim_values[experts].min(axis=0)

    @cached_property
    def hypervolume_history(self) -> list[float]:
        """The hypervolume after each iteration, of the positions that meet all constraints."""
        born = np.array([number for number, _ in self.measured_indices])
        found, kept = [], np.zeros((0, len(self.objectives)))
        for number in range(len(self.rounds)):
            new = self.aim_values[(born == number) & (self.constraint_violations == 0)]
            kept = np.vstack([kept, new])
            kept = kept[find_non_dominated(kept)]
            found.append(compute_hypervolume(kept, self.reference_point))
        return found

    def best_index(self, particles: int | None = None) -> ParticleIndex:
        """Return the index of the smallest violation, and among ties of the highest utility.

        Args:
            particles: Restrict to this many first particles of iteration 0.
        """
        known = [
            (violation, -self.rounds[number]["utilities"][i], (number, i))
            for violation, (number, i) in zip(
                self.constraint_violations, self.measured_indices, strict=True
            )
            if particles is None or (number == 0 and i < particles)
        ]
        return min(known, key=lambda one: one[:2])[2]

    def evenly_spaced_points(self, limit: int) -> list[int]:
        """Return at most `limit` point numbers: both ends of the front and evenly between them."""
        count = len(self.front_indices)
        return sorted({round(n) for n in np.linspace(0, count - 1, min(limit, count)).tolist()})

    def dev_utilities(self, index: ParticleIndex) -> dict[str, float]:
        """Return each part's utility on dev at a measured index."""
        return dict(zip(self.parts, self.rounds[index[0]]["objectives"][index[1]], strict=True))

    def to_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of front.json.

        Args:
            state: The record's state, including the test of some points if there was one.
        """
        tested = {tuple(one["place"]): one for one in (state.get("verdict") or {}).get("front", [])}
        points = []
        for point, (number, i) in enumerate(self.front_indices):
            position = self.rounds[number]["positions"][i]
            measured = tested.get((number, i), {})
            points.append(
                {
                    "point": point,
                    "iteration": number,
                    "particle": i,
                    "utility": self.rounds[number]["utilities"][i],
                    "dev": self.dev_utilities((number, i)),
                    "words": describe_position(state["experts"], position, state["groups"]),
                    "coefficients": position,
                    **{key: measured[key] for key in ("dev_parts", "test_parts") if measured},
                }
            )
        return {
            "objectives": list(self.objectives),
            "dev_items": dict(self.parts),
            "constraints": {
                name: {"at_least": self.constraint_bounds.get(name), "base": bound == BASE_BOUND}
                for name, bound in self.constraints.items()
            },
            "feasible": bool(len(self.measured_indices) and self.constraint_violations.min() == 0),
            "reference": dict(zip(self.objectives, self.reference_point.tolist(), strict=True)),
            "hypervolume": self.hypervolume_history,
            "points": points,
        }


def describe_front(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of front.json; `None` for a task without parts."""
    front = ParetoFront.from_state(state)
    return front.to_dict(state) if front else None
