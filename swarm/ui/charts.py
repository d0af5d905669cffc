"""Charts of runs as Apache ECharts options, drawn in the browser without external resources."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from swarm.merging.positions import group_by_route, route_means
from swarm.report.analyses import best_positions, objective_label
from swarm.report.sections import objective_chart
from swarm.runs.folder import ParticleIndex, RunFolder
from swarm.runs.pareto_front import ParetoFront

TEXT_COLOUR = "#7d8791"
"""Colour of text and lines, readable on light and dark backgrounds."""

COLOURS = ["#2f6fab", "#c8711d", "#3f8f5b", "#a34a8c", "#8a6d1f", "#4f8f9e", "#b04a4a", "#6b63b5"]

SIGN_COLOURS = ("#c8711d", "#8a8f9540", "#2f6fab")
"""Colours of negative, zero and positive coefficients; zero is transparent."""

TOOLTIP = {"trigger": "item", "renderMode": "richText", "confine": True}
"""Tooltip of every chart; rich text is drawn on the canvas, so that names are never HTML."""

BAR_LAYOUT = {"barGap": "0%", "barCategoryGap": "30%"}

WHISKER = """(params, api) => {
  const at = api.value(0), style = {stroke: api.visual('color'), lineWidth: 1.5};
  const shift = api.barLayout({count: BARS, barGap: '0%', barCategoryGap: '30%'})[api.value(3)];
  const [low, high] = [1, 2].map(n => api.coord([api.value(n), at]));
  const y = low[1] + shift.offsetCenter;
  const line = (x1, y1, x2, y2) => ({type: 'line', shape: {x1, y1, x2, y2}, style});
  return {type: 'group', children: [line(low[0], y, high[0], y),
    line(low[0], y - 3, low[0], y + 3), line(high[0], y - 3, high[0], y + 3)]};
}"""
"""JavaScript that draws an interval: data [place, low, high, slot], the slot one of BARS bars."""

MAX_COLUMN_LABELS = 15
"""Maximum number of labels below a heat map."""

MAX_DOMAIN_BARS = 16
"""Maximum number of domains in a chart."""

MAX_POINTS = 20_000
"""Maximum number of particle points in a chart; above it, only some particles are drawn."""


def particle_chart(run: RunFolder) -> dict[str, Any]:
    """Plot the best so far, as a step, and every particle; each point names its particle."""
    best = _line_series("best so far", run.best_so_far(), COLOURS[0], 2.5) | {"step": "end", "z": 5}
    max_points = max(1, MAX_POINTS // max(1, len(run.utilities)))
    step = math.ceil(run.particles / max_points)
    others = [
        _line_series(f"particle {i}", run.utilities[:, i], TEXT_COLOUR, 1)
        | {
            "lineStyle": _thin_line_style(),
            "showSymbol": True,
            "itemStyle": {"color": TEXT_COLOUR, "opacity": 0.55},
            "emphasis": {"focus": "series", "lineStyle": {"width": 2, "opacity": 1}},
        }
        for i in range(0, run.particles, step)
    ]
    options = _build_chart(
        objective_label(run), [*others, best], len(run.utilities), legend=["best so far"]
    )
    options["tooltip"]["formatter"] = "{a}\niteration {b}: {c}"
    return _add_zoom(options)


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
    options = _build_chart(
        "coefficient in the best",
        series,
        len(values),
        legend=[one["name"] for one in series[: len(COLOURS)]],
    )
    options["tooltip"]["formatter"] = "{a}\niteration {b}: {c}"
    return _add_zoom(options)


def module_chart(run: RunFolder, index: ParticleIndex) -> dict[str, Any]:
    """Plot a position's coefficient of each expert in each group of modules as a heat map.

    With routes of prompts: in each route, the mean over its groups.
    """
    groups = run.groups
    values = run.positions[index].reshape(len(groups), len(run.experts))
    if len(group_by_route(groups)) > 1:
        groups, values = route_means(groups, run.positions[index].tolist())
    data = [
        {
            "value": [g, k, round(float(values[g, k]), 4)],
            "name": f"{run.experts[k]}\n{group}: {values[g, k]:.3f}",
        }
        for g, group in enumerate(groups)
        for k in range(len(run.experts))
    ]
    return _build_heat_map(groups, run.experts, data, float(np.abs(values).max()))


def _build_heat_map(
    columns: list[str], rows: list[str], data: list[dict[str, Any]], bound: float
) -> dict[str, Any]:
    """Build a heat map of signed values from -bound to bound, the first row on top."""
    bound = max(bound, 1e-9)
    text_style = {"color": TEXT_COLOUR}
    category = {"type": "category", "axisTick": {"show": False}, "splitArea": {"show": False}}
    label = {**text_style, "width": 92, "overflow": "truncate"}
    # Every k-th label only, where all would overlap on a phone.
    column_label = {"rotate": 40 if len(columns) <= MAX_COLUMN_LABELS else 60}
    column_label["interval"] = math.ceil(len(columns) / MAX_COLUMN_LABELS) - 1
    return {
        "animation": False,
        "textStyle": text_style,
        "grid": {"left": 8, "right": 16, "top": 8, "bottom": 56, "containLabel": True},
        "tooltip": {**TOOLTIP, "formatter": "{b}"},
        "xAxis": {**category, "data": columns, "axisLabel": {**label, **column_label}},
        "yAxis": {**category, "data": rows, "inverse": True, "axisLabel": label},
        "visualMap": {
            "min": round(-bound, 3),
            "max": round(bound, 3),
            "precision": 2,
            "calculable": True,
            "orient": "horizontal",
            "left": "center",
            "bottom": 0,
            "itemHeight": 120,
            "itemWidth": 12,
            "textStyle": text_style,
            "inRange": {"color": list(SIGN_COLOURS)},
        },
        "series": [{"type": "heatmap", "data": data, "progressive": 4000}],
    }


def domain_chart(run: RunFolder) -> dict[str, Any]:
    """Plot the utility by domain of the best initial expert and of the best found.

    On test if both were tested, else on dev.

    Returns:
        Options with 95 % intervals as whiskers; empty for a task without domains.
    """
    verdict = run.verdict
    if verdict is None:
        return {}
    pair = [verdict.start_model, verdict.found]
    results = [one.test if verdict.tested else one.dev for one in pair]
    start, end = (one.domains if one else {} for one in results)
    if len(end) < 2:
        return {}
    names = [name for name in end if name in start][:MAX_DOMAIN_BARS]
    series: list[dict[str, Any]] = []
    for slot, (label, one) in enumerate((("best initial expert", start), ("best found", end))):
        colour = COLOURS[1 - slot]
        series.append(
            {
                "name": label,
                "type": "bar",
                "data": [round(one[name].utility, 4) for name in names],
                "itemStyle": {"color": colour, "opacity": 0.75},
                **BAR_LAYOUT,
            }
        )
        ends = [(one[name].low, one[name].high) for name in names]
        places = [[n, low, high, slot] for n, (low, high) in enumerate(ends)]
        series.append(_whisker_series(label, colour, places, 2))
    on = "test" if verdict.tested else "dev"
    options = _build_bars(names, series, f"utility on {on}, with 95 % intervals")
    options["legend"] = {"bottom": 0, "textStyle": {"color": TEXT_COLOUR}}
    options["grid"]["bottom"] = 56
    options["tooltip"]["formatter"] = "{a}\n{b}: {c}"
    return options


def cosine_chart(names: Sequence[str], cosines: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Plot the cosines of experts' updates, [K, K], as a heat map."""
    data = [
        {"value": [i, j, round(cosines[i][j], 3)], "name": f"{a}\n{b}: {cosines[i][j]:.3f}"}
        for i, a in enumerate(names)
        for j, b in enumerate(names)
    ]
    return _build_heat_map(list(names), list(names), data, 1.0)


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
        "tooltip": dict(TOOLTIP),
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


def _build_bars(names: list[str], series: list[dict[str, Any]], x_name: str) -> dict[str, Any]:
    """Build a chart of horizontal bars, one category per name, the first on top."""
    options = _build_chart("", series, 0, legend=[])
    label = {"color": TEXT_COLOUR, "width": 92, "overflow": "truncate"}
    options["xAxis"], options["yAxis"] = (
        options["yAxis"] | {"name": x_name, "nameLocation": "middle", "nameGap": 26},
        {"type": "category", "data": names, "inverse": True, "axisLabel": label},
    )
    options["xAxis"]["nameTextStyle"] = {"color": TEXT_COLOUR}
    options["grid"] |= {"top": 8, "bottom": 34}
    del options["legend"]
    return options


def _whisker_series(name: str, colour: str, data: list[list[float]], bars: int) -> dict[str, Any]:
    """Build the intervals of a series, one of `bars` per category; data as in `WHISKER`."""
    return {
        "name": name,
        "type": "custom",
        ":renderItem": WHISKER.replace("BARS", str(bars)),
        "encode": {"x": [1, 2], "y": 0},
        "data": data,
        "itemStyle": {"color": colour},
        "silent": True,
        "z": 5,
    }


def _add_zoom(options: dict[str, Any]) -> dict[str, Any]:
    """Add a slider, box zoom and reset; the page's scrolling by wheel and touch is left alone."""
    line = {"color": TEXT_COLOUR, "opacity": 0.4}
    slider = {
        "type": "slider",
        "height": 14,
        "bottom": 30,
        "showDetail": False,
        "brushSelect": False,
        "borderColor": "transparent",
        "fillerColor": "rgba(125, 135, 145, 0.25)",
        "dataBackground": {"lineStyle": line, "areaStyle": {"opacity": 0}},
    }
    inside = {
        "type": "inside",
        "zoomOnMouseWheel": "ctrl",
        "moveOnMouseMove": False,
        "preventDefaultMouseMove": False,
    }
    options["dataZoom"] = [slider, inside]
    options["toolbox"] = {
        "right": 8,
        "top": 0,
        "itemSize": 13,
        "iconStyle": {"borderColor": TEXT_COLOUR},
        "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {}, "saveAsImage": {}},
    }
    options["grid"]["bottom"] = 78
    return options


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
    """Round values for JSON and tooltips, with NaN and infinity as `None`."""
    return [round(float(v), 4) if np.isfinite(v) else None for v in values]
