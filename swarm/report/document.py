"""What a report consists of: sections with texts, tables, charts and changed items."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swarm.runs.verdict import Statement

Numbers = Sequence[float] | np.ndarray

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6d00")
"""The Okabe-Ito palette, which is distinguishable with colour vision deficiency.

Its yellow is darkened, as it is too light for a line on white, and its black is left out, as axes
and text use it.
"""

GREY = "#9aa1a9"

INVALID_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Characters that are not allowed in an HTML page."""


class Series(NamedTuple):
    """A named series of points (x, y); points with a NaN are left out.

    Attributes:
        kind: "line" joins the points, "steps" holds each y until the next x, "points" draws markers
            only.
        weight: "normal", "strong" (emphasised) or "faint" (grey background, no legend entry).
        labels: Label of each point; empty for none.
    """

    name: str
    x: Numbers
    y: Numbers
    kind: str = "line"
    weight: str = "normal"
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: series on two axes.

    Attributes:
        alt_text: One-sentence summary, the alternative text of the image.
        marks: Horizontal reference lines, as (name, y).
    """

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    alt_text: str = ""
    marks: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True)
class ListBlock:
    """Sentences, each an item of a list."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows of cells; the first column names the row."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class ChangedItem:
    """An item whose answers by two models have different values.

    Attributes:
        item: Item id, prefixed with its part in a mixture.
        question: Question and choices; empty if the data file could not be read.
        gold: Correct answer; empty if there is none or it is unknown.
        before, after: Parsed answer and full text of each model.
        values: Value of each answer.
    """

    item: str
    question: str
    gold: str
    before: tuple[str, str]
    after: tuple[str, str]
    values: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChangedItems:
    """Items that all changed in the same direction.

    Attributes:
        names: Names of the models before and after.
    """

    title: str
    names: tuple[str, str]
    flips: Sequence[ChangedItem]


Block = str | ListBlock | TableBlock | Chart | ChangedItems
"""Part of a section; a text is a paragraph."""


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A section of the report.

    Attributes:
        key: Anchor in the page's URL.
    """

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a run.

    Attributes:
        name: Name of the run.
        about: One-line description of what ran.
        verdict: The outcome.
        figures: Headline figures, as (label, value).
        sections: The details, folded.
        blocks: What is shown before them: what each expert has, and the charts.
        warnings: Warnings that qualify the outcome.
    """

    name: str
    about: str
    verdict: Statement
    figures: Sequence[tuple[str, str]]
    sections: Sequence[ReportSection]
    blocks: Sequence[Block] = ()
    warnings: Sequence[str] = ()
