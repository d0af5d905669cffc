"""Charts as Apache ECharts options, drawn in the browser without external resources."""

from typing import Any

import numpy as np

from swarm.report.document import COLOURS, Chart, Series

GREY = "#7d8791"
"""Colour of text, lines and faint series, readable on light and dark backgrounds."""

LINES = {"lineStyle": {"color": GREY, "opacity": 0.25}}
AXIS = {"axisLabel": {"color": GREY}, "nameTextStyle": {"color": GREY}, "splitLine": LINES}
THEME = {
    "color": [*COLOURS, GREY],
    "textStyle": {"color": GREY},
    "legend": {"textStyle": {"color": GREY}, "pageTextStyle": {"color": GREY}},
    "valueAxis": AXIS,
}
"""Theme of all charts, light or dark."""


def chart_options(chart: Chart) -> dict[str, Any]:
    """Convert a chart of the report; each point is named in a tooltip."""
    drawn = [_convert_series(one) for one in chart.series]
    lines = [{"yAxis": round(y, 4), "name": name} for name, y in chart.marks]
    if drawn and lines:
        label = {"formatter": "{b}", "position": "insideEndTop", "color": GREY}
        style = {"color": GREY, "type": "dashed"}
        mark = {"silent": True, "symbol": "none", "label": label, "lineStyle": style}
        drawn[0]["markLine"] = {**mark, "data": lines}
    named = [one.name for one in chart.series if one.weight != "faint"]
    whole = int(chart.x_name in ("round", "iteration"))
    middle = {"nameLocation": "middle", "nameGap": 26, "splitLine": {"show": False}}
    bottom = 62 if len(named) > 1 else 38
    return {
        "animation": False,
        "grid": {"left": 8, "right": 16, "top": 34, "bottom": bottom, "containLabel": True},
        "legend": {"type": "scroll", "bottom": 4, "data": named, "show": len(named) > 1},
        # Rich text is drawn on the canvas, so that names are never HTML.
        "tooltip": {"renderMode": "richText", "confine": True, "formatter": "{b}: {c}"},
        "xAxis": {
            "type": "value",
            "scale": True,
            "minInterval": whole,
            "name": chart.x_name,
            **middle,
        },
        "yAxis": {"scale": True, "name": chart.y_name, "nameTextStyle": {"align": "left"}},
        "series": drawn,
    }


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
