"""Answers of a data frame as a matrix: text to count, numbers, or probabilities."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype

from swarm.errors import InvalidArgument

OTHER_ANSWERS = "[OTHER]"
"""Name of the column of all other answers."""

UNSEEN_ANSWERS = "[UNSEEN]"
"""Name of the column of tokens whose probability the provider did not return."""

MAX_ANSWERS = 50
"""Number of separate answers if none are selected; the rest is `OTHER_ANSWERS`."""

MAX_COUNTED_ANSWERS = 200
"""Maximum number of answers that are counted separately at all, besides selected ones."""

MAX_COUNTED_INTEGERS = 10
"""Maximum number of different integers that are counted as answers instead of averaged."""

CLUSTER_COLUMNS = ("model", "paraphrase_ix")
"""Columns whose rows are correlated where they have the same value."""

AnswerKind = Literal["shares", "probabilities", "mean"]


def to_countable(value: Any) -> Any:
    """Return a countable value: lists and dictionaries as JSON, lone surrogates escaped."""
    if isinstance(value, list | dict | tuple | set):
        content = list(value) if isinstance(value, set) else value
        value = json.dumps(content, sort_keys=True, default=str, ensure_ascii=False)
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def to_hashable_column(series: pd.Series) -> pd.Series:
    """Return a column with countable values."""
    if is_numeric_dtype(series):
        return series
    found = [to_countable(value) for value in series]
    return pd.Series(found, index=series.index, dtype=object, name=series.name)


def infer_kind(answers: pd.Series, choosing: bool = False, measure: bool = False) -> AnswerKind:
    """Return the kind of a column's known answers.

    Args:
        choosing: Count numbers as answers, because the caller selects among them.
        measure: Integers are a measure, however few.
    """
    if len(answers) == 0:
        return "shares"
    if all(
        isinstance(answer, Mapping)
        and all(isinstance(p, int | float) and not isinstance(p, bool) for p in answer.values())
        for answer in answers
    ):
        return "probabilities"
    known = to_hashable_column(answers).infer_objects()
    if choosing or not is_numeric_dtype(known) or is_bool_dtype(known):
        return "shares"
    few = is_integer_dtype(known) and known.nunique() <= MAX_COUNTED_INTEGERS
    return "shares" if few and not measure else "mean"


def parse_probabilities(answer: Mapping[Any, float]) -> dict[Any, float]:
    """Return token or rating to probability, from log probabilities too; ratings as integers."""
    log = min(answer.values(), default=0.0) < 0
    whole = all(isinstance(k, str) and k.isascii() and k.isdigit() for k in answer)
    return {(int(k) if whole else k): (math.exp(p) if log else float(p)) for k, p in answer.items()}


def are_ratings(answers: Iterable[Mapping[Any, float]]) -> bool:
    """Return whether all keys are integers, with probabilities that sum to 1.

    Tokens that happen to be numbers leave some probability for others.
    """
    found = [one for one in map(parse_probabilities, answers) if one]
    return bool(found) and all(
        all(isinstance(key, int) for key in one) and abs(sum(one.values()) - 1) < 0.001
        for one in found
    )


class AnswerMatrix(NamedTuple):
    """Answers as a matrix, one row per answer, without failures and refusals.

    Attributes:
        kind: Whether the columns are answers, tokens with probabilities, or one number.
        names: [K] the answers; for a number the column's name.
        matrix: [N, K]; for shares 0 or 1.
        frame: [N] the corresponding rows of the data frame.
        categories: In display order.
        category: [N] each row's index in `categories`.
        refused: Answers of `None`, by category.
        errors: Rows that failed, by category.
    """

    kind: AnswerKind
    names: list[Any]
    matrix: np.ndarray
    frame: pd.DataFrame
    categories: list[Any]
    category: np.ndarray
    refused: dict[Any, int]
    errors: dict[Any, int]

    def cluster_codes(self, columns: Iterable[str]) -> list[np.ndarray]:
        """Return [N] integers for each of the columns that exist."""
        present = [name for name in columns if name in self.frame.columns]
        return [pd.factorize(to_hashable_column(self.frame[name]))[0] for name in present]


def get_column(df: pd.DataFrame, name: str, argument: str) -> pd.Series:
    """Return a column.

    Raises:
        InvalidArgument: There is none of this name.
    """
    if name in df.columns:
        return df[name]
    names = [str(one) for one in df.columns]
    near = get_close_matches(str(name), names, 3, 0.5) or names
    raise InvalidArgument(
        f"{argument}: the data frame has no column {name!r}; it has for instance "
        + ", ".join(near[:8])
    )


def read_answers(
    df: pd.DataFrame,
    answer_column: str = "answer",
    category_column: str = "group",
    selected_categories: Sequence[Any] | None = None,
    selected_answers: Sequence[Any] | None = None,
    min_fraction: float | None = None,
    count: bool = False,
    measure: bool = False,
    limit: int = MAX_ANSWERS,
) -> AnswerMatrix:
    """Read a data frame's answers.

    Args:
        selected_answers: Answers with a separate column; the others are `OTHER_ANSWERS`.
        min_fraction: Alternatively, select answers that reach this share in at least one category.
        count: Count numbers as answers, as is done if some are selected.
        measure: Numbers are measures, even if there are few integers.
        limit: Number of separate answers if none are selected.

    Raises:
        InvalidArgument: A column or category does not exist, or both ways to select are used.
    """
    if selected_answers is not None and min_fraction is not None:
        raise InvalidArgument("selected_answers and min_fraction: give one of the two, not both")
    if min_fraction is not None and not 0 <= min_fraction <= 1:
        raise InvalidArgument(f"min_fraction: a share from 0 to 1, not {min_fraction}")
    answers = get_column(df, answer_column, "answer_column")
    get_column(df, category_column, "category_column")
    categories = _order_categories(df, category_column, selected_categories)
    place = {name: i for i, name in enumerate(categories)}
    codes = to_hashable_column(df[category_column]).map(place)
    known, refused = codes.notna(), answers.isna()
    failed = df["error"].notna() if "error" in df.columns else known & False
    kept = known & ~failed & ~refused
    category = codes[kept].to_numpy(dtype=int)
    selected = None if selected_answers is None else [to_countable(one) for one in selected_answers]
    choosing = count or selected is not None or min_fraction is not None
    kind = infer_kind(answers[kept], choosing, measure)
    if kind == "mean":
        names, matrix = [str(answers.name)], answers[kept].to_numpy(dtype=np.float64)[:, None]
        if not np.isfinite(matrix).all():
            raise InvalidArgument(f"the column {answers.name} has an infinite number")
    else:
        read = _read_probabilities if kind == "probabilities" else _count_answers
        names, matrix = read(answers[kept], selected or ())
        names, matrix = _select_answers(names, matrix, category, selected, min_fraction, limit)
    per_category = [
        {name: int((codes[rows] == i).sum()) for name, i in place.items()}
        for rows in (known & refused & ~failed, known & failed)
    ]
    return AnswerMatrix(kind, names, matrix, df[kept], categories, category, *per_category)


def _order_categories(
    df: pd.DataFrame, category_column: str, selected: Sequence[Any] | None
) -> list[Any]:
    """Return the categories: as selected, else in order of appearance; models group by group."""
    found = to_hashable_column(df[category_column])
    if category_column == "model" and "group" in df.columns:
        # First groups first, and within a group the models in order of appearance.
        groups = pd.Series(pd.factorize(to_hashable_column(df["group"]))[0], df.index)
        first = groups.groupby(found, sort=False).min()
        found = first.sort_values(kind="stable").index.to_series()
    names = list(found.dropna().unique())
    if selected is None:
        return names
    if strange := [one for one in selected if to_countable(one) not in names]:
        raise InvalidArgument(
            f"selected_categories: {category_column} is never {strange[0]!r}; it is one of "
            + ", ".join(map(str, names[:8]))
        )
    return [to_countable(one) for one in selected]


def _read_probabilities(answers: pd.Series, _: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Return tokens [K] and probabilities [N, K], of unreported tokens too if there are any."""
    table = pd.DataFrame([parse_probabilities(answer) for answer in answers]).fillna(0.0)
    names, matrix = list(table.columns), table.to_numpy(dtype=np.float64)
    rest = np.clip(1.0 - matrix.sum(axis=1), 0.0, 1.0)
    if rest.max(initial=0.0) < 1e-6:
        return names, matrix
    return [*names, UNSEEN_ANSWERS], np.column_stack([matrix, rest])


def _count_answers(answers: pd.Series, selected: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Return the different answers [K], and for each row [N, K] a 1 and zeros."""
    codes, names = pd.factorize(to_hashable_column(answers))
    if len(names) > MAX_COUNTED_ANSWERS:  # a column for each of 100,000 would fill the memory
        frequent = np.argsort(-np.bincount(codes), kind="stable")[:MAX_COUNTED_ANSWERS]
        keep = np.union1d(frequent, np.flatnonzero(names.isin(list(selected))))
        place = np.full(len(names), len(keep))
        place[keep] = np.arange(len(keep))
        codes, names = place[codes], [*names[keep], OTHER_ANSWERS]
    return list(names), np.eye(len(names))[codes]


def _select_answers(
    names: list[Any],
    matrix: np.ndarray,
    category: np.ndarray,
    selected: list[Any] | None,
    min_fraction: float | None,
    limit: int,
) -> tuple[list[Any], np.ndarray]:
    """Return the selected or most frequent answers in descending order, then other and unseen."""
    last = (OTHER_ANSWERS, UNSEEN_ANSWERS)
    order = np.argsort(-matrix.sum(axis=0), kind="stable") if len(matrix) else np.arange(0)
    if min_fraction is not None:
        means = [matrix[category == c].mean(axis=0) for c in np.unique(category)]
        selected = [names[k] for k in order if max(m[k] for m in means) >= min_fraction]
    elif selected is None:
        selected = [names[k] for k in order if names[k] not in last][:limit]
    place = {name: i for i, name in enumerate(names)}
    kept = [name for name in selected if name in place and name not in last]
    rest = [i for name, i in place.items() if name not in kept and name != UNSEEN_ANSWERS]
    columns = {name: matrix[:, place[name]] for name in kept}
    if rest and matrix[:, rest].sum() > 0:
        columns[OTHER_ANSWERS] = matrix[:, rest].sum(axis=1)
    if UNSEEN_ANSWERS in place:
        columns[UNSEEN_ANSWERS] = matrix[:, place[UNSEEN_ANSWERS]]
    found = np.column_stack([*columns.values()]) if columns else np.zeros((len(matrix), 0))
    return list(columns), found
