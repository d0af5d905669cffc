"""Charts as HTML: legend, pictures for two widths, and the numbers for keys and as a table."""

import json
import math
from collections.abc import Sequence
from typing import Any

from swarm.report.blocks import ChartChoice, TableBlock
from swarm.report.markup import render_table, escape_text
from swarm.report.numbers import format_number
from swarm.report.pictures import Chart, Numbers, Series
from swarm.report.svg import NARROW_SIZE, WIDE_SIZE, legend_key, series_classes, render_svg

KEYBOARD_HINT = "Arrow keys left and right go along a series, up and down to another."


def render_figure(chart: Chart) -> str:
    """A chart with all that belongs to it."""
    return (
        f'<figure id="figure-{chart.key}"><figcaption>{escape_text(chart.title)}</figcaption>'
        f'{_render_legend(chart)}<div class="plot" tabindex="0" role="group" '
        f'aria-roledescription="chart" aria-label="{escape_text(f"{chart.title}. {KEYBOARD_HINT}")}">'
        f"{render_svg(chart, WIDE_SIZE)}{render_svg(chart, NARROW_SIZE)}"
        f'<div class="tip" role="status"></div>{_chart_data(chart)}</div>'
        f"<details><summary>Numbers of this chart</summary>{render_table(numbers_table(chart))}</details>"
        "</figure>"
    )


def render_choice(one: ChartChoice) -> str:
    """Charts of which one is shown; all, where there is no script."""
    options = "".join(f"<option>{escape_text(name)}</option>" for name in one.charts)
    charts = "".join(render_figure(chart) for chart in one.charts.values())
    return (
        f'<div class="choice"><label>{escape_text(one.label)} <select>{options}</select></label>'
        f'<div class="charts">{charts}</div></div>'
    )


def _render_legend(chart: Chart) -> str:
    """The series that have a colour; what is grey is told in one word."""
    entries = []
    for place, one in enumerate(chart.series):
        if one.weight != "faint":
            entries.append(_legend_entry(series_classes(chart, place), legend_key(chart, place), one.name))
    faint = [one for one in chart.series if one.weight == "faint" and len(one.x)]
    if faint:
        dots = faint[0].kind == "points"
        mark = '<path class="dot" d="M10 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0z"/>' if dots else (
            '<path class="line" d="M0 0H24"/>')  # fmt: skip
        name = faint[0].name if len(faint) == 1 else f"{len(faint)} others"
        entries.append(_legend_entry("faint", mark, name))
    return f'<ul class="legend">{"".join(entries)}</ul>' if len(entries) > 1 else "<div></div>"


def _legend_entry(classes: str, mark: str, name: str) -> str:
    return (
        f'<li><svg viewBox="0 -7 24 14" aria-hidden="true"><g class="{classes}">{mark}</g></svg>'
        f"{escape_text(name)}</li>"
    )


def _chart_data(chart: Chart) -> str:
    """The numbers for the page's script."""
    series = []
    for one in chart.series:
        entry: dict[str, Any] = {"name": one.name, "x": _round_numbers(one.x), "y": _round_numbers(one.y)}
        if len(one.labels):
            entry["labels"] = list(one.labels)
        series.append(entry)
    content = {"x": chart.x_name, "y": chart.y_name, "rows": bool(chart.rows), "series": series}
    told = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return f'<script type="application/json">{told.replace("<", chr(92) + "u003c")}</script>'


def _round_numbers(values: Numbers) -> list[float | int | None]:
    """Five digits, and whole numbers without a point."""
    found: list[float | int | None] = []
    for value in values:
        short = float(f"{value:.5g}") if math.isfinite(value) else None
        found.append(int(short) if short is not None and short == int(short) else short)
    return found


def numbers_table(chart: Chart) -> TableBlock:
    """What a chart shows as a table: a column a series, or a row a point where they differ in x."""
    title = f"{chart.title}, in numbers"
    series = [one for one in chart.series if len(one.x)]
    aligned = all(list(one.x) == list(series[0].x) and not one.labels for one in series)
    if not aligned or any(one.kind == "points" for one in series):
        return TableBlock(title, *_long_rows(chart, series))
    rows = [
        [f"{x:g}", *(format_number(one.y[place]) for one in series)]
        for place, x in enumerate(series[0].x)
    ]  # fmt: skip
    return TableBlock(title, [chart.x_name, *(one.name for one in series)], rows)


def _long_rows(chart: Chart, series: Sequence[Series]) -> tuple[list[str], list[list[str]]]:
    if chart.rows:
        rows = [[one.name, label] for one in series for label in one.labels]
        return ["model", "split, utility and interval"], rows
    rows = [
        [one.name, one.labels[place] if len(one.labels) else "", format_number(x), format_number(y)]
        for one in series
        for place, (x, y) in enumerate(zip(one.x, one.y, strict=True))
    ]
    return ["", "point", chart.x_name, chart.y_name], rows
