"""The end of a search: the best initial expert against the best found, on dev and on test."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swarm.certainty import (
    described,
    described_constants,
    domain_of,
    gain_of,
    interval_of,
    places_by_domain,
    poll,
)
from swarm.ending import Ending
from swarm.files import read_packed
from swarm.optimizers.multi_objective import BASE
from swarm.optimizers.starts import static_starts, utility_starts
from swarm.record import Place, Record
from swarm.tasks import Item, Score, Task
from swarm.words import label

BASELINES = {
    "base": "base model",
    "soup": "uniform soup",
    "recipe": "best recipe",
    "experts": "best expert of each domain",
}
"""What the best found may be compared with on test, by the names of the option, as tables say it.

"recipe" is the best on dev of the static recipes (`swarm.optimizers.starts`); "experts" asks of
each domain's items the expert that is best in it on dev, as a router that knows the domain would.
"""

SPENT = ("_tokens", "_cost")
"""How measures end that say what a judgement took."""


def judge(
    ending: Ending,
    test: bool,
    ensemble: int,
    noise_floor: bool,
    front: int = 0,
    baselines: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare what the search began with and what it found.

    Args:
        ending: Of a run whose search is over.
        test: Whether to use the test split.
        ensemble: How many personal bests may vote; 0 for no vote.
        noise_floor: Whether the best found is asked the dev items again, in other batches.
        front: How many points of the front are put to test.
        baselines: Names of `BASELINES` that are put to test.

    Returns:
        The metrics, the original's names first. Intervals are 95 %, [low, high]; the p-value is
        of a paired test on the test items. "constant_answers" is `None` where answers cannot be
        graded, else as `swarm.certainty.described_constants` returns it.
    """
    record, task = ending.record, ending.plain
    before, after = ending.choose()
    metrics: dict[str, Any] = {
        "starting_best_validation_utility": ending.utility(before),
        "starting_best_particle_on_validation": before[1],
        "starting_best_expert": record.state["experts"][before[1]],
        "ending_best_validation_utility": ending.utility(after),
        "ending_best_particle_on_validation": after[1],
        "ending_best_position": record.position(after),
        "ending_best_label": label(record.state["optimizer"], record.position(after)),
        "starting_place": list(before),
        "ending_place": list(after),
        "in_points": getattr(task, "highest", None) == 1.0,
        **_improvements(record),
        **record.prompts(),
    }
    if task is not ending.task:
        metrics["signal"] = ending.task.signal  # type: ignore[attr-defined]
        metrics["ending_best_signal"] = record.utility(after)
    dev = [ending.task.items("dev")[place] for place in ending.searched]
    for name, place in (("starting", before), ("ending", after)):
        metrics |= _described(f"{name}_best_validation", task, ending.dev(place), dev)
    if ending.kept:
        metrics["confirm"] = _confirmed(ending, before, after)
    if noise_floor:
        metrics["noise_floor"] = _noise(ending, after)
    if test:
        metrics |= _tested(ending, before, after)
    tested = (task.items("test"), ending.test(after)) if test else ()
    metrics["constant_answers"] = described_constants(task, dev, *tested)
    if test and baselines:
        metrics["baselines"] = [_baseline(ending, name, after) for name in baselines]
    if ending.front is not None:
        volumes = ending.front.hypervolumes
        metrics["front_points"] = len(ending.front.points)
        metrics["hypervolume"] = [volumes[0], volumes[-1]]
    if constraints := _constraints(ending, after, test):
        metrics["constraints"] = constraints
    if test and front:
        metrics["front"] = _front(ending, front)
    if ensemble and getattr(task, "votes", True):
        metrics |= _ensemble(ending, ensemble, test)
    if taken := spent(record):
        metrics["spent"] = taken
    return metrics


def _confirmed(ending: Ending, before: Place, after: Place) -> dict[str, Any]:
    """Both bests on the part of dev that the search did not see."""
    task = ending.plain
    start, end = ending.confirm(before), ending.confirm(after)
    gain = gain_of(task, end, start)
    found: dict[str, Any] = {"items": len(end), "chose": ending.by_kept}
    for name, scores in (("starting", start), ("ending", end)):
        interval = interval_of(task, scores)
        found |= {name: interval.mean, f"{name}_interval": [interval.low, interval.high]}
    return {
        **found,
        "ending_searched": ending.utility(after),
        "gain": gain.difference,
        "gain_interval": [gain.low, gain.high],
        "p_value": gain.p,
    }


def _noise(ending: Ending, after: Place) -> dict[str, Any]:
    """What rounding alone does: the same position and items, in other batches."""
    first, again = ending.dev(after), ending.again(after)
    changed = sum(a.answer != b.answer for a, b in zip(first, again, strict=True))
    difference = ending.plain.utility(again) - ending.plain.utility(first)
    return {"items": len(first), "changed_answers": changed, "difference": difference}


def _tested(ending: Ending, before: Place, after: Place) -> dict[str, Any]:
    task = ending.plain
    start, end = ending.test(before), ending.test(after)
    gain = gain_of(task, end, start)
    metrics: dict[str, Any] = {
        "starting_best_single_test_accuracy": task.utility(start),
        "ending_best_single_test_accuracy": task.utility(end),
        "test_gain": gain.difference,
        "test_gain_interval": [gain.low, gain.high],
        "test_gain_p_value": gain.p,
    }
    for name, scores in (("starting", start), ("ending", end)):
        metrics |= _described(f"{name}_best_single_test", task, scores, task.items("test"))
    return metrics


def _baseline(ending: Ending, name: str, after: Place) -> dict[str, Any]:
    """A baseline on test, and the best found beside it.

    Returns:
        "name", "label", "test" (as `swarm.certainty.described`), "gain" of the best found over it,
        "gain_interval" ([low, high], 95 %), "p_value", and of a recipe and of experts, which are
        chosen on dev, "dev" (likewise).
    """
    task, state = ending.plain, ending.record.state
    own, rows, groups = state["own"], len(state["experts"]), len(state["groups"])
    found: dict[str, Any] = {"name": name, "label": BASELINES[name]}
    items = task.items("test")
    if name == "experts":
        dev, scores, chosen = _best_of_domains(ending)
        found["experts"] = chosen
    elif name == "recipe":
        label, position, dev = _best_recipe(ending)
        found["label"] += f" ({label})"
        scores = ending.position_on_test(position)
    else:
        # Rows that are no experts of their own, such as noise, have no part in a soup.
        share = 0.0 if name == "base" else 1 / own
        position = [share * (row < own) for row in range(rows)] * groups
        dev, scores = [], ending.position_on_test(position)
    if dev:
        found["dev"] = described(task, dev)
    gain = gain_of(task, ending.test(after), scores)
    return {
        **found,
        "test": described(task, scores, items),
        "gain": gain.difference,
        "gain_interval": [gain.low, gain.high],
        "p_value": gain.p,
    }


def _best_recipe(ending: Ending) -> tuple[str, list[float], list[Score]]:
    """The static recipe or expert that is best on the searched part of dev.

    Returns:
        Its label, its position and its scores there.
    """
    state = ending.record.state
    own, names, groups = state["own"], state["experts"], len(state["groups"])
    known = np.array([ending.utility((0, i)) for i in range(own)])
    static = static_starts(len(names), groups, among=own)
    learnt = utility_starts(known, len(names), groups, among=own)
    candidates = dict(zip(static[0] + learnt[0], np.vstack([static[1], learnt[1]]), strict=True))
    scores = {
        label: ending.position_on_dev(position.tolist()) for label, position in candidates.items()
    }
    utilities = {label: ending.plain.utility(mine) for label, mine in scores.items()}
    best, alone = max(utilities, key=lambda label: utilities[label]), int(np.argmax(known))
    if known[alone] >= utilities[best]:
        return names[alone], ending.record.position((0, alone)), ending.dev((0, alone))
    return best, candidates[best].tolist(), scores[best]


def _best_of_domains(ending: Ending) -> tuple[list[Score], list[Score], dict[str, str]]:
    """Scores on dev and on test where each domain is asked its best expert, and who that is."""
    task, state = ending.plain, ending.record.state
    dev = [ending.task.items("dev")[place] for place in ending.searched]
    answers = [ending.dev((0, i)) for i in range(state["own"])]
    best = {
        domain: max(range(len(answers)), key=lambda i: sum(answers[i][p].value for p in places))
        for domain, places in places_by_domain(dev).items()
    }
    overall = max(range(len(answers)), key=lambda i: task.utility(answers[i]))
    test: dict[int, Score] = {}
    for domain, places in places_by_domain(task.items("test")).items():
        position = ending.record.position((0, best.get(domain, overall)))
        test |= dict(zip(places, ending.position_on_test(position, places), strict=True))
    mine = [answers[best[domain_of(item)]][i] for i, item in enumerate(dev)]
    named = {domain: state["experts"][i] for domain, i in best.items()}
    return mine, [test[place] for place in sorted(test)], named


def _constraints(ending: Ending, after: Place, test: bool) -> dict[str, Any]:
    """Each constrained part's bound and value, of the best found; paired with the base on test."""
    front, found = ending.front, {}
    for name, (bound, value) in ending.constrained(after).items():
        assert front is not None
        base = front.constraints[name] == BASE
        found[name] = {"at_least": bound, "base": base, "dev": value, "met": value >= bound}
        if test:
            part, mine = ending.plain.tasks[name], _of_part(ending, name, ending.test(after))  # type: ignore[attr-defined]
            found[name]["test"] = described(part, mine)
            if base and front.base is not None:
                theirs = _of_part(ending, name, ending.test(front.base))
                gain = gain_of(part, mine, theirs)
                found[name]["test_base"] = part.utility(theirs)
                found[name]["test_gain"] = gain.difference
                found[name]["test_gain_interval"] = [gain.low, gain.high]
    return found


def _front(ending: Ending, most: int) -> list[dict[str, Any]]:
    """Points of the front on dev and on test, part by part, by the task's own measure."""
    front, task = ending.front, ending.plain
    if front is None:
        return []
    tasks: dict[str, Task] = task.tasks  # type: ignore[attr-defined]
    found = []
    for number in front.spread(most):
        place = front.points[number]
        one: dict[str, Any] = {"place": list(place)}
        for split, scores in (("dev", ending.dev(place)), ("test", ending.test(place))):
            one[f"{split}_parts"] = {
                name: described(part, _of_part(ending, name, scores))
                for name, part in tasks.items()
            }
            one[f"{split}_utility"] = task.utility(scores)
        found.append(one)
    return found


def _of_part(ending: Ending, name: str, scores: Sequence[Score]) -> list[Score]:
    """The scores of one part, as the part itself gave them."""
    found: list[Score] = ending.plain.by_part(scores)[name]  # type: ignore[attr-defined]
    return found


def _ensemble(ending: Ending, most: int, test: bool) -> dict[str, Any]:
    """The vote of the top k; k is the first best on dev, whose answers are all known."""
    task, members = ending.plain, ending.finalists(most)
    if len(members) < 2:
        return {}
    weights = [ending.utility(place) for place in members]
    dev = [ending.task.items("dev")[place] for place in ending.searched]
    answers = [ending.dev(place) for place in members]
    by_size = [
        task.utility(poll(task, dev, answers[:k], weights[:k])) for k in range(1, len(members) + 1)
    ]
    size = by_size.index(max(by_size)) + 1
    metrics: dict[str, Any] = {
        "ensemble_size": size,
        "ensemble_dev_by_size": by_size,
        "ensemble_members": [
            {"iteration": place[0], "particle": place[1], "utility": weight}
            for place, weight in zip(members[:size], weights, strict=False)
        ],
    }
    if test:
        voters = [ending.test(place) for place in members[:size]]
        voted = poll(task, task.items("test"), voters, weights[:size])
        metrics["ending_top-k_ensemble_test_accuracy"] = task.utility(voted)
        metrics |= _described("ending_top-k_ensemble_test", task, voted, task.items("test"))
    return metrics


def spent(record: Record) -> dict[str, dict[str, float]]:
    """What scoring took, over dev and test: sums of the measures named *_tokens and *_cost.

    "first" is for texts that came up for the first time, "again" for those that some position had
    written before: a scorer with a cache has not paid for them, nor for what an earlier run paid.
    """
    seen: set[tuple[str, Any, str]] = set()
    found: dict[str, dict[str, float]] = {}
    for path in sorted((record.folder / "answers").glob("*.json.gz")):
        content = read_packed(path)
        split = "test" if path.name.startswith("test_") else "dev"
        several = isinstance(content, dict)
        rows = [row for mine in content.values() for row in mine] if several else content
        for row in rows:
            measures = row.get("measures", {}).items()
            taken = {name: value for name, value in measures if name.endswith(SPENT)}
            text = (split, row["id"], row["text"])
            when = "again" if text in seen else "first"
            seen |= {text} if taken else set()
            for name, value in taken.items():
                found.setdefault(name, {"first": 0.0, "again": 0.0})[when] += value
        if not found:
            return {}
    return found


def _improvements(record: Record) -> dict[str, int]:
    """How often and when last the global best rose."""
    highest, rises = None, []
    for number, entry in enumerate(record.rounds):
        value = max((u for u in entry["utilities"] if u is not None), default=None)
        if value is not None and (highest is None or value > highest):
            highest = value
            rises.append(number)
    return {
        "g_history_improve_count": max(0, len(rises) - 1),
        "g_history_last_change_index": rises[-1] if rises else 0,
    }


def _described(
    name: str, task: Task, scores: Sequence[Score], items: Sequence[Item]
) -> dict[str, Any]:
    """What is said of a utility, each name begun with `name`."""
    found = described(task, scores, items).items()
    return {f"{name}_{key}": value for key, value in found if key != "utility"}
