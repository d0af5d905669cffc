"""The figures of a report: of each column, and of which model said what to which paraphrase."""

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from swarm.compare.errors import InvalidArgument
from swarm.report.markdown import escape_markdown

if TYPE_CHECKING:
    import pandas as pd

MAX_HEATMAP_CATEGORIES = 60
"""A heat map with more rows or columns could not be read."""

MIN_HEATMAP_SHARE = 0.05
"""Of an answer that is less frequent than this no heat map is drawn."""


def column_file_stem(column: str) -> str:
    """What the files of a column begin with."""
    return re.sub(r"[^\w.-]", "_", column)


def save_figures(place: Path, df: "pd.DataFrame", column: str, by: str) -> list[str]:
    """Save a column's figures, and give the lines that show them in a report beside the folder.

    They are plot.png of "answer" and COLUMN_plot.png of others; with several models and paraphrases
    COLUMN_models.png is a heat map.

    Args:
        by: The column of what is compared.

    Raises:
        UserError: They can't be saved there.
    """
    from swarm.compare.plots import heatmap, plot
    from swarm.compare.plots.canvas import save_figure

    drawn = "probs" if column == "answer" and "probs" in df else column
    figures = {"plot" if column == "answer" else f"{column_file_stem(column)}_plot": lambda: plot(
        df, drawn, by)}  # fmt: skip
    if _needs_heatmap(df, column):
        figures[f"{column_file_stem(column)}_models"] = lambda: heatmap(df, column)
    lines = []
    for name, made in figures.items():
        try:
            figure = made()
        except InvalidArgument as error:
            lines += ["", f"No figure: {escape_markdown(str(error))}."]
            (place / f"{name}.png").unlink(missing_ok=True)
            continue
        save_figure(figure, place / f"{name}.png")
        lines += ["", f"![{escape_markdown(column)}]({quote(place.name)}/{quote(name)}.png)"]
    return lines


def _needs_heatmap(df: "pd.DataFrame", column: str) -> bool:
    from swarm.compare.statistics.values import read_answers

    if not {"model", "paraphrase_ix"} <= set(df.columns):
        return False
    if not all(1 < df[name].nunique() <= MAX_HEATMAP_CATEGORIES for name in ("model", "paraphrase_ix")):
        return False
    values = read_answers(df, column, "model")
    if values.kind == "mean":
        return len(values.matrix) > 0
    return values.matrix.size > 0 and float(values.matrix[:, 0].mean()) >= MIN_HEATMAP_SHARE
