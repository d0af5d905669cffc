"""The Pareto front of a search on a task of several parts, its hypervolume and its constraints."""

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
from swarm.tasks.mixture import Mixture

ParticleIndex = tuple[int, int]
"""(iteration, particle)."""


def check_objectives(optimizer: Optimizer, task: Task) -> None:
    """Name the objectives of a started multi-objective optimizer.

    Raises:
        UserError: The task has no parts, or an option does not fit them.
    """
    if not isinstance(optimizer, NSGA2Search):
        return
    kind = optimizer.NAME
    if not task.tasks:
        raise UserError(
            f"optimizer={kind}: task {task.name} has one objective; use task=mixture with two "
            "tasks (docs/objectives.md#several-objectives), or an optimizer of one objective, e.g. "
            "optimizer=pso"
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
    if not isinstance(task, Mixture) or not scores:
        return None
    found = {i: list(task.subtask_utilities(mine).values()) for i, mine in scores.items()}
    values = np.full((particles, len(next(iter(found.values())))), np.nan)
    for i, row in found.items():
        values[i] = row
    return values


def objectives_to_lists(values: np.ndarray) -> list[list[float] | None]:
    """Return objectives [N, M] in the record's format, `None` for a particle without."""
    return [row.tolist() if np.isfinite(row).all() else None for row in values]


def count_items_by_subtask(task: Any, scores: Sequence[Score]) -> dict[str, int]:
    """Return the number of items of each part."""
    of = [score.part.partition("/")[0] for score in scores]
    return {part: of.count(part) for part in task.subtask_utilities(scores)}


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
    found: np.ndarray = np.logical_not((least & more).any(axis=0))
    return found


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
        names: Names of the M parts.
        items: Dev items of each part.
        objectives: The parts that are objectives; the others can only be constrained.
        constraints: Lower bounds by part, a number or `base`.
        experts: The number of experts, the first particles of iteration 0.
        rounds: The record's iterations.
    """

    names: Sequence[str]
    items: Sequence[int]
    objectives: Sequence[str]
    constraints: Mapping[str, Any]
    experts: int
    rounds: Sequence[Mapping[str, Any]]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ParetoFront | None":
        """Return the front of a record's state; `None` for a task without parts.

        Args:
            state: Its `objectives` (items by part), `rounds`, `own`, `experts`, `optimizer`.
        """
        items = state.get("objectives")
        if not items or not state["rounds"]:
            return None
        optimizer = state.get("optimizer") or {}
        aims = optimizer.get("objectives") or list(items)
        constraints = optimizer.get("constraints") or {}
        own_count = state.get("own") or len(state["experts"])
        return cls(list(items), list(items.values()), aims, constraints, own_count, state["rounds"])

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
        return np.array(found, dtype=float).reshape(-1, len(self.names))

    @cached_property
    def aim_values(self) -> np.ndarray:
        """Utilities [P, aims] on dev, the objectives alone."""
        found: np.ndarray = self.objective_values[
            :, [self.names.index(name) for name in self.objectives]
        ]
        return found

    @cached_property
    def base_index(self) -> ParticleIndex | None:
        """Index of the base model's (position zero) first measurement; `None` if there is none."""
        positions = (self.rounds[number]["positions"][i] for number, i in self.measured_indices)
        zeros = (
            index
            for index, row in zip(self.measured_indices, positions, strict=True)
            if not any(row)
        )
        return next(zeros, None)

    @cached_property
    def constraint_bounds(self) -> dict[str, float]:
        """The lower bounds by part; without `base` ones as long as the base is not measured."""
        found = {}
        for name, bound in self.constraints.items():
            if bound != BASE_BOUND:
                found[name] = float(bound)
            elif self.base_index is not None:
                column = self.names.index(name)
                found[name] = float(
                    self.objective_values[self.measured_indices.index(self.base_index), column]
                )
        return found

    @cached_property
    def constraint_violations(self) -> np.ndarray:
        """Sums [P] of the constrained parts' violations of their bounds."""
        below = [
            bound - self.objective_values[:, self.names.index(name)]
            for name, bound in self.constraint_bounds.items()
        ]
        return np.maximum(below, 0.0).sum(axis=0) if below else np.zeros(len(self.measured_indices))

    @cached_property
    def front_indices(self) -> list[ParticleIndex]:
        """The indices of the front's points, in order of their numbers."""
        found: dict[tuple[float, ...], int] = {}
        for index in np.flatnonzero(
            find_non_dominated(self.aim_values, self.constraint_violations)
        ).tolist():
            found.setdefault(tuple(self.aim_values[index]), index)
        order = sorted(found.values(), key=lambda index: (-self.aim_values[index, 0], index))
        return [self.measured_indices[index] for index in order]

    @cached_property
    def reference_point(self) -> np.ndarray:
        """The worst of the experts in each objective, [aims]."""
        first = [
            n
            for n, (number, i) in enumerate(self.measured_indices)
            if not number and i < self.experts
        ]
        found: np.ndarray = self.aim_values[first].min(axis=0)
        return found

    @cached_property
    def hypervolume_history(self) -> list[float]:
        """The hypervolume after each iteration, of the positions that meet all constraints."""
        born = np.array([number for number, _ in self.measured_indices])
        found = []
        kept = np.zeros((0, len(self.objectives)))
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
            (self.constraint_violations[n], -self.rounds[number]["utilities"][i], (number, i))
            for n, (number, i) in enumerate(self.measured_indices)
            if particles is None or (number == 0 and i < particles)
        ]
        return min(known, key=lambda one: one[:2])[2]

    def evenly_spaced_points(self, limit: int) -> list[int]:
        """Return at most `limit` point numbers: both ends of the front and evenly between them."""
        count = len(self.front_indices)
        if count <= limit:
            return list(range(count))
        return sorted({round(n) for n in np.linspace(0, count - 1, limit).tolist()})

    def dev_utilities(self, index: ParticleIndex) -> dict[str, float]:
        """Return each part's utility on dev at a measured index."""
        return dict(zip(self.names, self.rounds[index[0]]["objectives"][index[1]], strict=True))

    def to_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of front.json.

        Args:
            state: The record's state, including the test of some points if there was one.
        """
        tested = {tuple(one["place"]): one for one in (state.get("verdict") or {}).get("front", [])}
        points = []
        for number, index in enumerate(self.front_indices):
            entry = self.rounds[index[0]]
            position = entry["positions"][index[1]]
            point = {
                "point": number,
                "iteration": index[0],
                "particle": index[1],
                "utility": entry["utilities"][index[1]],
                "dev": self.dev_utilities(index),
                "words": describe_position(state["experts"], position, state["groups"]),
                "coefficients": position,
            }
            measured = {
                key: one for key, one in tested.get(index, {}).items() if key.endswith("_parts")
            }
            points.append(point | measured)
        return {
            "objectives": list(self.objectives),
            "dev_items": dict(zip(self.names, self.items, strict=True)),
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
