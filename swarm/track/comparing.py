"""Questions put to groups of models, as trackers are told of them: a step a question."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.track.base import TrackerTable, Tracker

if TYPE_CHECKING:
    import pandas as pd

SUMMED_COLUMNS = ("cost", "prompt_tokens", "new_tokens")


def log_comparison(
    tracker: Tracker, folder: Path, frames: "Mapping[str, pd.DataFrame]"
) -> dict[str, Any]:
    """Tell each question's counts, and the tables that its folder has; gives the summary.

    Args:
        folder: Of the report, which has a folder a question.
        frames: Question name to its answers.
    """
    totals: dict[str, Any] = {"questions": len(frames)}
    for number, (name, frame) in enumerate(frames.items()):
        # A model in several groups was asked once, and its rows are there several times.
        keys = [key for key in ("model", "paraphrase_ix", "sample") if key in frame]
        once = frame.drop_duplicates(keys) if "sample" in frame else frame
        values: dict[str, Any] = {"rows": len(frame), "errors": int(frame["error"].notna().sum())}
        values |= {key: float(once[key].sum()) for key in SUMMED_COLUMNS if key in once}
        totals |= {key: totals.get(key, 0) + value for key, value in values.items()}
        for file in sorted((folder / name).glob("*.csv")):
            table = _read_table(file)
            values[f"{name}/{file.stem}"] = table
            if file.stem.endswith("_summary"):
                values |= _summary_numbers(f"{name}/{file.stem.removesuffix('_summary')}", table)
        tracker.log(number, values)
    return totals


def _read_table(file: Path) -> TrackerTable:
    """A file's rows; its numbers as numbers."""
    with file.open(newline="", encoding="utf-8") as lines:
        columns, *rows = csv.reader(lines)
    numeric = [all(_is_number(row[n]) for row in rows) for n in range(len(columns))]
    return TrackerTable(columns, [
        [(float(cell) if cell else None) if numeric[n] else cell for n, cell in enumerate(row)]
        for row in rows
    ])  # fmt: skip


def _is_number(cell: str) -> bool:
    try:
        return not cell or float(cell) is not None
    except ValueError:
        return False


def _summary_numbers(name: str, table: TrackerTable) -> dict[str, float]:
    """Of a summary: each row's value and the ends of its interval."""
    place = {column: n for n, column in enumerate(table.columns)}
    found: dict[str, float] = {}
    for row in table.rows:
        words = [str(cell) for cell in row if isinstance(cell, str) and cell]
        for column in ("value", "mean", "share", "low", "high"):
            if column in place and isinstance(cell := row[place[column]], float):
                found["/".join([name, *words[:2], column])] = cell
    return found
