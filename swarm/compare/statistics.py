"""Statistics of an experiment: intervals, tests of pairs of groups, and what a run can show."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from swarm._util.terminal import pluralize
from swarm.compare.answer_values import (
    CLUSTER_COLUMNS,
    AnswerMatrix,
    read_answers,
    to_countable,
)
from swarm.errors import InvalidArgument
from swarm.stats.intervals import MIN_CLUSTERS, bootstrap_intervals, t_quantile
from swarm.stats.significance import (
    bootstrap_mean,
    holm_correction,
    make_generator,
    wilson_interval,
)

MIN_UNITS = 4
"""Minimum number of paraphrases on each side, none of them on both, to compare them as units."""

PARAPHRASES = 8
"""Minimum number of shared paraphrases for a difference that generalizes over paraphrases."""

NUM_PERMUTATIONS = 5_000

MAX_EXACT_ROWS = 200
"""With more rows, permuted sums are drawn from their normal limit."""

POWER, SIGNIFICANCE_LEVEL = 0.8, 0.05


# Intervals


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
    *,
    selected_categories: Sequence[Any] | None = None,
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
) -> pd.DataFrame:
    """Return each category's shares of answers, mean, or mean probabilities, with 95 % intervals.

    Of more than 50 different answers the 50 most frequent are separate, unless some are selected;
    `[OTHER]` is the rest, and `[UNSEEN]` the probability of tokens that were not reported. Models
    and paraphrases are resampled before the samples within them
    (`swarm.stats.intervals.bootstrap_intervals`).

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
    codes = values.cluster_codes([name for name in CLUSTER_COLUMNS if name != category_column])
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


# Tests


class GroupDifference(NamedTuple):
    """Test result of two categories.

    Attributes:
        difference: The first minus the second; for all answers the total variation distance.
        low, high: Its 95 % interval; NaN if there is none.
        p: Two-sided; NaN if nothing can be tested.
        test: Name of the test.
        note: Caveats.
    """

    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    test: str = "none"
    note: str = ""


class ComparableRows(NamedTuple):
    """The rows of two categories that can be compared.

    Attributes:
        values: [N, K].
        first: [N] whether a row is of the first category.
        strata: [N] integers; rows of one stratum answer the same question, and both sides have
            some.
        paraphrases: [N] integers.
        shared: Number of paraphrases that both answered.
        units: [N] the models, if each side has several exclusive ones, or else the paraphrases if
            none is on both sides; `None` otherwise.
        unit: Kind of the units: "models" or "paraphrases".
        shares: Whether the values are 0 or 1.
        note: Omitted rows and other caveats.
    """

    values: np.ndarray
    first: np.ndarray
    strata: np.ndarray
    paraphrases: np.ndarray
    shared: int
    units: np.ndarray | None
    unit: str
    shares: bool
    note: str


def pairwise(
    df: pd.DataFrame,
    answer_column: str = "answer",
    category_column: str = "group",
    answer: Any = None,
    selected_categories: Sequence[Any] | None = None,
) -> pd.DataFrame:
    """Test each pair of categories: its difference with a 95 % interval, and Holm's p value.

    Compared are the means of a numeric column, the share (or token probability) of `answer`, or,
    without `answer`, all shares at once. The test depends on what the two have in common:

    - Several models on each side, none of them on both: Welch's t-test of the models' means (for
      all answers: models are permuted), so that it generalizes to other models of such groups.
    - Else 8 or more paraphrases that both answered: the signs of the paraphrases' differences are
      flipped, so that it generalizes to other paraphrases too.
    - Fewer: answers are permuted within each paraphrase, so that it is valid for these alone, which
      is noted: such an interval covers the difference for other wordings in less than 95 %.
    - None in common, as with categories of paraphrases: Welch's test of the paraphrases' means from
      4 on each side, else answers are permuted.

    Each paraphrase has equal weight. Questions that only one of the two answered are left out, and
    noted.

    Returns:
        "a", "b", "answer", "difference" (a minus b; for all answers the total variation distance,
        with a note of its size by chance alone), "low", "high", "p", "p_holm" (corrected over all
        rows), "n_a", "n_b", "test", "note"; a row for each pair.

    Raises:
        InvalidArgument: A column, category or answer does not exist.
    """
    chosen = None if answer is None else [answer]
    values = read_answers(df, answer_column, category_column, selected_categories, chosen)
    if answer is not None and values.names[:1] != [to_countable(answer)]:
        raise InvalidArgument(
            f"answer: no row has the answer {answer!r} in the column {answer_column}"
        )
    label = "mean" if values.kind == "mean" else "all answers" if answer is None else answer
    rows = []
    for i, j in combinations(range(len(values.categories)), 2):
        both = match_rows(values, i, j, category_column)
        sizes = {"n_a": int(both.first.sum()), "n_b": int((~both.first).sum())}
        found = compare_pair(both, chosen=answer is not None)._asdict()
        names = {"a": values.categories[i], "b": values.categories[j], "answer": label}
        rows.append({**names, **found, **sizes})
    order = "a b answer difference low high p p_holm n_a n_b test note".split()
    table = pd.DataFrame(rows, columns=order)
    table["p_holm"] = holm_correction(table["p"].tolist())
    return table


def match_rows(values: AnswerMatrix, i: int, j: int, category_column: str) -> ComparableRows:
    """Return the comparable rows of the i-th and the j-th category."""
    rows = np.isin(values.category, (i, j))
    first = values.category[rows] == i

    def read_codes(name: str) -> np.ndarray:
        # All 0 if the column does not exist, or is the one compared.
        codes = values.cluster_codes([name] if name != category_column else [])
        return codes[0][rows] if codes else np.zeros(int(rows.sum()), dtype=int)

    models, paraphrases = read_codes("model"), read_codes("paraphrase_ix")
    common = set(paraphrases[first]) & set(paraphrases[~first])
    sides = set(models[first]), set(models[~first])
    strata = paraphrases if common else np.zeros_like(paraphrases)
    if sides[0] == sides[1]:
        strata = strata * (int(models.max(initial=0)) + 1) + models
    both = np.isin(strata, np.intersect1d(strata[first], strata[~first]))
    units, unit = None, ""
    if not sides[0] & sides[1] and min(map(len, sides)) > 1:
        units, unit = models, "models"
    elif not common and min(len(set(paraphrases[x])) for x in (first, ~first)) >= MIN_UNITS:
        units, unit = paraphrases, "paraphrases"
    notes = []
    if not both.all():
        notes.append(f"{int((~both).sum())} answers to what only one was asked left out")
    if sides[0] & sides[1] and sides[0] != sides[1]:
        notes.append("a model is on both sides")
    elif unit != "models" and max(map(len, sides)) > 1:
        notes.append("holds for these models")
    told = category_column != "paraphrase_ix" and "paraphrase_ix" in values.frame.columns
    if told and units is None and 0 < (count := len(common)) < PARAPHRASES:
        few = f"only {pluralize(count, 'paraphrase')}: too narrow an interval for other wordings"
        notes.append(few)
    return ComparableRows(
        values.matrix[rows][both],
        first[both],
        strata[both],
        paraphrases[both],
        len(common),
        None if units is None else units[both],
        unit,
        values.kind == "shares",
        "; ".join(notes),
    )


def compare_pair(pair: ComparableRows, chosen: bool = False) -> GroupDifference:
    """Test one pair.

    Args:
        chosen: Only the first column is of interest; the others are all remaining answers.
    """
    if not pair.first.any() or pair.first.all():
        return GroupDifference(note="one side has no answers to the same")
    if len(pair.first) == 2:
        gain = pair.values[pair.first][0] - pair.values[~pair.first][0]
        value = float(gain[0] if chosen or len(gain) == 1 else np.abs(gain).sum() / 2)
        return GroupDifference(value, note="one answer each: nothing to test")
    if pair.units is not None:
        found = _test_units(pair, pair.units, chosen)
    elif pair.shared >= PARAPHRASES:
        found = _test_paraphrases(pair, chosen)
    else:
        found = _test_answers(pair, chosen)
    return found._replace(note="; ".join(filter(None, [found.note, pair.note])))


def _test_answers(pair: ComparableRows, chosen: bool) -> GroupDifference:
    found = stratified_differences(pair.values, pair.first, pair.strata)
    drawn = permute_differences(pair.values, pair.first, pair.strata, pair.shares)
    ends = newcombe_interval(pair) if pair.shares else student_interval(pair)
    strata = "" if pair.shared < 2 else f" within {pair.shared} paraphrases"
    return _build_difference(found, drawn, ends, pair, chosen, f"permutation of answers{strata}")


def _test_paraphrases(pair: ComparableRows, chosen: bool) -> GroupDifference:
    places = [pair.paraphrases == code for code in np.unique(pair.paraphrases)]
    gains = np.array(
        [stratified_differences(pair.values[p], pair.first[p], pair.strata[p]) for p in places]
    )
    found, low, high = bootstrap_intervals(gains)
    if pair.shares:
        least = newcombe_interval(pair)
        low, high = np.minimum(low, least[0]), np.maximum(high, least[1])
    signs = 2.0 * make_generator(2).integers(0, 2, size=(NUM_PERMUTATIONS, len(gains))) - 1.0
    test = f"signs of {len(gains)} paraphrases' differences"
    return _build_difference(found, signs @ gains / len(gains), (low, high), pair, chosen, test)


def _test_units(pair: ComparableRows, units: np.ndarray, chosen: bool) -> GroupDifference:
    # The means of each model or paraphrase, with equal weights of paraphrases.
    places = [units == unit for unit in np.unique(units)]
    means = np.array([_stratified_mean(pair.values, pair.strata, place) for place in places])
    first = np.array([bool(pair.first[place][0]) for place in places])
    sizes = f"{first.sum()} and {(~first).sum()} {pair.unit}"
    if chosen or means.shape[1] == 1:
        value, low, high, p = welch_test(means[first, 0], means[~first, 0])
        if not math.isnan(p):
            return GroupDifference(value, low, high, p, f"Welch's t of {sizes}")
    none = np.zeros(len(means), dtype=int)
    drawn = permute_differences(means, first, none, shares=False)
    found = stratified_differences(means, first, none)
    nothing = np.full(means.shape[1], math.nan)
    test = f"permutation of {sizes}"
    difference = _build_difference(found, drawn, (nothing, nothing), pair, chosen, test)
    least = 1 / math.comb(len(first), int(first.sum()))
    note = f"no p value below {2 * least:.2g} is possible with so few" if least > 0.01 else ""
    return difference._replace(note="; ".join(filter(None, [difference.note, note])))


def _build_difference(
    found: np.ndarray,
    drawn: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    pair: ComparableRows,
    chosen: bool,
    test: str,
) -> GroupDifference:
    """Return the difference of one column, or the total variation distance of all."""
    if chosen or len(found) == 1:
        p = permutation_p_value(found[:1], drawn[:, :1], np.ones(1))
        return GroupDifference(float(found[0]), float(ends[0][0]), float(ends[1][0]), p, test)
    p = permutation_p_value(found, drawn, pair.values.mean(axis=0))
    chance = float(np.abs(drawn).sum(axis=1).mean() / 2)
    note = f"chance alone makes it about {chance:.2f}"
    return GroupDifference(float(np.abs(found).sum() / 2), p=p, test=test, note=note)


def _stratified_mean(values: np.ndarray, strata: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Return the [K] means of some of the rows; strata weigh equally."""
    places = [(strata == s) & side for s in np.unique(strata[side])]
    mean: np.ndarray = np.mean([values[place].mean(axis=0) for place in places], axis=0)
    return mean


def stratified_differences(values: np.ndarray, first: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Return [K] means of the first rows minus those of the others; strata weigh equally."""
    places = [strata == s for s in np.unique(strata)]
    gains = [values[p & first].mean(axis=0) - values[p & ~first].mean(axis=0) for p in places]
    mean: np.ndarray = np.mean(gains, axis=0)
    return mean


def permute_differences(
    values: np.ndarray, first: np.ndarray, strata: np.ndarray, shares: bool
) -> np.ndarray:
    """Return [R, K] values of `stratified_differences` with labels permuted within strata.

    Args:
        shares: The K columns of each row are one 1 and zeros.
    """
    generator = make_generator(1)
    exact = len(values) <= MAX_EXACT_ROWS
    deal = _permute_counts if shares else _permute_rows if exact else _sample_normal
    places = [strata == s for s in np.unique(strata)]
    drawn = np.array([deal(values[p], int(first[p].sum()), generator) for p in places])
    return drawn.mean(axis=0)


def _permute_counts(values: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    totals = values.sum(axis=0).astype(int)
    drawn = generator.multivariate_hypergeometric(
        totals, size, NUM_PERMUTATIONS, method="marginals"
    )
    return drawn / size - (totals - drawn) / (len(values) - size)


def _permute_rows(values: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    n = len(values)
    order = np.argsort(generator.random((NUM_PERMUTATIONS, n)), axis=1)
    weights = np.full((NUM_PERMUTATIONS, n), -1 / (n - size))
    np.put_along_axis(weights, order[:, :size], 1 / size, axis=1)
    return weights @ values


def _sample_normal(values: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    n, k = values.shape
    # The covariance of a difference of means of n rows drawn without replacement.
    left = values - values.mean(axis=0)
    covariance = left.T @ left / max(n - 1, 1) * (1 / size + 1 / (n - size))
    return generator.multivariate_normal(np.zeros(k), covariance, NUM_PERMUTATIONS, method="eigh")


def permutation_p_value(found: np.ndarray, drawn: np.ndarray, scale: np.ndarray) -> float:
    """Return the p value of a difference [K], given [R, K] differences by chance.

    The statistic is the sum of squares, each divided by the scale [K] (for shares: chi square's).
    """
    scale = np.where(scale > 0, scale, 1.0)
    extreme = (drawn**2 / scale).sum(axis=1) >= (found**2 / scale).sum() * (1 - 1e-9) - 1e-15
    return float((extreme.sum() + 1) / (len(drawn) + 1))


def newcombe_interval(pair: ComparableRows) -> tuple[np.ndarray, np.ndarray]:
    """Return [K] ends of differences of shares by Newcombe's method 10.

    Newcombe 1998, Statistics in Medicine 17:873. Each paraphrase has equal weight; as shares differ
    between paraphrases, the interval is slightly conservative.
    """
    a, b = (_stratified_mean(pair.values, pair.strata, side) for side in (pair.first, ~pair.first))
    low_a, high_a = wilson_interval(a, int(pair.first.sum()))
    low_b, high_b = wilson_interval(b, int((~pair.first).sum()))
    down = np.sqrt((a - low_a) ** 2 + (high_b - b) ** 2)
    up = np.sqrt((high_a - a) ** 2 + (b - low_b) ** 2)
    return a - b - down, a - b + up


def student_interval(pair: ComparableRows) -> tuple[np.ndarray, np.ndarray]:
    """Return [K] Student ends of differences of means over strata; NaN if a side has one row."""
    strata, difference, variance, freedom = np.unique(pair.strata), 0.0, 0.0, 0
    for stratum in strata:
        for side, sign in ((pair.first, 1), (~pair.first, -1)):
            rows = pair.values[(pair.strata == stratum) & side]
            difference = difference + sign * rows.mean(axis=0) / len(strata)
            each = rows.var(axis=0, ddof=1) if len(rows) > 1 else math.nan * rows[0]
            variance = variance + each / len(rows) / len(strata) ** 2
            freedom += len(rows) - 1
    half = t_quantile(max(freedom, 1)) * np.sqrt(variance)
    return difference - half, difference + half


def welch_test(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float, float]:
    """Apply Welch's t-test (1947, Biometrika 34:28): difference, its 95 % interval, two-sided p.

    All but the difference are NaN if nothing varies.
    """
    value = float(first.mean() - second.mean())
    if first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second) < 1e-24:
        return value, math.nan, math.nan, math.nan
    from scipy import stats

    found = stats.ttest_ind(first, second, equal_var=False)
    ends = found.confidence_interval()
    return value, float(ends.low), float(ends.high), float(found.pvalue)


# Before a run


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
    each = " each" if paraphrases > 1 else ""
    asked = f"{pluralize(paraphrases, 'paraphrase')} x {pluralize(samples, 'sample')}{each}"
    head = f"{pluralize(count, 'group')}, {asked}"
    several = any(len(models) > 1 for models in groups.values())
    assumed = "models and paraphrases alike" if several else "paraphrases alike"
    if any(set(a) & set(b) for a, b in combinations(groups.values(), 2)):
        assumed += "; some models are in several groups"
    if count == 1:
        half = NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / 2) / math.sqrt(4 * sizes[0])
        return f"{head}: shares will be known to within {_round_up(half)} (95 %, {assumed})"
    comparisons = math.comb(count, 2)
    least = smallest_difference(sizes[0], sizes[1], comparisons)
    assumed = f"(5 %, {pluralize(comparisons, 'comparison')}; {assumed})"
    if least >= 1:
        return f"{head}: too few answers to show a difference of shares {assumed}"
    seen = f"differences of shares from {_round_up(least)} up will be seen in 4 of 5 runs"
    return f"{head}: {seen} {assumed}"


def smallest_difference(first: int, second: int, comparisons: int = 1) -> float:
    """Return the smallest difference of two shares around a half detected with 80 % power.

    Args:
        first: Answers of one.
        second: Answers of the other.
        comparisons: Divisor of the level of 5 %.
    """
    normal = NormalDist()
    level, power = normal.inv_cdf(1 - SIGNIFICANCE_LEVEL / 2 / comparisons), normal.inv_cdf(POWER)
    each = (1 / first + 1 / second) / 2
    least = 0.0
    for _ in range(50):
        # Under the alternative the shares are (1 ± least) / 2, whose variance is below that of two
        # halves.
        apart = max(0.0, 0.5 - least**2 / 2)
        least = min(1.0, (level * math.sqrt(0.5) + power * math.sqrt(apart)) * math.sqrt(each))
    return least


def _round_up(value: float) -> str:
    """Format with two decimals, rounded up."""
    return f"{math.ceil(value * 100 - 1e-9) / 100:.2f}"
