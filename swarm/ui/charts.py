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

GREY = "#7d8791"
"""Colour of text, lines and other particles, readable on light and dark backgrounds."""

COLOURS = ["#2f6fab", "#c8711d", "#3f8f5b", "#a34a8c", "#8a6d1f", "#4f8f9e", "#b04a4a", "#6b63b5"]

SIGN_COLOURS = ["#c8711d", "#8a8f9540", "#2f6fab"]
"""Colours of negative, zero and positive coefficients; zero is transparent."""

LINES = {"lineStyle": {"color": GREY, "opacity": 0.25}}
AXIS = {"axisLabel": {"color": GREY}, "nameTextStyle": {"color": GREY}, "splitLine": LINES}
THEME = {
    "color": [*COLOURS, GREY],
    "textStyle": {"color": GREY},
    "legend": {"textStyle": {"color": GREY}, "pageTextStyle": {"color": GREY}},
    "toolbox": {"iconStyle": {"borderColor": GREY}},
    "visualMap": {"textStyle": {"color": GREY}},
    "categoryAxis": AXIS,
    "valueAxis": AXIS,
}
"""Theme of all charts, light or dark."""

LONG_LABEL = {"width": 92, "overflow": "truncate"}

WHISKER = """(params, api) => {
  const at = api.value(0), style = {stroke: api.visual('color'), lineWidth: 1.5};
  const shift = api.barLayout({count: 2, barGap: '0%', barCategoryGap: '30%'})[api.value(3)];
  const [low, high] = [1, 2].map(n => api.coord([api.value(n), at]));
  const y = low[1] + shift.offsetCenter;
  const line = (x1, y1, x2, y2) => ({type: 'line', shape: {x1, y1, x2, y2}, style});
  return {type: 'group', children: [line(low[0], y, high[0], y),
    line(low[0], y - 3, low[0], y + 3), line(high[0], y - 3, high[0], y + 3)]};
}"""
"""JavaScript that draws an interval: data [place, low, high, slot], the slot one of two bars."""

MAX_COLUMN_LABELS = 15
"""Maximum number of labels below a heat map."""

MAX_DOMAIN_BARS = 16
"""Maximum number of domains in a chart."""

MAX_POINTS = 20_000
"""Maximum number of particle points in a chart; above it, only some particles are drawn."""


def particle_chart(run: RunFolder) -> dict[str, Any]:
    """Plot the best so far, as a step, and every particle; each point names its particle."""
    iterations = len(run.utilities)
    stride = math.ceil(run.particles / max(1, MAX_POINTS // iterations))
    line = {"type": "line", "symbolSize": 3, "connectNulls": True}
    particle = line | {
        "lineStyle": {"width": 1, "color": GREY, "opacity": 0.35},
        "showSymbol": True,
        "itemStyle": {"color": GREY, "opacity": 0.55},
        "emphasis": {"focus": "series", "lineStyle": {"width": 2, "opacity": 1}},
    }
    series = [
        {**particle, "name": f"particle {i}", "data": _to_json_numbers(run.utilities[:, i])}
        for i in range(0, run.particles, stride)
    ]
    best = line | {
        "name": "best so far",
        "data": _to_json_numbers(run.best_so_far()),
        "step": "end",
        "showSymbol": iterations == 1,
        "itemStyle": {"color": COLOURS[0]},
        "lineStyle": {"width": 2.5, "color": COLOURS[0]},
        "z": 5,
    }
    return _by_iteration(objective_label(run), [*series, best], iterations, ["best so far"])


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
            "itemStyle": {"color": (COLOURS + [GREY] * len(order))[rank]},
        }
        for rank, k in enumerate(order)
    ]
    names = [run.experts[k] for k in order[: len(COLOURS)]]
    return _by_iteration("coefficient in the best", series, len(values), names)


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


def domain_chart(run: RunFolder) -> dict[str, Any]:
    """Plot the utility by domain of the best expert and of the best found.

    On test if both were tested, else on dev.

    Returns:
        Options with 95 % intervals as whiskers; empty for a task without domains.
    """
    verdict = run.verdict
    if verdict is None:
        return {}
    models = {"best expert": verdict.start_model, "best found": verdict.found}
    results = {name: one.test if verdict.tested else one.dev for name, one in models.items()}
    domains = {name: one.domains if one else {} for name, one in results.items()}
    start, end = domains.values()
    names = [name for name in end if name in start][:MAX_DOMAIN_BARS]
    if len(end) < 2:
        return {}
    series: list[dict[str, Any]] = []
    for slot, (model, found) in enumerate(domains.items()):
        shown, colour = [found[name] for name in names], {"color": COLOURS[1 - slot]}
        series += [
            {
                "name": model,
                "type": "bar",
                "data": [round(one.utility, 4) for one in shown],
                "itemStyle": {**colour, "opacity": 0.75},
                "barGap": "0%",
                "barCategoryGap": "30%",
            },
            {
                "name": model,
                "type": "custom",
                ":renderItem": WHISKER,
                "encode": {"x": [1, 2], "y": 0},
                "data": [[n, one.low, one.high, slot] for n, one in enumerate(shown)],
                "itemStyle": colour,
                "silent": True,
                "z": 5,
            },
        ]
    on = "test" if verdict.tested else "dev"
    options = _build_chart(f"utility on {on}, with 95 % intervals", "", series)
    options["grid"] |= {"top": 8, "bottom": 56}
    options["xAxis"] |= {"type": "value"}
    options["yAxis"] = {"type": "category", "data": names, "inverse": True, "axisLabel": LONG_LABEL}
    options["tooltip"]["formatter"] = "{a}\n{b}: {c}"
    return options


def front_chart(run: RunFolder, found: ParetoFront) -> dict[str, Any]:
    """Plot the first two objectives of all measured positions, with the front highlighted."""
    chart = objective_chart(run, found, *found.names[:2])
    order = sorted(chart.series, key=lambda one: ("faint", "normal", "strong").index(one.weight))
    series = []
    for n, one in enumerate(order):
        faint, labels = one.weight == "faint", one.labels or [one.name] * len(one.x)
        points = np.round(np.stack([one.x, one.y], axis=1), 6).tolist()
        series.append(
            {
                "name": one.name,
                "type": "scatter",
                "data": [
                    {"value": point, "name": label}
                    for point, label in zip(points, labels, strict=True)
                ],
                "symbolSize": 5 if faint else 10,
                "z": n,
                "itemStyle": {
                    "color": GREY if faint else COLOURS[(n - 1) % len(COLOURS)],
                    "opacity": 0.4 if faint else 1.0,
                },
            }
        )
    options = _build_chart(chart.x_name, chart.y_name, series, [one.name for one in order[::-1]])
    options["xAxis"] |= {"type": "value", "scale": True}
    options["tooltip"]["formatter"] = "{b}: {c}"
    return options


def _build_chart(
    x_name: str, y_name: str, series: list[dict[str, Any]], legend: Sequence[str] | None = None
) -> dict[str, Any]:
    """Build a chart of series on two axes, x a category.

    Args:
        legend: Names in the legend; `None` is all.
    """
    middle = {"nameLocation": "middle", "nameGap": 26}
    return {
        "animation": False,
        "grid": {"left": 8, "right": 16, "top": 34, "bottom": 62, "containLabel": True},
        "legend": {"type": "scroll", "bottom": 4, "data": legend},
        # Rich text is drawn on the canvas, so that names are never HTML.
        "tooltip": {"trigger": "item", "renderMode": "richText", "confine": True},
        "xAxis": {"type": "category", "name": x_name, **middle},
        "yAxis": {
            "type": "value",
            "scale": series[0]["type"] != "bar",
            "name": y_name,
            "nameTextStyle": {"align": "left"},
        },
        "series": series,
    }


def _by_iteration(
    y_name: str, series: list[dict[str, Any]], iterations: int, legend: list[str]
) -> dict[str, Any]:
    """Build a chart over iterations with a slider, box zoom and reset."""
    options = _build_chart("iteration", y_name, series, legend)
    options["xAxis"] |= {"data": list(range(iterations)), "splitLine": {"show": False}}
    options["tooltip"]["formatter"] = "{a}\niteration {b}: {c}"
    options["grid"]["bottom"] = 78
    # The page's scrolling by wheel and touch is left alone.
    still = {"moveOnMouseMove": False, "preventDefaultMouseMove": False}
    options["dataZoom"] = [
        {"type": "slider", "height": 14, "bottom": 30, "showDetail": False, "brushSelect": False},
        {"type": "inside", "zoomOnMouseWheel": "ctrl", **still},
    ]
    features = {"dataZoom": {"yAxisIndex": "none"}, "restore": {}, "saveAsImage": {}}
    options["toolbox"] = {"right": 8, "top": 0, "itemSize": 13, "feature": features}
    return options


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
    del options["legend"]
    plain = {"type": "category", "axisTick": {"show": False}, "splitArea": {"show": False}}
    return options | {
        "grid": {**options["grid"], "top": 8, "bottom": 56},
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


def _to_json_numbers(values: np.ndarray) -> list[float | None]:
    """Round values for JSON and tooltips, with NaN and infinity as `None`."""
    return [round(float(v), 4) if np.isfinite(v) else None for v in values]
