"""The end of a search: the best initial expert against the best found, on dev and on test."""

from collections.abc import Callable, Sequence
from typing import Any

from swarm.record import Record
from swarm.report.statistics import Interval, mean_interval, paired_test, vote
from swarm.tasks import Score, Task

Scorer = Callable[[list[list[float]]], list[list[Score]]]
"""Scores positions on the test split."""


def ensemble_members(record: Record, size: int) -> list[tuple[int, int]]:
    """The personal bests of the `size` best particles, the best first; at most one a particle."""
    count = len(record.rounds[0]["positions"])
    places = [record.best(i) for i in range(count)]
    measured = [place for place in places if record.utility(place) is not None]
    return sorted(measured, key=lambda place: -(record.utility(place) or 0.0))[:size]


def judge(record: Record, task: Task, score: Scorer | None, ensemble: int) -> dict[str, Any]:
    """Compare what the search began with and what it found.

    Args:
        record: A run whose search is over.
        task: Its task.
        score: Scores positions on the test split; `None` leaves the test split alone.
        ensemble: How many personal bests vote; 0 for no vote.

    Returns:
        The metrics, the original's names first. Intervals are 95 %, [low, high]; the p-value is
        of a paired test on the test items.
    """
    experts = len(record.state["experts"])
    before, after = record.best(rows=experts), record.best()
    history = [u["utilities"] for u in record.rounds]
    best_so_far = [max((u for u in row if u is not None), default=None) for row in history]
    metrics: dict[str, Any] = {
        "starting_best_validation_utility": record.utility(before),
        "starting_best_particle_on_validation": before[1],
        "starting_best_expert": record.state["experts"][before[1]],
        "ending_best_validation_utility": record.utility(after),
        "ending_best_particle_on_validation": after[1],
        **_improvements(best_so_far),
    }
    for name, place in (("starting", before), ("ending", after)):
        values = [row["value"] for row in record.answers(*place)]
        metrics[f"{name}_best_validation_interval"] = _as_list(mean_interval(values))
    if score is not None:
        metrics |= _test_metrics(record, task, score, ensemble, before, after)
    return metrics


def _improvements(best: Sequence[float | None]) -> dict[str, int]:
    """How often and when last the global best rose."""
    highest, rises = None, []
    for number, value in enumerate(best):
        if value is not None and (highest is None or value > highest):
            highest = value
            rises.append(number)
    return {
        "g_history_improve_count": max(0, len(rises) - 1),
        "g_history_last_change_index": rises[-1] if rises else 0,
    }


def _test_metrics(
    record: Record,
    task: Task,
    score: Scorer,
    ensemble: int,
    before: tuple[int, int],
    after: tuple[int, int],
) -> dict[str, Any]:
    members = ensemble_members(record, ensemble)
    places = [before, after, *members]
    found = score([record.position(place) for place in places])
    start, end, voters = found[0], found[1], found[2:]
    gain = paired_test([s.value for s in end], [s.value for s in start])
    metrics: dict[str, Any] = {
        "starting_best_single_test_accuracy": task.utility(start),
        "ending_best_single_test_accuracy": task.utility(end),
        "starting_best_single_test_interval": _as_list(mean_interval([s.value for s in start])),
        "ending_best_single_test_interval": _as_list(mean_interval([s.value for s in end])),
        "test_gain": gain.difference,
        "test_gain_interval": [gain.low, gain.high],
        "test_gain_p_value": gain.p,
        "starting_best_unparsed_rate": _unparsed(start),
        "ending_best_unparsed_rate": _unparsed(end),
    }
    if len(members) > 1 and any(s.answer is not None for row in voters for s in row):
        weights = [record.utility(place) or 0.0 for place in members]
        graded = [
            task.grade(item, vote([row[i].answer for row in voters], weights))
            for i, item in enumerate(task.items("test"))
        ]
        metrics["ending_top-k_ensemble_test_accuracy"] = mean_interval(graded).mean
        metrics["ending_top-k_ensemble_test_interval"] = _as_list(mean_interval(graded))
        metrics["ensemble_size"] = len(members)
    return metrics


def _unparsed(scores: Sequence[Score]) -> float:
    """The share of answers that nothing could be read from."""
    return sum(score.answer is None for score in scores) / len(scores)


def _as_list(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def sentence(experts: Sequence[str], position: Sequence[float]) -> str:
    """A position in words, the largest share first: "0.41 cot + 0.33 lima - 0.08 sharegpt"."""
    shares = sorted(zip(position, experts, strict=True), key=lambda pair: -abs(pair[0]))
    words = ""
    for share, name in shares:
        if abs(share) >= 0.005:
            sign = ("- " if share < 0 else "") if not words else (" - " if share < 0 else " + ")
            words += f"{sign}{abs(share):.2f} {name}"
    return words or "nothing of any expert"


def conclusion(metrics: dict[str, Any]) -> str:
    """What may be said of the test result, in one sentence."""
    gain, p = metrics["test_gain"], metrics["test_gain_p_value"]
    low, high = metrics["test_gain_interval"]
    size = f"{gain:+.3f} [{low:+.3f}, {high:+.3f}] on test, paired p = {p:.3g}"
    if metrics["ending_best_validation_utility"] <= metrics["starting_best_validation_utility"]:
        return f"The search found nothing better on dev than the best initial expert ({size})."
    if p >= 0.05:
        return f"No difference on test that these items can tell from chance: {size}."
    better = "better" if gain > 0 else "worse"
    return f"The best found is {better} than the best initial expert: {size}."
