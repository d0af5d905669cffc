"""What a finished search prints: a table, and what may be said of it."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from swarm.words import list_caveats, test_conclusion, describe_constant_answers, domain_table, describe_position


def summary_table(metrics: dict[str, Any]) -> Table:
    """The best initial expert and the best found, on dev and, where it was asked, on test.

    Args:
        metrics: As `swarm.verdict.judge` returns them.
    """
    tested = "test_gain" in metrics
    made = Table()
    made.add_column("model", overflow="fold")
    made.add_column(f"dev, n = {metrics['ending_best_validation_items']}", overflow="fold")
    if tested:
        made.add_column(f"test, n = {metrics['ending_best_single_test_items']}", overflow="fold")
    compared = tested and bool(metrics.get("baselines"))
    if compared:
        made.add_column("best found minus it", overflow="fold")
    for row in summary_rows(metrics):
        made.add_row(*map(Text, row[: 2 + tested + compared]))
    return made


def domain_summary_table(metrics: dict[str, Any]) -> Table | None:
    """Utilities by domain, on test or, without a test, on dev; `None` without several domains."""
    found = domain_table(metrics, "test" if "test_gain" in metrics else "dev")
    if found is None:
        return None
    header, rows = found
    made = Table()
    for name in header:
        made.add_column(Text(name), overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def summary_lines(
    metrics: dict[str, Any], experts: Sequence[str], groups: Sequence[str] = ("all",)
) -> list[str]:
    """What may be said of the table, and the best found in words.

    Args:
        metrics: As `swarm.verdict.judge` returns them.
        experts, groups: The pool's names.
    """
    words = describe_position(experts, metrics["ending_best_position"], groups)
    name = metrics.get("ending_best_label")
    return [
        "Brackets: 95 % intervals. The dev number of the best found is the highest of many and so "
        "flatters it; test was never searched on.",
        *subtask_lines(metrics),
        *front_lines(metrics),
        *([scoring_cost_line(metrics["spent"])] if "spent" in metrics else []),
        *list_caveats(metrics),
        *([test_conclusion(metrics)] if "test_gain" in metrics else []),
        "best found = " + (f"{name}: {words}" if name else words),
    ]


def subtask_lines(metrics: dict[str, Any]) -> list[str]:
    """Each part of a mixture, on dev and on test, where `domains` does not show it."""
    if domain_summary_table(metrics):
        return []
    lines = []
    for split, name in (("dev", "validation"), ("test", "single_test")):
        after = metrics.get(f"ending_best_{name}_parts", {})
        before = metrics.get(f"starting_best_{name}_parts", {})
        lines += [f"{part}, {split}: {before[part]:.3f} to {after[part]:.3f}" for part in after]
    return lines


def front_lines(metrics: dict[str, Any]) -> list[str]:
    """The size of the front on dev and its hypervolume, where the task has parts."""
    points, (first, last) = metrics.get("front_points", 0), metrics.get("hypervolume", (0.0, 0.0))
    if points < 2:
        return []
    return [
        f"front on dev: {points} points, hypervolume {first:.4g} at the start, {last:.4g} at the "
        "end; front.json lists the points, and the report shows them"
    ]


def scoring_cost_line(spent: dict[str, dict[str, float]]) -> str:
    """What scoring took, as `swarm.verdict.spent` has it."""
    sums = [f"{name} {n['first']:.6g} + {n['again']:.6g}" for name, n in spent.items()]
    return (
        f"scoring took {', '.join(sums)} (texts met for the first time + met again, which a cache "
        "gives for nothing)"
    )


def summary_rows(metrics: dict[str, Any]) -> list[list[str]]:
    """The final table's rows: model, dev, test."""
    names = {
        "starting": f"best initial expert ({metrics['starting_best_expert']})",
        "ending": "best found",
    }
    rows = []
    if constant := metrics.get("constant_answers"):
        found = constant["by_domain"]
        each = " of each domain" if len(found["answers"]) > 1 else ""
        row = [f"best constant answer{each} ({describe_constant_answers(constant)}; chosen on dev)"]
        for split in ("dev", "test"):
            if split in found:
                row.append(_format_with_interval(found[split]["utility"], found[split]["interval"]))
        rows.append([*row, _format_gain(metrics, constant)])
    for one in metrics.get("baselines", ()):
        row = [one["label"]]
        for split in ("dev", "test"):
            known = one.get(split)
            row.append(_format_with_interval(known["utility"], known["interval"]) if known else "–")
        rows.append([*row, _format_gain(metrics, one)])
    for when, name in names.items():
        row = [name]
        for split, value in (("validation", "validation_utility"), ("single_test", "")):
            number = metrics.get(f"{when}_best_{value or 'single_test_accuracy'}")
            if number is not None:
                row.append(_format_with_interval(number, metrics[f"{when}_best_{split}_interval"]))
        if when == "starting" and "test_gain" in metrics:
            keys = {"gain": "test_gain", "gain_interval": "test_gain_interval"}
            keys |= {"p_value": "test_gain_p_value"}
            row.append(_format_gain(metrics, {key: metrics[name] for key, name in keys.items()}))
        rows.append(row)
    if "ending_top-k_ensemble_test_accuracy" in metrics:
        number = metrics["ending_top-k_ensemble_test_accuracy"]
        vote = _format_with_interval(number, metrics["ending_top-k_ensemble_test_interval"])
        size = metrics["ensemble_size"]
        dev = f"{metrics['ensemble_dev_by_size'][size - 1]:.3f}"
        rows.append([f"vote of the top {size} (chosen on dev)", dev, vote])
    return rows


def _format_gain(metrics: dict[str, Any], one: dict[str, Any]) -> str:
    """How far the best found is above a model on test, with interval and p."""
    if "gain" not in one:
        return ""
    scale = 100.0 if metrics.get("in_points", False) else 1.0
    low, high = (f"{scale * end:+.3g}" for end in one["gain_interval"])
    return f"{scale * one['gain']:+.3g} [{low}, {high}], p = {one['p_value']:.2g}"


def _format_with_interval(number: float, interval: Sequence[float]) -> str:
    return f"{number:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
