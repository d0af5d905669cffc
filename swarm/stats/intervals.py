"""Intervals of means and differences with clustered rows: models, paraphrases, and samples."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from swarm.stats.significance import Z95, ComparableRows, utility_interval, wilson_interval

NUM_RESAMPLES = 2_000

MAX_RESAMPLED_ROWS = 100
"""With more rows, resampled means are drawn from their normal limit."""

MIN_CLUSTERS = 5
"""With fewer clusters, their spread is widened as for this many."""


class ColumnIntervals(NamedTuple):
    """[K] means with their 95 % intervals; NaN ends where none can be given."""

    center: np.ndarray
    low: np.ndarray
    high: np.ndarray


def bootstrap_intervals(
    values: np.ndarray, clusters: Sequence[np.ndarray] = (), kind: str = "mean"
) -> ColumnIntervals:
    """Return means of columns with 95 % intervals by a hierarchical bootstrap.

    A mean varies by the draw of models, of paraphrases, and of samples within them. Each is
    resampled: the clusters' deviations from the mean, shrunk by the deviation expected from samples
    alone (so that this part is not counted twice), and the samples within each cluster. Rows within
    a cluster are correlated; resampling them as independent gives intervals that are far too
    narrow: Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640.

    The bootstrap of clusters' effects: Field and Welsh 2007, "Bootstrapping clustered data", JRSS B
    69:369; the shrinking: Davison and Hinkley 1997, "Bootstrap Methods and their Application", 3.8;
    the spread of few clusters is widened as Student's t is, as in Hesterberg 2015, arXiv 1411.5279.

    Args:
        values: [N, K].
        clusters: For each way to cluster, [N] integers; crossed ones are allowed.
        kind: "shares" for columns of 0 and 1 (their intervals are nowhere narrower than Wilson's
            for the same number of answers), "probabilities" for values within 0 and 1, or "mean".
    """
    n, k = values.shape
    nothing = np.full(k, math.nan)
    if n < 2:
        return ColumnIntervals(values.mean(axis=0) if n else nothing, nothing, nothing)
    center = values.mean(axis=0)
    several = _distinct_clusterings(clusters)
    if kind == "shares" and not several:
        return ColumnIntervals(center, *wilson_interval(center, n))
    generator = np.random.Generator(np.random.Philox(key=0))
    drawn, variance = _resample_samples(values, _cell_codes(several, n), generator)
    for codes in several:
        drawn = drawn + _resample_clusters(values, codes, variance, generator)
    low, high = center + np.quantile(drawn, (0.025, 0.975), axis=0)
    if kind == "shares":
        narrow = wilson_interval(center, n)
        low, high = np.minimum(low, narrow[0]), np.maximum(high, narrow[1])
    if kind != "mean":
        low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
    return ColumnIntervals(center, low, high)


def _distinct_clusterings(clusters: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the clusterings with several clusters, without duplicates."""
    found: dict[bytes, np.ndarray] = {}
    for codes in clusters:
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        if len(first) > 1:
            # Renumber in order of appearance, so that two numberings of one partition are equal.
            renumbered = np.argsort(np.argsort(first))[inverse]
            found.setdefault(renumbered.tobytes(), renumbered)
    return list(found.values())


def _cell_codes(clusters: Sequence[np.ndarray], n: int) -> np.ndarray:
    """Return [N] cell indices; rows that share every cluster are samples of one cell."""
    cells = np.zeros(n, dtype=int)
    for codes in clusters:
        cells = np.unique(cells * (codes.max() + 1) + codes, return_inverse=True)[1]
    return cells


def _resample_samples(
    values: np.ndarray, cells: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the means' deviations [R, K] by the draw of samples, and their variances [K]."""
    n, k = values.shape
    sizes = np.bincount(cells)
    order = np.argsort(cells, kind="stable")
    starts = np.cumsum(sizes) - sizes
    means = np.add.reduceat(values[order], starts, axis=0) / sizes[:, None]
    left = values - means[cells]
    # Each sample's square, corrected for the cell's lost degree of freedom.
    weight = np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1), 0.0)[cells]
    variance = (weight[:, None] * left**2).sum(axis=0) / n**2
    if n > MAX_RESAMPLED_ROWS:
        return generator.normal(size=(NUM_RESAMPLES, k)) * np.sqrt(variance), variance
    inside = (generator.random((NUM_RESAMPLES, n)) * sizes[cells[order]]).astype(int)
    drawn = order[starts[cells[order]] + inside] + n * np.arange(NUM_RESAMPLES)[:, None]
    times = np.bincount(drawn.reshape(-1), minlength=NUM_RESAMPLES * n).reshape(NUM_RESAMPLES, n)
    known = (left**2).sum(axis=0) / n**2
    wider = np.sqrt(variance / np.maximum(known, 1e-300)) * student_widening(n - len(sizes) + 1)
    return times @ left / n * wider, variance


def _resample_clusters(
    values: np.ndarray,
    codes: np.ndarray,
    variance: np.ndarray,
    generator: np.random.Generator,
) -> np.ndarray:
    """Return the means' deviations [R, K] by the draw of clusters alone."""
    sizes = np.bincount(codes)
    count = len(sizes)
    order = np.argsort(codes, kind="stable")
    sums = np.add.reduceat(values[order], np.cumsum(sizes) - sizes, axis=0)
    away = sums / sizes[:, None] - values.mean(axis=0)
    spread = (away**2).sum(axis=0) / (count - 1)
    # A cluster has 1 / count of the samples, so its mean has count times the variance.
    own = np.clip(1 - count * variance / np.maximum(spread, 1e-300), 0.0, 1.0)
    times = generator.multinomial(count, [1 / count] * count, size=NUM_RESAMPLES) * sizes
    drawn: np.ndarray = times @ away / times.sum(axis=1, keepdims=True)
    return drawn * np.sqrt(own * count / (count - 1)) * student_widening(count)


def student_widening(count: int) -> float:
    """Return the ratio of Student's central 95 % width to the normal one's, for `count` values."""
    return t_quantile(max(count, MIN_CLUSTERS) - 1) / Z95


IntervalEnds = tuple[np.ndarray, np.ndarray]


def newcombe_interval(pair: ComparableRows) -> IntervalEnds:
    """Return [K] ends of differences of shares by Newcombe's method 10.

    Newcombe 1998, Statistics in Medicine 17:873. Each paraphrase has equal weight; as shares differ
    between paraphrases, the interval is slightly conservative.
    """
    first, second = (_stratified_mean(pair, side) for side in (pair.first, ~pair.first))
    low_a, high_a = wilson_interval(first, int(pair.first.sum()))
    low_b, high_b = wilson_interval(second, int((~pair.first).sum()))
    down = np.sqrt((first - low_a) ** 2 + (high_b - second) ** 2)
    up = np.sqrt((high_a - first) ** 2 + (second - low_b) ** 2)
    return first - second - down, first - second + up


def _stratified_mean(pair: ComparableRows, side: np.ndarray) -> np.ndarray:
    places = [(pair.strata == s) & side for s in np.unique(pair.strata)]
    return np.mean([pair.values[place].mean(axis=0) for place in places], axis=0)


def student_interval(pair: ComparableRows) -> IntervalEnds:
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


def unit_means(pair: ComparableRows) -> tuple[np.ndarray, np.ndarray]:
    """Return [U, K] the units' means, with equal weights of paraphrases, and which are first."""
    assert pair.units is not None
    means, first = [], []
    for unit in np.unique(pair.units):
        here = pair.units == unit
        strata = pair.strata[here]
        cells = [pair.values[here][strata == s].mean(axis=0) for s in np.unique(strata)]
        means.append(np.mean(cells, axis=0))
        first.append(bool(pair.first[here][0]))
    return np.array(means), np.array(first)


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


def t_quantile(freedom: float) -> float:
    """Return the quantile that bounds the central 95 % of Student's t."""
    from scipy import special

    return float(special.stdtrit(freedom, 0.975))


class Average(NamedTuple):
    """A mean of a judge's scores with its 95 % interval.

    Attributes:
        mean: `None` without values.
        low, high: The bootstrap's over questions; `None` with fewer than two questions.
        n: Values in the mean.
        unparsed: Verdicts that could not be parsed, which are in none of the other numbers.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int
    unparsed: int = 0

    def __str__(self) -> str:
        if self.mean is None:
            return f"- n=0{self._unparsed_note}"
        within = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.mean:.2f}{within} n={self.n}{self._unparsed_note}"

    @property
    def _unparsed_note(self) -> str:
        return f", {self.unparsed} unparsed" if self.unparsed else ""

    def to_row(self) -> dict[str, Any]:
        """Return a row for JSON and CSV."""
        return {"average": self.mean, **{key: getattr(self, key) for key in self._fields[1:]}}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Average":
        """Return the average of a row of `to_row`, which may have other fields."""
        return cls(row["average"], *(row[key] for key in cls._fields[1:]))


def average_scores(questions: Sequence[Sequence[float | None]]) -> Average:
    """Return the mean of all values of all questions.

    A question's values (of its turns, or its skills) are correlated, so the bootstrap draws
    questions instead of values.

    Args:
        questions: Values of each question; `None` is one that could not be parsed.
    """
    unparsed = sum(value is None for values in questions for value in values)
    read = [[value for value in values if value is not None] for values in questions]
    read = [values for values in read if values]
    if not read:
        return Average(None, None, None, 0, unparsed)
    sums = np.array([sum(values) for values in read], dtype=np.float64)
    counts = np.array([len(values) for values in read])
    n = int(counts.sum())
    if len(read) == 1:
        return Average(float(sums[0] / n), None, None, n, unparsed)

    def mean_of(places: Sequence[int]) -> float:
        return float(sums[places].sum() / counts[places].sum())

    found = utility_interval(mean_of, [""] * len(read))
    return Average(found.mean, found.low, found.high, n, unparsed)
