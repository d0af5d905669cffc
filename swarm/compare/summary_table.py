"""Intervals of an experiment's results."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from swarm.compare.answer_values import CLUSTER_COLUMNS, AnswerMatrix, read_answers
from swarm.errors import InvalidArgument
from swarm.stats.intervals import MIN_CLUSTERS, bootstrap_intervals
from swarm.stats.significance import bootstrap_mean


def get_error_bars(
    fractions: Sequence[float],
    rng: np.random.Generator | None = None,
    alpha: float = 0.95,
    n_resamples: int = 2000,
) -> tuple[float, float, float]:
    """Return the mean of some numbers and the lengths of its bootstrap error bars.

    The numbers are assumed to be independent; for rows of an experiment see `summary`.

    Args:
        fractions: Empty: all is 0; one: an interval of no width.
        rng: Random generator; by default with seed 0.
        alpha: Share of the resampled means within the interval.

    Returns:
        center, lower_err, upper_err; the last two as matplotlib's `yerr` takes them.
    """
    if not 0 < alpha < 1 or n_resamples < 1:
        raise InvalidArgument(
            f"alpha={alpha}, n_resamples={n_resamples}: must be a share between 0 and 1 such as "
            "0.95, and at least 1"
        )
    values = np.asarray(fractions, dtype=np.float64)
    if len(values) == 0:
        return 0.0, 0.0, 0.0
    center = float(values.mean())
    low, high = bootstrap_mean(values, rng or np.random.default_rng(0), n_resamples, alpha)
    return center, center - low, high - center


def summary(
    df: pd.DataFrame,
    answer_column: str = "answer",
    category_column: str = "group",
    cluster: Sequence[str] = CLUSTER_COLUMNS,
    *,
    selected_categories: Sequence[Any] | None = None,
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
) -> pd.DataFrame:
    """Return each category's shares of answers, mean, or mean probabilities, with 95 % intervals.

    Of more than 50 different answers the 50 most frequent are separate, unless some are selected;
    `[OTHER]` is the rest, and `[UNSEEN]` the probability of tokens that were not reported.

    Args:
        cluster: Columns of which rows with the same value are correlated; they are resampled before
            the samples within them (`swarm.stats.intervals.bootstrap_intervals`).

    Returns:
        A row for each category and answer: the category, "answer" ("mean" for numbers), "value",
            "low", "high" (NaN where no interval can be given), "n" answers, "models",
            "paraphrases", "refused" and "errors" (rows without an answer, which are in no share),
            "note".

    Raises:
        InvalidArgument: A column does not exist, or an argument's value is not allowed.
    """
    values = read_answers(
        df, answer_column, category_column, selected_categories, selected_answers, min_fraction
    )
    codes = values.cluster_codes([name for name in cluster if name != category_column])
    answers = ["mean"] if values.kind == "mean" else values.names
    rows = []
    for place, name in enumerate(values.categories):
        here = values.category == place
        found = bootstrap_intervals(values.matrix[here], [one[here] for one in codes], values.kind)
        ends: Any = [*zip(answers, *found, strict=True)] or [(None, math.nan, math.nan, math.nan)]
        counts = _count_rows(values, here, name)
        rows += [[name, *end, *counts] for end in ends]
    order = "answer value low high n models paraphrases refused errors note".split()
    return pd.DataFrame(rows, columns=[category_column, *order])


def _count_rows(values: AnswerMatrix, here: np.ndarray, name: Any) -> list[Any]:
    """Return the columns from "n" to "note" of one category."""
    n, frame = int(here.sum()), values.frame[here]
    models, paraphrases = (
        frame[column].nunique() if column in frame.columns else 0 for column in CLUSTER_COLUMNS
    )
    counts = {"models": models, "paraphrases": paraphrases}
    few = [f"{count} {what}" for what, count in counts.items() if 1 < count < MIN_CLUSTERS]
    note = f"only {' and '.join(few)}: says little of others" if few else ""
    note = {0: "no answers", 1: "one answer: no interval can be given"}.get(n, note)
    return [n, models, paraphrases, values.refused[name], values.errors[name], note]
