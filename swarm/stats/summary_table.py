"""Intervals of an experiment's results, and the power of an experiment before it runs."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm._util.terminal import pluralize
from swarm.errors import InvalidArgument
from swarm.stats.answer_values import AnswerMatrix, read_answers
from swarm.stats.intervals import MIN_CLUSTERS, bootstrap_intervals
from swarm.stats.significance import bootstrap_mean

if TYPE_CHECKING:
    import pandas as pd

CLUSTER_COLUMNS = ("model", "paraphrase_ix")
"""Columns whose rows are correlated where they have the same value."""

POWER = 0.8
SIGNIFICANCE_LEVEL = 0.05


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
    if not 0 < alpha < 1:
        raise InvalidArgument(f"alpha: a share between 0 and 1 such as 0.95, not {alpha}")
    if n_resamples < 1:
        raise InvalidArgument(f"n_resamples: at least 1, not {n_resamples}")
    values = np.asarray(fractions, dtype=np.float64)
    if len(values) == 0:
        return 0.0, 0.0, 0.0
    center = float(values.mean())
    if len(values) == 1:
        return center, 0.0, 0.0
    rng = rng or np.random.default_rng(0)
    low, high = bootstrap_mean(values, rng, n_resamples, alpha)
    return center, center - low, high - center


def summary(
    df: "pd.DataFrame",
    answer_column: str = "answer",
    category_column: str = "group",
    cluster: Sequence[str] = CLUSTER_COLUMNS,
    *,
    selected_categories: Sequence[Any] | None = None,
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
) -> "pd.DataFrame":
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
    import pandas as pd

    values = read_answers(
        df, answer_column, category_column, selected_categories, selected_answers, min_fraction
    )
    columns = [name for name in cluster if name != category_column]
    codes = values.cluster_codes(columns)
    rows = [
        {category_column: name, **row}
        for i, name in enumerate(values.categories)
        for row in _category_rows(values, i, name, codes)
    ]
    order = "answer value low high n models paraphrases refused errors note".split()
    return pd.DataFrame(rows, columns=[category_column, *order])


def _category_rows(
    values: AnswerMatrix, place: int, name: Any, codes: list[np.ndarray]
) -> list[dict[str, Any]]:
    here = values.category == place
    found = bootstrap_intervals(values.matrix[here], [one[here] for one in codes], values.kind)
    shared = {
        "n": int(here.sum()),
        **_count_clusters(values, here),
        "refused": values.refused[name],
        "errors": values.errors[name],
        "note": _category_note(values, here),
    }
    answers = ["mean"] if values.kind == "mean" else values.names
    return [
        {
            "answer": answer,
            "value": float(found.center[k]),
            "low": float(found.low[k]),
            "high": float(found.high[k]),
            **shared,
        }
        for k, answer in enumerate(answers or [None])
        if len(values.names)
    ] or [{"answer": None, "value": math.nan, "low": math.nan, "high": math.nan, **shared}]


def _count_clusters(values: AnswerMatrix, here: np.ndarray) -> dict[str, int]:
    names = {"models": "model", "paraphrases": "paraphrase_ix"}
    return {
        what: values.frame[name][here].nunique() if name in values.frame.columns else 0
        for what, name in names.items()
    }


def _category_note(values: AnswerMatrix, here: np.ndarray) -> str:
    n, counts = int(here.sum()), _count_clusters(values, here)
    if n == 0:
        return "no answers"
    if n == 1:
        return "one answer: no interval can be given"
    few = [
        f"{count} {what}"
        for what, count in (("models", counts["models"]), ("paraphrases", counts["paraphrases"]))
        if 1 < count < MIN_CLUSTERS
    ]
    return f"only {' and '.join(few)}: says little of others" if few else ""


def detectable(groups: Mapping[str, Sequence[str]], paraphrases: int, samples: int) -> str:
    """Describe the smallest difference of shares that a run can detect, before it is paid for.

    For shares near a half, the worst case, by a two-sided z-test of the two smallest groups at 5 %
    over all comparisons (Bonferroni's, which Holm's is never worse than), with 80 % power.
    Paraphrases and models are assumed to be equal; if they differ, the power is lower.

    Args:
        groups: Name to models.
        paraphrases: Number of paraphrases of the question.
        samples: Number per paraphrase and model.
    """
    count, sizes = len(groups), sorted(len(m) * paraphrases * samples for m in groups.values())
    head = f"{pluralize(count, 'group')}, {_describe_sample_size(paraphrases, samples)}"
    if count == 0 or sizes[0] == 0:
        return f"{head}: nothing is asked"
    if count == 1:
        half = NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / 2) / math.sqrt(4 * sizes[0])
        assumption = _describe_assumption(groups)
        return f"{head}: shares will be known to within {_round_up(half)} (95 %, {assumption})"
    comparisons = math.comb(count, 2)
    least = smallest_difference(sizes[0], sizes[1], comparisons)
    assumption = f"5 %, {pluralize(comparisons, 'comparison')}; {_describe_assumption(groups)}"
    if least >= 1:
        return f"{head}: too few answers to show a difference of shares ({assumption})"
    return (
        f"{head}: differences of shares from {_round_up(least)} up will be seen in 4 of 5 runs "
        f"({assumption})"
    )


def smallest_difference(first: int, second: int, comparisons: int = 1) -> float:
    """Return the smallest difference of two shares around a half detected with 80 % power.

    Args:
        first: Answers of one.
        second: Answers of the other.
        comparisons: Divisor of the level of 5 %.
    """
    level, power = (
        NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / 2 / comparisons),
        NormalDist().inv_cdf(POWER),
    )
    each = (1 / first + 1 / second) / 2
    least = 0.0
    for _ in range(50):
        # Under the alternative the shares are (1 ± least) / 2, whose variance is below that of two
        # halves.
        apart = max(0.0, 0.5 - least**2 / 2)
        least = min(1.0, (level * math.sqrt(0.5) + power * math.sqrt(apart)) * math.sqrt(each))
    return least


def _describe_sample_size(paraphrases: int, samples: int) -> str:
    each = " each" if paraphrases > 1 else ""
    return f"{pluralize(paraphrases, 'paraphrase')} x {pluralize(samples, 'sample')}{each}"


def _describe_assumption(groups: Mapping[str, Sequence[str]]) -> str:
    shared = any(set(a) & set(b) for a, b in combinations(groups.values(), 2))
    several = any(len(models) > 1 for models in groups.values())
    assumption = "models and paraphrases alike" if several else "paraphrases alike"
    return f"{assumption}; some models are in several groups" if shared else assumption


def _round_up(value: float) -> str:
    """Format with two decimals, rounded up."""
    return f"{math.ceil(value * 100 - 1e-9) / 100:.2f}"
