"""Rows of answers and the data frame built from them."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
        return names + list(DETAIL_COLUMNS) * details


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

    pairs = [(group, model) for group, models in groups.items() for model in models]
    parts = [(group, model, block) for group, model in pairs for block in blocks[model]]
    counts = [len(block.rows) for *_, block in parts]
    rows = [row for *_, block in parts for row in block.rows]

    def per_row(values: Iterable[Any]) -> list[Any]:
        """Repeat a value of each block for its rows."""
        return list(chain.from_iterable(map(repeat, values, counts)))

    columns = {
        "group": per_row(group for group, _, _ in parts),
        "model": per_row(model for _, model, _ in parts),
        "question": per_row(block.question for *_, block in parts),
        "paraphrase_ix": per_row(block.paraphrase_ix for *_, block in parts),
        "api_kwargs": [
            copy_request(row.columns.get("api_kwargs", block.api_kwargs))
            for *_, block in parts
            for row in block.rows
        ],
        "error": [row.error for row in rows],
    }
    for name in layout.metadata:
        columns[name] = per_row(block.metadata.get(name) for *_, block in parts)
    for name in ("answer", *layout.near, *layout.far):
        columns[name] = [row.columns.get(name) for row in rows]
    if details:
        samples = chain.from_iterable(map(range, counts))
        values = [(n, *_detail_values(row)) for n, row in zip(samples, rows, strict=True)]
        columns |= {name: [one[k] for one in values] for k, name in enumerate(DETAIL_COLUMNS)}
    return pd.DataFrame({name: as_column(columns[name]) for name in layout.list_columns(details)})


def copy_request(sent: dict[str, Any]) -> dict[str, Any]:
    """Copy a request with its turns: a script may extend the conversation of one row."""
    return {**sent, "messages": [{**turn} for turn in sent["messages"]]}


def as_column(values: list[Any]) -> Any:
    """Return a column; missing numbers become NaN, other missing values `None`."""
    import pandas as pd

    first_value = next((value for value in values if value is not None), None)
    return values if isinstance(first_value, int | float) else pd.Series(values, dtype=object)


def _detail_values(row: SampleRow) -> tuple[Any, ...]:
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
        rows = [row for block in model_blocks for row in block.rows]
        errors = [row.error for row in rows if row.error is not None]
        if errors:
            kinds = len(Counter(errors))
            more = f" (and {kinds - 1} other reasons)" if kinds > 1 else ""
            print(
                f"question {name}, model {model}: {len(errors)} of {len(rows)} rows have an error: "
                f"{errors[0]}{more}; they are requested again next time",
                file=sys.stderr,
            )
