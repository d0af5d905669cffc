"""The verdict's numbers: the best position and what needed no search, on dev and test."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from swarm._util.files import parse_json, read_gzip_json
from swarm.engine.base import ExpertPool
from swarm.loop.evaluator import mean_by_route
from swarm.loop.final_evaluation import FinalEvaluation
from swarm.merging.positions import position_label
from swarm.optimizers.multi_objective import BASE_BOUND
from swarm.optimizers.static_merges import (
    FEW_SCALES,
    static_start_positions,
    utility_start_positions,
)
from swarm.optimizers.swarm import SOUP_SCALES
from swarm.runs.folder import ParticleIndex, RunRecord
from swarm.runs.verdict import (
    EXPERT,
    FOUND,
    MODEL_LABELS,
    Compared,
    Constraint,
    FrontPoint,
    HeldOut,
    NoiseFloor,
    Start,
    Verdict,
    Vote,
    compare_constant_answers,
)
from swarm.tasks.base import Score, Task
from swarm.tasks.metrics import (
    Measured,
    group_items_by_domain,
    item_domain,
    majority_vote,
    measure,
    paired_gain,
)

Baseline = Literal["base", "soup", "recipe", "experts", "routes"]

BASELINE_LABELS = {
    "base": "base model",
    "soup": "uniform soup",
    "recipe": "best recipe",
    "experts": "best expert of each domain",
    "routes": "best expert of each kind of prompt",
}
"""Models that the best position is compared with on test: name -> label in tables.

"recipe" is the best on dev of the static recipes (`swarm.optimizers.static_merges`); "experts"
scores each domain's items with the expert that is best in it on dev, as a router that knows the
domain would. "routes" does so with the kinds of prompts that the pool's router knows, for which
nothing is searched.
"""


def resolve_baselines(names: str | Sequence[str], task: Task, pool: ExpertPool) -> list[str]:
    """Return those of the baselines `names` that are applicable to this pool and task.

    A pool of full models has no base among its mixtures, and a single-domain task has no expert per
    domain. "auto" is base, recipe and routes: what can be deployed as the result of a search is.
    """
    items = task.items("test")
    missing = {"base"} if getattr(pool, "saves", "") != "adapter" else set()
    missing |= {"experts"} if len(group_items_by_domain(items)) < 2 else set()
    missing |= {"routes"} if getattr(pool, "router", None) is None else set()
    if names == "auto":
        names = ["base", "recipe", "routes"]
    return [name for name in dict.fromkeys(names) if name not in missing]


SPENT_SUFFIXES = ("_tokens", "_cost")
"""Suffixes of measures that are costs of a judgement."""


def final_metrics(
    ending: FinalEvaluation,
    test: bool,
    ensemble: int,
    noise_floor: bool,
    front: int = 0,
    baselines: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Verdict:
    """Compare the result of the search with its start and with models that need no search.

    Args:
        ending: Evaluation of a run whose search is over.
        test: Whether to use the test split.
        ensemble: Maximum number of personal bests that vote; 0 for no vote.
        noise_floor: Whether to score the best position on dev again, in other batches.
        front: Number of points of the front to score on test.
        baselines: Names of `BASELINE_LABELS` to score on test.
        settings: Stored in the verdict.
    """
    record, task = ending.record, ending.metric_task
    before, after = ending.choose_bests()
    expert, position = record.state["experts"][before[1]], record.position_at(after)
    dev = [ending.task.items("dev")[index] for index in ending.searched]
    tested = task.items("test") if test else []
    start_label = f"{MODEL_LABELS[0]} ({expert})"
    alternatives = [_compare_place(ending, before, after, EXPERT, start_label, test)]
    if test:
        alternatives += [_compare_baseline(ending, name, after) for name in baselines]
    found_scores = ending.test_scores(after) if test else []
    if constant := compare_constant_answers(task, dev, tested, found_scores):
        alternatives.append(constant)
    alternatives.sort(key=lambda one: -one.test.utility if one.test else 0.0)
    pareto = ending.pareto_front
    volumes = pareto.hypervolume_history if pareto else [0.0]
    votes = ensemble and task.votes
    return Verdict(
        found=_compare_place(ending, after, after, FOUND, MODEL_LABELS[1], test),
        expert=expert,
        alternatives=alternatives,
        in_points=task.highest == 1.0,
        places=(before, after),
        found_label=position_label(record.state["optimizer"], position),
        start=_describe_start(ending, after),
        signal=None if task is ending.task else ending.task.signal,
        held_out=_compare_held_out(ending, before, after) if ending.held_out else None,
        no_gradient=_measure_without_gradient(ending, after),
        noise_floor=_measure_noise_floor(ending, after) if noise_floor else None,
        constraints=_check_constraints(ending, after, test),
        vote=_measure_vote(ending, ensemble, test) if votes else None,
        front_size=len(pareto.front_indices) if pareto else 0,
        hypervolume=(volumes[0], volumes[-1]),
        front=_measure_front(ending, front) if test and front else [],
        reconstruction_error=reconstruction_error(record.folder),
        costs=record.count_prompts(),
        scoring_costs=sum_scoring_costs(record),
        settings=dict(settings or {}),
    )


def _compare_place(
    ending: FinalEvaluation,
    index: ParticleIndex,
    after: ParticleIndex,
    name: str,
    label: str,
    test: bool,
) -> Compared:
    """Measure a position of the search on both splits; the gain is that of `after` over it."""
    task, dev = ending.metric_task, [ending.task.items("dev")[i] for i in ending.searched]
    position = ending.record.position_at(index)
    on_dev = measure(task, ending.dev_scores(index), dev)
    if not test:
        return Compared(name, label, on_dev, position=position)
    model = MODEL_LABELS[name == FOUND]
    scores = ending.test_scores(index, model)
    on_test = measure(task, scores, task.items("test"))
    gain = (
        None
        if name == FOUND
        else paired_gain(task, ending.test_scores(after, MODEL_LABELS[1]), scores)
    )
    return Compared(name, label, on_dev, on_test, gain, position)


def _describe_start(ending: FinalEvaluation, after: ParticleIndex) -> Start:
    """Describe how much of the best position is what the search started from."""
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
    return Start(
        whole=bool(same.all()),
        label=label,
        routes=state.get("kept_start", []),
        iterations=sum(searched) - 1,
        ended=state["finished"],
    )


def _compare_held_out(
    ending: FinalEvaluation, before: ParticleIndex, after: ParticleIndex
) -> HeldOut:
    """Compare both bests on the part of dev that the search did not see."""
    task = ending.metric_task
    start, end = ending.holdout_scores(before), ending.holdout_scores(after)
    gain = paired_gain(task, end, start)
    return HeldOut(measure(task, start), measure(task, end), gain, ending.by_kept)


def _measure_without_gradient(ending: FinalEvaluation, after: ParticleIndex) -> Measured | None:
    """Measure the best position on the dev items that no gradient used.

    `None` if no gradient came before it, or for a task with parts: its utility needs items of each.
    """
    before = ending.record.iterations[: after[0] + 1]
    descended = any(entry.get("gradients_computed") for entry in before)
    task, items = ending.metric_task, ending.without_gradient
    if not items or not descended or task.tasks:
        return None
    scores = ending.dev_scores(after)
    return measure(task, [scores[index] for index in items])


def _measure_noise_floor(ending: FinalEvaluation, after: ParticleIndex) -> NoiseFloor:
    """Measure the effect of rounding alone: the same position and items, in other batches."""
    first, again = ending.dev_scores(after), ending.repeat_dev_scores(after)
    changed = sum(a.answer != b.answer for a, b in zip(first, again, strict=True))
    difference = ending.metric_task.utility(again) - ending.metric_task.utility(first)
    return NoiseFloor(len(first), changed, difference)


def _compare_baseline(ending: FinalEvaluation, name: str, after: ParticleIndex) -> Compared:
    """Measure a baseline on test, and on dev where it was chosen there."""
    task, state = ending.metric_task, ending.record.state
    own_count, rows, groups = state["own"], len(state["experts"]), len(state["groups"])
    label, position, dev, choices = BASELINE_LABELS[name], None, list[Score](), dict[str, str]()
    if name == "experts":
        dev, scores, choices = _best_expert_by_domain(ending)
    else:
        if name == "routes":
            position, dev = _best_expert_by_route(ending)
        elif name == "recipe":
            chosen, position, dev = _best_merge_or_expert(ending)
            label += f" ({chosen})"
        else:
            # Extra rows that are not the user's experts, such as noise, are not part of a soup.
            share = 0.0 if name == "base" else 1 / own_count
            position = [share * (row < own_count) for row in range(rows)] * groups
        scores = ending.score_position_on_test(position, name=label)
    return Compared(
        name,
        label,
        measure(task, dev) if dev else None,
        measure(task, scores, task.items("test")),
        paired_gain(task, ending.test_scores(after), scores),
        position,
        choices,
    )


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


def _check_constraints(
    ending: FinalEvaluation, after: ParticleIndex, test: bool
) -> dict[str, Constraint]:
    """Return the bound and value of each constrained part, paired with the base on test."""
    front, found = ending.pareto_front, {}
    for name, (bound, value) in ending.constraint_values(after).items():
        assert front is not None
        base = front.constraints[name] == BASE_BOUND
        part = ending.metric_task.tasks[name]
        mine = _subtask_scores(ending, name, ending.test_scores(after)) if test else []
        on_test = measure(part, mine) if test else None
        on_base = gain = None
        if test and base and front.base_index is not None:
            base_scores = ending.test_scores(front.base_index, BASELINE_LABELS["base"])
            theirs = _subtask_scores(ending, name, base_scores)
            on_base, gain = measure(part, theirs), paired_gain(part, mine, theirs)
        found[name] = Constraint(bound, base, value, value >= bound, on_test, on_base, gain)
    return found


def _measure_front(ending: FinalEvaluation, limit: int) -> list[FrontPoint]:
    """Measure points of the front on dev and test, part by part, by the task's own metric."""
    front, task = ending.pareto_front, ending.metric_task
    if front is None:
        return []
    tasks = task.tasks
    found = []
    for number in front.evenly_spaced_points(limit):
        index = front.front_indices[number]
        dev, test = (
            ending.dev_scores(index),
            ending.test_scores(index, f"point {number} of the front"),
        )
        parts = [
            {
                name: measure(part, _subtask_scores(ending, name, scores))
                for name, part in tasks.items()
            }
            for scores in (dev, test)
        ]
        found.append(FrontPoint(index, measure(task, dev), measure(task, test), *parts))
    return found


def _subtask_scores(ending: FinalEvaluation, name: str, scores: Sequence[Score]) -> list[Score]:
    """Return the scores of one part, as given by the part itself."""
    found: list[Score] = ending.metric_task.scores_by_subtask(scores)[name]  # type: ignore[attr-defined]
    return found


def _measure_vote(ending: FinalEvaluation, limit: int, test: bool) -> Vote | None:
    """Measure the vote of the top k; k is the best on dev, where all answers are known."""
    task, members = ending.metric_task, ending.best_finalists(limit)
    if len(members) < 2:
        return None
    weights = [ending.search_utility(member) for member in members]
    dev = [ending.task.items("dev")[index] for index in ending.searched]
    answers = [ending.dev_scores(member) for member in members]
    by_size = [
        task.utility(majority_vote(task, dev, answers[:k], weights[:k]))
        for k in range(1, len(members) + 1)
    ]
    size = by_size.index(max(by_size)) + 1
    voted = None
    if test:
        voters = [
            ending.test_scores(member, f"voter {number}")
            for number, member in enumerate(members[:size], 1)
        ]
        items = task.items("test")
        voted = measure(task, majority_vote(task, items, voters, weights[:size]), items)
    voting = [(*member, weight) for member, weight in zip(members[:size], weights, strict=False)]
    return Vote(voting, by_size, voted)


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


EXACT_ERROR = 1e-6
"""Relative errors of saved weights up to this are float32 rounding."""


def reconstruction_error(folder: Path) -> float:
    """Return the error of a run's saved best, if its rank was truncated when saved; else 0."""
    try:
        facts = parse_json((folder / "global_best" / "swarm.json").read_text())
    except (OSError, ValueError):
        return 0.0
    error: float = facts.get("reconstruction_error", {}).get("overall", 0.0)
    return error if error > EXACT_ERROR else 0.0


def encode_ensemble(vote: Vote | None) -> bytes | None:
    """Return ensemble.yaml, a model for `python -m swarm.evaluate`; `None` without a vote."""
    import yaml

    if vote is None:
        return None
    members = [
        {"folder": f"particle_{particle}/personal_best", "utility": utility}
        for _, particle, utility in vote.members
    ]
    content = {"rule": "majority", "members": members}
    head = "# The vote of the best personal bests; how many was chosen on dev.\n"
    return (head + yaml.safe_dump(content, sort_keys=False)).encode()
