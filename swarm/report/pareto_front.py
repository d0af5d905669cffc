"""Report section on the Pareto front of a search with several objectives: its points and growth."""

from itertools import combinations
from typing import Any

import numpy as np

from swarm._util.terminal import format_number, pluralize
from swarm.optimizers.multi_objective import BASE_BOUND
from swarm.report.document import (
    Chart,
    ChartChoice,
    ReportSection,
    Series,
    TableBlock,
    TextBlock,
)
from swarm.report.paired_comparison import PairedComparison
from swarm.runs.folder import RunFolder
from swarm.runs.pareto_front import ParetoFront
from swarm.runs.verdict import format_measured
from swarm.tasks.metrics import Measured


def front_section(models: PairedComparison) -> ReportSection | None:
    """Build the section of the front's charts and table; `None` for fewer than two objectives."""
    run = models.run
    if run.front is None or len(run.front.names) < 2:
        return None
    found = run.front
    pairs = [objective_chart(run, found, x, y) for x, y in combinations(found.names, 2)]
    charts: list[Any] = pairs
    if len(pairs) > 1:
        charts = [ChartChoice("Objectives", {chart.title: chart for chart in pairs})]
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
        f"front_{found.names.index(x)}_{found.names.index(y)}",
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
    return TableBlock(caption, [*header, "made of"], rows, sortable=True)


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
        "hypervolume",
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
