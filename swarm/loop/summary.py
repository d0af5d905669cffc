"""The end of a search in the terminal: the tables of final metrics, and the comments on them."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from swarm._util.terminal import align_columns
from swarm.runs.describe import (
    describe_by_route,
    describe_position,
    list_caveats,
)
from swarm.runs.verdict import constant_label, format_gain, list_alternatives

MAX_ROUTES = 6
"""Maximum number of kinds of prompts whose coefficients are listed."""


def summary_table(metrics: dict[str, Any]) -> Table:
    """Return the table of best initial expert and best position, on dev and, if scored, on test.

    Args:
        metrics: As returned by `swarm.loop.final_metrics.final_metrics`.
    """
    tested = "test_gain" in metrics
    made = Table()
    made.add_column("model", overflow="fold")
    made.add_column(f"dev, n = {metrics['ending_best_validation_items']}", overflow="fold")
    if tested:
        made.add_column(f"test, n = {metrics['ending_best_single_test_items']}", overflow="fold")
        made.add_column("gain of best found", overflow="fold")
    for row in summary_rows(metrics):
        made.add_row(*map(Text, row))
    return made


def summary_lines(
    metrics: dict[str, Any],
    experts: Sequence[str],
    groups: Sequence[str] = ("all",),
    too_long: Sequence[str] = (),
) -> list[str]:
    """Return the comments on the table, and a description of the best position.

    Args:
        metrics: As returned by `swarm.loop.final_metrics.final_metrics`.
        experts, groups: The pool's names.
        too_long: Lines on dropped or truncated items.
    """
    return [
        "Brackets: 95 % intervals. The dev score of the best found is the maximum of many and "
        "so biased upwards; test was not used by the search.",
        *subtask_lines(metrics),
        *front_lines(metrics),
        *([scoring_cost_line(metrics["scoring_cost"])] if "scoring_cost" in metrics else []),
        *list_caveats(metrics, too_long, brief=True),
        *position_lines(metrics, experts, groups),
    ]


def position_lines(
    metrics: dict[str, Any], experts: Sequence[str], groups: Sequence[str]
) -> list[str]:
    """Return the best position in one line, or a line for each of the first kinds of prompts."""
    position, name = metrics["ending_best_position"], metrics.get("ending_best_label")
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


def subtask_lines(metrics: dict[str, Any]) -> list[str]:
    """Return a line per part of a mixture, on dev and test."""
    lines = []
    for split, name in (("dev", "validation"), ("test", "single_test")):
        after = metrics.get(f"ending_best_{name}_parts", {})
        before = metrics.get(f"starting_best_{name}_parts", {})
        lines += [f"{part}, {split}: {before[part]:.3f} to {after[part]:.3f}" for part in after]
    return lines


def front_lines(metrics: dict[str, Any]) -> list[str]:
    """Return the size of the front on dev and its hypervolume, if the task has parts."""
    points, (first, last) = metrics.get("front_points", 0), metrics.get("hypervolume", (0.0, 0.0))
    if points < 2:
        return []
    return [
        f"front on dev: {points} points, hypervolume {first:.4g} at the start, {last:.4g} at the "
        "end; front.json lists the points, and the report shows them"
    ]


def scoring_cost_line(spent: dict[str, dict[str, float]]) -> str:
    """Format the costs returned by `swarm.loop.final_metrics.sum_scoring_costs`."""
    sums = [f"{name} {n['first']:.6g} + {n['again']:.6g}" for name, n in spent.items()]
    return f"scoring took {', '.join(sums)} (new texts + repeated texts, which are cached)"


def summary_rows(metrics: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the final table: model, dev, test, gain of the best found on test."""
    rows = []
    for one in sorted(list_alternatives(metrics), key=lambda one: one.test[0]):
        dev = _format_with_interval(one.dev[0], one.dev[1:]) if one.dev else "–"
        test = _format_with_interval(one.test[0], one.test[1:])
        rows.append([one.label, dev, test, format_gain(metrics, one)])
    names = {"ending": "best found"}
    if not rows:
        names = {"starting": f"best initial expert ({metrics['starting_best_expert']})"} | names
        if constant := metrics.get("constant_answers"):
            dev = constant["by_domain"]["dev"]
            value = _format_with_interval(dev["utility"], dev["interval"])
            rows.append([constant_label(constant), value])
    for when, name in names.items():
        row = [name]
        for split, measure in (("validation", "utility"), ("single_test", "accuracy")):
            number = metrics.get(f"{when}_best_{split}_{measure}")
            if number is not None:
                row.append(_format_with_interval(number, metrics[f"{when}_best_{split}_interval"]))
        rows.append(row)
    # A vote of one is the best found.
    if "ending_top-k_ensemble_test_accuracy" in metrics and metrics["ensemble_size"] > 1:
        number = metrics["ending_top-k_ensemble_test_accuracy"]
        vote = _format_with_interval(number, metrics["ending_top-k_ensemble_test_interval"])
        size = metrics["ensemble_size"]
        dev = f"{metrics['ensemble_dev_by_size'][size - 1]:.3f}"
        rows.append([f"vote of the top {size} (chosen on dev)", dev, vote])
    return rows


def _format_with_interval(number: float, interval: Sequence[float]) -> str:
    return f"{number:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
