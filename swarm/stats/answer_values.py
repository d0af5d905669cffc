"""Kinds of answers (text to count, numbers, probabilities), and answers as a matrix."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from swarm.errors import InvalidArgument

if TYPE_CHECKING:
    import pandas as pd

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

AnswerKind = Literal["shares", "probabilities", "mean"]


def to_countable(value: Any) -> Any:
    """Return a countable value: lists and dictionaries as JSON, lone surrogates escaped."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | dict | tuple | set):
        return to_countable(
            json.dumps(
                list(value) if isinstance(value, set) else value,
                sort_keys=True,
                default=str,
                ensure_ascii=False,
            )
        )
    return value


def to_hashable_column(series: "pd.Series") -> "pd.Series":
    """Return a column with countable values."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(series):
        return series
    found = [to_countable(value) for value in series]
    return pd.Series(found, index=series.index, dtype=object, name=series.name)


def infer_kind(answers: "pd.Series", choosing: bool = False, measure: bool = False) -> AnswerKind:
    """Return the kind of a column's known answers.

    Args:
        choosing: Count numbers as answers, because the caller selects among them.
        measure: Integers are a measure, however few.
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


def build_matrix(
    answers: "pd.Series", choosing: bool, selected: Sequence[Any] | None, measure: bool
) -> tuple[AnswerKind, list[Any], np.ndarray]:
    """Return the kind of the answers, the names of the columns, [K], and their values, [N, K].

    Raises:
        InvalidArgument: A number is infinite.
    """
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


def add_unseen(names: list[Any], matrix: np.ndarray) -> tuple[list[Any], np.ndarray]:
    """Append a column with the probability of unreported tokens, if there is any."""
    rest = np.clip(1.0 - matrix.sum(axis=1), 0.0, 1.0)
    if len(rest) == 0 or rest.max() < 1e-6:
        return names, matrix
    return [*names, UNSEEN_ANSWERS], np.column_stack([matrix, rest])


def select_answers(
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
    columns = [matrix[:, place[name]] for name in kept]
    found: list[Any] = list(kept)
    if rest and matrix[:, rest].sum() > 0:
        found, columns = [*found, OTHER_ANSWERS], [*columns, matrix[:, rest].sum(axis=1)]
    if UNSEEN_ANSWERS in place:
        found, columns = [*found, UNSEEN_ANSWERS], [*columns, matrix[:, place[UNSEEN_ANSWERS]]]
    return found, np.column_stack(columns) if columns else np.zeros((len(matrix), 0))


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
    frame: "pd.DataFrame"
    categories: list[Any]
    category: np.ndarray
    refused: dict[Any, int]
    errors: dict[Any, int]

    def cluster_codes(self, columns: Sequence[str]) -> list[np.ndarray]:
        """Return [N] integers for each of the columns that exist."""
        import pandas as pd

        return [
            pd.factorize(to_hashable_column(self.frame[name]))[0]
            for name in columns
            if name in self.frame.columns
        ]


def get_column(df: "pd.DataFrame", name: str, argument: str) -> "pd.Series":
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


def order_categories(
    df: "pd.DataFrame", category_column: str, selected: Sequence[Any] | None = None
) -> list[Any]:
    """Return the categories: as selected, else in order of appearance; models group by group.

    Raises:
        InvalidArgument: A selected one does not occur.
    """
    found = to_hashable_column(df[category_column])
    if category_column == "model" and "group" in df.columns:
        # First groups first, and within a group the models in order of appearance.
        groups = to_hashable_column(df["group"])
        place = {name: i for i, name in enumerate(groups.unique())}
        first = groups.map(place).groupby(found, sort=False).min()
        found = first.sort_values(kind="stable").index.to_series()
    names = list(found.dropna().unique())
    if selected is None:
        return names
    for one in selected:
        if to_countable(one) not in names:
            raise InvalidArgument(
                f"selected_categories: {category_column} is never {one!r}; it is one of "
                + ", ".join(map(str, names[:8]))
            )
    return [to_countable(one) for one in selected]


def read_answers(
    df: "pd.DataFrame",
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
    categories = order_categories(df, category_column, selected_categories)
    place = {name: i for i, name in enumerate(categories)}
    codes = to_hashable_column(df[category_column]).map(place)
    known, refused = codes.notna(), answers.isna()
    failed = df["error"].notna() if "error" in df.columns else known & False
    kept = known & ~failed & ~refused
    category = codes[kept].to_numpy(dtype=int)
    selected = None if selected_answers is None else [to_countable(one) for one in selected_answers]
    choosing = count or selected is not None or min_fraction is not None
    kind, names, matrix = build_matrix(answers[kept], choosing, selected, measure)
    if kind == "probabilities":
        names, matrix = add_unseen(names, matrix)
    if kind != "mean":
        names, matrix = select_answers(names, matrix, category, selected, min_fraction, limit)

    def count_by_category(rows: "pd.Series") -> dict[Any, int]:
        found = codes[rows].value_counts()
        return {name: int(found.get(i, 0)) for name, i in place.items()}

    return AnswerMatrix(
        kind,
        names,
        matrix,
        df[kept],
        categories,
        category,
        count_by_category(known & refused & ~failed),
        count_by_category(known & failed),
    )
