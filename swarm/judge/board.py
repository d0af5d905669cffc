"""Win rates of judged answers, as numbers and as a leaderboard."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from swarm.files import short_digest
from swarm.judge.pairs import ORDERS, PairVerdict, orders_disagree
from swarm.judge.win_rates import MIN_RELIABLE_INSTRUCTIONS, length_controlled_win_rate, mean_win_rate
from swarm.report.statistics import MeanInterval
from swarm.report.text import format_table as aligned

HEADER = ("model", "length-controlled", "win rate", "n", "unparsed", "orders disagree",
          "first preferred", "characters", "reference's")  # fmt: skip

MIN_LETTERS_SHARE = 0.5
"""The share of the two letters, of all that a judge may reply, below which it is remarked on."""


def summarize_annotations(annotations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All numbers of a model's annotations, as `swarm.judge.alpaca_eval.annotation` makes them.

    Rates are in percent with 95 % intervals, over the instructions whose two replies could both be
    read; `None` where there is none. "order_disagreement" is the share of those in which the two
    orders prefer different answers, and "first_preferred" the mean preference for the answer that
    is shown first: 0.5 is a judge that does not go by the place. "soft" is the share of replies
    with probabilities, and "letters_share" how probable the two letters were in them.
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
    """The mean preference for the answer that is shown first; the orders are `ORDERS`."""
    assert len(verdicts) == len(ORDERS)
    model_first, reference_first = (one.preference or 0.0 for one in verdicts)
    return (model_first + 1 - reference_first) / 2


def _join_distinct(rows: Sequence[Mapping[str, Any]], field: str) -> str:
    return ", ".join(dict.fromkeys(str(row[field]) for row in rows))


def rank_models(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The highest length-controlled rate first; those without one last."""
    return sorted(found, key=lambda one: -(one["length_controlled"] or {"rate": -1})["rate"])


def format_leaderboard(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The leaderboard as lines, with what has to be known to read it."""
    lines = aligned(HEADER, [_leaderboard_row(one) for one in rank_models(found)])
    judges = " and ".join(dict.fromkeys(one["judge"] for one in found))
    references = " and ".join(dict.fromkeys(one["reference"] for one in found))
    lines.append(f"Judged by {judges}, against {references}; each pair in both orders. Rates in %.")
    if len({(one["judge"], one["reading"], one["reference_digest"]) for one in found}) > 1:
        lines.append("These rates cannot be compared: the judge, how it is read, the instructions "
                     "or the reference's answers are not the same.")  # fmt: skip
    if any(one["length_controlled"] and one["n"] < MIN_RELIABLE_INSTRUCTIONS for one in found):
        lines.append(
            f"Length-controlled rates of fewer than {MIN_RELIABLE_INSTRUCTIONS} instructions depend on the fit's "
            "penalty by up to several points; see docs/judging.md."
        )
    return lines + [note for one in found for note in _quality_notes(one)]


def _quality_notes(one: Mapping[str, Any]) -> list[str]:
    """What there is to say against a model's judgements."""
    who, notes = one["generator"], []
    if one["unparsed"]:
        counts = f"{one['unparsed']} of {one['instructions']} instructions"
        notes.append(f"{who}: {counts} are in no rate: a reply about them could not be read.")
    if one["soft"] is not None and one["soft"] < 1 and one["reading"] != "text":
        share = f"{1 - one['soft']:.0%}"
        notes.append(f"{who}: {share} of the replies gave a verdict without probabilities: this "
                     "judge tells none, and --reading text lets it compare first.")  # fmt: skip
    if one["letters_share"] is not None and one["letters_share"] < MIN_LETTERS_SHARE:
        share = f"{one['letters_share']:.0%}"
        notes.append(f"{who}: A and B together had a probability of {share} only: this judge does "
                     "not reply as it is asked, and its preferences say little.")  # fmt: skip
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
