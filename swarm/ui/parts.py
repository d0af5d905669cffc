"""Parts of pages: facts in a row, and tables of text."""

from collections.abc import Iterable, Sequence
from typing import Any

from nicegui import ui


def draw_facts(found: Iterable[tuple[str, str]]) -> None:
    """Short facts, as what and how much."""
    with ui.row().classes("w-full gap-x-8 gap-y-2"):
        for what, much in found:
            with ui.column().classes("gap-0"):
                ui.label(what).classes("quiet text-sm")
                ui.label(much).classes("text-base")


def draw_plain_table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], align: str = "right"
) -> ui.table:
    """A table of text; on a telephone each row is a card of its own.

    Args:
        align: Of all columns but the first.
    """
    columns = [
        {"name": f"c{n}", "label": title, "field": f"c{n}", "align": align if n else "left"}
        for n, title in enumerate(header)
    ]
    found = [{"key": n, **{f"c{m}": str(cell) for m, cell in enumerate(row)}}
             for n, row in enumerate(rows)]  # fmt: skip
    table = ui.table(columns=columns, rows=found, row_key="key").classes("w-full")
    return table.props("flat bordered dense wrap-cells hide-pagination :rows-per-page-options=[0] "
                       ":grid=Quasar.Screen.lt.sm")  # fmt: skip
