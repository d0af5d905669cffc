"""The Pareto front of a search with several objectives: its points, and how it grew."""

from itertools import combinations
from typing import Any

import numpy as np

from swarm.front import Front
from swarm.optimizers.multi_objective import BASE
from swarm.report.blocks import Choice, Section, Table, Words
from swarm.report.compared import Compared
from swarm.report.folder import RunFolder
from swarm.report.numbers import counted, interval, number
from swarm.report.pictures import Chart, Series


def front(models: Compared) -> Section | None:
    """The front in a picture for each two objectives and as a table; `None` without parts."""
    run = models.run
    if run.front is None or len(run.front.names) < 2:
        return None
    found = run.front
    pairs = [scatter(run, found, x, y) for x, y in combinations(found.names, 2)]
    charts: list[Any] = pairs
    if len(pairs) > 1:
        charts = [Choice("Objectives", {chart.title: chart for chart in pairs})]
    return Section(
        "front",
        "Front of the objectives",
        "A position is a point of the front if no other one measured on dev is at least as good in "
        "every objective and better in one; of positions equal in all, the first found. Dev "
        "flatters a front, as the highest of many; a point's test numbers were never searched on.",
        [*charts, _hypervolume(found), front_table(run, found), Words(_told(found), listed=True)],
    )


def scatter(run: RunFolder, found: Front, x: str, y: str) -> Chart:
    """Two objectives of all measured positions, the front among them."""
    across, up = (found.values[:, found.names.index(name)] for name in (x, y))
    front = [found.places.index(place) for place in found.points]
    experts = [
        n for n, (t, i) in enumerate(found.places) if not t and i < found.experts and n not in front
    ]
    names = [run.experts[found.places[n][1]] for n in experts]
    points = [f"point {n}" for n in range(len(front))]
    series = [
        Series("front on dev", across[front], up[front], "points", "strong", points),
        Series("other experts on dev", across[experts], up[experts], "points", "normal", names),
    ]
    tested = [one for one in _points(run, found) if "test_parts" in one]
    if tested:
        right, top = ([p["test_parts"][name]["utility"] for p in tested] for name in (x, y))
        labels = [f"point {point['point']} on test" for point in tested]
        series.append(Series("front on test", right, top, "points", "normal", labels))
    if found.base is not None:
        base = found.places.index(found.base)
        series.append(Series("base model on dev", across[[base]], up[[base]], "points"))
    series.append(Series("all others", across, up, "points", "faint"))
    told = "; ".join(
        f"point {n}: {number(across[place])}, {number(up[place])}" for n, place in enumerate(front)
    )
    marks = [(f"bound of {y}", found.bounds[y])] if y in found.bounds else []
    return Chart(
        f"front_{found.names.index(x)}_{found.names.index(y)}",
        f"{x} and {y}",
        x,
        y,
        series,
        f"On dev, {x} and {y}: {told}",
        marks,
    )


def front_table(run: RunFolder, found: Front) -> Table:
    """Each point with its objectives on dev and, as far as it was put to test, on test."""
    header = ["point"]
    header += [
        f"{name}, dev, n = {items}" for name, items in zip(found.names, found.items, strict=True)
    ]
    points = _points(run, found)
    tested: dict[str, Any] = next((p["test_parts"] for p in points if "test_parts" in p), {})
    header += [f"{name}, test, n = {one['items']}" for name, one in tested.items()]
    rows = []
    for point in points:
        row = [str(point["point"]), *(number(value) for value in point["dev"].values())]
        mine = point.get("test_parts", {})
        row += [
            interval(mine[name]["utility"], mine[name]["interval"]) if mine else "–"
            for name in tested
        ]
        rows.append([*row, point["words"]])
    caption = "Points of the front; brackets are 95 % intervals"
    return Table(caption, [*header, "made of"], rows, sortable=True)


def _points(run: RunFolder, found: Front) -> list[dict[str, Any]]:
    state = {"experts": run.experts, "groups": run.groups, "metrics": run.metrics}
    points: list[dict[str, Any]] = found.described(state)["points"]
    return points


def _hypervolume(found: Front) -> Chart:
    volumes = found.hypervolumes
    told = f"It goes from {volumes[0]:.4g} to {volumes[-1]:.4g}"
    return Chart(
        "hypervolume",
        "Hypervolume of the front",
        "iteration",
        "hypervolume on dev",
        [Series("hypervolume", np.arange(len(volumes)), volumes, "steps", "strong")],
        told,
        whole=True,
    )


def _told(found: Front) -> list[str]:
    worst = zip(found.aims, found.reference, strict=True)
    reference = ", ".join(f"{name} {number(value)}" for name, value in worst)
    lines = [
        f"{counted(len(found.points), 'point')} of {len(found.places)} measured positions. "
        f"Objectives: {', '.join(found.aims)}. The hypervolume is what the front covers beyond the "
        f"worst of the experts in each objective ({reference}).",
        "A point is taken out by python -m swarm.export RUN point=NUMBER to=FOLDER.",
    ]
    for name, bound in found.constraints.items():
        whose = " (the base model's)" if bound == BASE else ""
        least = number(found.bounds[name]) + whose if name in found.bounds else "not known yet"
        lines.append(f"Constraint: {name} at least {least} on dev.")
    if found.violations.min() > 0:
        lines.append(
            "No position meets the constraints: the front is of those that miss them by "
            "the least, and its hypervolume is 0."
        )
    return lines
