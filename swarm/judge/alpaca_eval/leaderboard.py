"""Win rates of judged answers, raw and length-controlled, and the leaderboard."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from swarm._util.files import short_digest
from swarm._util.format import format_table as aligned
from swarm.judge.pairwise import ORDERS, PairVerdict, orders_disagree
from swarm.stats.significance import MeanInterval, mean_interval, resample_utilities

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
    preferences: Sequence[float],
    differences: Sequence[float],
    difficulty: Sequence[float] | None = None,
) -> LengthControlledWinRate:
    """Return the win rate without the judge's length bias (Dubois et al. 2024, 2404.04475).

    A logistic regression of the preferences as soft labels: `logit p = theta + phi *
    tanh(difference / deviation) [+ psi * difficulty]`; the rate is the mean prediction without the
    length term, in percent. Penalised likelihood (`RIDGE`), Newton's method. The interval and the
    standard error are those of 1,000 bootstrap samples of the instructions, each fitted separately;
    the deviation remains that of all instructions. If all length differences or all preferences are
    equal, it is the win rate.

    AlpacaEval's values are similar but not equal, for four reasons. It adds the annotations of two
    gamed baselines to the fit, with a fifth of the weight; it always includes the instructions'
    difficulty, which was fitted to all models of its leaderboard (both are data on a hub that are
    not needed here); its penalty is an L1 whose strength is chosen by 5-fold cross-validation and
    which can shrink theta itself to 0, a rate of 50; and its standard error is that of the mean of
    the predictions, as if the coefficients were known.

    Args:
        preferences: [n], from 0 to 1; see `mean_win_rate`.
        differences: [n], characters of the model's answer minus those of the other one.
        difficulty: [n], or `None` for a regression without it.

    Raises:
        ValueError: There are no preferences, or the lengths differ.
    """
    soft = np.asarray(preferences, dtype=np.float64)
    columns = [np.ones_like(soft), _scale_differences(np.asarray(differences, dtype=np.float64))]
    if difficulty is not None:
        columns.append(np.asarray(difficulty, dtype=np.float64))
    if not len(soft) or any(len(column) != len(soft) for column in columns):
        raise ValueError("as many length differences as preferences are needed, and at least one")
    design = np.stack(columns, axis=1)
    if not design[:, 1:].any() or (soft == soft[0]).all():  # no length effect can be estimated
        error = soft.std(ddof=1) / len(soft) ** 0.5 if len(soft) > 1 else 0.0
        return LengthControlledWinRate(mean_win_rate(soft.tolist()), 100 * float(error), 0.0)
    whole = fit_logistic(design, soft)

    def refit_rate(places: Sequence[int]) -> float:
        these = np.asarray(places)
        found = fit_logistic(design[these], soft[these], whole)
        found[1] = 0.0
        return 100 * float(_logistic(design[these] @ found).mean())

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


HEADER = (
    "model",
    "length-controlled",
    "win rate",
    "n",
    "unparsed",
    "orders disagree",
    "first preferred",
    "characters",
    "reference's",
)

MIN_LETTERS_SHARE = 0.5
"""Total probability of the two letters, below which a note is added."""


def summarize_annotations(annotations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize a model's annotations, see `swarm.judge.alpaca_eval.build_annotation`.

    Rates are in percent with 95 % intervals, over the instructions whose two replies could both be
    parsed; `None` if there are none. "order_disagreement" is the share of those in which the two
    orders prefer different answers, and "first_preferred" the mean preference for the answer shown
    first: 0.5 is a judge without position bias. "soft" is the share of replies with probabilities,
    and "letters_share" the mean total probability of the two letters in them.
    """
    read = [one for one in annotations if one["preference"] is not None]
    both = [_parse_verdicts(one) for one in read if one["orders"]]
    shares = [one.share for pair in both for one in pair if one.share is not None]
    return {
        "generator": _join_distinct(annotations, "generator"),
        "reference": _join_distinct(annotations, "reference_generator"),
        "judge": _join_distinct(annotations, "judge"),
        "reading": _join_distinct(annotations, "reading"),
        "instructions": len(annotations),
        "reference_digest": short_digest(
            sorted((one["instruction"], one["reference_output"]) for one in annotations)
        ),
        "n": len(read),
        "unparsed": len(annotations) - len(read),
        "equal_answers": sum(not one["orders"] for one in annotations),
        "soft": len(shares) / (2 * len(both)) if both else None,
        "letters_share": fmean(shares) if shares else None,
        "order_disagreement": fmean(map(orders_disagree, both)) if both else None,
        "first_preferred": fmean(map(_first_preference, both)) if both else None,
        "mean_length": fmean(len(one["output"]) for one in annotations),
        "reference_mean_length": fmean(len(one["reference_output"]) for one in annotations),
        **_compute_rates(read),
    }


def _compute_rates(read: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not read:
        return {"win_rate": None, "length_controlled": None}
    preferences = [one["preference"] for one in read]
    lengths = [len(one["output"]) - len(one["reference_output"]) for one in read]
    known = all("difficulty" in one for one in read)
    difficulty = [one["difficulty"] for one in read] if known else None
    controlled = length_controlled_win_rate(preferences, lengths, difficulty)
    return {
        "win_rate": _interval_to_dict(mean_win_rate(preferences)),
        "length_controlled": {
            **_interval_to_dict(controlled.rate),
            "standard_error": controlled.standard_error,
            "length_effect": controlled.length_effect,
            "difficulty_used": known,
        },
    }


def _interval_to_dict(interval: MeanInterval) -> dict[str, float]:
    return {"rate": interval.mean, "low": interval.low, "high": interval.high}


def _parse_verdicts(row: Mapping[str, Any]) -> list[PairVerdict]:
    return [PairVerdict(one["preference"], one["share"], one["reply"]) for one in row["orders"]]


def _first_preference(verdicts: Sequence[PairVerdict]) -> float:
    """Return the mean preference for the answer shown first; verdicts are ordered as `ORDERS`."""
    assert len(verdicts) == len(ORDERS)
    model_first, reference_first = (one.preference or 0.0 for one in verdicts)
    return (model_first + 1 - reference_first) / 2


def _join_distinct(rows: Sequence[Mapping[str, Any]], field: str) -> str:
    return ", ".join(dict.fromkeys(str(row[field]) for row in rows))


def rank_models(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort by length-controlled rate, highest first; those without one last."""
    return sorted(found, key=lambda one: -(one["length_controlled"] or {"rate": -1})["rate"])


def format_leaderboard(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the leaderboard, with notes on how to interpret it."""
    lines = aligned(HEADER, [_leaderboard_row(one) for one in rank_models(found)])
    judges = " and ".join(dict.fromkeys(one["judge"] for one in found))
    references = " and ".join(dict.fromkeys(one["reference"] for one in found))
    lines.append(f"Judged by {judges}, against {references}; each pair in both orders. Rates in %.")
    if len({(one["judge"], one["reading"], one["reference_digest"]) for one in found}) > 1:
        lines.append(
            "These rates cannot be compared: the judge, how it is read, the instructions "
            "or the reference's answers are not the same."
        )
    if any(one["length_controlled"] and one["n"] < MIN_RELIABLE_INSTRUCTIONS for one in found):
        lines.append(
            f"Length-controlled rates of fewer than {MIN_RELIABLE_INSTRUCTIONS} instructions "
            "depend on the fit's "
            "penalty by up to several points; see docs/judging.md."
        )
    return lines + [note for one in found for note in _quality_notes(one)]


def _quality_notes(one: Mapping[str, Any]) -> list[str]:
    """Return notes on problems of a model's judgements."""
    who, notes = one["generator"], []
    if one["unparsed"]:
        counts = f"{one['unparsed']} of {one['instructions']} instructions"
        notes.append(f"{who}: {counts} are in no rate: a reply about them could not be read.")
    if one["soft"] is not None and one["soft"] < 1 and one["reading"] != "text":
        share = f"{1 - one['soft']:.0%}"
        notes.append(
            f"{who}: {share} of the replies gave a verdict without probabilities: this "
            "judge tells none, and --reading text lets it compare first."
        )
    if one["letters_share"] is not None and one["letters_share"] < MIN_LETTERS_SHARE:
        share = f"{one['letters_share']:.0%}"
        notes.append(
            f"{who}: A and B together had a probability of {share} only: this judge does "
            "not reply as it is asked, and its preferences say little."
        )
    return notes


def _leaderboard_row(one: Mapping[str, Any]) -> list[str]:
    return [
        str(one["generator"]),
        _format_rate(one["length_controlled"]),
        _format_rate(one["win_rate"]),
        str(one["n"]),
        str(one["unparsed"]),
        _format_share(one["order_disagreement"]),
        _format_share(one["first_preferred"]),
        f"{one['mean_length']:.0f}",
        f"{one['reference_mean_length']:.0f}",
    ]


def _format_rate(found: Mapping[str, float] | None) -> str:
    return f"{found['rate']:.1f} [{found['low']:.1f}, {found['high']:.1f}]" if found else "-"


def _format_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
