"""Intervals of a difference of two means."""

import math
from typing import TYPE_CHECKING

from swarm.compare.statistics.pairs import ComparableRows

if TYPE_CHECKING:
    import numpy as np

IntervalEnds = tuple["np.ndarray", "np.ndarray"]


def newcombe_interval(pair: ComparableRows) -> IntervalEnds:
    """[K] ends of differences of shares: Newcombe 1998, Statistics in Medicine 17:873, method 10.

    Each paraphrase weighs the same; that shares differ between them makes it a little wide.
    """
    import numpy as np

    from swarm.compare.statistics.resampling import wilson_interval

    first, second = (_stratified_mean(pair, side) for side in (pair.first, ~pair.first))
    low_a, high_a = wilson_interval(first, int(pair.first.sum()))
    low_b, high_b = wilson_interval(second, int((~pair.first).sum()))
    down = np.sqrt((first - low_a) ** 2 + (high_b - second) ** 2)
    up = np.sqrt((high_a - first) ** 2 + (second - low_b) ** 2)
    return first - second - down, first - second + up


def _stratified_mean(pair: ComparableRows, side: "np.ndarray") -> "np.ndarray":
    import numpy as np

    places = [(pair.strata == s) & side for s in np.unique(pair.strata)]
    return np.mean([pair.values[place].mean(axis=0) for place in places], axis=0)


def student_interval(pair: ComparableRows) -> IntervalEnds:
    """[K] ends of differences of means over these strata, Student's; NaN where one has one row."""
    import numpy as np

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


def unit_means(pair: ComparableRows) -> tuple["np.ndarray", "np.ndarray"]:
    """[U, K] the units' means, each paraphrase weighing the same, and whether each is first."""
    import numpy as np

    assert pair.units is not None
    means, first = [], []
    for unit in np.unique(pair.units):
        here = pair.units == unit
        strata = pair.strata[here]
        cells = [pair.values[here][strata == s].mean(axis=0) for s in np.unique(strata)]
        means.append(np.mean(cells, axis=0))
        first.append(bool(pair.first[here][0]))
    return np.array(means), np.array(first)


def welch_test(first: "np.ndarray", second: "np.ndarray") -> tuple[float, float, float, float]:
    """Welch's t-test (1947, Biometrika 34:28): difference, its 95 % interval, two-sided p.

    All but the difference are NaN where nothing varies.
    """
    value = float(first.mean() - second.mean())
    parts = [float(side.var(ddof=1)) / len(side) for side in (first, second)]
    error = math.sqrt(sum(parts))
    if error < 1e-12:
        return value, math.nan, math.nan, math.nan
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (first, second), strict=True)
    )
    half = t_quantile(freedom) * error
    return value, value - half, value + half, t_two_sided_p(abs(value) / error, freedom)


def t_two_sided_p(t: float, freedom: float) -> float:
    """How often Student's t is at least so far from 0, on both sides together."""
    import numpy as np

    # With t = sqrt(freedom) tan(angle) its density is cos(angle) ** (freedom - 1).
    def tail_area(start: float) -> float:
        angles = np.linspace(start, math.pi / 2, 4001)
        heights = np.clip(np.cos(angles), 0.0, None) ** (freedom - 1)
        return float(np.trapezoid(heights, angles))

    return tail_area(math.atan(t / math.sqrt(freedom))) / tail_area(0.0)


def t_quantile(freedom: float) -> float:
    """Within which the central 95 % of Student's t lie, by bisection."""
    if freedom > 200:
        return 1.96 + 2.4 / freedom
    low, high = 0.0, 14.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided_p(middle, freedom) > 0.05 else (low, middle)
    return high
