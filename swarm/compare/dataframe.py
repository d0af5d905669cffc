"""Rows of answers and the data frame built from them."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm.compare.sampling import SampleOutcome
from swarm.errors import InvalidArgument
from swarm.models.base import Completion, sum_usage

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
    outcomes: Sequence[SampleOutcome] = ()


class ParaphraseBlock(NamedTuple):
    """All rows of one model and one paraphrase, in sample order."""

    question: Any
    api_kwargs: dict[str, Any]
    paraphrase_ix: int
    metadata: Mapping[str, Any]
    rows: Sequence[SampleRow]


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
        return names + (list(DETAIL_COLUMNS) if details else [])


def build_frame(
    layout: ColumnLayout,
    groups: Mapping[str, Sequence[str]],
    blocks: Mapping[str, Sequence[ParaphraseBlock]],
    details: bool = False,
) -> "pd.DataFrame":
    """Build a frame with one row per group, model, paraphrase and sample, in this order.

    Args:
        layout: Columns of the question type.
        groups: Models by group; a model may be in several groups.
        blocks: By model, one block per paraphrase.
        details: Whether to add `DETAIL_COLUMNS`.
    """
    import pandas as pd

    parts = [
        (group, model, block)
        for group, models in groups.items()
        for model in models
        for block in blocks[model]
    ]
    columns = block_columns(layout, parts)
    rows = list(chain.from_iterable(block.rows for _, _, block in parts))
    for name in ("answer", *layout.near, *layout.far):
        columns[name] = [row.columns.get(name) for row in rows]
    columns["error"] = [row.error for row in rows]
    if details:
        columns["sample"] = [n for _, _, block in parts for n in range(len(block.rows))]
        details_rows = [detail_values(row) for row in rows]
        columns |= {
            name: [one[n] for one in details_rows] for n, name in enumerate(DETAIL_COLUMNS[1:])
        }
    selected = {name: as_column(columns[name]) for name in layout.list_columns(details)}
    return pd.DataFrame(selected)


def block_columns(
    layout: ColumnLayout, parts: Sequence[tuple[str, str, ParaphraseBlock]]
) -> dict[str, list[Any]]:
    """Return the columns that identify the request of each row."""
    columns: dict[str, list[Any]] = {
        "group": repeat_per_row(parts, lambda group, model, block: group),
        "model": repeat_per_row(parts, lambda group, model, block: model),
        "question": repeat_per_row(parts, lambda group, model, block: block.question),
        "paraphrase_ix": repeat_per_row(parts, lambda group, model, block: block.paraphrase_ix),
    }
    for name in layout.metadata:
        columns[name] = repeat_per_row(parts, lambda *one, name=name: one[2].metadata.get(name))
    columns["api_kwargs"] = [
        copy_request(row.columns.get("api_kwargs", block.api_kwargs))
        for _, _, block in parts
        for row in block.rows
    ]
    return columns


def copy_request(sent: dict[str, Any]) -> dict[str, Any]:
    """Copy a request with its turns: a script may extend the conversation of one row."""
    return {**sent, "messages": [{**turn} for turn in sent["messages"]]}


def repeat_per_row(
    parts: Sequence[tuple[str, str, ParaphraseBlock]], value: Callable[..., Any]
) -> list[Any]:
    """Compute a value per part and repeat it for each of its rows."""
    return list(chain.from_iterable(repeat(value(*part), len(part[2].rows)) for part in parts))


def as_column(values: list[Any]) -> Any:
    """Return a column; missing numbers become NaN, other missing values `None`."""
    import pandas as pd

    first_value = next((value for value in values if value is not None), None)
    if isinstance(first_value, int | float):
        return values
    return pd.Series(values, dtype=object)


def detail_values(row: SampleRow) -> tuple[Any, ...]:
    """Return the values of `DETAIL_COLUMNS[1:]`.

    Tokens, seconds and costs are summed over a row's answers; "cached" requires that all of them
    are.
    """
    completions = [one for one in row.outcomes if isinstance(one, Completion)]
    if not completions:
        return (None,) * (len(DETAIL_COLUMNS) - 1)
    usage = sum_usage(completions)
    return (
        completions[0].finish,
        completions[0].reasoning,
        usage.prompt_tokens,
        usage.new_tokens,
        sum(one.seconds for one in completions),
        usage.known_cost,
        all(one.cached for one in completions),
    )


def print_failures(name: str, blocks: Mapping[str, Sequence[ParaphraseBlock]]) -> None:
    """Print to stderr how many rows failed, one line per model, with the first reason."""
    for model, model_blocks in blocks.items():
        errors = [
            row.error for block in model_blocks for row in block.rows if row.error is not None
        ]
        if not errors:
            continue
        number = sum(len(block.rows) for block in model_blocks)
        kinds = len(Counter(errors))
        more = f" (and {kinds - 1} other reasons)" if kinds > 1 else ""
        print(
            f"question {name}, model {model}: {len(errors)} of {number} rows have an error: "
            f"{errors[0]}{more}; they are requested again next time",
            file=sys.stderr,
        )
