"""Rows of answers and the data frame built from them."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm.errors import InvalidArgument
from swarm.models.base import Completion, sum_usage
from swarm.models.sampling import Outcome

if TYPE_CHECKING:
    import pandas as pd

LEADING_COLUMNS = ("model", "group", "answer")
MIDDLE_COLUMNS = ("question", "api_kwargs", "paraphrase_ix")
DETAIL_COLUMNS = (
    *("sample", "finish", "reasoning", "prompt_tokens", "new_tokens", "seconds", "cost", "cached"),
)
"""Additional columns of a frame with `details=True`."""


class SampleRow(NamedTuple):
    """Outcome of one sample.

    Attributes:
        columns: "answer", `None` on failure, and the columns of the question type; also
            "api_kwargs" where it differs from that of the paraphrase's other rows.
        error: Why the answer, or a judge's verdict, is missing; `None` on success.
        outcomes: Outcomes of the model's requests for this row, without those of judges.
    """

    columns: Mapping[str, Any]
    error: str | None = None
    outcomes: Sequence[Outcome] = ()


class ColumnLayout(NamedTuple):
    """Columns specific to a question type: `near` follow the answer, `far` come behind."""

    near: Sequence[str] = ()
    far: Sequence[str] = ()
    metadata: Sequence[str] = ()

    def list_columns(self, details: bool = False) -> list[str]:
        """Return all columns of the frame in order.

        Raises:
            InvalidArgument: A judge or a metadata key has the name of a detail column.
        """
        names = [*LEADING_COLUMNS, *self.near, *MIDDLE_COLUMNS, *self.far, *self.metadata, "error"]
        if details and (clashes := [name for name in names if name in DETAIL_COLUMNS]):
            raise InvalidArgument(
                f"details=True adds a column {clashes[0]}; rename the existing one"
            )
        return names + list(DETAIL_COLUMNS) * details


def build_frame(
    layout: ColumnLayout,
    groups: Mapping[str, Sequence[str]],
    blocks: Mapping[str, Sequence[Mapping[str, Any]]],
    details: bool = False,
) -> "pd.DataFrame":
    """Build a frame with one row per group, model, paraphrase and sample, in this order.

    Args:
        layout: Columns of the question type.
        groups: Models by group; a model may be in several groups.
        blocks: By model, the values of its rows by column; see `build_record`.
        details: Whether to add `DETAIL_COLUMNS`.
    """
    import pandas as pd

    pairs = [(group, model) for group, models in groups.items() for model in models]
    records = [
        {**one, "group": group, "model": model, "api_kwargs": copy_request(one["api_kwargs"])}
        for group, model in pairs
        for one in blocks[model]
    ]
    names = layout.list_columns(details)
    return pd.DataFrame({name: as_column([one.get(name) for one in records]) for name in names})


def copy_request(sent: dict[str, Any]) -> dict[str, Any]:
    """Copy a request with its turns: a script may extend the conversation of one row."""
    return {**sent, "messages": [{**turn} for turn in sent["messages"]]}


def as_column(values: list[Any]) -> Any:
    """Return a column; missing numbers become NaN, other missing values `None`."""
    import pandas as pd

    first_value = next((value for value in values if value is not None), None)
    return values if isinstance(first_value, int | float) else pd.Series(values, dtype=object)


def build_record(sample: int, row: SampleRow, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's values by column, and those of `DETAIL_COLUMNS` if it has an answer.

    Tokens, seconds and costs are summed over a row's answers; "cached" requires that all of them
    are.

    Args:
        sample: Index of the row among those of its paraphrase.
        row: The row.
        asked: Values of all rows of its paraphrase, among them "api_kwargs".
    """
    record = {**asked, "sample": sample, **row.columns, "error": row.error}
    completions = [one for one in row.outcomes if isinstance(one, Completion)]
    if not completions:
        return record
    usage = sum_usage(completions)
    return {
        **record,
        "finish": completions[0].finish,
        "reasoning": completions[0].reasoning,
        "prompt_tokens": usage.prompt_tokens,
        "new_tokens": usage.new_tokens,
        "seconds": sum(one.seconds for one in completions),
        "cost": usage.known_cost,
        "cached": all(one.cached for one in completions),
    }


def print_failures(name: str, blocks: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print to stderr how many rows failed, one line per model, with the first reason."""
    for model, rows in blocks.items():
        errors = [row["error"] for row in rows if row["error"] is not None]
        if errors:
            kinds = len(Counter(errors))
            more = f" (and {kinds - 1} other reasons)" if kinds > 1 else ""
            print(
                f"question {name}, model {model}: {len(errors)} of {len(rows)} rows have an error: "
                f"{errors[0]}{more}; they are requested again next time",
                file=sys.stderr,
            )
