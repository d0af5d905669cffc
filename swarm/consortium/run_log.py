"""Database of consortium runs, with the answers of the members."""

import json
import sqlite3
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.multi_agent.consortium.settings import ConsortiumSettings
from swarm.multi_agent.consortium.store import SQLiteDatabase

Row = dict[str, Any]
Rows = list[Row]


class RunLog:
    """The recorded runs; several threads and processes may add runs concurrently.

    Args:
        path: The file; `None` is consortium.db in llm's folder.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.database = SQLiteDatabase(path)

    def add(
        self,
        name: str | None,
        config: ConsortiumSettings,
        result: Mapping[str, Any],
        error: str = "",
    ) -> str:
        """Record a finished run in one transaction.

        Args:
            name: Name of the consortium, or `None`.
            config: Its settings.
            result: See `swarm.multi_agent.consortium.result_json.result_to_json`; for a failed run
                at least "original_prompt".
            error: Reason for a failure; empty on success.

        Returns:
            The id of the run.

        Raises:
            UserError: The file cannot be written.
        """
        number = uuid.uuid4().hex
        run = {
            "id": number,
            "time": _format_time(datetime.now(UTC)),
            "name": name,
            "strategy": config.strategy,
            "status": "failed" if error else "done",
            "error": error or None,
            "config": json.dumps(config.to_dict()),
            "result": json.dumps(result),
            **_run_columns(result),
        }
        with self.database.open_transaction() as rows:
            _insert_run(rows, run)
        return number

    def get(self, number: str) -> Row:
        """Return a run with its configuration and result, as JSON values.

        Args:
            number: The id, or a unique prefix of it.

        Raises:
            UserError: No or several runs match.
        """
        with self.database.open_for_reading() as rows:
            found = rows.execute(
                "SELECT * FROM runs WHERE substr(id, 1, length(:id)) = :id", {"id": number}
            ).fetchall()
            if len(found) != 1 or not number:
                raise UserError(_lookup_error(number, [row["id"] for row in found]))
            run = dict(found[0])
        return {
            **run,
            "config": json.loads(run["config"]),
            "result": json.loads(run["result"]),
        }

    def list(self, limit: int = 10, since: str | None = None, name: str | None = None) -> Rows:
        """Return the last runs, newest first, without their answers.

        Args:
            limit: Maximum number of runs.
            since: Only runs from then on: a day as in 2026-01-31, or a local time.
            name: Only runs of the consortium with this name.

        Raises:
            UserError: The date is invalid, or the file cannot be read.
        """
        parameters = {"limit": limit, "since": _parse_since(since), "name": name}
        with self.database.open_for_reading() as rows:
            found = rows.execute(
                "SELECT * FROM runs WHERE time >= :since AND (:name IS NULL OR name = :name) "
                "ORDER BY time DESC, rowid DESC LIMIT :limit",
                parameters,
            ).fetchall()
        return [_drop_columns(dict(row), "config", "result", "best") for row in found]


def _run_columns(result: Mapping[str, Any]) -> Row:
    """Return the fields of a result that are columns of its run."""
    about, verdict = result.get("metadata", {}), result.get("synthesis") or {}
    return {
        "prompt": result.get("original_prompt"),
        "answer": verdict.get("synthesis"),
        "confidence": verdict.get("confidence"),
        "iterations": about.get("iteration_count"),
        "best": about.get("best_iteration"),
        "calls": about.get("calls"),
        "prompt_tokens": about.get("prompt_tokens"),
        "new_tokens": about.get("completion_tokens"),
        "cost": about.get("cost"),
        "seconds": about.get("seconds"),
    }


def _insert_run(rows: sqlite3.Connection, row: Mapping[str, Any]) -> None:
    names, placeholders = ", ".join(row), ", ".join(f":{key}" for key in row)
    # SQLite rejects lone surrogates, which models may generate.
    converted = {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in row.items()
    }
    rows.execute(f"INSERT INTO runs ({names}) VALUES ({placeholders})", converted)


def _lookup_error(number: str, found: "list[str]") -> str:
    if not found:
        return f"{number}: no run with this id; `runs` lists them"
    return (
        f"{number}: {len(found)} runs have this prefix: {', '.join(one[:12] for one in found[:5])}"
    )


def _drop_columns(row: Row, *names: str) -> Row:
    return {key: value for key, value in row.items() if key not in names}


def _parse_since(date: str | None) -> str:
    if date is None:
        return ""
    try:
        return _format_time(datetime.fromisoformat(date).astimezone(UTC))
    except (ValueError, TypeError):
        raise UserError(f"since: {date!r} is not a date; use the form 2026-01-31") from None


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds")
