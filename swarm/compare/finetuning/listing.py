"""The models and the jobs that a database holds, as data frames."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swarm.compare.errors import InvalidArgument
from swarm.compare.finetuning.store import JobRow

if TYPE_CHECKING:
    from pandas import DataFrame

MODEL_COLUMNS = (
    "model", "base_model", "file_name", "file_id", "file_md5", "suffix", "batch_size",
    "learning_rate_multiplier", "epochs", "seed", "learning_rate", "lora_rank", "checkpoint_step",
)  # fmt: skip

JOB_COLUMNS = ("id", "kind", "state", "suffix", "base_model", "file_name", "file_md5", "job", "model",
          "created", "error")  # fmt: skip


def list_model_rows(jobs: Sequence[JobRow]) -> list[JobRow]:
    """The models of jobs, each with what is known of its job."""
    return [
        {**job, "model": one["model"], "epochs": one["epochs"], "checkpoint_step": one["step"]}
        for job in jobs
        for one in job.get("models", [])
        if job["state"] != "deleted" and not one.get("deleted")
    ]


def list_job_rows(jobs: Sequence[JobRow]) -> list[JobRow]:
    """Jobs that are not deleted, each with its final model."""
    rows = []
    for job in jobs:
        if job["state"] != "deleted":
            models = [one["model"] for one in job.get("models", []) if not one.get("deleted")]
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(job["created"]))
            rows.append({**job, "model": models[0] if models else None, "created": when})
    return rows


def build_frame(rows: list[JobRow], columns: Sequence[str], filters: dict[str, Any]) -> "DataFrame":
    """The rows that have these values, with these columns; a number may be given as text.

    Raises:
        WrongValue: A filter is no column's.
    """
    import pandas

    if unknown := sorted(filters.keys() - set(columns)):
        raise InvalidArgument(f"{', '.join(unknown)}: no column; there are {', '.join(columns)}")
    kept = [[row.get(column) for column in columns] for row in rows
            if all(_matches_filter(row.get(key), value) for key, value in filters.items())]  # fmt: skip
    return pandas.DataFrame(kept, columns=list(columns), dtype=object).infer_objects()


def _matches_filter(have: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and isinstance(have, int | float):
        try:
            return have == float(wanted)
        except ValueError:
            return False
    return bool(have == wanted)
