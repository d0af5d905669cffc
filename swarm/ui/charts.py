"""Charts of runs as Apache ECharts options, drawn in the browser without external resources."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from swarm.report.analyses.convergence import best_positions, objective_label
from swarm.report.pareto_front import objective_chart
from swarm.runs.pareto_front import ParetoFront
from swarm.runs.run_reader import RunFolder

TEXT_COLOUR = "#7d8791"
"""Colour of text and lines, readable on light and dark backgrounds."""

COLOURS = ["#2f6fab", "#c8711d", "#3f8f5b", "#a34a8c", "#8a6d1f", "#4f8f9e", "#b04a4a", "#6b63b5"]

MAX_POINTS = 20_000
"""Maximum number of particle points in a chart; above it, only some particles are drawn."""


def particle_chart(run: RunFolder) -> dict[str, Any]:
    """Plot the best so far and every particle."""
    best = _line_series("best so far", run.best_so_far(), COLOURS[0], 2.5) | {"step": "end", "z": 5}
    max_points = max(1, MAX_POINTS // max(1, len(run.utilities)))
    step = math.ceil(run.particles / max_points)
    others = [
        _line_series(f"particle {i}", run.utilities[:, i], TEXT_COLOUR, 1)
        | {"lineStyle": _thin_line_style()}
        for i in range(0, run.particles, step)
    ]
    return _build_chart(
        objective_label(run), [*others, best], len(run.utilities), legend=["best so far"]
    )


def coefficient_chart(run: RunFolder) -> dict[str, Any]:
    """Plot each expert's coefficient in the best so far as stacked bars, above and below 0."""
    trail = best_positions(run)
    values = trail.reshape(len(trail), len(run.groups), len(run.experts)).mean(axis=1)
    order = np.argsort(-np.abs(values).max(axis=0))
    series = [
        {
            "name": run.experts[k],
            "type": "bar",
            "stack": "all",
            "barCategoryGap": "0%",
            "data": _to_json_numbers(values[:, k]),
            "itemStyle": {"color": _series_colour(rank)},
        }
        for rank, k in enumerate(order)
    ]
    return _build_chart(
        "coefficient in the best",
        series,
        len(values),
        legend=[one["name"] for one in series[: len(COLOURS)]],
    )


def run_comparison_chart(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Plot the best so far of several runs."""
    series = [
        _line_series(run.name, run.best_so_far(), _series_colour(n), 2) | {"step": "end"}
        for n, run in enumerate(runs)
    ]
    measures = list(dict.fromkeys(map(objective_label, runs)))
    return _build_chart(
        " / ".join(measures),
        series,
        max(len(run.rounds) for run in runs),
        legend=[one["name"] for one in series],
    )


def front_chart(run: RunFolder, found: ParetoFront) -> dict[str, Any]:
    """Plot the first two objectives of all measured positions, with the front highlighted."""
    chart = objective_chart(run, found, *found.names[:2])
    order = sorted(chart.series, key=lambda one: ("faint", "normal", "strong").index(one.weight))
    series = []
    for n, one in enumerate(order):
        labels = one.labels or [one.name] * len(one.x)
        data = [
            {"value": [round(float(x), 6), round(float(y), 6)], "name": label}
            for x, y, label in zip(one.x, one.y, labels, strict=True)
        ]
        faint = one.weight == "faint"
        series.append(
            {
                "name": one.name,
                "type": "scatter",
                "data": data,
                "symbolSize": 5 if faint else 10,
                "z": n,
                "itemStyle": {
                    "color": TEXT_COLOUR if faint else _series_colour(n - 1),
                    "opacity": 0.4 if faint else 1.0,
                },
            }
        )
    names = [one.name for one in reversed(order)]
    chart_options = _build_chart(chart.y_name, series, 0, legend=names)
    value = {"type": "value", "scale": True}
    chart_options["xAxis"] = {
        key: one for key, one in chart_options["xAxis"].items() if key != "data"
    } | value
    chart_options["xAxis"]["name"] = chart.x_name
    chart_options["tooltip"]["formatter"] = "{b}: {c}"
    return chart_options


def _build_chart(
    y_name: str, series: list[dict[str, Any]], iterations: int, legend: list[str]
) -> dict[str, Any]:
    text_style = {"color": TEXT_COLOUR}
    lines = {"lineStyle": {"color": TEXT_COLOUR, "opacity": 0.25}}
    from_zero = series[0]["type"] == "bar"
    return {
        "animation": False,
        "textStyle": text_style,
        "grid": {"left": 8, "right": 16, "top": 34, "bottom": 62, "containLabel": True},
        "legend": {
            "data": legend,
            "type": "scroll",
            "bottom": 4,
            "textStyle": text_style,
            "pageTextStyle": text_style,
        },
        "tooltip": {"trigger": "item", "renderMode": "richText", "confine": True},
        "xAxis": {
            "type": "category",
            "data": list(range(iterations)),
            "name": "iteration",
            "nameLocation": "middle",
            "nameGap": 26,
            "axisLabel": text_style,
        },
        "yAxis": {
            "type": "value",
            "scale": not from_zero,
            "name": y_name,
            "axisLabel": text_style,
            "nameTextStyle": {"align": "left", **text_style},
            "splitLine": lines,
        },
        "series": series,
    }


def _line_series(name: str, values: np.ndarray, colour: str, width: float) -> dict[str, Any]:
    return {
        "name": name,
        "type": "line",
        "data": _to_json_numbers(values),
        "symbolSize": 3,
        "showSymbol": len(values) == 1,
        "itemStyle": {"color": colour},
        "lineStyle": {"width": width, "color": colour},
        "connectNulls": True,
    }


def _thin_line_style() -> dict[str, Any]:
    return {"width": 1, "color": TEXT_COLOUR, "opacity": 0.35}


def _series_colour(rank: int) -> str:
    return COLOURS[rank] if rank < len(COLOURS) else TEXT_COLOUR


def _to_json_numbers(values: np.ndarray) -> list[float | None]:
    """Round values for JSON, with NaN and infinity as `None`."""
    return [round(float(v), 6) if np.isfinite(v) else None for v in values]
