"""What an answer is: text to count, a number, or probabilities; and columns of numbers for it."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from swarm.compare.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

OTHER_ANSWERS = "[OTHER]"
"""The answers that are not told apart."""

UNSEEN_ANSWERS = "[UNSEEN]"
"""Probability of tokens that a provider did not tell."""

MAX_ANSWERS = 50
"""Answers told apart where nobody chose; the rest is `OTHER`."""

MAX_COUNTED_ANSWERS = 200
"""Answers that are counted one by one at all, but for selected ones."""

MAX_COUNTED_INTEGERS = 10
"""Up to so many different whole numbers are answers to count, not a measure to average."""

AnswerKind = Literal["shares", "probabilities", "mean"]


def to_countable(value: Any) -> Any:
    """A value that can be counted: lists and dictionaries as JSON, half surrogates escaped."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | dict | tuple | set):
        return to_countable(json.dumps(list(value) if isinstance(value, set) else value,
                                sort_keys=True, default=str, ensure_ascii=False))  # fmt: skip
    return value


def to_hashable_column(series: "pd.Series") -> "pd.Series":
    """A column whose values can be counted."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(series):
        return series
    found = [to_countable(value) for value in series]
    return pd.Series(found, index=series.index, dtype=object, name=series.name)


def infer_kind(answers: "pd.Series", choosing: bool = False, measure: bool = False) -> AnswerKind:
    """What a column's known answers are.

    Args:
        choosing: Numbers are answers to count, as somebody chose among them.
        measure: Whole numbers are a measure, however few.
    """
    import pandas as pd

    if len(answers) == 0:
        return "shares"
    if all(isinstance(a, Mapping) and _are_numbers(a.values()) for a in answers):
        return "probabilities"
    known = to_hashable_column(answers).infer_objects()
    numeric = pd.api.types.is_numeric_dtype(known) and not pd.api.types.is_bool_dtype(known)
    if choosing or not numeric:
        return "shares"
    whole = pd.api.types.is_integer_dtype(known) and not measure
    return "shares" if whole and known.nunique() <= MAX_COUNTED_INTEGERS else "mean"


def _are_numbers(values: Any) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def parse_probabilities(answer: Mapping[Any, float]) -> dict[Any, float]:
    """Token or rating to probability: of log probabilities too, and with ratings as integers."""
    log = min(answer.values(), default=0.0) < 0
    whole = all(isinstance(k, str) and k.isascii() and k.isdigit() for k in answer)
    return {(int(k) if whole else k): (math.exp(p) if log else float(p)) for k, p in answer.items()}


def are_ratings(answers: Iterable[Mapping[Any, float]]) -> bool:
    """Whether all that is there are whole numbers, with probabilities that sum to 1.

    Tokens that happen to be numbers leave some probability for others.
    """
    found = [one for one in map(parse_probabilities, answers) if one]
    return bool(found) and all(
        all(isinstance(key, int) for key in one) and abs(sum(one.values()) - 1) < 0.001
        for one in found
    )  # fmt: skip


def build_matrix(
    answers: "pd.Series", choosing: bool, selected: Sequence[Any] | None, measure: bool
) -> tuple[AnswerKind, list[Any], "np.ndarray"]:
    """What answers are, the names of what is counted, [K], and their numbers, [N, K].

    Raises:
        WrongValue: A number is infinite.
    """
    import numpy as np
    import pandas as pd

    kind = infer_kind(answers, choosing, measure)
    if kind == "mean":
        numbers = answers.to_numpy(dtype=np.float64)[:, None]
        if not np.isfinite(numbers).all():
            raise InvalidArgument(f"the column {answers.name} has an infinite number")
        return kind, [str(answers.name)], numbers
    if kind == "probabilities":
        table = pd.DataFrame([parse_probabilities(a) for a in answers]).fillna(0.0)
        return kind, list(table.columns), table.to_numpy(dtype=np.float64)
    codes, names = pd.factorize(to_hashable_column(answers))
    if len(names) > MAX_COUNTED_ANSWERS:  # a column for each of 100,000 would fill the memory
        frequent = np.argsort(-np.bincount(codes), kind="stable")[:MAX_COUNTED_ANSWERS]
        keep = np.union1d(frequent, np.flatnonzero(names.isin(list(selected or ()))))
        place = np.full(len(names), len(keep))
        place[keep] = np.arange(len(keep))
        codes, names = place[codes], [*(names[i] for i in keep), OTHER_ANSWERS]
    matrix = np.zeros((len(codes), len(names)))
    matrix[np.arange(len(codes)), codes] = 1.0
    return kind, list(names), matrix


def add_unseen(names: list[Any], matrix: "np.ndarray") -> tuple[list[Any], "np.ndarray"]:
    """With a column of the probability that no token was told for, if there is any."""
    import numpy as np

    rest = np.clip(1.0 - matrix.sum(axis=1), 0.0, 1.0)
    if len(rest) == 0 or rest.max() < 1e-6:
        return names, matrix
    return [*names, UNSEEN_ANSWERS], np.column_stack([matrix, rest])


def select_answers(
    names: list[Any],
    matrix: "np.ndarray",
    category: "np.ndarray",
    selected: list[Any] | None,
    min_fraction: float | None,
    most: int,
) -> tuple[list[Any], "np.ndarray"]:
    """The chosen or most frequent answers, most frequent first, then `OTHER` and `UNSEEN`."""
    import numpy as np

    last = (OTHER_ANSWERS, UNSEEN_ANSWERS)
    order = np.argsort(-matrix.sum(axis=0), kind="stable") if len(matrix) else np.arange(0)
    if min_fraction is not None:
        means = [matrix[category == c].mean(axis=0) for c in np.unique(category)]
        selected = [names[k] for k in order if max(m[k] for m in means) >= min_fraction]
    elif selected is None:
        selected = [names[k] for k in order if names[k] not in last][:most]
    place = {name: i for i, name in enumerate(names)}
    kept = [name for name in selected if name in place and name not in last]
    rest = [i for name, i in place.items() if name not in kept and name != UNSEEN_ANSWERS]
    columns = [matrix[:, place[name]] for name in kept]
    found: list[Any] = list(kept)
    if rest and matrix[:, rest].sum() > 0:
        found, columns = [*found, OTHER_ANSWERS], [*columns, matrix[:, rest].sum(axis=1)]
    if UNSEEN_ANSWERS in place:
        found, columns = [*found, UNSEEN_ANSWERS], [*columns, matrix[:, place[UNSEEN_ANSWERS]]]
    return found, np.column_stack(columns) if columns else np.zeros((len(matrix), 0))
