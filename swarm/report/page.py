"""A report as one HTML file that opens offline and asks nothing of anywhere."""

import base64
import hashlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from swarm.report.blocks import ReportBlock, ChartChoice, ChangedItem, ChangedItems, Report, ReportSection, TableBlock, TextBlock
from swarm.report.figures import render_choice, render_figure
from swarm.report.markup import render_paragraphs, render_table, escape_text
from swarm.report.numbers import format_number
from swarm.report.pictures import Chart

RESOURCE_FOLDER = Path(__file__).parent

VERDICT_SIGNS = {"better": "▲", "worse": "▼", "unclear": "◆", "open": "○"}


def render_page(report: Report) -> str:
    """The whole file."""
    style, script = ((RESOURCE_FOLDER / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    parts = {"result": "Result", **{one.key: one.title for one in report.sections}}
    links = "".join(f'<li><a href="#{key}">{escape_text(title)}</a></li>' for key, title in parts.items())
    facts = "".join(f"<div><dt>{escape_text(what)}</dt><dd>{escape_text(much)}</dd></div>"
                    for what, much in report.figures)  # fmt: skip
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_content_policy(style, script)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
        f"<title>{escape_text(report.name)}: {escape_text(report.verdict)}</title>",
        f"<style>{style}</style>\n</head>\n<body>",
        '<a class="skip" href="#main">Skip to the report</a>',
        '<header class="top"><div><p class="eyebrow">Model Swarms: report of a search</p>'
        f'<h1>{escape_text(report.name)}</h1><p class="about">{escape_text(report.about)}</p></div>',
        '<button id="theme" type="button" hidden></button></header>',
        f'<div class="layout"><nav aria-label="Sections"><ol>{links}</ol></nav>',
        '<main id="main" tabindex="-1">',
        f'<section class="verdict {report.kind}" id="result"><h2>Result</h2>',
        f'<p class="badge"><span aria-hidden="true">{VERDICT_SIGNS[report.kind]}</span> '
        f"{escape_text(report.verdict)}</p>",
        f'<p class="lead">{escape_text(report.result)}</p><dl class="facts">{facts}</dl></section>',
        *map(_render_section, report.sections),
        "</main></div>",
        f"<footer>Written by python -m swarm.report from the folder of the run {escape_text(report.name)}"
        ". Model Swarms: Feng et al., ICML 2025, arXiv 2410.11163.</footer>",
        f"<script>{script}</script>\n</body>\n</html>\n",
    ])  # fmt: skip


def _content_policy(style: str, script: str) -> str:
    """What the page may do: use these two, and nothing from anywhere else."""
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()
              for one in (style, script)]  # fmt: skip
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
        f'<section id="{one.key}"><h2>{escape_text(one.title)}</h2><p class="how">{escape_text(one.how)}</p>'
        f"{_render_blocks(one.blocks)}{folded}</section>"
    )


def _render_blocks(blocks: Sequence[ReportBlock]) -> str:
    """The blocks in order; charts in a row stand side by side where there is room."""
    told = ""
    for charts, some in groupby(blocks, lambda block: isinstance(block, Chart)):
        drawn = "".join(map(_render_block, some))
        told += f'<div class="charts">{drawn}</div>' if charts else drawn
    return told


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
            flips = "".join(_render_changed_item(one, block.names) for one in block.flips)
            told = f'<div class="flips">{flips}</div>' if flips else "<p>None.</p>"
            return f"<h3>{escape_text(block.title)}</h3>{told}"


def _render_changed_item(one: ChangedItem, names: tuple[str, str]) -> str:
    """An item: in a line what was answered; opened, the question and both texts."""
    lines = one.question.split("\n")
    first = lines[0] if len(lines[0]) <= 140 else f"{lines[0][:139]}…"
    whole = f"<h4>Question</h4>{_render_quote(one.question)}" if one.question != first else ""
    rated = not set(one.values) <= {0.0, 1.0}
    said = "".join(
        f"{', ' * bool(place)}{escape_text(name)} <b>{escape_text(answer)}</b>{_value_suffix(value, rated)}"
        for place, (name, (answer, _), value) in enumerate(
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
        f'<span class="said">{said}{gold}</span></summary>'
        f'<div class="texts">{f"<div>{whole}</div>" * bool(whole)}{texts}</div></details>'
    )


def _render_quote(words: str) -> str:
    return f'<pre dir="auto">{escape_text(words) or "(nothing)"}</pre>'


def _value_suffix(value: float, rated: bool) -> str:
    """What an answer that is not just right or wrong was worth."""
    return f" ({format_number(value)})" if rated else ""
