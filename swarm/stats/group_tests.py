"""Pairwise tests of groups or models, corrected for multiple comparisons."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from swarm.errors import InvalidArgument
from swarm.stats import intervals, significance
from swarm.stats.answer_values import read_answers, to_countable
from swarm.stats.significance import PARAPHRASES, ComparableRows, match_rows

if TYPE_CHECKING:
    import pandas as pd

ALL_ANSWERS = "all answers"


class GroupDifference(NamedTuple):
    """Test result of two categories.

    Attributes:
        difference: The first minus the second; for all answers the total variation distance.
        low: Lower end of its 95 % interval; NaN if there is none.
        high: Upper end, likewise.
        p: Two-sided; NaN if nothing can be tested.
        test: Name of the test.
        note: Caveats.
    """

    difference: float
    low: float
    high: float
    p: float
    test: str
    note: str = ""


UNTESTED = GroupDifference(math.nan, math.nan, math.nan, math.nan, "none")


def pairwise(
    df: "pd.DataFrame",
    answer_column: str = "answer",
    category_column: str = "group",
    answer: Any = None,
    selected_categories: Sequence[Any] | None = None,
) -> "pd.DataFrame":
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
    import pandas as pd

    values = read_answers(
        df,
        answer_column,
        category_column,
        selected_categories,
        None if answer is None else [answer],
    )
    if answer is not None and values.names[:1] != [to_countable(answer)]:
        raise InvalidArgument(
            f"answer: no row has the answer {answer!r} in the column {answer_column}"
        )
    label = "mean" if values.kind == "mean" else ALL_ANSWERS if answer is None else answer
    rows = []
    for i, j in combinations(range(len(values.categories)), 2):
        both = match_rows(values, i, j, category_column)
        sizes = {"n_a": int(both.first.sum()), "n_b": int((~both.first).sum())}
        found = compare_pair(both, chosen=answer is not None)._asdict()
        names = {"a": values.categories[i], "b": values.categories[j], "answer": label}
        rows.append({**names, **found, "p_holm": math.nan, **sizes})
    order = "a b answer difference low high p p_holm n_a n_b test note".split()
    table = pd.DataFrame(rows, columns=order)
    table["p_holm"] = significance.holm_correction(table["p"].tolist())
    return table


def compare_pair(pair: ComparableRows, chosen: bool = False) -> GroupDifference:
    """Test one pair.

    Args:
        chosen: Only the first column is of interest; the others are all remaining answers.
    """
    if not pair.first.any() or pair.first.all():
        return UNTESTED._replace(note="one side has no answers to the same")
    if len(pair.first) == 2:
        gain = pair.values[pair.first][0] - pair.values[~pair.first][0]
        value = float(gain[0] if chosen or len(gain) == 1 else np.abs(gain).sum() / 2)
        return UNTESTED._replace(difference=value, note="one answer each: nothing to test")
    if pair.units is not None:
        found = _test_units(pair, chosen)
    elif pair.shared >= PARAPHRASES:
        found = _test_paraphrases(pair, chosen)
    else:
        found = _test_answers(pair, chosen)
    return found._replace(note="; ".join(filter(None, [found.note, pair.note])))


def _test_answers(pair: ComparableRows, chosen: bool) -> GroupDifference:
    found = significance.stratified_differences(pair.values, pair.first, pair.strata)
    drawn = significance.permute_differences(pair.values, pair.first, pair.strata, pair.shares)
    ends = intervals.newcombe_interval(pair) if pair.shares else intervals.student_interval(pair)
    strata = "" if pair.shared < 2 else f" within {pair.shared} paraphrases"
    return _build_difference(found, drawn, ends, pair, chosen, f"permutation of answers{strata}")


def _test_paraphrases(pair: ComparableRows, chosen: bool) -> GroupDifference:
    gains = np.array(
        [
            significance.stratified_differences(
                pair.values[here], pair.first[here], pair.strata[here]
            )
            for here in (pair.paraphrases == code for code in np.unique(pair.paraphrases))
        ]
    )
    found, low, high = intervals.bootstrap_intervals(gains)
    if pair.shares:
        least = intervals.newcombe_interval(pair)
        low, high = np.minimum(low, least[0]), np.maximum(high, least[1])
    test = f"signs of {len(gains)} paraphrases' differences"
    return _build_difference(
        found, significance.flip_gain_signs(gains), (low, high), pair, chosen, test
    )


def _test_units(pair: ComparableRows, chosen: bool) -> GroupDifference:
    assert pair.units is not None
    means, first = intervals.unit_means(pair)
    sizes = f"{first.sum()} and {(~first).sum()} {pair.unit}"
    if chosen or means.shape[1] == 1:
        value, low, high, p = intervals.welch_test(means[first, 0], means[~first, 0])
        if not math.isnan(p):
            return GroupDifference(value, low, high, p, f"Welch's t of {sizes}")
    none = np.zeros(len(means), dtype=int)
    drawn = significance.permute_differences(means, first, none, shares=False)
    found = significance.stratified_differences(means, first, none)
    ends = np.full((2, means.shape[1]), math.nan)
    least = 1 / math.comb(len(first), int(first.sum()))
    difference = _build_difference(
        found, drawn, (ends[0], ends[1]), pair, chosen, f"permutation of {sizes}"
    )
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
        p = significance.permutation_p_value(found[:1], drawn[:, :1], np.ones(1))
        return GroupDifference(float(found[0]), float(ends[0][0]), float(ends[1][0]), p, test)
    p = significance.permutation_p_value(found, drawn, pair.values.mean(axis=0))
    chance = float(np.abs(drawn).sum(axis=1).mean() / 2)
    note = f"chance alone makes it about {chance:.2f}"
    return GroupDifference(float(np.abs(found).sum() / 2), math.nan, math.nan, p, test, note)
