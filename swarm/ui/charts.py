"""Charts as Apache ECharts options, drawn in the browser without external resources."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from swarm.merging.positions import group_by_route, route_means
from swarm.report.document import COLOURS, Chart, Series
from swarm.runs.folder import ParticleIndex, RunFolder

GREY = "#7d8791"
"""Colour of text, lines and faint series, readable on light and dark backgrounds."""

SIGN_COLOURS = [COLOURS[1], "#8a8f9540", COLOURS[0]]
"""Colours of negative, zero and positive coefficients; zero is transparent."""

LINES = {"lineStyle": {"color": GREY, "opacity": 0.25}}
AXIS = {"axisLabel": {"color": GREY}, "nameTextStyle": {"color": GREY}, "splitLine": LINES}
THEME = {
    "color": [*COLOURS, GREY],
    "textStyle": {"color": GREY},
    "legend": {"textStyle": {"color": GREY}, "pageTextStyle": {"color": GREY}},
    "visualMap": {"textStyle": {"color": GREY}},
    "categoryAxis": AXIS,
    "valueAxis": AXIS,
}
"""Theme of all charts, light or dark."""

GRID = {"left": 8, "right": 16, "top": 34, "bottom": 62, "containLabel": True}

LONG_LABEL = {"width": 92, "overflow": "truncate"}

MAX_COLUMN_LABELS = 15
"""Maximum number of labels below a heat map."""


def chart_options(chart: Chart) -> dict[str, Any]:
    """Convert a chart of the report; each point is named in a tooltip."""
    drawn = [_convert_series(one) for one in chart.series]
    lines = [{"yAxis": round(y, 4), "name": name} for name, y in chart.marks]
    if drawn and lines:
        label = {"formatter": "{b}", "position": "insideEndTop", "color": GREY}
        style = {"color": GREY, "type": "dashed"}
        mark = {"silent": True, "symbol": "none", "label": label, "lineStyle": style}
        drawn[0]["markLine"] = {**mark, "data": lines}
    options = _build_chart(chart.x_name, chart.y_name, drawn)
    options["xAxis"]["minInterval"] = int(chart.x_name in ("round", "iteration"))
    named = [one.name for one in chart.series if one.weight != "faint"]
    options["legend"] = {"type": "scroll", "bottom": 4, "data": named, "show": len(named) > 1}
    options["grid"] = {**GRID, "bottom": 62 if len(named) > 1 else 38}
    return options


def _convert_series(one: Series) -> dict[str, Any]:
    faint, strong = one.weight == "faint", one.weight == "strong"
    points = np.stack([np.asarray(one.x, float), np.asarray(one.y, float)], axis=1)
    labels = one.labels or [one.name] * len(points)
    found: dict[str, Any] = {
        "name": one.name,
        "type": "scatter" if one.kind == "points" else "line",
        "data": [
            {"value": np.round(point, 6).tolist(), "name": label}
            for point, label in zip(points, labels, strict=True)
            if np.isfinite(point).all()
        ],
        "symbolSize": (5 if faint else 10) if one.kind == "points" else 4,
        "z": 2 if faint else 5 if strong else 3,
        "lineStyle": {"width": 1 if faint else 2.5 if strong else 1.6},
        "emphasis": {"focus": "series"},
    }
    if faint:
        found |= {"itemStyle": {"color": GREY, "opacity": 0.5}}
        found["lineStyle"] |= {"color": GREY, "opacity": 0.35}
    return found | ({"step": "end"} if one.kind == "steps" else {})


def module_chart(run: RunFolder, index: ParticleIndex) -> dict[str, Any]:
    """Plot a position's coefficient of each expert in each group of modules as a heat map.

    With routes of prompts: in each route, the mean over its groups.
    """
    groups, values = run.groups, run.positions[index].reshape(-1, len(run.experts))
    if len(group_by_route(groups)) > 1:
        groups, values = route_means(groups, run.positions[index].tolist())
    return _build_heat_map(groups, run.experts, values, float(np.abs(values).max()))


def cosine_chart(names: Sequence[str], cosines: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Plot the cosines of experts' updates, [K, K], as a heat map."""
    return _build_heat_map(names, names, np.array(cosines), 1.0)


def _build_chart(x_name: str, y_name: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    """Build a chart of series on two axes."""
    middle = {"nameLocation": "middle", "nameGap": 26, "splitLine": {"show": False}}
    return {
        "animation": False,
        "grid": GRID,
        # Rich text is drawn on the canvas, so that names are never HTML.
        "tooltip": {
            "trigger": "item",
            "renderMode": "richText",
            "confine": True,
            "formatter": "{b}: {c}",
        },
        "xAxis": {"type": "value", "scale": True, "name": x_name, **middle},
        "yAxis": {
            "type": "value",
            "scale": True,
            "name": y_name,
            "nameTextStyle": {"align": "left"},
        },
        "series": series,
    }


def _build_heat_map(
    columns: Sequence[str], rows: Sequence[str], values: np.ndarray, bound: float
) -> dict[str, Any]:
    """Build a heat map of signed values [columns, rows] from -bound to bound, first row on top."""
    bound = round(max(bound, 1e-3), 3)
    data = [
        {"value": [i, j, round(float(c), 4)], "name": f"{rows[j]}\n{columns[i]}: {c:.3f}"}
        for (i, j), c in np.ndenumerate(values)
    ]
    # Every k-th label only, where all would overlap on a phone.
    interval = math.ceil(len(columns) / MAX_COLUMN_LABELS) - 1
    below = {**LONG_LABEL, "rotate": 60 if interval else 40, "interval": interval}
    series = [{"type": "heatmap", "data": data, "progressive": 4000}]
    options = _build_chart("", "", series)
    plain = {"type": "category", "axisTick": {"show": False}, "splitArea": {"show": False}}
    return options | {
        "grid": {**GRID, "top": 8, "bottom": 56},
        "tooltip": {**options["tooltip"], "formatter": "{b}"},
        "xAxis": {**plain, "data": list(columns), "axisLabel": below},
        "yAxis": {**plain, "data": list(rows), "inverse": True, "axisLabel": LONG_LABEL},
        "visualMap": {
            "min": -bound,
            "max": bound,
            "precision": 2,
            "calculable": True,
            "orient": "horizontal",
            "left": "center",
            "bottom": 0,
            "itemHeight": 120,
            "itemWidth": 12,
            "inRange": {"color": SIGN_COLOURS},
        },
    }
