"""Charts as HTML: legend, pictures for two widths, and the numbers for keys and as a table."""

import json
import math
from collections.abc import Sequence
from typing import Any

from swarm.report.blocks import Choice, Table
from swarm.report.markup import table, text
from swarm.report.numbers import number
from swarm.report.pictures import Chart, Numbers, Series
from swarm.report.svg import NARROW, WIDE, key, kind, svg

KEYS = "Arrow keys left and right go along a series, up and down to another."


def figure(chart: Chart) -> str:
    """A chart with all that belongs to it."""
    return (
        f'<figure id="figure-{chart.key}"><figcaption>{text(chart.title)}</figcaption>'
        f'{_legend(chart)}<div class="plot" tabindex="0" role="group" '
        f'aria-roledescription="chart" aria-label="{text(f"{chart.title}. {KEYS}")}">'
        f"{svg(chart, WIDE)}{svg(chart, NARROW)}"
        f'<div class="tip" role="status"></div>{_data(chart)}</div>'
        f"<details><summary>Numbers of this chart</summary>{table(numbers(chart))}</details>"
        "</figure>"
    )


def choice(one: Choice) -> str:
    """Charts of which one is shown; all, where there is no script."""
    options = "".join(f"<option>{text(name)}</option>" for name in one.charts)
    charts = "".join(figure(chart) for chart in one.charts.values())
    return (
        f'<div class="choice"><label>{text(one.label)} <select>{options}</select></label>'
        f'<div class="charts">{charts}</div></div>'
    )


def _legend(chart: Chart) -> str:
    """The series that have a colour; what is grey is told in one word."""
    entries = []
    for place, one in enumerate(chart.series):
        if one.weight != "faint":
            entries.append(_entry(kind(chart, place), key(chart, place), one.name))
    faint = [one for one in chart.series if one.weight == "faint" and len(one.x)]
    if faint:
        dots = faint[0].kind == "points"
        mark = '<path class="dot" d="M10 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0z"/>' if dots else (
            '<path class="line" d="M0 0H24"/>')  # fmt: skip
        name = faint[0].name if len(faint) == 1 else f"{len(faint)} others"
        entries.append(_entry("faint", mark, name))
    return f'<ul class="legend">{"".join(entries)}</ul>' if len(entries) > 1 else "<div></div>"


def _entry(classes: str, mark: str, name: str) -> str:
    return (
        f'<li><svg viewBox="0 -7 24 14" aria-hidden="true"><g class="{classes}">{mark}</g></svg>'
        f"{text(name)}</li>"
    )


def _data(chart: Chart) -> str:
    """The numbers for the page's script."""
    series = []
    for one in chart.series:
        entry: dict[str, Any] = {"name": one.name, "x": _rounded(one.x), "y": _rounded(one.y)}
        if len(one.labels):
            entry["labels"] = list(one.labels)
        series.append(entry)
    content = {"x": chart.x_name, "y": chart.y_name, "rows": bool(chart.rows), "series": series}
    told = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return f'<script type="application/json">{told.replace("<", chr(92) + "u003c")}</script>'


def _rounded(values: Numbers) -> list[float | int | None]:
    """Five digits, and whole numbers without a point."""
    found: list[float | int | None] = []
    for value in values:
        short = float(f"{value:.5g}") if math.isfinite(value) else None
        found.append(int(short) if short is not None and short == int(short) else short)
    return found


def numbers(chart: Chart) -> Table:
    """What a chart shows as a table: a column a series, or a row a point where they differ in x."""
    title = f"{chart.title}, in numbers"
    series = [one for one in chart.series if len(one.x)]
    aligned = all(list(one.x) == list(series[0].x) and not one.labels for one in series)
    if not aligned or any(one.kind == "points" for one in series):
        return Table(title, *_long(chart, series))
    rows = [
        [f"{x:g}", *(number(one.y[place]) for one in series)]
        for place, x in enumerate(series[0].x)
    ]  # fmt: skip
    return Table(title, [chart.x_name, *(one.name for one in series)], rows)


def _long(chart: Chart, series: Sequence[Series]) -> tuple[list[str], list[list[str]]]:
    if chart.rows:
        rows = [[one.name, label] for one in series for label in one.labels]
        return ["model", "split, utility and interval"], rows
    rows = [
        [one.name, one.labels[place] if len(one.labels) else "", number(x), number(y)]
        for one in series
        for place, (x, y) in enumerate(zip(one.x, one.y, strict=True))
    ]
    return ["", "point", chart.x_name, chart.y_name], rows
