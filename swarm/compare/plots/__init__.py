"""Plots of an experiment: figures with 95 % intervals, returned and optionally saved.

Colours are distinguishable for colour-blind readers, no figure stays open, and no display is
needed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.plots.bars import free_form_stacked_bar, probs_stacked_bar
from swarm.compare.plots.heatmap import heatmap
from swarm.compare.plots.ratings import judge_scores, rating_cumulative_plot, rating_violins

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = [
    "free_form_stacked_bar",
    "heatmap",
    "judge_scores",
    "plot",
    "probs_stacked_bar",
    "rating_cumulative_plot",
    "rating_violins",
]


def plot(
    df: "pd.DataFrame",
    answer_column: str | None = None,
    category_column: str = "group",
    selected_categories: Sequence[Any] | None = None,
    min_rating: int | None = None,
    max_rating: int | None = None,
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
    colors: Mapping[Any, str] | None = None,
    title: str | None = None,
    selected_paraphrase: str | None = None,
    filename: str | Path | None = None,
    error_bars: bool = True,
    show: bool = False,
) -> "Figure":
    """Draw the plot that fits a column.

    Answers become stacked bars of their shares, tokens with probabilities stacked bars of these,
    ratings with probabilities cumulative lines, and other numbers boxes. With `selected_answers` or
    `min_fraction`, all become stacked bars. Refused and failed answers are excluded from shares;
    their number is shown under each category. The order of the arguments is that of llmcomp's
    `llmcomp.question.plots.plot`, which differs from `Question.plot`.

    Args:
        df: Frame with the columns of `Question.df`, or custom ones.
        answer_column: Column of answers; by default "probs" for ratings, else "answer".
        category_column: Column to compare by: "group", "model", "paraphrase_ix" or any other.
        selected_categories: Categories to show, in this order; by default models are sorted by
            group.
        min_rating, max_rating: Ends of the rating axis.
        selected_answers: Answers to distinguish, in this order; others become "[OTHER]". By default
            the 14 most frequent.
        min_fraction: Alternatively, distinguish answers with at least this share in one category.
        colors: Colours of answers, or of categories where these are coloured.
        title: Title; by default a paraphrase and the number of others.
        selected_paraphrase: Paraphrase in the title; by default the first.
        filename: File to save: .png, .svg, .pdf.
        error_bars: Whether to draw 95 % intervals (`swarm.stats.intervals.bootstrap_intervals`).
        show: Whether to open a window and wait until it is closed. A notebook displays the returned
            figure by itself.

    Raises:
        UserError: An argument is invalid, or the figure cannot be saved or shown.
    """
    from swarm.compare.plots.style import build_title, check_filename
    from swarm.errors import InvalidArgument
    from swarm.stats.answer_values import are_ratings, get_column, infer_kind

    if selected_answers is not None and min_fraction is not None:
        raise InvalidArgument("selected_answers and min_fraction: give only one")
    if filename is not None:
        check_filename(filename)
    if selected_paraphrase is not None:
        title = build_title(df, title, selected_paraphrase)
    if answer_column is None:
        answer_column = "probs" if "probs" in df.columns else "answer"
    answers = get_column(df, answer_column, "answer_column").dropna()
    kind = infer_kind(answers)
    shared: dict[str, Any] = {
        "category_column": category_column,
        "selected_categories": selected_categories,
        "colors": colors,
        "title": title,
        "filename": filename,
        "error_bars": error_bars,
        "show": show,
    }
    chosen: dict[str, Any] = {"selected_answers": selected_answers, "min_fraction": min_fraction}
    choosing = selected_answers is not None or min_fraction is not None
    if kind == "probabilities":
        if not choosing and are_ratings(answers):
            return rating_cumulative_plot(
                df, min_rating, max_rating, probs_column=answer_column, **shared
            )
        return probs_stacked_bar(df, answer_column, **chosen, **shared)
    if kind == "mean" and not choosing:
        return judge_scores(df, answer_column, **shared)
    return free_form_stacked_bar(df, answer_column=answer_column, **chosen, **shared)
