"""What may be said of a search, in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def sentence(
    experts: Sequence[str], position: Sequence[float], groups: Sequence[str] = ("all",)
) -> str:
    """A position in words, the largest share first: "0.41 cot + 0.33 lima - 0.08 sharegpt".

    Args:
        experts: The K names.
        position: [G * K], group by group.
        groups: The G names; up to three are told one by one, more as their mean.
    """
    rows = np.reshape(np.asarray(position, dtype=np.float64), (len(groups), len(experts)))
    if len(rows) == 1 or len({tuple(row) for row in rows}) == 1:
        return _row(experts, rows[0])
    if len(rows) <= 3:
        return "; ".join(
            f"{name}: {_row(experts, row)}" for name, row in zip(groups, rows, strict=True)
        )
    return f"{_row(experts, rows.mean(axis=0))} (mean of {len(rows)} groups)"


def _row(experts: Sequence[str], row: np.ndarray) -> str:
    shares = sorted(zip(row.tolist(), experts, strict=True), key=lambda pair: -abs(pair[0]))
    words = ""
    for share, name in shares:
        if abs(share) >= 0.005:
            sign = ("- " if share < 0 else "") if not words else (" - " if share < 0 else " + ")
            words += f"{sign}{abs(share):.2f} {name}"
    return words or "nothing of any expert"


def conclusion(metrics: dict[str, Any]) -> str:
    """What may be said of the test result, in one sentence.

    Args:
        metrics: As `swarm.verdict.judge` makes them, with a test.
    """
    start = metrics["starting_best_validation_utility"]
    if metrics["ending_best_validation_utility"] <= start:
        nothing = "The search found nothing better on dev than the best initial expert"
        return f"{nothing}: {_tested(metrics)}" if metrics["test_gain"] else f"{nothing}."
    return _tested(metrics)


def _tested(metrics: dict[str, Any]) -> str:
    return told(
        metrics["test_gain"],
        metrics["test_gain_interval"],
        metrics["test_gain_p_value"],
        metrics["ending_best_single_test_items"],
        "test items",
        metrics.get("in_points", False),
    )


def told(
    gain: float, interval: Sequence[float], p: float, items: int, of: str, points: bool
) -> str:
    """Whether a difference may be chance, in one sentence.

    Args:
        gain, interval, p, items: As `swarm.report.statistics.Paired` has them.
        of: What the items are.
        points: Utilities are shares, and a hundredth is a point.
    """
    scale, unit = (100.0, " points") if points else (1.0, "")
    low, high = (f"{scale * end:+.3g}" for end in interval)
    if not gain and not any(interval):
        return f"No difference: none of {items} {of} differs."
    kind = "gain" if gain >= 0 else "loss"
    chance = "is" if p < 0.05 else "is not"
    apart = not interval[0] <= 0 <= interval[1]
    odd = " The test decides: with so few items the bootstrap's interval is rough."
    return (
        f"The {kind} of {scale * abs(gain):.3g}{unit} on {items} {of} {chance} distinguishable "
        f"from chance (p = {p:.3g}; 95 % interval {low} to {high})."
    ) + odd * (apart != (p < 0.05))


def label(optimizer: Mapping[str, Any], position: Sequence[float]) -> str | None:
    """What an optimizer calls a position, such as "uniform soup"; `None`: it has no names.

    Args:
        optimizer: Its state.
    """
    named = zip(optimizer.get("rows", []), optimizer.get("labels", []), strict=False)
    return next((words for row, words in named if row == list(position)), None)


def caveats(metrics: dict[str, Any]) -> list[str]:
    """What else bears on the numbers: the kept part of dev, and noise that is no learning."""
    lines = []
    points = metrics.get("in_points", False)
    if found := metrics.get("confirm"):
        bias = found["ending_searched"] - found["ending"]
        lines.append(
            f"Of the {found['ending_searched']:.3f} that the search saw, the {found['items']} dev "
            f"items kept from it confirm {found['ending']:.3f} (difference {bias:+.3f}; a maximum "
            "of many flatters itself)."
        )
        lines.append(told(found["gain"], found["gain_interval"], found["p_value"], found["items"],
                          "kept dev items", points))  # fmt: skip
    if error := metrics.get("reconstruction_error"):
        lines.append(
            f"The saved adapter is cut to pool.export_rank and off by {error:.2g} of the update's "
            "norm: all numbers are of the position before that; python -m swarm.evaluate "
            "measures the adapter."
        )
    if found := metrics.get("noise_floor"):
        lines.append(
            f"Noise floor: asked again in other batches, {found['changed_answers']} of "
            f"{found['items']} dev answers of the best found change, and its utility by "
            f"{found['difference']:+.4f}."
        )
    return lines
