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
    if len(rows) == 1 or len({tuple(row) for row in rows}) == 1:
        return _describe_coefficients(experts, rows[0])
    routes = describe_by_route(experts, position, groups)
    if len(routes) > 1:
        described = "; ".join(f"{name}: {words}" for name, words in routes.items())
        each = len(groups) // len(group_by_route(groups))
        return described + (f" (means of {each} groups)" if each > 1 else "")
    if len(rows) <= 3:
        return "; ".join(
            f"{name}: {_describe_coefficients(experts, row)}"
            for name, row in zip(groups, rows, strict=True)
        )
    return f"{_describe_coefficients(experts, rows.mean(axis=0))} (mean of {len(rows)} groups)"


def describe_by_route(
    experts: Sequence[str], position: Sequence[float], groups: Sequence[str]
) -> dict[str, str]:
    """Describe a position by the largest shares of each route of prompts.

    Returns:
        Name of the route -> "1.00 rooms - 0.08 logic"; means where it has several groups.
    """
    routes, means = route_means(groups, position)
    return {
        name: _describe_coefficients(experts, row, MAX_SHARES)
        for name, row in zip(routes, means, strict=True)
    }


def _describe_coefficients(
    experts: Sequence[str], row: np.ndarray, limit: int | None = None
) -> str:
    shares = sorted(zip(row.tolist(), experts, strict=True), key=lambda pair: -abs(pair[0]))
    shares = shares[:limit]
    words = ""
    for share, name in shares:
        if abs(share) >= 0.005:
            sign = ("- " if share < 0 else "") if not words else (" - " if share < 0 else " + ")
            words += f"{sign}{abs(share):.2f} {name}"
    return words or "no expert"


def position_label(optimizer: Mapping[str, Any], position: Sequence[float]) -> str | None:
    """Return an optimizer's name for a position, such as "uniform soup", or `None`.

    Args:
        optimizer: Its state.
    """
    named = zip(optimizer.get("rows", []), optimizer.get("labels", []), strict=False)
    return next((words for row, words in named if row == list(position)), None)
