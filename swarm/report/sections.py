"""The sections of a report: result, course of the search, uncertainty, cost, configuration."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from swarm._util.secrets import clean
from swarm._util.terminal import (
    format_count,
    format_interval,
    format_number,
    format_p_value,
    format_percent,
    format_signed,
    pluralize,
)
from swarm.errors import UserError
from swarm.merging.positions import describe_position, group_by_route, route_means
from swarm.optimizers.multi_objective import BASE_BOUND
from swarm.report.analyses import (
    best_positions,
    describe_start,
    measure_economy,
    measure_emergence,
    measure_trajectory,
    objective_label,
    rank_of_origin,
    search_signal,
)
from swarm.report.document import (
    COLOURS,
    Chart,
    ReportBlock,
    ReportSection,
    Series,
    TableBlock,
    TextBlock,
)
from swarm.report.paired_comparison import (
    PairedComparison,
    name_test,
)
from swarm.runs.folder import RunFolder, verify_run_file
from swarm.runs.pareto_front import ParetoFront
from swarm.runs.verdict import (
    CONSTANT,
    EXPERT,
    Statement,
    domain_table,
    format_gain,
    format_measured,
    list_caveats,
    state_verdict,
)
from swarm.stats.significance import PairedTest
from swarm.tasks.metrics import Measured

SPLIT_NAMES = {"dev": "dev", "confirm": "held-out part of dev", "test": "test"}


MAX_PAIRS = 6
"""Maximum number of charts of two objectives."""

MAX_LISTED = 30
"""Maximum number of rows of particles or groups of modules; the run folder has all."""


def summarize_verdict(models: PairedComparison) -> Statement:
    """Return the verdict; of a search that has not ended, how far it is."""
    run = models.run
    start, end = models.split_result("starting", "dev"), models.split_result("ending", "dev")
    if start is None or end is None:
        sentence = "no particle has been evaluated on all dev items yet."
        return Statement("open", "Nothing measured yet", sentence)
    if models.verdict:
        return state_verdict(models.verdict, run.path)
    if (signal := run.identity.get("task.signal", "accuracy")) != "accuracy":
        sentence = (
            f"by its signal ({signal}) the search has reached {format_number(end.utility)}; the "
            "best are chosen by the task's metric at the end."
        )
        return Statement("open", "Not judged yet", sentence)
    sentence = (
        f"on {end.n} dev items after {pluralize(len(run.rounds) - 1, 'iteration')}, the best "
        f"found has {format_number(end.utility)} and the best initial expert, {models.expert}, "
        f"{format_number(start.utility)}."
    )
    return Statement("open", "Still running", sentence)


def comparison_table(models: PairedComparison) -> TableBlock | None:
    """Tabulate the best found minus each model that needs no search on test, with the tests.

    Returns:
        One row per model, the highest utility first; `None` without a test.
    """
    rows = []
    verdict = models.verdict
    for one in verdict.alternatives if verdict else ():
        if one.test and one.gain:
            cells = _gain_row(one.label, one.gain)
            rows.append([one.label, format_number(one.test.utility), *cells[1:4]])
    if not rows or verdict is None or not (test := verdict.found.test):
        return None
    items = format_count(test.n)
    header = ["needs no search", f"test, n = {items}", "best found minus it", "95 % interval", "p"]
    return TableBlock("Against each alternative on test", header, rows)


def headline_figures(models: PairedComparison) -> list[tuple[str, str]]:
    """Return short facts for the head of the page, as (label, value)."""
    found = []
    for split in ("dev", "test"):
        start, end = models.split_result("starting", split), models.split_result("ending", split)
        if start and end:
            found.append(
                (
                    f"{split}, n = {format_count(end.n)}",
                    f"{format_number(start.utility)} → {format_number(end.utility)}",
                )
            )
    if (verdict := models.verdict) and (strongest := verdict.strongest):
        found.append((f"gain over the {strongest.label}", format_gain(verdict, strongest)))
    return found


def start_end_section(models: PairedComparison) -> ReportSection:
    """Build the section that compares start and end."""
    run = models.run
    position = run.positions[models.places["ending"]]
    blocks: list[Any] = [_result_table(models), *_domain_tables(models)]
    if parts := _subtask_table(models):
        blocks.append(parts)
    blocks.append(
        TextBlock([f"Best found: {describe_position(run.experts, position, run.groups)}."])
    )
    if models.verdict and (vote := models.verdict.vote):
        size, by_size = len(vote.members), vote.dev_by_size
        votes = ", ".join(f"{n}: {format_number(value)}" for n, value in enumerate(by_size, 1))
        blocks.append(TextBlock([f"Vote on dev by number of voters: {votes}; {size} was chosen."]))
    return ReportSection(
        "ends",
        "Start and end",
        "Brackets are 95 % intervals of a single model's score. The dev score of the best "
        "found is the maximum of many and so biased upwards; test was not used by the search.",
        blocks,
    )


def _result_lines(models: PairedComparison) -> Iterator[tuple[str, dict[str, Measured | None]]]:
    """Yield each model's label with its results by split, the best constant answers included."""
    others = models.verdict.alternatives if models.verdict else []
    for one in sorted(others, key=lambda one: one.name != CONSTANT):
        if one.name != EXPERT:
            yield one.label, {"dev": one.dev, "confirm": None, "test": one.test}
    for label, name in models.model_labels.items():
        yield name, {split: models.split_result(label, split) for split in SPLIT_NAMES}
    vote = {split: models.vote_result(split) for split in SPLIT_NAMES}
    if any(vote.values()):
        size = len(models.verdict.vote.members) if models.verdict and models.verdict.vote else 0
        if size > 1:  # a vote of one is the best found
            yield f"vote of the top {size}", vote


def _result_table(models: PairedComparison) -> TableBlock:
    lines = list(_result_lines(models))
    shown = [split for split in SPLIT_NAMES if any(one[split] for _, one in lines)]
    header = ["model"]
    for split in shown:
        items = next(one[split].n for _, one in lines if one[split])  # type: ignore[union-attr]
        header.append(f"{SPLIT_NAMES[split]}, n = {format_count(items)}")
    splits = [split for split in shown if split != "confirm"]
    header += [f"unread on {split}" for split in splits]
    rows: list[list[str]] = []
    for name, one in lines:
        row = [name]
        row += [
            format_interval(m.utility, m.interval) if (m := one[split]) else "–" for split in shown
        ]
        row += [format_percent(m.unparsed) if (m := one[split]) else "–" for split in splits]
        rows.append(row)
    return TableBlock(
        "Utilities with 95 % intervals, and the rate of unparsed answers",
        header,
        rows,
    )


def _subtask_table(models: PairedComparison) -> TableBlock | None:
    """Tabulate the utility of each part of a mixture before and after; `None` without parts."""
    rows: list[list[str]] = []
    for split in ("dev", "test"):
        start, end = models.split_result("starting", split), models.split_result("ending", split)
        if start and end:
            rows += [
                [
                    part,
                    split,
                    format_number(start.parts[part]),
                    format_number(value),
                    format_signed(value - start.parts[part]),
                ]
                for part, value in end.parts.items()
            ]
    header = ["part", "split", models.expert, "best found", "change"]
    return TableBlock("The parts of the mixture", header, rows) if rows else None


def _domain_tables(models: PairedComparison) -> list[TableBlock]:
    """Tabulate utilities by domain on test and dev, for tasks with 2 to 12 domains."""
    found = domain_table(models.verdict) if models.verdict else None
    caption = "Utilities by domain; (!): one answer throughout"
    return [TableBlock(caption, found[0], [list(row) for row in found[1]])] if found else []


def front_section(models: PairedComparison) -> ReportSection | None:
    """Build the section of the front's charts and table; `None` for fewer than two objectives."""
    run = models.run
    if run.front is None or len(run.front.names) < 2:
        return None
    found = run.front
    pairs = list(combinations(found.names, 2))[:MAX_PAIRS]
    charts = [objective_chart(run, found, x, y) for x, y in pairs]
    return ReportSection(
        "front",
        "Front of the objectives",
        "A position is a point of the front if no other one measured on dev is at least as good in "
        "every objective and better in one; of positions equal in all, the first found. On dev "
        "a front is a maximum of many and so biased upwards; test was not used by the search.",
        [
            *charts,
            _hypervolume_chart(found),
            front_table(run, found),
            TextBlock(_describe_front(found), listed=True),
        ],
    )


def objective_chart(run: RunFolder, found: ParetoFront, x: str, y: str) -> Chart:
    """Plot two objectives of all measured positions, with the front highlighted."""
    across, up = (found.objective_values[:, found.names.index(name)] for name in (x, y))
    front = [found.measured_indices.index(place) for place in found.front_indices]
    experts = [
        n
        for n, (t, i) in enumerate(found.measured_indices)
        if not t and i < found.experts and n not in front
    ]
    names = [run.experts[found.measured_indices[n][1]] for n in experts]
    points = [f"point {n}" for n in range(len(front))]
    series = [
        Series("front on dev", across[front], up[front], "points", "strong", points),
        Series("other experts on dev", across[experts], up[experts], "points", "normal", names),
    ]
    tested = [one for one in _front_points(run, found) if "test_parts" in one]
    if tested:
        right, top = ([p["test_parts"][name]["utility"] for p in tested] for name in (x, y))
        labels = [f"point {point['point']} on test" for point in tested]
        series.append(Series("front on test", right, top, "points", "normal", labels))
    if found.base_index is not None:
        base = found.measured_indices.index(found.base_index)
        series.append(Series("base model on dev", across[[base]], up[[base]], "points"))
    series.append(Series("all others", across, up, "points", "faint"))
    description = "; ".join(
        f"point {n}: {format_number(across[place])}, {format_number(up[place])}"
        for n, place in enumerate(front)
    )
    marks = [(f"bound of {y}", found.constraint_bounds[y])] if y in found.constraint_bounds else []
    return Chart(
        f"{x} and {y}",
        x,
        y,
        series,
        f"On dev, {x} and {y}: {description}",
        marks,
    )


def front_table(run: RunFolder, found: ParetoFront) -> TableBlock:
    """Build a table of the front's points: objectives on dev and, where evaluated, on test."""
    header = ["point"]
    header += [
        f"{name}, dev, n = {items}" for name, items in zip(found.names, found.items, strict=True)
    ]
    points = _front_points(run, found)
    tested: dict[str, Any] = next((p["test_parts"] for p in points if "test_parts" in p), {})
    header += [f"{name}, test, n = {one['n']}" for name, one in tested.items()]
    rows = []
    for point in points:
        row = [str(point["point"]), *(format_number(value) for value in point["dev"].values())]
        mine = point.get("test_parts", {})
        row += [format_measured(Measured(**mine[name])) if mine else "–" for name in tested]
        rows.append([*row, point["words"]])
    caption = "Points of the front; brackets are 95 % intervals"
    return TableBlock(caption, [*header, "made of"], rows)


def _front_points(run: RunFolder, found: ParetoFront) -> list[dict[str, Any]]:
    state = {
        "experts": run.experts,
        "groups": run.groups,
        "verdict": run.verdict.to_dict() if run.verdict else None,
    }
    points: list[dict[str, Any]] = found.to_dict(state)["points"]
    return points


def _hypervolume_chart(found: ParetoFront) -> Chart:
    volumes = found.hypervolume_history
    description = f"From {volumes[0]:.4g} to {volumes[-1]:.4g}"
    return Chart(
        "Hypervolume of the front",
        "iteration",
        "hypervolume on dev",
        [Series("hypervolume", np.arange(len(volumes)), volumes, "steps", "strong")],
        description,
        integer_x=True,
    )


def _describe_front(found: ParetoFront) -> list[str]:
    worst = zip(found.objectives, found.reference_point, strict=True)
    reference = ", ".join(f"{name} {format_number(value)}" for name, value in worst)
    lines = [
        f"{pluralize(len(found.front_indices), 'point')} of {len(found.measured_indices)} "
        "measured positions. "
        f"Objectives: {', '.join(found.objectives)}. The hypervolume is the volume that the front "
        f"dominates beyond the worst of the experts in each objective ({reference}).",
        "Export a point by python -m swarm.export RUN point=NUMBER to=FOLDER.",
    ]
    for name, bound in found.constraints.items():
        whose = " (the base model's)" if bound == BASE_BOUND else ""
        least = (
            format_number(found.constraint_bounds[name]) + whose
            if name in found.constraint_bounds
            else "not known yet"
        )
        lines.append(f"Constraint: {name} at least {least} on dev.")
    if found.constraint_violations.min() > 0:
        lines.append(
            "No position meets the constraints: the front has those with the smallest "
            "violation, and its hypervolume is 0."
        )
    return lines


def signal_suffix(run: RunFolder) -> str:
    """Return a suffix that names the signal; empty if it is the task's own measure."""
    climbed = search_signal(run)
    return f", by the signal ({climbed})" if climbed else ""


def progress_section(models: PairedComparison) -> ReportSection:
    """Build the section on the best so far and every particle."""
    run = models.run
    best = run.best_so_far()
    x = np.arange(len(best))
    rises = 1 + np.flatnonzero(np.diff(best) > 0)
    last = f"last at iteration {rises[-1]}" if len(rises) else "never after the start"
    start = run.utilities[models.places["starting"]]
    chart = Chart(
        "Best so far",
        "iteration",
        objective_label(run),
        [Series("best so far", x, best, "steps", "strong")],
        f"From {format_number(best[0])} to {format_number(best[-1])} in "
        f"{pluralize(len(best) - 1, 'iteration')}, with {pluralize(len(rises), 'rise')}, {last}"
        f"{signal_suffix(run)}",
        [("best initial expert", float(start))] if np.isfinite(start) else [],
        integer_x=True,
    )
    began = rank_of_origin(run) if np.isfinite(run.utilities[run.find_best()]) else None
    origin = TextBlock(
        [
            f"The best particle at the end, number {began['particle']}, started as "
            f"{began['start_kind']} "
            f"at rank {began['rank']:g} of {began['of']}."
        ]
        if began
        else []
    )
    climbed = search_signal(run)
    other = (
        f" These numbers are the signal ({climbed}) that the search maximized; those of the "
        "result and of Start and end are by the task's metric."
        if climbed
        else ""
    )
    return ReportSection(
        "progress",
        "Progress of the search",
        "The best so far never decreases; the second chart has the score of every particle in "
        f"each iteration. All of it is on dev, where the maximum of many is biased upwards.{other}",
        [chart, _particle_chart(models), origin, _particle_table(run)],
    )


def _particle_chart(models: PairedComparison) -> Chart:
    run = models.run
    x = np.arange(len(run.utilities))
    best, expert = models.places["ending"][1], models.places["starting"][1]
    names = {
        expert: f"particle {expert}, started as {models.expert}",
        best: f"particle {best}, best",
    }
    series = [
        Series(
            names.get(i, f"particle {i}"),
            x,
            run.utilities[:, i],
            weight={best: "strong", expert: "normal"}.get(i, "faint"),
        )
        for i in (best, *(i for i in range(run.particles) if i != best))
    ]
    known = run.utilities[~np.isnan(run.utilities)]
    return Chart(
        f"All {run.particles} particles",
        "iteration",
        objective_label(run),
        series,
        f"They are between {format_number(known.min())} and "
        f"{format_number(known.max())}{signal_suffix(run)}"
        if len(known)
        else "None was evaluated",
        integer_x=True,
    )


def _particle_table(run: RunFolder) -> TableBlock:
    order = sorted(range(run.particles), key=lambda i: run.find_best(i)[::-1])
    bests = {i: run.find_best(i) for i in order}
    order.sort(key=lambda i: -np.nan_to_num(run.utilities[bests[i]], nan=-np.inf))
    rows = []
    for i in order[:MAX_LISTED]:
        mine = run.utilities[:, i]
        numbers = (mine[0], run.utilities[bests[i]], mine[-1])
        start, best, last = map(format_number, numbers)
        rows.append([str(i), describe_start(run, i), start, best, str(bests[i][0]), last])
    header = ["particle", "began as", "start", "best", "at iteration", "last"]
    return TableBlock(f"Particles by their best {objective_label(run)}", header, rows)


def coefficient_section(models: PairedComparison) -> ReportSection:
    """Build the section on the experts' coefficients: best so far and mean of the swarm."""
    run = models.run
    trail = best_positions(run)
    shape = (len(trail), len(run.groups), len(run.experts))
    groups = trail.reshape(shape)
    best = "Coefficients of the best so far"
    alike = bool((groups == groups[:, :1]).all())
    mean = best
    if len(run.groups) > 1:
        mean += ", the same in all groups" if alike else ", mean over groups"
    swarm = run.means.mean(axis=1)
    # All charts use the same order, so that an expert has the same colour everywhere.
    order = np.argsort(-np.abs(groups).max(axis=(0, 1)) - 1e-3 * np.abs(swarm).max(axis=0))
    charts = [
        _coefficient_chart(run, mean, groups.mean(axis=1), order),
        _coefficient_chart(run, "Coefficients, mean of the swarm", swarm, order, "line"),
    ]
    blocks: list[ReportBlock] = [*charts]
    if len(routes := group_by_route(run.groups)) > 1 and not alike:
        blocks.append(_route_table(run, trail[-1], order, len(run.groups) // len(routes)))
    elif not alike:
        blocks.append(_group_table(run, groups[-1], order))
    blocks.append(_expert_table(run, groups.mean(axis=1)))
    shown = (
        f" The {len(COLOURS)} largest in the best are coloured."
        if len(run.experts) > len(COLOURS)
        else ""
    )
    return ReportSection(
        "coefficients",
        "Contributions of experts",
        "Mixing coefficients of the experts: 1 is that expert alone, and below 0 its update is "
        f"subtracted.{shown} Steps: the best stays until a better one is found.",
        blocks,
    )


def _coefficient_chart(
    run: RunFolder, title: str, values: np.ndarray, order: np.ndarray, kind: str = "steps"
) -> Chart:
    """Plot coefficients [T, K] over iterations; the first experts of `order` are coloured."""
    # Repeated values are reduced to their ends, so that long searches give short lines.
    held = (np.diff(values, axis=0) == 0).all(axis=1)
    kept = np.flatnonzero(np.concatenate([[True], ~held[:-1], [True]])) if len(held) else [0]
    series = [
        Series(
            run.experts[k],
            kept,
            values[kept, k],
            kind,
            "normal" if rank < len(COLOURS) else "faint",
        )
        for rank, k in enumerate(order)
    ]
    last = values[-1, order]
    description = ", ".join(
        f"{run.experts[k]} {format_signed(c, 2)}"
        for k, c in list(zip(order, last, strict=True))[:5]
    )
    return Chart(
        title,
        "iteration",
        "coefficient",
        series,
        f"At the end {description}",
        [("", 0.0)],
        integer_x=True,
    )


def _group_table(run: RunFolder, best: np.ndarray, order: np.ndarray) -> TableBlock:
    """Tabulate the coefficients [G, K] of the best found, one row per group of modules."""
    rows = [
        [name, *(format_signed(best[g, k], 2) for k in order)]
        for g, name in enumerate(run.groups[:MAX_LISTED])
    ]
    more = f", the first {MAX_LISTED} of {len(run.groups)}" * (len(run.groups) > MAX_LISTED)
    caption = f"Coefficients of the best found, by group of modules{more}"
    return TableBlock(caption, ["group", *(run.experts[k] for k in order)], rows)


def _route_table(run: RunFolder, best: np.ndarray, order: np.ndarray, size: int) -> TableBlock:
    """Tabulate the mean coefficients of the best found [R * G * K], one row per route."""
    names, means = route_means(run.groups, best.tolist())
    rows = [
        [name, *(format_signed(row[k], 2) for k in order)]
        for name, row in zip(names, means, strict=True)
    ]
    title = "Coefficients of the best found, by kind of prompt"
    title += f" (mean of {size} groups of modules)" if size > 1 else ""
    return TableBlock(title, ["kind of prompt", *(run.experts[k] for k in order)], rows)


def _expert_table(run: RunFolder, best: np.ndarray) -> TableBlock:
    swarm = run.means[-1].mean(axis=0)
    rows = [
        [
            name,
            format_number(run.utilities[0, k]),
            format_signed(best[-1, k]),
            format_signed(swarm[k]),
            format_signed(run.means[-1, :, k].min()),
            format_signed(run.means[-1, :, k].max()),
        ]
        for k, name in enumerate(run.experts)
    ]
    alone = f"alone, {objective_label(run)}" if search_signal(run) else "alone on dev"
    header = [
        "expert",
        alone,
        "in the best",
        "swarm mean",
        "lowest",
        "highest",
    ]
    return TableBlock("Experts, alone and in the swarm's last iteration", header, rows)


def diversity_section(models: PairedComparison) -> ReportSection:
    """Build the section on the distance between particles and their paths."""
    found = measure_trajectory(models.run)
    apart, outside = found["diversity"], found["outside"]
    x = np.arange(len(apart))
    spread = Chart(
        "Distance from the swarm's middle",
        "iteration",
        "mean distance",
        [Series("mean distance", x, apart, weight="strong")],
        f"From {format_number(apart[0])} to {format_number(apart[-1])}",
        integer_x=True,
    )
    hull = TextBlock(
        [
            "Outside the experts' hull (a coefficient below 0, or a sum other than 1) were "
            f"{format_percent(outside[0])} of the particles at the start and "
            f"{format_percent(outside[-1])} at the end."
        ]
    )
    return ReportSection(
        "diversity",
        "Diversity of the swarm",
        "The mean Euclidean distance of the particles from their mean, in coefficients: two "
        "different experts are 1.41 apart. A swarm at 0 has converged to one position.",
        [spread, hull],
    )


def emergence_section(models: PairedComparison) -> ReportSection | None:
    """Build the section on items that are right only at the end; `None` if it does not apply."""
    try:
        found = measure_emergence(models.run)
    except UserError:  # no answers of the start yet
        return None
    if not found["applies"]:
        return None
    rows = []
    for name, one in found["shares"].items():
        cells = ["–", "–", "–"]
        if one:
            chance, low, high = one["chance"]
            cells = [
                format_interval(one["observed"].mean, (one["observed"].low, one["observed"].high)),
                format_interval(chance, (low, high)),
                format_p_value(one["p_above_chance"]),
            ]
        rows.append([name, *cells])
    mirror = found["mirror"]
    words = (
        f"Of {found['items']} dev items, {mirror['more_right']} are right more often at the end, "
        f"{mirror['fewer_right']} less often; {mirror['emerged']} emerged, and "
        f"{mirror['vanished']} that some particle got right now none does."
    )
    header = ["share of items", "observed, 95 %", "by chance, 95 %", "p"]
    return ReportSection(
        "emergence",
        "Items that emerge",
        "C-surge: items that more particles get right at the end than at the start. C-emerge: of "
        "the items that every starting particle got wrong, those that any ending one gets right; "
        "best alone: that the best found gets right. By chance: ending particles with as many "
        "right answers, on random items.",
        [
            TableBlock("Correctness emergence (Model Swarms, figure 2)", header, rows),
            TextBlock([words]),
        ],
    )


def statistics_section(models: PairedComparison) -> ReportSection:
    """Build the section on which conclusions the data supports."""
    rows = []
    if models.verdict and (kept := models.verdict.held_out):
        rows.append(_gain_row(SPLIT_NAMES["confirm"], kept.gain))
    if models.verdict and (gain := models.verdict.start_model.gain):
        rows.append(_gain_row(SPLIT_NAMES["test"], gain))
    blocks: list[Any] = []
    if rows:
        header = ["on", "gain", "95 % interval", "p", "items"]
        blocks.append(TableBlock("Best found less best initial expert, item by item", header, rows))
    caveats = list_caveats(models.verdict) if models.verdict else []
    blocks.append(TextBlock([*caveats, *_describe_method(models)], listed=True))
    return ReportSection(
        "statistics",
        "Uncertainty",
        "The paired test uses only items on which the two differ; p is the probability of a "
        "difference this large if neither were better. Below 0.05 it counts as a gain.",
        blocks,
    )


def _gain_row(name: str, gain: PairedTest) -> list[str]:
    low, high = gain.low, gain.high
    # (0, 0) if no resampled item differs.
    ends = f"[{format_signed(low)}, {format_signed(high)}]" if low or high else "(no item differs)"
    difference, p = format_signed(gain.difference), format_p_value(gain.p)
    return [name, difference, ends, p, format_count(gain.n)]


def _describe_method(models: PairedComparison) -> list[str]:
    verdict, answers = models.verdict, models.paired_answers()
    sentences = []
    if answers and answers[0] == "test":
        sentences.append(f"The paired test on test is {name_test(*answers[1:])}.")
    sentences.append(
        "Intervals of right-or-wrong answers are Wilson's, those of other utilities are "
        "bootstrapped over items, and that of a difference inverts its test; they cover the "
        "sampling of items, not the seed: another seed is another search."
    )
    evaluated = int((~np.isnan(models.run.utilities)).sum())
    sentences.append(
        f"The best found is the highest of {format_count(evaluated)} evaluations on dev."
    )
    if verdict is None or verdict.held_out is None:
        sentences.append(
            "No part of dev was held out from the search (e.g. confirm=0.3), so only test "
            "checks the dev score of the best found."
        )
    if verdict and verdict.signal:
        sentences.append(
            f"The search maximized the signal {verdict.signal}; the numbers above are by the "
            "task's metric, which also chose among the bests."
        )
    return sentences


FINAL_STAGES = {
    "test": "on test, at the end",
    "judged": "on dev by the task's metric, at the end",
    "confirm": "on the held-out part of dev, at the end",
    "again": "on dev once more, for the noise floor",
}
"""Purpose of the prompts in answers/KIND_*.json.gz, by kind."""


def cost_section(models: PairedComparison) -> ReportSection:
    """Build the section on prompts, those that racing and caching saved, and scoring."""
    run = models.run
    spent = measure_economy(run)
    evaluated = int(spent["prompts"][-1])
    rows = [["on dev, by the search", format_count(evaluated)], *_final_rows(run)]
    blocks: list[Any] = [
        TableBlock("Prompts evaluated", ["prompts", "how many"], rows),
        TableBlock("Prompts saved", ["prompts", "how many"], _saved_rows(run, spent, evaluated)),
    ]
    if taken := run.verdict.scoring_costs if run.verdict else {}:
        blocks.append(
            TableBlock(
                "Cost of scoring",
                ["measure", "new texts", "repeated texts"],
                [
                    [name, format_number(n["first"]), format_number(n["again"])]
                    for name, n in taken.items()
                ],
            )
        )
    better = spent["improvements"]
    each = spent["prompts_per_improvement"]
    if each is not None:
        blocks.append(
            TextBlock(
                [
                    f"The best rose {pluralize(better, 'time')} after the start, "
                    f"once every {format_count(each)} prompts."
                ]
            )
        )
    return ReportSection(
        "cost",
        "Cost",
        "A prompt is one item evaluated at one position.",
        blocks,
    )


def _final_rows(run: RunFolder) -> list[list[str]]:
    rows: list[list[str]] = []
    # Verify first: the glob below cannot notice a missing file.
    verify_run_file(run.path / "answers")
    for kind, name in FINAL_STAGES.items():
        paths = list((run.path / "answers").glob(f"{kind}_*.json.gz"))
        if evaluated := sum(len(run.load_packed(path)) for path in paths):
            rows.append([name, format_count(evaluated)])
    return rows


def _saved_rows(run: RunFolder, spent: dict[str, Any], evaluated: int) -> list[list[str]]:
    """Return rows of prompts saved on dev, by cause."""
    scored = sum(n or 0 for entry in run.rounds for n in entry.get("items_scored", ()))
    shared = sum(entry.get("prompts_shared", 0) for entry in run.rounds)
    rows = [
        ["racing: stopped, as it could no longer win", spent["raced"]],
        ["cache: position evaluated before", max(0, scored - evaluated)],
        ["dropping: moved without an evaluation", spent["dropped"]],
    ]
    if spent["beyond_budget"]:
        rows.append(["budget: exhausted", spent["beyond_budget"]])
    if shared:
        rows.append(["shared: evaluated by another search (counted as evaluated above)", shared])
    return [[name, format_count(saved)] for name, saved in rows]


def configuration_section(models: PairedComparison) -> ReportSection:
    """Build the section of settings, and of the digests that identify the search."""
    run = models.run
    own_experts, made = run.experts[: run.expert_count], run.experts[run.expert_count :]
    words = [f"{len(own_experts)} experts: {', '.join(own_experts)}."]
    if made:
        words.append(f"{pluralize(len(made), 'more row')}, added by the pool: {', '.join(made)}.")
    routes = group_by_route(run.groups)
    if len(routes) > 1:
        kinds = ", ".join(routes)
        words.append(f"At most {len(routes)} kinds of prompts with separate coefficients: {kinds}.")
    named = [run.groups[i].rpartition(" / ")[2] for i in next(iter(routes.values()))]
    if (count := len(named)) > 1:
        if count > 12:
            named = [*named[: 12 - 2], "...", named[-1]]
        words.append(f"{count} groups of modules with separate coefficients: {', '.join(named)}.")
    blocks: list[ReportBlock] = [TextBlock([sentence]) for sentence in words]
    names = ("seed", "base weights", "pool weights", "task items")
    rows = [[name, str(run.identity[name])] for name in names if name in run.identity]
    for one in run.state.get("versions", ()):
        packages = ", ".join(f"{name} {number}" for name, number in one["packages"].items())
        rows.append([f"versions from iteration {one['from_iteration']} on", packages])
    blocks.append(
        TableBlock("What it ran on", ["what", "configuration (weights and items as digests)"], rows)
    )
    try:
        config = clean(run.config)
    except UserError:
        config = run.identity
    keys = [[key, format_setting(value)] for key, value in flatten_keys(config)]
    table = TableBlock("Configuration", ["key", "value"], keys)
    return ReportSection(
        "setup",
        "Configuration",
        "The same keys, seed, weights and items give the same search; python -m swarm.search "
        "accepts these keys.",
        [*blocks, table],
    )


def flatten_keys(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a configuration as (dotted key, value); a router is "auto"."""
    for name, value in tree.items():
        here = f"{path}.{name}" if path else str(name)
        router = here == "pool.routes" and isinstance(value, Mapping)
        if isinstance(value, Mapping) and value and not router:
            yield from flatten_keys(value, here)
        else:
            yield here, "auto" if router else value


def format_setting(value: object) -> str:
    """Format a value in command-line syntax."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(format_setting, value))}]"
    return str(value)
