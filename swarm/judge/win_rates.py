"""Averages of scores, and win rates of preferences, raw and without a judge's length bias."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from swarm.stats.significance import (
    MeanInterval,
    mean_interval,
    resample_utilities,
    utility_interval,
)

RIDGE = 0.1
"""L2 penalty of the slopes, half of it per squared unit: a normal prior with standard deviation
3.2. It bounds the fit if every longer answer wins, and is negligible with hundreds of instructions.
"""

RIDGE_OF_INTERCEPT = 1e-6
"""Only bounds the intercept if all answers win, near 17 (100.0 %)."""

MIN_RELIABLE_INSTRUCTIONS = 100
"""Number of instructions from which on the penalty changes the length-controlled rate by less than
1 point. In 1,000 simulated sets of hard verdicts (theta within 1.5, phi within 2 of 0) it differs
from the unpenalised fit by 2.3 points at 30 instructions, 1.0 at 50, 0.34 at 100, 0.16 at 200 and
0.04 at 805 (95th percentiles); the largest difference is 6.8 points at 30 and 0.85 at 100.
"""

MAX_NEWTON_STEPS, TOLERANCE = 100, 1e-9
"""Maximum number of Newton steps, and the largest coefficient change that ends them."""


class LengthControlledWinRate(NamedTuple):
    """A length-controlled win rate.

    Attributes:
        rate: In percent, with its 95 % interval.
        standard_error: Bootstrap standard error in percent.
        length_effect: phi, the log odds gained by answers that are much longer than the usual
            difference; 0 is a judge without length bias.
    """

    rate: MeanInterval
    standard_error: float
    length_effect: float


def mean_win_rate(preferences: Sequence[float]) -> MeanInterval:
    """Return the mean preference in percent, with its 95 % interval over instructions.

    Args:
        preferences: Preference for the model per instruction: 1 if its answer is preferred, 0 if
            the other one is, or a value in between.

    Raises:
        ValueError: There are none.
    """
    found = mean_interval(preferences)
    return MeanInterval(100 * found.mean, 100 * found.low, 100 * found.high, found.n)


def length_controlled_win_rate(
    preferences: Sequence[float], differences: Sequence[float]
) -> LengthControlledWinRate:
    """Return the win rate without the judge's length bias (Dubois et al. 2024, 2404.04475).

    A logistic regression of the preferences as soft labels: `logit p = theta + phi *
    tanh(difference / deviation)`; the rate is the prediction without the length
    term, in percent. Penalised likelihood (`RIDGE`), Newton's method. The interval and the
    standard error are those of 1,000 bootstrap samples of the instructions, each fitted separately;
    the deviation remains that of all instructions. If all length differences or all preferences are
    equal, it is the win rate.

    AlpacaEval's values are similar but not equal, for four reasons. It adds the annotations of two
    gamed baselines to the fit, with a fifth of the weight; it includes the instructions'
    difficulty, which was fitted to all models of its leaderboard (both are data on a hub that are
    not needed here); its penalty is an L1 whose strength is chosen by 5-fold cross-validation and
    which can shrink theta itself to 0, a rate of 50; and its standard error is that of the mean of
    the predictions, as if the coefficients were known.

    Args:
        preferences: [n], from 0 to 1; see `mean_win_rate`.
        differences: [n], characters of the model's answer minus those of the other one.

    Raises:
        ValueError: There are no preferences, or the lengths differ.
    """
    soft = np.asarray(preferences, dtype=np.float64)
    lengths = _scale_differences(np.asarray(differences, dtype=np.float64))
    if not len(soft) or len(lengths) != len(soft):
        raise ValueError("as many length differences as preferences are needed, and at least one")
    design = np.stack([np.ones_like(soft), lengths], axis=1)
    if not lengths.any() or (soft == soft[0]).all():  # no length effect can be estimated
        error = soft.std(ddof=1) / len(soft) ** 0.5 if len(soft) > 1 else 0.0
        return LengthControlledWinRate(mean_win_rate(soft.tolist()), 100 * float(error), 0.0)
    whole = fit_logistic(design, soft)

    def refit_rate(places: Sequence[int]) -> float:
        these = np.asarray(places)
        return 100 * float(_logistic(fit_logistic(design[these], soft[these], whole)[0]))

    draws = resample_utilities(refit_rate, [""] * len(soft))
    low, high = np.quantile(draws, (0.025, 0.975))
    interval = MeanInterval(refit_rate(range(len(soft))), float(low), float(high), len(soft))
    return LengthControlledWinRate(interval, float(draws.std(ddof=1)), float(whole[1]))


def fit_logistic(
    design: np.ndarray, soft: np.ndarray, start: np.ndarray | None = None
) -> np.ndarray:
    """Fit a logistic regression with soft labels by Newton's method; return its coefficients.

    Args:
        design: [n, k]; the first column is ones.
        soft: [n], from 0 to 1.
        start: [k], initial coefficients; zeros by default.
    """
    ridge = np.full(design.shape[1], RIDGE)
    ridge[0] = RIDGE_OF_INTERCEPT
    found = np.zeros(design.shape[1]) if start is None else start
    for _ in range(MAX_NEWTON_STEPS):
        expected = _logistic(design @ found)
        slope = design.T @ (soft - expected) - ridge * found
        weighted = design * (expected * (1 - expected))[:, None]
        step = np.linalg.solve(design.T @ weighted + np.diag(ridge), slope)
        before = _penalized_loss(design, soft, ridge, found) + TOLERANCE
        # A full Newton step can overshoot where the loss is flat; the loss is convex, so halving
        # helps.
        while _penalized_loss(design, soft, ridge, found + step) > before:
            step = step / 2
        found = found + step
        if np.abs(step).max() <= TOLERANCE:
            break
    return found


def _scale_differences(differences: np.ndarray) -> np.ndarray:
    """Return tanh(difference / deviation); zeros if all differences are equal."""
    deviation = differences.std(ddof=1) if len(differences) > 1 else 0.0
    return np.tanh(differences / deviation) if deviation > 0 else np.zeros_like(differences)


def _logistic(value: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -value))


def _penalized_loss(
    design: np.ndarray, soft: np.ndarray, ridge: np.ndarray, found: np.ndarray
) -> float:
    value = design @ found
    return float(np.sum(np.logaddexp(0.0, value) - soft * value) + 0.5 * ridge @ found**2)


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
