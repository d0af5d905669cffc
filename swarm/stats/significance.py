"""Confidence intervals of means, paired tests, and votes.

scipy computes what it has: exact binomial tests and intervals, the bootstrap of a mean. It lacks
intervals that invert a sign-flip test, and Holm's method.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Z95 = 1.959963984540054
"""Half the width of the central 95 % of a standard normal distribution, in standard deviations."""

RESAMPLES, SIGN_FLIPS_PER_BATCH = 10_000, 500

MAX_LATTICE_SCALE = 200
"""Finest step to which an exact sign-flip test rounds differences, per unit or per largest."""

UTILITY_RESAMPLES = 1_000
"""Fewer resamples: each one calls a task's own utility."""


def make_generator(key: int) -> np.random.Generator:
    """Return a generator that is the same at every call with this key."""
    return np.random.Generator(np.random.Philox(key=key))


class MeanInterval(NamedTuple):
    """A mean with its 95 % confidence interval, in the scores' unit, from n scores."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] n={self.n}"


def mean_interval(values: Sequence[float], signed: bool = False) -> MeanInterval:
    """Return the mean and its 95 % interval: Wilson's for right or wrong, else the bootstrap's.

    Args:
        values: Right is 1 and wrong 0.
        signed: They can be below 0, so that 0 and 1 are not wrong and right even if none is.

    Raises:
        ValueError: There are no values.
    """
    scores = np.asarray(values, dtype=np.float64)
    n = len(scores)
    if n == 0:
        raise ValueError("a mean needs at least one value")
    mean = float(scores.mean())
    if not signed and np.isin(scores, (0.0, 1.0)).all():
        low, high = wilson_interval(np.array(mean), n)
        return MeanInterval(mean, float(low), float(high), n)
    return MeanInterval(mean, *bootstrap_mean(scores), n)


def wilson_interval(share: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Wilson's score intervals (1927, JASA 22:209) of [K] shares among n."""
    scale = 1 + Z95**2 / n
    middle = (share + Z95**2 / (2 * n)) / scale
    half = Z95 / scale * np.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    return np.maximum(0.0, middle - half), np.minimum(1.0, middle + half)


def bootstrap_mean(
    values: np.ndarray,
    generator: np.random.Generator | None = None,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of [n] independent values.

    Args:
        generator: By default the same at every call.
    """
    if len(values) < 2:
        return float(values[0]), float(values[0])
    from scipy import stats

    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        confidence_level=level,
        method="percentile",
        rng=generator or make_generator(0),
    ).confidence_interval
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class PairedTest:
    """A difference on the same items: its mean, 95 % interval, and two-sided p-value."""

    difference: float
    low: float
    high: float
    p: float
    n: int


def paired_test(after: Sequence[float], before: Sequence[float]) -> PairedTest:
    """Compare two models on the same items.

    The p-value is McNemar's exact one if every score is 0 or 1, else that of 10,000 random sign
    flips. The interval inverts the same test: it contains the differences that are not rejected, so
    that it excludes 0 exactly if p is below .05. McNemar's inversion conditions on the number of
    items that differ (Clopper and Pearson, 1934, Biometrika 26:404), and so undercovers (.90 to .92
    in simulations); it is extended to the bootstrap's interval where that is wider. Sign flips
    shift all differences alike; with too few items to reject any difference, the interval ends at
    twice the largest difference of an item.

    Raises:
        ValueError: The two have different lengths, or are empty.
    """
    gains = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    if len(gains) == 0:
        raise ValueError("a paired test needs at least one item")
    if np.isin([*after, *before], (0.0, 1.0)).all():
        low, high, p = _mcnemar_test(int((gains > 0).sum()), int((gains < 0).sum()), len(gains))
        ends = bootstrap_mean(gains)
        wide = min(low, ends[0]), max(high, ends[1])
        # An interval widened over 0 would contradict a p below .05.
        if not wide[0] <= 0 <= wide[1] or p >= 0.05:
            low, high = wide
    else:
        low, high, p = _sign_flip_test(gains)
    return PairedTest(float(gains.mean()), low, high, p, len(gains))


def _mcnemar_test(won: int, lost: int, n: int) -> tuple[float, float, float]:
    """Return interval and p; under the null hypothesis, won and lost are a fair coin."""
    differ = won + lost
    if differ == 0:
        return 0.0, 0.0, 1.0
    from scipy import stats

    found = stats.binomtest(won, differ)
    ends = found.proportion_ci(method="exact")
    scale = differ / n
    return (2 * ends.low - 1) * scale, (2 * ends.high - 1) * scale, float(found.pvalue)


def smallest_gain(items: int, changed: float) -> float | None:
    """Return the smallest gain on `items` items that McNemar's exact test finds at 5 %.

    Args:
        items: Number of items that both models answer, each right or wrong.
        changed: Assumed share of the items that one of the two alone answers right; with fewer
            than six such items no gain is significant, so at least six are assumed.

    Returns:
        The gain as a share of the items; `None` if there are fewer than six items.
    """
    differ = max(6, round(changed * items))
    if differ > items:
        return None
    won = differ // 2
    while _mcnemar_test(won, differ - won, items)[2] >= 0.05:
        won += 1
    return (2 * won - differ) / items


def _sign_flip_test(gains: np.ndarray) -> tuple[float, float, float]:
    generator, count = make_generator(1), len(gains)
    flipped, balance = np.empty(RESAMPLES), np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, SIGN_FLIPS_PER_BATCH):  # all at once may not fit in memory
        rows = slice(start, start + SIGN_FLIPS_PER_BATCH)
        signs = generator.choice((-1.0, 1.0), size=(SIGN_FLIPS_PER_BATCH, count))
        flipped[rows], balance[rows] = (signs * gains).mean(axis=1), signs.mean(axis=1)
    mean = gains.mean()

    def p_at_shift(shift: float) -> float:
        # The tolerance counts a flip of every sign as equal to none despite rounding.
        extreme = np.abs(flipped - shift * balance) >= abs(mean - shift) - 1e-12
        return float((extreme.sum() + 1) / (RESAMPLES + 1))

    def interval_end(direction: int) -> float:
        # With growing distance from the mean fewer flips are as extreme, so p falls on both sides
        # and bisection applies.
        near, far = mean, mean + direction * 2 * np.abs(gains).max()
        if p_at_shift(far) >= 0.05:
            return float(far)
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (middle, far) if p_at_shift(middle) >= 0.05 else (near, middle)
        return float(near)

    return interval_end(-1), interval_end(1), p_at_shift(0.0)


def exact_sign_flip_p(gains: np.ndarray) -> float:
    """Return the two-sided p value of the exact sign-flip test (Fisher's randomisation test).

    Under the null hypothesis each of the n differences had either sign with probability 1/2; p is
    the probability of a sum at least as far from 0. It is computed by convolution, with no lower
    bound other than 2^(1 - n), whereas random flips are bounded by their number. With differences
    of -1, 0 and 1 it is McNemar's exact test.

    Args:
        gains: [n] paired differences. If they are multiples of 1/k for some k up to
            `MAX_LATTICE_SCALE`, as means over k seeds of right and wrong are, p is exact; others
            are rounded to 1/`MAX_LATTICE_SCALE` of the largest.
    """
    largest = float(np.abs(gains).max(initial=0.0))
    if largest == 0:
        return 1.0
    scales = (
        k for k in range(1, MAX_LATTICE_SCALE + 1) if np.allclose(gains * k, np.round(gains * k))
    )
    steps = np.round(gains * next(scales, MAX_LATTICE_SCALE / largest)).astype(int)
    # Chances of the sums from -total to total, total being that of the steps so far.
    chances = np.ones(1)
    for step in np.abs(steps[steps != 0]).tolist():
        half = chances / 2
        chances = np.zeros(len(half) + 2 * step)
        chances[: len(half)] += half
        chances[2 * step :] += half
    total = len(chances) // 2
    far = np.abs(np.arange(-total, total + 1)) >= abs(steps.sum())
    return min(1.0, float(chances[far].sum()))


def holm_correction(p: Sequence[float]) -> list[float]:
    """Correct p values by Holm's step-down method (1979, Scand. J. Statist. 6:65); NaN stays."""
    tested = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    corrected, largest = [math.nan] * len(p), 0.0
    for rank, (value, i) in enumerate(tested):
        largest = max(largest, min(1.0, value * (len(tested) - rank)))
        corrected[i] = largest
    return corrected


def resample_utilities(
    utility: Callable[[Sequence[int]], float], groups: Sequence[object]
) -> np.ndarray:
    """Return utilities of 1,000 bootstrap samples of the items, stratified by group.

    Args:
        utility: Returns the utility of the items at these indices.
        groups: Group of each item (for example its part of a mixture).
    """
    generator = make_generator(2)
    names = list(dict.fromkeys(groups))
    members = [np.array([i for i, g in enumerate(groups) if g == name]) for name in names]
    draws = (
        np.concatenate([generator.choice(places, len(places)) for places in members]).tolist()
        for _ in range(UTILITY_RESAMPLES)
    )
    return np.array([utility(places) for places in draws])


def utility_interval(
    utility: Callable[[Sequence[int]], float], groups: Sequence[object]
) -> MeanInterval:
    """Return a utility that is no mean of its items' values, with its bootstrap 95 % interval."""
    low, high = np.quantile(resample_utilities(utility, groups), (0.025, 0.975))
    n = len(groups)
    return MeanInterval(utility(range(n)), float(low), float(high), n)


def utility_test(gain: Callable[[Sequence[int]], float], groups: Sequence[object]) -> PairedTest:
    """Test a difference of two utilities on the same items; the p-value is the bootstrap's."""
    draws = resample_utilities(gain, groups)
    low, high = np.quantile(draws, (0.025, 0.975))
    tail = min((draws <= 0).sum(), (draws >= 0).sum())
    p = min(1.0, 2 * (int(tail) + 1) / (len(draws) + 1))
    return PairedTest(gain(range(len(groups))), float(low), float(high), p, len(groups))


def plurality_vote(answers: Sequence[str | None], weights: Sequence[float]) -> str | None:
    """Return the most frequent answer; ties go to the largest summed weight.

    Voters without an answer do not vote; the first of still equal answers wins.
    """
    votes: dict[str, tuple[int, float]] = {}
    for answer, utility in zip(answers, weights, strict=True):
        if answer is not None:
            count, weight = votes.get(answer, (0, 0.0))
            votes[answer] = count + 1, weight + utility
    return max(votes, key=votes.__getitem__, default=None)


def interval_over_seeds(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean over seeds and items, by the bootstrap of both.

    Few seeds represent others poorly: with one, it is the interval over items alone.

    Args:
        values: [S, n], each seed's values of the same items.
    """
    generator, (seeds, items) = make_generator(3), values.shape
    means = []
    for _ in range(2_000):
        drawn = values[generator.integers(seeds, size=seeds)]
        means.append(drawn[:, generator.integers(items, size=items)].mean())
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
