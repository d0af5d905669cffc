"""Heat map: answers by model and paraphrase."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.plots import style
from swarm.compare.plots.style import text_colour_on
from swarm.errors import InvalidArgument
from swarm.stats.answer_values import (
    AnswerMatrix,
    get_column,
    order_categories,
    read_answers,
    to_countable,
    to_hashable_column,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LABELLED_COLUMNS = 60
"""Maximum number of columns for which cells show their numbers."""


def heatmap(
    df: "pd.DataFrame",
    answer_column: str = "answer",
    answer: Any = None,
    row_column: str = "model",
    category_column: str = "paraphrase_ix",
    selected_categories: Sequence[Any] | None = None,
    title: str | None = None,
    filename: str | Path | None = None,
    show: bool = False,
) -> "Figure":
    """Draw models (rows) by paraphrases (columns): means of numbers, or shares of an answer.

    Args:
        df: Frame with the columns of `Question.df`.
        answer_column: Column of answers.
        answer: Answer or token whose share or probability is shown; by default the most frequent.
        row_column: Column of the rows.
        category_column: Column of the columns.
        selected_categories: Columns to show, in this order.
        title, filename, show: See `plots.plot`.

    Raises:
        InvalidArgument: A column, category or answer does not exist.
    """
    if filename is not None:
        style.check_filename(filename)
    get_column(df, row_column, "row_column")
    chosen = None if answer is None else [answer]
    values = read_answers(df, answer_column, category_column, selected_categories, chosen)
    if not len(values.category):
        return style.empty_figure(values, style.build_title(df, title), filename, show)
    if answer is not None and values.names[0] != to_countable(answer):
        raise InvalidArgument(f"answer: no answer {answer!r} in the column {answer_column}")
    rows = order_categories(df, row_column)
    cells = _cell_means(values, rows, row_column)
    measure = (
        "mean" if values.kind == "mean" else f"share of {style.shorten_label(values.names[0])!r}"
    )
    picture, axes = style.create_axes(
        3.4 + 0.75 * max(3, min(len(values.categories), 30)), 1.9 + 0.45 * max(2, len(rows))
    )
    limits = (None, None) if values.kind == "mean" else (0.0, 1.0)
    image = axes.imshow(cells, cmap="cividis", aspect="auto", vmin=limits[0], vmax=limits[1])
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(len(values.categories)), _column_labels(df, values, category_column))
    axes.set_yticks(range(len(rows)), style.shorten_labels(rows, 32))
    axes.set_xlabel(category_column)
    picture.min_widths[axes] = max(4.0, 0.45 * min(len(values.categories), MAX_LABELLED_COLUMNS))
    _draw_cell_values(axes, cells, image)
    picture.colorbar(image, ax=axes, label=f"{answer_column}: {measure}")
    note = "–: no answers." if bool((cells != cells).any()) else ""
    return style.finish_figure(picture, style.build_title(df, title), note, filename, show)


def _cell_means(values: AnswerMatrix, rows: Sequence[Any], row_column: str) -> "np.ndarray":
    """Return means of shape [rows, columns]; NaN without answers."""
    import numpy as np

    position = {name: i for i, name in enumerate(rows)}
    codes = to_hashable_column(values.frame[row_column]).map(position).to_numpy()
    shape = len(rows), len(values.categories)
    flat = codes * shape[1] + values.category
    counts = np.bincount(flat, minlength=shape[0] * shape[1]).astype(float)
    sums = np.bincount(flat, values.matrix[:, 0], minlength=shape[0] * shape[1])
    counts[counts == 0] = np.nan
    means: np.ndarray = (sums / counts).reshape(shape)
    return means


def _column_labels(df: "pd.DataFrame", values: AnswerMatrix, category_column: str) -> list[str]:
    """Return the column labels; those of paraphrases include the start of the text."""
    if category_column != "paraphrase_ix" or "question" not in df.columns:
        return style.shorten_labels(values.categories, 18)
    first = df.drop_duplicates("paraphrase_ix").set_index("paraphrase_ix")["question"]
    return [f"{ix}\n{style.shorten_label(first[ix], 14)}" for ix in values.categories]


def _draw_cell_values(axes: "Axes", cells: "np.ndarray", image: Any) -> None:
    from matplotlib.colors import to_hex

    if cells.shape[1] > MAX_LABELLED_COLUMNS:
        return
    for (row, column), value in _iter_cells(cells):
        colour = "#FFFFFF" if value != value else to_hex(image.cmap(image.norm(value)))
        digits = 2 - (abs(value) >= 10) - (abs(value) >= 1000)
        text = "–" if value != value else f"{value:.{digits}f}"
        axes.text(
            column, row, text, ha="center", va="center", fontsize=9, color=text_colour_on(colour)
        )


def _iter_cells(cells: "np.ndarray") -> list[tuple[tuple[int, int], float]]:
    return [((i, j), float(v)) for i, row in enumerate(cells) for j, v in enumerate(row)]
