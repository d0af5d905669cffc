"""Reports as one self-contained HTML file that works offline, with the charts' legends and data."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from swarm._util.terminal import format_number
from swarm.report.charts import NARROW_SIZE, WIDE_SIZE, legend_key, render_svg, series_classes
from swarm.report.document import (
    ChangedItem,
    ChangedItems,
    Chart,
    ChartChoice,
    Numbers,
    Report,
    ReportBlock,
    ReportSection,
    Series,
    TableBlock,
    TextBlock,
    escape_text,
    render_paragraphs,
    render_table,
)

MAX_UNFOLDED = 10
"""Number of changed items shown in each direction; the others are folded."""

KEYBOARD_HINT = "Arrow keys: left and right move along a series, up and down to another series."


def render_figure(chart: Chart) -> str:
    """Render a chart as a figure: legend, wide and narrow SVG, data for the script, table."""
    return (
        f'<figure id="figure-{chart.key}"><figcaption>{escape_text(chart.title)}</figcaption>'
        f'{_render_legend(chart)}<div class="plot" tabindex="0" role="group" '
        'aria-roledescription="chart" '
        f'aria-label="{escape_text(f"{chart.title}. {KEYBOARD_HINT}")}">'
        f"{render_svg(chart, WIDE_SIZE)}{render_svg(chart, NARROW_SIZE)}"
        f'<div class="tip" role="status"></div>{_chart_data(chart)}</div>'
        "<details><summary>Numbers of this "
        f"chart</summary>{render_table(numbers_table(chart))}</details>"
        "</figure>"
    )


def render_choice(one: ChartChoice) -> str:
    """Render charts of which the script shows one; without a script all are visible."""
    options = "".join(f"<option>{escape_text(name)}</option>" for name in one.charts)
    charts = "".join(render_figure(chart) for chart in one.charts.values())
    return (
        f'<div class="choice"><label>{escape_text(one.label)} <select>{options}</select></label>'
        f'<div class="charts">{charts}</div></div>'
    )


def _render_legend(chart: Chart) -> str:
    """Render the legend; all faint series share one entry."""
    entries = []
    for index, one in enumerate(chart.series):
        if one.weight != "faint":
            entries.append(
                _legend_entry(series_classes(chart, index), legend_key(chart, index), one.name)
            )
    faint = [one for one in chart.series if one.weight == "faint" and len(one.x)]
    if faint:
        dots = faint[0].kind == "points"
        mark = (
            '<path class="dot" d="M10 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0z"/>'
            if dots
            else ('<path class="line" d="M0 0H24"/>')
        )
        name = faint[0].name if len(faint) == 1 else f"{len(faint)} others"
        entries.append(_legend_entry("faint", mark, name))
    return f'<ul class="legend">{"".join(entries)}</ul>' if len(entries) > 1 else "<div></div>"


def _legend_entry(classes: str, mark: str, name: str) -> str:
    return (
        f'<li><svg viewBox="0 -7 24 14" aria-hidden="true"><g class="{classes}">{mark}</g></svg>'
        f"{escape_text(name)}</li>"
    )


def _chart_data(chart: Chart) -> str:
    """Render the chart's numbers as JSON for the page's script."""
    series = []
    for one in chart.series:
        entry: dict[str, Any] = {
            "name": one.name,
            "x": _round_numbers(one.x),
            "y": _round_numbers(one.y),
        }
        if len(one.labels):
            entry["labels"] = list(one.labels)
        series.append(entry)
    content = {"x": chart.x_name, "y": chart.y_name, "rows": bool(chart.rows), "series": series}
    content_json = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # Escape "<", as "</script>" in a label would end the element.
    return (
        f'<script type="application/json">{content_json.replace("<", chr(92) + "u003c")}</script>'
    )


def _round_numbers(values: Numbers) -> list[float | int | None]:
    """Round to five significant digits, with integers as `int` and non-finite values as `None`."""
    found: list[float | int | None] = []
    for value in values:
        short = float(f"{value:.5g}") if math.isfinite(value) else None
        found.append(int(short) if short is not None and short == int(short) else short)
    return found


def numbers_table(chart: Chart) -> TableBlock:
    """Tabulate a chart: one column per series, or one row per point if the series differ in x."""
    title = f"{chart.title}, in numbers"
    series = [one for one in chart.series if len(one.x)]
    aligned = all(list(one.x) == list(series[0].x) and not one.labels for one in series)
    if not aligned or any(one.kind == "points" for one in series):
        return TableBlock(title, *_long_rows(chart, series))
    rows = [
        [f"{x:g}", *(format_number(one.y[index]) for one in series)]
        for index, x in enumerate(series[0].x)
    ]
    return TableBlock(title, [chart.x_name, *(one.name for one in series)], rows)


def _long_rows(chart: Chart, series: Sequence[Series]) -> tuple[list[str], list[list[str]]]:
    if chart.rows:
        rows = [[one.name, label] for one in series for label in one.labels]
        return ["model", "split, utility and interval"], rows
    rows = [
        [one.name, one.labels[index] if len(one.labels) else "", format_number(x), format_number(y)]
        for one in series
        for index, (x, y) in enumerate(zip(one.x, one.y, strict=True))
    ]
    return ["", "point", chart.x_name, chart.y_name], rows


RESOURCE_FOLDER = Path(__file__).parent

VERDICT_SIGNS = {"better": "▲", "worse": "▼", "unclear": "◆", "open": "○"}


def render_page(report: Report) -> str:
    """Render the complete page."""
    style, script = (
        (RESOURCE_FOLDER / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")
    )
    parts = {"result": "Result", **{one.key: one.title for one in report.sections}}
    links = "".join(
        f'<li><a href="#{key}">{escape_text(title)}</a></li>' for key, title in parts.items()
    )
    verdict = report.verdict
    facts = "".join(
        f"<div><dt>{escape_text(what)}</dt><dd>{escape_text(much)}</dd></div>"
        for what, much in report.figures
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" '
            f'content="{_content_policy(style, script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
            f"<title>{escape_text(report.name)}: {escape_text(verdict.headline)}</title>",
            f"<style>{style}</style>\n</head>\n<body>",
            '<a class="skip" href="#main">Skip to the report</a>',
            '<header class="top"><div><p class="eyebrow">Model Swarms: report of a search</p>'
            f"<h1>{escape_text(report.name)}</h1><p "
            f'class="about">{escape_text(report.about)}</p></div>',
            '<button id="theme" type="button" hidden></button></header>',
            f'<div class="layout"><nav aria-label="Sections"><ol>{links}</ol></nav>',
            '<main id="main" tabindex="-1">',
            f'<section class="verdict {verdict.kind}" id="result"><h2>Result</h2>',
            f'<p class="badge"><span aria-hidden="true">{VERDICT_SIGNS[verdict.kind]}</span> '
            f"{escape_text(verdict.headline)}</p>",
            f'<p class="lead">{escape_text(verdict.sentence)}</p><dl '
            f'class="facts">{facts}</dl>{_render_comparisons(report)}</section>',
            *map(_render_section, report.sections),
            "</main></div>",
            "<footer>Written by python -m swarm.report from the folder of the run "
            f"{escape_text(report.name)}"
            ". Model Swarms: Feng et al., ICML 2025, arXiv 2410.11163.</footer>",
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _render_comparisons(report: Report) -> str:
    """Render the comparisons with the baselines, and the warnings, below the outcome."""
    table = render_table(report.comparisons) if report.comparisons else ""
    return table + render_paragraphs(TextBlock(report.warnings))


def _content_policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows only this style and script."""
    hashes = [
        base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in (style, script)
    ]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _render_section(one: ReportSection) -> str:
    folded = "".join(
        f"<details><summary>{escape_text(words)}</summary>{_render_blocks(blocks)}</details>"
        for words, blocks in one.folded.items()
    )
    return (
        f'<section id="{one.key}"><h2>{escape_text(one.title)}</h2><p '
        f'class="how">{escape_text(one.explanation)}</p>'
        f"{_render_blocks(one.blocks)}{folded}</section>"
    )


def _render_blocks(blocks: Sequence[ReportBlock]) -> str:
    """Render the blocks in order; adjacent charts share a row where there is space."""
    html = ""
    for charts, some in groupby(blocks, lambda block: isinstance(block, Chart)):
        drawn = "".join(map(_render_block, some))
        html += f'<div class="charts">{drawn}</div>' if charts else drawn
    return html


def _render_block(block: ReportBlock) -> str:
    match block:
        case TextBlock():
            return render_paragraphs(block)
        case TableBlock():
            return render_table(block)
        case Chart():
            return render_figure(block)
        case ChartChoice():
            return render_choice(block)
        case ChangedItems():
            return f"<h3>{escape_text(block.title)}</h3>{render_changed_items(block)}"


def render_changed_items(block: ChangedItems) -> str:
    """Render items, each of which expands; those after the first ten are folded."""
    if not block.flips:
        return "<p>None.</p>"
    items = [_render_changed_item(one, block.names) for one in block.flips]
    html = f'<div class="flips">{"".join(items[:MAX_UNFOLDED])}</div>'
    if rest := items[MAX_UNFOLDED:]:
        summary = f"<summary>{len(rest)} more</summary>"
        html += f'<details class="more">{summary}<div class="flips">{"".join(rest)}</div></details>'
    return html


def _render_changed_item(one: ChangedItem, names: tuple[str, str]) -> str:
    """Render an item: a summary of both answers that expands to the question and both texts."""
    lines = one.question.split("\n")
    first = lines[0] if len(lines[0]) <= 140 else f"{lines[0][:139]}…"
    question = ""
    if one.question != first:
        question = f"<div><h4>Question</h4>{_render_quote(one.question)}</div>"
    rated = not set(one.values) <= {0.0, 1.0}
    answers = "".join(
        f"{', ' * bool(index)}{escape_text(name)} "
        f"<b>{escape_text(answer)}</b>{_value_suffix(value, rated)}"
        for index, (name, (answer, _), value) in enumerate(
            zip(names, (one.before, one.after), one.values, strict=True)
        )
    )
    gold = f", right is <b>{escape_text(one.gold)}</b>" if one.gold else ""
    texts = "".join(
        f"<div><h4>{escape_text(name)} wrote</h4>{_render_quote(written)}</div>"
        for name, (_, written) in zip(names, (one.before, one.after), strict=True)
    )
    return (
        f'<details class="flip"><summary><span class="id">{escape_text(one.item)}</span>'
        f'<span class="question" dir="auto">{escape_text(first)}</span>'
        f'<span class="said">{answers}{gold}</span></summary>'
        f'<div class="texts">{question}{texts}</div></details>'
    )


def _render_quote(words: str) -> str:
    return f'<pre dir="auto">{escape_text(words) or "(nothing)"}</pre>'


def _value_suffix(value: float, rated: bool) -> str:
    """Return the value of an answer that is not simply right or wrong, in parentheses."""
    return f" ({format_number(value)})" if rated else ""
