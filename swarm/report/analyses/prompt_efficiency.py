"""Economy: prompts spent per improvement, and prompts saved by dropping and racing."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swarm._util.terminal import format_table
from swarm.runs.folder import RunFolder

MAX_BUDGETS = 5
"""Maximum number of equal budgets at which runs are compared."""


def measure_economy(run: RunFolder) -> dict[str, Any]:
    """Compute the prompts on dev by iteration, and the best utility so far that they bought.

    Returns:
        `prompts` [T], cumulative; `best` [T]; `dropped`: prompts of particles that moved without
        being evaluated (drop-K, drop-N); `beyond_budget`: prompts of particles for which no budget
        was left; `raced`: prompts that racing saved.
    """
    items = len(run.load_answers((0, 0)))
    scored = [entry.get("items_scored") or _items_by_utility(entry, items) for entry in run.rounds]
    skipped = sum(one is None for entry in scored for one in entry)
    beyond = sum(entry.get("beyond_budget", 0) for entry in run.rounds)
    best = run.best_so_far()
    evaluated = [
        entry.get("prompts_scored", _sum_known(s))
        for entry, s in zip(run.rounds, scored, strict=True)
    ]
    improvements = int((np.diff(best[~np.isnan(best)]) > 0).sum())
    return {
        "run": run.name,
        "task_items": run.identity.get("task items"),
        "items": items,
        "prompts": np.cumsum(evaluated),
        "best": best,
        "iterations": len(run.rounds) - 1,
        "evaluations": sum(one is not None for entry in scored for one in entry),
        "dropped": (skipped - beyond) * items,
        "beyond_budget": beyond * items,
        "raced": sum(entry.get("prompts_saved", 0) for entry in run.rounds),
        "improvements": improvements,
        "prompts_per_improvement": sum(evaluated[1:]) / improvements if improvements else None,
    }


def _items_by_utility(entry: dict[str, Any], items: int) -> list[int | None]:
    return [None if utility is None else items for utility in entry["utilities"]]


def _sum_known(scored: Sequence[int | None]) -> int:
    return sum(one or 0 for one in scored)


def compare_at_equal_prompts(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the best so far of several runs at equal numbers of prompts.

    The largest budget is the total of the cheapest run. A run whose start exceeds a budget has no
    best there (NaN).

    Returns:
        `budgets` [B], `best` [runs, B].
    """
    least = min(int(one["prompts"][-1]) for one in found)
    first = max(int(one["prompts"][0]) for one in found)
    low = min(first, least)
    budgets = np.unique(np.linspace(low, least, MAX_BUDGETS).round().astype(int))
    best = [
        [
            float(one["best"][at - 1])
            if (at := np.searchsorted(one["prompts"], b, "right"))
            else float("nan")
            for b in budgets
        ]
        for one in found
    ]
    return {"budgets": budgets, "best": np.array(best)}


def format_economy(found: Sequence[dict[str, Any]]) -> list[str]:
    """Format one row per run and, for several runs, the best at equal numbers of prompts."""
    rows = [
        [
            one["run"][:22],
            str(one["prompts"][-1]),
            str(one["dropped"]),
            str(one["raced"]),
            str(one["improvements"]),
            "-"
            if one["prompts_per_improvement"] is None
            else f"{one['prompts_per_improvement']:.0f}",
            f"{one['best'][-1]:.3f}",
        ]
        for one in found
    ]
    header = ["run", "prompts", "dropped", "raced", "better", "each", "dev"]
    lines = [
        *format_table(header, rows),
        "",
        "Prompts evaluated on dev; prompts saved by dropping (drop-K, drop-N) and racing;",
        "improvements of the best, and prompts after the start per improvement.",
    ]
    if len(found) < 2:
        return lines
    if len({(one["task_items"], one["items"]) for one in found}) > 1:
        return [*lines, "", "The runs have different dev items: no comparison at equal prompts."]
    equal = compare_at_equal_prompts(found)
    rows = [
        [one["run"][:22], *("-" if np.isnan(b) else f"{b:.3f}" for b in best)]
        for one, best in zip(found, equal["best"], strict=True)
    ]
    header = ["best dev after prompts", *(str(b) for b in equal["budgets"])]
    return [*lines, "", *format_table(header, rows)]
