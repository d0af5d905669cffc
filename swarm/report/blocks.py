"""What a report is made of, whatever file it becomes: words, tables, charts and items."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.report.pictures import Chart


class TextBlock(NamedTuple):
    """Paragraphs, or with `listed` one list."""

    lines: Sequence[str]
    listed: bool = False


class Sparkline(NamedTuple):
    """A cell that shows how a number went, NaN where it was not measured."""

    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows of cells; the first column names the row.

    Attributes:
        sortable: Readers may order the rows by a column.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Sparkline]]
    sortable: bool = False


@dataclass(frozen=True, slots=True)
class ChartChoice:
    """Charts of which one is shown, by name; the first one at first."""

    label: str
    charts: dict[str, Chart]


@dataclass(frozen=True, slots=True)
class ChangedItem:
    """An item that two models answered with different value.

    Attributes:
        item: Its id, and its part in a mixture.
        question: What was asked, and the choices; empty where the data file could not be read.
        gold: The right answer; empty where there is none or it is not known.
        before, after: What the two answered: as it was read, and the text.
        values: What the answers were worth.
    """

    item: str
    question: str
    gold: str
    before: tuple[str, str]
    after: tuple[str, str]
    values: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChangedItems:
    """Items that went one way.

    Attributes:
        total: How many there are, those left out too.
        names: Who answered before and after.
    """

    title: str
    total: int
    names: tuple[str, str]
    flips: Sequence[ChangedItem]


ReportBlock = TextBlock | TableBlock | Chart | ChartChoice | ChangedItems


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A part of the report.

    Attributes:
        key: Names it in addresses.
        how: How to read it, in one or two sentences.
        folded: Blocks that are opened only on demand, by what is said of them.
    """

    key: str
    title: str
    how: str
    blocks: Sequence[ReportBlock]
    folded: dict[str, Sequence[ReportBlock]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A run's.

    Attributes:
        name: The run's.
        about: What ran, in a line.
        kind: "better", "worse", "unclear", "open" (no test yet).
        verdict: That in two or three words.
        result: The result in one plain sentence.
        figures: Short facts, as what and how much.
    """

    name: str
    about: str
    kind: str
    verdict: str
    result: str
    figures: Sequence[tuple[str, str]]
    sections: Sequence[ReportSection]
