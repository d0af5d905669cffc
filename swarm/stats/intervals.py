"""Intervals of means whose rows are clustered: by models, by paraphrases, and as samples."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from swarm.stats.significance import Z95, make_generator, wilson_interval

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
    # Rows that share every cluster are samples of one cell.
    cells = np.zeros(n, dtype=int)
    for codes in several:
        cells = np.unique(cells * (codes.max() + 1) + codes, return_inverse=True)[1]
    generator = make_generator(0)
    drawn, variance = _resample_samples(values, cells, generator)
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


def _sum_clusters(values: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the clusters' sums [C, K], sizes [C], and the rows sorted by cluster with [C] starts.

    Args:
        codes: [N], from 0, each of which occurs.
    """
    sizes = np.bincount(codes)
    order = np.argsort(codes, kind="stable")
    starts = np.cumsum(sizes) - sizes
    return np.add.reduceat(values[order], starts, axis=0), sizes, order, starts


def _resample_samples(
    values: np.ndarray, cells: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the means' deviations [R, K] by the draw of samples, and their variances [K]."""
    n, k = values.shape
    sums, sizes, order, starts = _sum_clusters(values, cells)
    left = values - (sums / sizes[:, None])[cells]
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
    values: np.ndarray, codes: np.ndarray, variance: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Return the means' deviations [R, K] by the draw of clusters alone."""
    sums, sizes, *_ = _sum_clusters(values, codes)
    count = len(sizes)
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


def t_quantile(freedom: float) -> float:
    """Return the quantile that bounds the central 95 % of Student's t."""
    from scipy import special

    return float(special.stdtrit(freedom, 0.975))
