"""The answers of a data frame as numbers: one row an answer, one column what can be counted."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm.compare.errors import InvalidArgument
from swarm.compare.statistics.counted import (
    MAX_ANSWERS,
    AnswerKind,
    to_hashable_column,
    build_matrix,
    to_countable,
    select_answers,
    add_unseen,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


class AnswerMatrix(NamedTuple):
    """What was answered, without what failed or was refused.

    Attributes:
        kind: Whether the columns are answers, tokens with probabilities, or one number.
        names: [K] the answers; of a number the column's name.
        matrix: [N, K]; of shares 0 or 1.
        frame: [N] the rows that it comes from.
        categories: In the order in which they are shown.
        category: [N] each row's place in `categories`.
        refused: Answers of `None`, by category.
        errors: Rows that failed, by category.
    """

    kind: AnswerKind
    names: list[Any]
    matrix: "np.ndarray"
    frame: "pd.DataFrame"
    categories: list[Any]
    category: "np.ndarray"
    refused: dict[Any, int]
    errors: dict[Any, int]

    def cluster_codes(self, columns: Sequence[str]) -> list["np.ndarray"]:
        """[N] integers for each of those columns that are there."""
        import pandas as pd

        return [
            pd.factorize(to_hashable_column(self.frame[name]))[0]
            for name in columns
            if name in self.frame.columns
        ]


def get_column(df: "pd.DataFrame", name: str, argument: str) -> "pd.Series":
    """A column.

    Raises:
        WrongValue: There is none of this name.
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
    """The categories: as selected, else as they come; models group by group.

    Raises:
        WrongValue: A selected one is not there.
    """
    found = to_hashable_column(df[category_column])
    if category_column == "model" and "group" in df.columns:
        # First groups first, and within one the models as they come.
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
    most: int = MAX_ANSWERS,
) -> AnswerMatrix:
    """A data frame's answers.

    Args:
        selected_answers: Told apart; the others are `OTHER`.
        min_fraction: Or told apart are those that at least one category gave so often.
        count: Numbers are answers to count too, as they are where some are chosen.
        measure: Numbers are measures, even if there are few whole ones.
        most: So many are told apart where none are chosen.

    Raises:
        WrongValue: A column or category is not there, or both ways to choose are used.
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
        names, matrix = select_answers(names, matrix, category, selected, min_fraction, most)

    def count_by_category(rows: "pd.Series") -> dict[Any, int]:
        found = codes[rows].value_counts()
        return {name: int(found.get(i, 0)) for name, i in place.items()}

    return AnswerMatrix(
        kind, names, matrix, df[kept], categories, category,
        count_by_category(known & refused & ~failed), count_by_category(known & failed),
    )  # fmt: skip
