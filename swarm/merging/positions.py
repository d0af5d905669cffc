"""Positions in words: names of groups and routes, and the largest shares of the experts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_SHARES = 2
"""Number of experts named for each route of prompts."""

ROUTE_SEPARATOR = " / "
"""Between the names of a route of prompts and of a group of modules."""


def group_by_route(groups: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of the groups of each route; one without a name if there are no routes."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(groups):
        route, separator, _ = name.partition(ROUTE_SEPARATOR)
        found.setdefault(route if separator else "", []).append(index)
    return found


def route_means(groups: Sequence[str], position: Sequence[float]) -> tuple[list[str], np.ndarray]:
    """Return the routes' names, and the mean coefficients [R, K] over each route's groups.

    Routes with equal coefficients are one, such as "dates and 2 more".

    Args:
        groups: The names of the R * G groups.
        position: [R * G * K].
    """
    rows = np.reshape(np.asarray(position, dtype=np.float64), (len(groups), -1))
    alike: dict[bytes, list[str]] = {}
    means = {}
    for name, indices in group_by_route(groups).items():
        key = rows[indices].tobytes()
        alike.setdefault(key, []).append(name)
        means[key] = rows[indices].mean(axis=0)
    names = [one[0] + f" and {len(one) - 1} more" * (len(one) > 1) for one in alike.values()]
    return names, np.array(list(means.values()))


def describe_position(
    experts: Sequence[str], position: Sequence[float], groups: Sequence[str] = ("all",)
) -> str:
    """Describe a position, the largest share first: "0.41 cot + 0.33 lima - 0.08 sharegpt".

    Args:
        experts: The K names.
        position: [G * K], group by group.
        groups: The G names; up to three are described individually, more by their mean. Routes of
            prompts are described individually, by the largest shares of each.
    """
    rows = np.reshape(np.asarray(position, dtype=np.float64), (len(groups), len(experts)))
    if (rows == rows[0]).all():
        return _describe_coefficients(experts, rows[0])
    described = describe_by_route(experts, position, groups)
    each = len(groups) // len(group_by_route(groups))
    more = f" (means of {each} groups)" if each > 1 else ""
    if len(described) == 1:
        if len(rows) > 3:
            mean = _describe_coefficients(experts, rows.mean(axis=0))
            return f"{mean} (mean of {len(rows)} groups)"
        pairs = zip(groups, rows, strict=True)
        described = {name: _describe_coefficients(experts, row) for name, row in pairs}
        more = ""
    return "; ".join(f"{name}: {words}" for name, words in described.items()) + more


def describe_by_route(
    experts: Sequence[str], position: Sequence[float], groups: Sequence[str]
) -> dict[str, str]:
    """Describe a position by the largest shares of each route of prompts.

    Returns:
        Name of the route -> "1.00 rooms - 0.08 logic"; means where it has several groups.
    """
    pairs = zip(*route_means(groups, position), strict=True)
    return {name: _describe_coefficients(experts, row, MAX_SHARES) for name, row in pairs}


def _describe_coefficients(
    experts: Sequence[str], row: np.ndarray, limit: int | None = None
) -> str:
    shares = sorted(zip(row.tolist(), experts, strict=True), key=lambda pair: -abs(pair[0]))
    parts = [
        f"{'-' if share < 0 else '+'} {abs(share):.2f} {name}"
        for share, name in shares[:limit]
        if abs(share) >= 0.005
    ]
    return " ".join(parts).removeprefix("+ ") or "no expert"


def position_label(optimizer: Mapping[str, Any], position: Sequence[float]) -> str | None:
    """Return an optimizer's name for a position, such as "mean of all", or `None`.

    Args:
        optimizer: Its state.
    """
    named = zip(optimizer.get("rows", []), optimizer.get("labels", []), strict=False)
    return next((words for row, words in named if row == list(position)), None)
