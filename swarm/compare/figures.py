"""The figures of a report: of each column, and of which model said what to which paraphrase."""

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from swarm.compare.errors import WrongValue
from swarm.report.markdown import plain

if TYPE_CHECKING:
    import pandas as pd

MOST = 60
"""A heat map with more rows or columns could not be read."""

RARE = 0.05
"""Of an answer that is less frequent than this no heat map is drawn."""


def file_of(column: str) -> str:
    """What the files of a column begin with."""
    return re.sub(r"[^\w.-]", "_", column)


def draw(place: Path, df: "pd.DataFrame", column: str, by: str) -> list[str]:
    """Save a column's figures, and give the lines that show them in a report beside the folder.

    They are plot.png of "answer" and COLUMN_plot.png of others; with several models and paraphrases
    COLUMN_models.png is a heat map.

    Args:
        by: The column of what is compared.

    Raises:
        UserError: They can't be saved there.
    """
    from swarm.compare.plots import heatmap, plot
    from swarm.compare.plots.canvas import save

    drawn = "probs" if column == "answer" and "probs" in df else column
    figures = {"plot" if column == "answer" else f"{file_of(column)}_plot": lambda: plot(
        df, drawn, by)}  # fmt: skip
    if _has_map(df, column):
        figures[f"{file_of(column)}_models"] = lambda: heatmap(df, column)
    lines = []
    for name, made in figures.items():
        try:
            figure = made()
        except WrongValue as error:
            lines += ["", f"No figure: {plain(str(error))}."]
            (place / f"{name}.png").unlink(missing_ok=True)
            continue
        save(figure, place / f"{name}.png")
        lines += ["", f"![{plain(column)}]({quote(place.name)}/{quote(name)}.png)"]
    return lines


def _has_map(df: "pd.DataFrame", column: str) -> bool:
    from swarm.compare.statistics.values import read

    if not {"model", "paraphrase_ix"} <= set(df.columns):
        return False
    if not all(1 < df[name].nunique() <= MOST for name in ("model", "paraphrase_ix")):
        return False
    values = read(df, column, "model")
    if values.kind == "mean":
        return len(values.matrix) > 0
    return values.matrix.size > 0 and float(values.matrix[:, 0].mean()) >= RARE
