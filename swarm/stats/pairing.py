"""Match the comparable rows of two categories."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from swarm._util.format import pluralize

if TYPE_CHECKING:
    from swarm.stats.answer_values import AnswerMatrix

MIN_UNITS = 4
"""Minimum number of paraphrases on each side, none of them on both, to compare them as units."""

PARAPHRASES = 8
"""Minimum number of shared paraphrases for a difference that generalizes over paraphrases."""


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


def match_rows(values: "AnswerMatrix", i: int, j: int, category_column: str) -> ComparableRows:
    """Return the comparable rows of the i-th and the j-th category."""
    rows = np.isin(values.category, (i, j))
    first = values.category[rows] == i
    paraphrases = _column_codes(values, "paraphrase_ix", category_column)[rows]
    models = _column_codes(values, "model", category_column)[rows]
    common = set(paraphrases[first]) & set(paraphrases[~first])
    sides = set(models[first]), set(models[~first])
    strata = paraphrases if common else np.zeros_like(paraphrases)
    if sides[0] == sides[1]:
        strata = strata * (int(models.max(initial=0)) + 1) + models
    both = np.isin(strata, np.intersect1d(strata[first], strata[~first]))
    units, unit = _select_units(models, paraphrases, first, bool(common))
    note = f"{int((~both).sum())} answers to what only one was asked left out" * (not both.all())
    if sides[0] & sides[1] and sides[0] != sides[1]:
        note = "; ".join(filter(None, [note, "a model is on both sides"]))
    elif unit != "models" and max(map(len, sides)) > 1:
        note = "; ".join(filter(None, [note, "holds for these models"]))
    told = category_column != "paraphrase_ix" and "paraphrase_ix" in values.frame.columns
    if told and units is None and 0 < (count := len(common)) < PARAPHRASES:
        few = f"only {pluralize(count, 'paraphrase')}: too narrow an interval for other wordings"
        note = "; ".join(filter(None, [note, few]))
    return ComparableRows(
        values.matrix[rows][both],
        first[both],
        strata[both],
        paraphrases[both],
        len(common),
        None if units is None else units[both],
        unit,
        values.kind == "shares",
        note,
    )


def _column_codes(values: "AnswerMatrix", name: str, category_column: str) -> np.ndarray:
    """Return [N] integers; all 0 if the column does not exist, or is the one compared."""
    if name == category_column or name not in values.frame.columns:
        return np.zeros(len(values.frame), dtype=int)
    return values.cluster_codes([name])[0]


def _select_units(
    models: np.ndarray, paraphrases: np.ndarray, first: np.ndarray, common: bool
) -> tuple[np.ndarray | None, str]:
    sides = set(models[first]), set(models[~first])
    if not sides[0] & sides[1] and min(map(len, sides)) > 1:
        return models, "models"
    if not common and min(len(set(paraphrases[side])) for side in (first, ~first)) >= MIN_UNITS:
        return paraphrases, "paraphrases"
    return None, ""
