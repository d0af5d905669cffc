"""Final metrics: the best initial expert against the best position found, on dev and test."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.files import parse_json, read_gzip_json, write_atomic
from swarm.loop.evaluator import (
    mean_by_route,
)
from swarm.loop.final_evaluation import FinalEvaluation
from swarm.loop.search_inputs import BASELINE_LABELS
from swarm.optimizers.multi_objective import BASE_BOUND
from swarm.optimizers.pso import SOUP_SCALES
from swarm.optimizers.static_merges import (
    FEW_SCALES,
    static_start_positions,
    utility_start_positions,
)
from swarm.runs.describe import MODEL_LABELS, position_label
from swarm.runs.run_folder import ParticleIndex, RunRecord
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.metrics import (
    find_form_mismatches,
    group_items_by_domain,
    item_domain,
    majority_vote,
    paired_gain,
    summarize_constant_answers,
    utility_summary,
    utility_with_interval,
)

SPENT_SUFFIXES = ("_tokens", "_cost")
"""Suffixes of measures that are costs of a judgement."""


def final_metrics(
    ending: FinalEvaluation,
    test: bool,
    ensemble: int,
    noise_floor: bool,
    front: int = 0,
    baselines: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare the start of the search with its result.

    Args:
        ending: Evaluation of a run whose search is over.
        test: Whether to use the test split.
        ensemble: Maximum number of personal bests that vote; 0 for no vote.
        noise_floor: Whether to score the best position on dev again, in other batches.
        front: Number of points of the front to score on test.
        baselines: Names of `BASELINE_LABELS` to score on test.

    Returns:
        The metrics, with the original implementation's names first. Intervals are 95 %, [low,
            high]; the p-value is of a paired test on the test items. "constant_answers" is `None`
            if answers cannot be graded, else as `swarm.tasks.metrics.summarize_constant_answers`
            returns it.
    """
    record, task = ending.record, ending.metric_task
    before, after = ending.choose_bests()
    metrics: dict[str, Any] = {
        "starting_best_validation_utility": ending.search_utility(before),
        "starting_best_particle_on_validation": before[1],
        "starting_best_expert": record.state["experts"][before[1]],
        "ending_best_validation_utility": ending.search_utility(after),
        "ending_best_particle_on_validation": after[1],
        "ending_best_position": record.position_at(after),
        "ending_best_label": position_label(record.state["optimizer"], record.position_at(after)),
        "starting_place": list(before),
        "ending_place": list(after),
        "start": _start_facts(ending, after),
        "in_points": getattr(task, "highest", None) == 1.0,
        **_improvement_stats(record),
        **record.count_prompts(),
        **reconstruction_error(record.folder),
    }
    if task is not ending.task:
        metrics["signal"] = ending.task.signal  # type: ignore[attr-defined]
        metrics["ending_best_signal"] = record.utility_at(after)
    dev = [ending.task.items("dev")[index] for index in ending.searched]
    for name, index in (("starting", before), ("ending", after)):
        metrics |= _prefixed_summary(f"{name}_best_validation", task, ending.dev_scores(index), dev)
    if found := _metrics_without_gradient(ending, after):
        metrics["no_gradient"] = found
    if ending.held_out:
        metrics["confirm"] = _holdout_metrics(ending, before, after)
    if noise_floor:
        metrics["noise_floor"] = _noise_floor(ending, after)
    if test:
        metrics |= _test_metrics(ending, before, after)
    tested = (task.items("test"), ending.test_scores(after)) if test else ()
    metrics["constant_answers"] = summarize_constant_answers(task, dev, *tested)
    if test and baselines:
        metrics["baselines"] = [_baseline_metrics(ending, name, after) for name in baselines]
    if forms := [
        *record.state.get("answer_forms", ()),
        *_test_forms(ending, after, test, baselines),
    ]:
        metrics["answer_forms"] = forms
    if ending.pareto_front is not None:
        volumes = ending.pareto_front.hypervolume_history
        metrics["front_points"] = len(ending.pareto_front.front_indices)
        metrics["hypervolume"] = [volumes[0], volumes[-1]]
    if constraints := _constraint_metrics(ending, after, test):
        metrics["constraints"] = constraints
    if test and front:
        metrics["front"] = _front_metrics(ending, front)
    if ensemble and getattr(task, "votes", True):
        metrics |= _ensemble_metrics(ending, ensemble, test)
    if taken := sum_scoring_costs(record):
        metrics["scoring_cost"] = taken
    return metrics


def _start_facts(ending: FinalEvaluation, after: ParticleIndex) -> dict[str, Any]:
    """Return how much of the best position is what the search started from.

    Returns:
        "whole", whether it is a position of the first iteration, on each route; "label", which
            one; "routes", the routes on which it replaced a worse position that the search had
            found (`FinalEvaluation.choose_bests`); "iterations", their number after the first; and
            "ended", why no more followed.
    """
    state, position = ending.record.state, np.array(ending.record.position_at(after))
    first, shape = ending.record.iterations[0], (-1, ending.routes, len(position) // ending.routes)
    known = [u is not None for u in first["utilities"]]
    starts = np.array(first["positions"])[known].reshape(shape)
    same = (starts == position.reshape(shape)).all(axis=2).any(axis=0)
    label = "best of the first iteration" + " for each kind of prompt" * (ending.routes > 1)
    experts, groups = len(state["experts"]), len(state["groups"])
    named, rows = static_start_positions(experts, groups, SOUP_SCALES, among=state["own"])
    named, rows = [*state["experts"], *named], np.vstack([np.tile(np.eye(experts), groups), rows])
    matching = np.flatnonzero(np.isclose(rows, position).all(axis=1))
    if len(matching):
        label = f"{label}: {named[matching[0]]}"
    searched = [not entry.get("after_search") for entry in ending.record.iterations]
    return {
        "whole": bool(same.all()),
        "label": label,
        "routes": state.get("kept_start", []),
        "iterations": sum(searched) - 1,
        "ended": state["finished"],
    }


def _holdout_metrics(
    ending: FinalEvaluation, before: ParticleIndex, after: ParticleIndex
) -> dict[str, Any]:
    """Return the metrics of both bests on the part of dev that the search did not see."""
    task = ending.metric_task
    start, end = ending.holdout_scores(before), ending.holdout_scores(after)
    gain = paired_gain(task, end, start)
    found: dict[str, Any] = {"items": len(end), "selected_on_held_out": ending.by_kept}
    for name, scores in (("starting", start), ("ending", end)):
        interval = utility_with_interval(task, scores)
        found |= {name: interval.mean, f"{name}_interval": [interval.low, interval.high]}
    return {
        **found,
        "ending_searched": ending.search_utility(after),
        "gain": gain.difference,
        "gain_interval": [gain.low, gain.high],
        "p_value": gain.p,
    }


def _metrics_without_gradient(ending: FinalEvaluation, after: ParticleIndex) -> dict[str, Any]:
    """Return the utility of the best position on the dev items that no gradient used.

    Empty if no gradient came before it, or for a task with parts: its utility needs items of each.
    """
    before = ending.record.iterations[: after[0] + 1]
    descended = any(entry.get("gradients_computed") for entry in before)
    task, items = ending.metric_task, ending.without_gradient
    if not items or not descended or hasattr(task, "subtask_utilities"):
        return {}
    scores = ending.dev_scores(after)
    found = utility_with_interval(task, [scores[index] for index in items])
    interval = [found.low, found.high]
    return {"items": len(items), "ending": found.mean, "ending_interval": interval}


def _noise_floor(ending: FinalEvaluation, after: ParticleIndex) -> dict[str, Any]:
    """Measure the effect of rounding alone: the same position and items, in other batches."""
    first, again = ending.dev_scores(after), ending.repeat_dev_scores(after)
    changed = sum(a.answer != b.answer for a, b in zip(first, again, strict=True))
    difference = ending.metric_task.utility(again) - ending.metric_task.utility(first)
    return {"items": len(first), "changed_answers": changed, "difference": difference}


def _test_metrics(
    ending: FinalEvaluation, before: ParticleIndex, after: ParticleIndex
) -> dict[str, Any]:
    task = ending.metric_task
    start, end = (
        ending.test_scores(index, name)
        for index, name in zip((before, after), MODEL_LABELS, strict=True)
    )
    gain = paired_gain(task, end, start)
    metrics: dict[str, Any] = {
        "starting_best_single_test_accuracy": task.utility(start),
        "ending_best_single_test_accuracy": task.utility(end),
        "test_gain": gain.difference,
        "test_gain_interval": [gain.low, gain.high],
        "test_gain_p_value": gain.p,
    }
    for name, scores in (("starting", start), ("ending", end)):
        metrics |= _prefixed_summary(f"{name}_best_single_test", task, scores, task.items("test"))
    return metrics


def _baseline_metrics(ending: FinalEvaluation, name: str, after: ParticleIndex) -> dict[str, Any]:
    """Return the metrics of a baseline on test, with the gain of the best position over it.

    Returns:
        "name", "label", "test" (as `swarm.tasks.metrics.utility_summary`), "gain" of the best
            position over it, "gain_interval" ([low, high], 95 %), "p_value", for a recipe and for
            experts, which are chosen on dev, "dev" (likewise), and for a recipe its "position".
    """
    task, state = ending.metric_task, ending.record.state
    own_count, rows, groups = state["own"], len(state["experts"]), len(state["groups"])
    found: dict[str, Any] = {"name": name, "label": BASELINE_LABELS[name]}
    items, dev = task.items("test"), list[Score]()
    if name == "experts":
        dev, scores, found["experts"] = _best_expert_by_domain(ending)
    else:
        if name == "routes":
            position, dev = _best_expert_by_route(ending)
        elif name == "recipe":
            label, position, dev = _best_merge_or_expert(ending)
            found["label"] += f" ({label})"
        else:
            # Extra rows that are not the user's experts, such as noise, are not part of a soup.
            share = 0.0 if name == "base" else 1 / own_count
            position = [share * (row < own_count) for row in range(rows)] * groups
        found["position"] = position
        scores = ending.score_position_on_test(position, name=found["label"])
    if dev:
        found["dev"] = utility_summary(task, dev)
    gain = paired_gain(task, ending.test_scores(after), scores)
    return {
        **found,
        "test": utility_summary(task, scores, items),
        "gain": gain.difference,
        "gain_interval": [gain.low, gain.high],
        "p_value": gain.p,
    }


def _test_forms(
    ending: FinalEvaluation, after: ParticleIndex, test: bool, baselines: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the form of the base's test answers if it differs, and whether the best's are cut."""
    if not test:
        return []
    task, state = ending.metric_task, ending.record.state
    items, found = task.items("test"), []
    if "base" in baselines:
        position = [0.0] * len(state["experts"]) * len(state["groups"])
        label = BASELINE_LABELS["base"]
        base = {label: ending.score_position_on_test(position, name=label)}
        # Unread answers are in the summary of each baseline.
        found += [one for one in find_form_mismatches(task, items, base) if one.get("contained")]
    if not any("cut" in one for one in state.get("answer_forms", ())):
        best = {f"the {MODEL_LABELS[1]}": ending.test_scores(after)}
        found += [one for one in find_form_mismatches(task, items, best) if "cut" in one]
    return [{**one, "split": "test"} for one in found]


def _best_merge_or_expert(ending: FinalEvaluation) -> tuple[str, list[float], list[Score]]:
    """Return the static recipe or expert that is best on the searched part of dev.

    Returns:
        Its label, its position and its scores there.
    """
    state = ending.record.state
    own_count, names, groups = state["own"], state["experts"], len(state["groups"])
    known = np.array([ending.search_utility((0, i)) for i in range(own_count)])
    static = static_start_positions(len(names), groups, FEW_SCALES, among=own_count)
    learnt = utility_start_positions(known, len(names), groups, FEW_SCALES, among=own_count)
    candidates = dict(zip(static[0] + learnt[0], np.vstack([static[1], learnt[1]]), strict=True))
    scores = {
        label: ending.score_position_on_dev(position.tolist())
        for label, position in candidates.items()
    }
    utilities = {label: ending.metric_task.utility(mine) for label, mine in scores.items()}
    best, alone = max(utilities, key=lambda label: utilities[label]), int(np.argmax(known))
    if known[alone] >= utilities[best]:
        return names[alone], ending.record.position_at((0, alone)), ending.dev_scores((0, alone))
    return best, candidates[best].tolist(), scores[best]


def _best_expert_by_domain(
    ending: FinalEvaluation,
) -> tuple[list[Score], list[Score], dict[str, str]]:
    """Return dev and test scores with each domain scored by its best expert, and their names."""
    task, state = ending.metric_task, ending.record.state
    dev = [ending.task.items("dev")[index] for index in ending.searched]
    answers = [ending.dev_scores((0, i)) for i in range(state["own"])]
    best = {
        domain: max(range(len(answers)), key=lambda i: sum(answers[i][p].value for p in indices))
        for domain, indices in group_items_by_domain(dev).items()
    }
    overall = max(range(len(answers)), key=lambda i: task.utility(answers[i]))
    test: dict[int, Score] = {}
    for domain, indices in group_items_by_domain(task.items("test")).items():
        position = ending.record.position_at((0, best.get(domain, overall)))
        name = BASELINE_LABELS["experts"]
        scores = ending.score_position_on_test(position, indices, name)
        test |= dict(zip(indices, scores, strict=True))
    mine = [answers[best[item_domain(item)]][i] for i, item in enumerate(dev)]
    named = {domain: state["experts"][i] for domain, i in best.items()}
    return mine, [test[index] for index in sorted(test)], named


def _best_expert_by_route(ending: FinalEvaluation) -> tuple[list[float], list[Score]]:
    """Return the position with the best expert of each route on dev, and its scores there."""
    routes = ending.item_routes
    assert routes is not None
    answers = [ending.dev_scores((0, i)) for i in range(ending.record.state["own"])]
    values = mean_by_route(dict(enumerate(answers)), routes, ending.routes, len(answers))
    rows = np.array([ending.record.position_at((0, i)) for i in range(len(answers))])
    parts = rows.reshape(len(answers), values.shape[1], -1)
    # A route without items has the first expert.
    best = np.where(np.isnan(values), -np.inf, values).argmax(axis=0)
    position = [parts[expert, route] for route, expert in enumerate(best)]
    dev = [answers[best[route]][i] for i, route in enumerate(routes.tolist())]
    return np.concatenate(position).tolist(), dev


def _constraint_metrics(
    ending: FinalEvaluation, after: ParticleIndex, test: bool
) -> dict[str, Any]:
    """Return the bound and value of each constrained part, paired with the base on test."""
    front, found = ending.pareto_front, {}
    for name, (bound, value) in ending.constraint_values(after).items():
        assert front is not None
        base = front.constraints[name] == BASE_BOUND
        found[name] = {"at_least": bound, "base": base, "dev": value, "met": value >= bound}
        if test:
            part = ending.metric_task.tasks[name]  # type: ignore[attr-defined]
            mine = _subtask_scores(ending, name, ending.test_scores(after))
            found[name]["test"] = utility_summary(part, mine)
            if base and front.base_index is not None:
                base_scores = ending.test_scores(front.base_index, BASELINE_LABELS["base"])
                theirs = _subtask_scores(ending, name, base_scores)
                gain = paired_gain(part, mine, theirs)
                found[name]["test_base"] = part.utility(theirs)
                found[name]["test_gain"] = gain.difference
                found[name]["test_gain_interval"] = [gain.low, gain.high]
    return found


def _front_metrics(ending: FinalEvaluation, limit: int) -> list[dict[str, Any]]:
    """Return points of the front on dev and test, part by part, by the task's own metric."""
    front, task = ending.pareto_front, ending.metric_task
    if front is None:
        return []
    tasks: dict[str, Task] = task.tasks  # type: ignore[attr-defined]
    found = []
    for number in front.evenly_spaced_points(limit):
        index = front.front_indices[number]
        one: dict[str, Any] = {"place": list(index)}
        for split, scores in (
            ("dev", ending.dev_scores(index)),
            ("test", ending.test_scores(index, f"point {number} of the front")),
        ):
            one[f"{split}_parts"] = {
                name: utility_summary(part, _subtask_scores(ending, name, scores))
                for name, part in tasks.items()
            }
            one[f"{split}_utility"] = task.utility(scores)
        found.append(one)
    return found


def _subtask_scores(ending: FinalEvaluation, name: str, scores: Sequence[Score]) -> list[Score]:
    """Return the scores of one part, as given by the part itself."""
    found: list[Score] = ending.metric_task.scores_by_subtask(scores)[name]  # type: ignore[attr-defined]
    return found


def _ensemble_metrics(ending: FinalEvaluation, limit: int, test: bool) -> dict[str, Any]:
    """Score the vote of the top k; k is the best on dev, where all answers are known."""
    task, members = ending.metric_task, ending.best_finalists(limit)
    if len(members) < 2:
        return {}
    weights = [ending.search_utility(member) for member in members]
    dev = [ending.task.items("dev")[index] for index in ending.searched]
    answers = [ending.dev_scores(member) for member in members]
    by_size = [
        task.utility(majority_vote(task, dev, answers[:k], weights[:k]))
        for k in range(1, len(members) + 1)
    ]
    size = by_size.index(max(by_size)) + 1
    metrics: dict[str, Any] = {
        "ensemble_size": size,
        "ensemble_dev_by_size": by_size,
        "ensemble_members": [
            {"iteration": member[0], "particle": member[1], "utility": weight}
            for member, weight in zip(members[:size], weights, strict=False)
        ],
    }
    if test:
        voters = [
            ending.test_scores(member, f"voter {number}")
            for number, member in enumerate(members[:size], 1)
        ]
        voted = majority_vote(task, task.items("test"), voters, weights[:size])
        metrics["ending_top-k_ensemble_test_accuracy"] = task.utility(voted)
        metrics |= _prefixed_summary("ending_top-k_ensemble_test", task, voted, task.items("test"))
    return metrics


def sum_scoring_costs(record: RunRecord) -> dict[str, dict[str, float]]:
    """Sum the costs of scoring over dev and test: the measures named *_tokens and *_cost.

    "first" is for texts that appeared for the first time, "again" for texts that an earlier
    position had written: a scorer with a cache does not pay for these, nor for what an earlier run
    paid.
    """
    seen: set[tuple[str, Any, str]] = set()
    found: dict[str, dict[str, float]] = {}
    for path in sorted((record.folder / "answers").glob("*.json.gz")):
        content = read_gzip_json(path)
        split = "test" if path.name.startswith("test_") else "dev"
        several = isinstance(content, dict)
        rows = [row for mine in content.values() for row in mine] if several else content
        for row in rows:
            measures = row.get("measures", {}).items()
            taken = {name: value for name, value in measures if name.endswith(SPENT_SUFFIXES)}
            text = (split, row["id"], row["text"])
            when = "again" if text in seen else "first"
            seen |= {text} if taken else set()
            for name, value in taken.items():
                found.setdefault(name, {"first": 0.0, "again": 0.0})[when] += value
        if not found:
            return {}
    return found


def _improvement_stats(record: RunRecord) -> dict[str, int]:
    """Return how often, and when last, the global best improved."""
    highest, rises = None, []
    for number, entry in enumerate(record.iterations):
        value = max((u for u in entry["utilities"] if u is not None), default=None)
        if value is not None and (highest is None or value > highest):
            highest = value
            rises.append(number)
    return {
        "g_history_improve_count": max(0, len(rises) - 1),
        "g_history_last_change_index": rises[-1] if rises else 0,
    }


def _prefixed_summary(
    name: str, task: Task, scores: Sequence[Score], items: Sequence[Item]
) -> dict[str, Any]:
    """Return the summary of a utility, with `name` as prefix of the keys."""
    found = utility_summary(task, scores, items).items()
    return {f"{name}_{key}": value for key, value in found if key != "utility"}


EXACT_ERROR = 1e-6
"""Relative errors of saved weights up to this are float32 rounding."""


def reconstruction_error(folder: Path) -> dict[str, float]:
    """Return the error of a run's saved best, if its rank was truncated when saved."""
    try:
        facts = parse_json((folder / "global_best" / "swarm.json").read_text())
    except (OSError, ValueError):
        return {}
    error = facts.get("reconstruction_error", {}).get("overall", 0.0)
    return {"reconstruction_error": error} if error > EXACT_ERROR else {}


def write_ensemble_yaml(folder: Path, metrics: Mapping[str, Any]) -> None:
    """Write ensemble.yaml, a model for `python -m swarm.evaluate`; remove it if there was no vote.

    Args:
        folder: The run folder.
        metrics: Result of `swarm.loop.final_metrics.final_metrics`.
    """
    import yaml

    if "ensemble_members" not in metrics:
        (folder / "ensemble.yaml").unlink(missing_ok=True)
        return
    members = [
        {"folder": f"particle_{one['particle']}/personal_best", "utility": one["utility"]}
        for one in metrics["ensemble_members"]
    ]
    content = {"rule": "majority", "members": members}
    head = "# The vote of the best personal bests; how many was chosen on dev.\n"
    text = head + yaml.safe_dump(content, sort_keys=False)
    write_atomic(folder / "ensemble.yaml", text.encode())
