"""The end of a search in the terminal: the verdict's table, and the comments on it."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from swarm._util.terminal import align_columns
from swarm.merging.positions import describe_by_route, describe_position
from swarm.runs.verdict import Verdict, list_caveats, result_table

MAX_ROUTES = 6
"""Maximum number of kinds of prompts whose coefficients are listed."""


def summary_table(verdict: Verdict) -> Table:
    """Return the table of all models, on dev and, if scored, on test."""
    header, rows = result_table(verdict)
    made = Table()
    for name in header:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def summary_lines(
    verdict: Verdict,
    experts: Sequence[str],
    groups: Sequence[str] = ("all",),
) -> list[str]:
    """Return the comments on the table, and a description of the best position.

    Args:
        experts, groups: The pool's names.
    """
    return [
        "Brackets: 95 % intervals. The dev score of the best found is the maximum of many and "
        "so biased upwards; test was not used by the search.",
        *_part_lines(verdict),
        *_front_lines(verdict),
        *_scoring_cost_lines(verdict),
        *list_caveats(verdict),
        *position_lines(verdict, experts, groups),
    ]


def position_lines(verdict: Verdict, experts: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return the best position in one line, or a line for each of the first kinds of prompts."""
    position, name = verdict.found.position or [], verdict.found_label
    title = f"best found = {name}: " if name else "best found = "
    routes = describe_by_route(experts, position, groups)
    if len(set(routes.values())) < 2:
        return [title + describe_position(experts, position, groups)]
    rows = align_columns([[f"  {route}", words] for route, words in routes.items()])
    more = len(rows) - MAX_ROUTES
    return [
        f"{title}a model for each kind of prompt, with these largest shares of the experts:",
        *rows[:MAX_ROUTES],
        *([f"  and {more} more, which the report lists"] if more > 0 else []),
    ]


def _part_lines(verdict: Verdict) -> list[str]:
    """Return a line per part of a mixture, on dev and test."""
    pairs = [("dev", verdict.start_model.dev, verdict.found.dev)]
    pairs += [("test", verdict.start_model.test, verdict.found.test)]
    return [
        f"{part}, {split}: {before.parts[part]:.3f} to {utility:.3f}"
        for split, before, after in pairs
        if before and after
        for part, utility in after.parts.items()
    ]


def _front_lines(verdict: Verdict) -> list[str]:
    """Return the size of the front on dev and its hypervolume, if the task has parts."""
    if verdict.front_size < 2:
        return []
    first, last = verdict.hypervolume
    return [
        f"front on dev: {verdict.front_size} points, hypervolume {first:.4g} at the start, "
        f"{last:.4g} at the end; front.json lists the points, and the report shows them"
    ]


def _scoring_cost_lines(verdict: Verdict) -> list[str]:
    sums = [
        f"{name} {n['first']:.6g} + {n['again']:.6g}" for name, n in verdict.scoring_costs.items()
    ]
    words = "new texts + repeated texts, which are cached"
    return [f"scoring took {', '.join(sums)} ({words})"] if sums else []
