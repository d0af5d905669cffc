"""Report sections on the course of a search: progress, contribution of the experts, diversity."""

import math
from collections.abc import Sequence

import numpy as np

from swarm._util.terminal import format_number, format_percent, format_signed, pluralize
from swarm.merging.positions import group_by_route, route_means
from swarm.report.analyses.trajectories import describe_start, measure_trajectory, rank_of_origin
from swarm.report.document import (
    COLOURS,
    Chart,
    ChartChoice,
    ReportBlock,
    ReportSection,
    Series,
    Sparkline,
    TableBlock,
    TextBlock,
)
from swarm.report.paired_comparison import PairedComparison
from swarm.runs.folder import RunFolder

POINTS_BETWEEN = 1_000
"""Approximate maximum number of intermediate positions in the chart of principal components."""

MAX_PANELS = 3
"""Maximum number of module groups with charts shown together; of more, the reader selects one."""

MAX_CHOICES = 12
"""Maximum number of module groups with a chart; more are shown as a table of coefficients."""


def search_signal(run: RunFolder) -> str:
    """Return the signal that the search optimized; empty if it is the task's own measure."""
    found = (run.verdict and run.verdict.signal) or run.identity.get("task.signal") or "accuracy"
    return "" if found == "accuracy" else str(found)


def objective_label(run: RunFolder) -> str:
    """Return the axis label of the optimized objective."""
    climbed = search_signal(run)
    return f"signal ({climbed}) on dev" if climbed else "utility on dev"


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
        "best",
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
        [chart, _particle_chart(models), origin],
        {"Every particle": [_particle_table(run)]},
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
        "particles",
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
    rows: list[list[str | Sparkline]] = []
    for i in range(run.particles):
        iteration, _ = run.find_best(i)
        mine = run.utilities[:, i]
        began = describe_start(run, i)
        rows.append(
            [
                str(i),
                began,
                format_number(mine[0]),
                format_number(mine[iteration]),
                str(iteration),
                format_number(mine[-1]),
                Sparkline(mine.tolist()),
            ]
        )
    header = ["particle", "began as", "start", "best", "at iteration", "last", "course"]
    return TableBlock(f"Every particle's {objective_label(run)}", header, rows, sortable=True)


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
        _coefficient_chart(run, "coefficients", mean, groups.mean(axis=1), order),
        _coefficient_chart(run, "swarm", "Coefficients, mean of the swarm", swarm, order),
    ]
    blocks: list[Chart | ChartChoice | TableBlock] = [*charts]
    panels = {
        name: _coefficient_chart(run, f"group_{g}", f"{best}, {name}", groups[:, g], order)
        for g, name in enumerate(() if alike or len(run.groups) > MAX_CHOICES else run.groups)
    }
    folded: dict[str, Sequence[ReportBlock]] = {}
    if not alike and not panels:
        summary = f"Coefficients of the best found, by {len(run.groups)} groups of modules"
        folded[summary] = [_group_table(run, groups[-1], order)]
    elif len(panels) <= MAX_PANELS:
        blocks += panels.values()
    else:
        blocks.append(ChartChoice("Group of modules", panels))
    if len(routes := group_by_route(run.groups)) > 1 and not alike:
        blocks.append(_route_table(run, trail[-1], order, len(run.groups) // len(routes)))
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
        folded,
    )


def _group_table(run: RunFolder, best: np.ndarray, order: np.ndarray) -> TableBlock:
    """Tabulate the coefficients [G, K] of the best found, one row per group of modules."""
    rows = [
        [name, *(format_signed(best[g, k], 2) for k in order)] for g, name in enumerate(run.groups)
    ]
    header = ["group", *(run.experts[k] for k in order)]
    return TableBlock(
        "Coefficients of the best found, by group of modules", header, rows, sortable=True
    )


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


def best_positions(run: RunFolder) -> np.ndarray:
    """Return the position of the best so far, [T, G * K]; the first start until one is measured."""
    known = np.where(np.isnan(run.utilities), -np.inf, run.utilities)
    index, highest, found = (0, 0), -np.inf, []
    for number_, utilities in enumerate(known):
        if utilities.max() > highest:
            highest, index = utilities.max(), (number_, int(utilities.argmax()))
        found.append(run.positions[index])
    return np.array(found)


def _coefficient_chart(
    run: RunFolder, key: str, title: str, values: np.ndarray, order: np.ndarray
) -> Chart:
    """Plot coefficients [T, K] over iterations; the first experts of `order` are coloured."""
    # Repeated values are reduced to their ends, so that long searches give short lines.
    held = (np.diff(values, axis=0) == 0).all(axis=1)
    kept = np.flatnonzero(np.concatenate([[True], ~held[:-1], [True]])) if len(held) else [0]
    kind = "line" if key == "swarm" else "steps"
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
        key,
        title,
        "iteration",
        "coefficient",
        series,
        f"At the end {description}",
        [("", 0.0)],
        integer_x=True,
    )


def _expert_table(run: RunFolder, best: np.ndarray) -> TableBlock:
    swarm = run.means[-1].mean(axis=0)
    rows: list[list[str | Sparkline]] = [
        [
            name,
            format_number(run.utilities[0, k]),
            format_signed(best[-1, k]),
            format_signed(swarm[k]),
            format_signed(run.means[-1, :, k].min()),
            format_signed(run.means[-1, :, k].max()),
            Sparkline(best[:, k].tolist()),
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
        "in the best, over time",
    ]
    return TableBlock(
        "Experts, alone and in the swarm's last iteration", header, rows, sortable=True
    )


def diversity_section(models: PairedComparison) -> ReportSection:
    """Build the section on the distance between particles and their paths."""
    run, found = models.run, measure_trajectory(models.run)
    apart, outside = found["diversity"], found["outside"]
    x = np.arange(len(apart))
    spread = Chart(
        "diversity",
        "Distance from the swarm's middle",
        "iteration",
        "mean distance",
        [Series("mean distance", x, apart, weight="strong")],
        f"From {format_number(apart[0])} to {format_number(apart[-1])}; "
        f"{format_percent(outside[-1])} of the "
        "particles end outside the experts' hull",
        integer_x=True,
    )
    blocks: list[Chart | TextBlock] = [spread]
    if len(found["explained"]) > 1:
        blocks.append(_component_chart(run, found))
    blocks.append(
        TextBlock(
            [
                "Outside the experts' hull (a coefficient below 0, or a sum other than 1) were "
                f"{format_percent(outside[0])} of the "
                f"particles at the start and {format_percent(outside[-1])} at the end."
            ]
        )
    )
    return ReportSection(
        "diversity",
        "Diversity of the swarm",
        "The mean Euclidean distance of the particles from their mean, in coefficients: two "
        "different experts are 1.41 apart. A swarm at 0 has converged to one position.",
        blocks,
    )


def _component_chart(run: RunFolder, found: dict[str, np.ndarray]) -> Chart:
    """Plot the first two principal components of all positions."""
    points, explained = found["points"], found["explained"]
    rounds, particles = points.shape[:2]
    flat = points.reshape(-1, points.shape[2])
    labels = [f"particle {i}, iteration {t}" for t in range(rounds) for i in range(particles)]
    experts, end = len(run.experts), points[-1]
    best = points[run.find_best()]
    every = math.ceil(rounds * particles / POINTS_BETWEEN)
    between = [t * particles + i for t in range(every, rounds - 1, every) for i in range(particles)]
    passed = "between" + f", each {every} iterations" * (every > 1)
    series = [
        Series(
            passed,
            flat[between, 0],
            flat[between, 1],
            "points",
            "faint",
            [labels[n] for n in between],
        ),
        Series(
            "particles at the end",
            end[:, 0],
            end[:, 1],
            "points",
            labels=labels[-particles:] if rounds > 1 else labels,
        ),
        Series("best found", [best[0]], [best[1]], "points", "strong"),
        Series(
            "experts", points[0, :experts, 0], points[0, :experts, 1], "points", labels=run.experts
        ),
    ]
    names = [
        f"component {n} ({format_percent(share)} of variance)"
        for n, share in enumerate(explained, 1)
    ]
    return Chart(
        "map",
        "Where the particles were",
        names[0],
        names[1],
        series,
        "Experts, particles at the end and the best found in the plane of the first two "
        "principal components of all positions",
    )
