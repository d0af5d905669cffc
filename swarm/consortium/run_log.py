"""Database of consortium runs: prompts, answers of the members, and a leaderboard of members."""

import json
import sqlite3
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.multi_agent.consortium.config import ConsortiumSettings
from swarm.multi_agent.consortium.store import SQLiteDatabase

Row = dict[str, Any]
Rows = list[Row]

LEADERBOARD_QUERY = """
WITH judged AS (
    SELECT DISTINCT run FROM answers JOIN runs ON runs.id = run
    WHERE chosen IS NOT NULL AND iteration = best
)
SELECT member AS model, COUNT(*) AS answers, SUM(a.error IS NOT NULL) AS failures,
    COUNT(DISTINCT CASE WHEN a.error IS NULL THEN judged.run END) AS judged,
    COUNT(DISTINCT CASE WHEN chosen AND iteration = best THEN a.run END) AS wins,
    AVG(rank) AS rank, AVG(CASE WHEN ranked > 1 THEN (ranked - rank) * 1.0 / (ranked - 1) END)
    AS borda, AVG(a.confidence) AS confidence, SUM(a.prompt_tokens) AS prompt_tokens,
    SUM(a.new_tokens) AS new_tokens, SUM(a.cost) AS cost, AVG(a.seconds) AS seconds
FROM answers a JOIN runs ON runs.id = a.run LEFT JOIN judged ON judged.run = a.run
WHERE role = 'member' AND time >= :since AND (:model IS NULL OR member = :model)
GROUP BY member
ORDER BY judged = 0, wins * 1.0 / judged DESC, borda DESC, member
LIMIT :limit
"""


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
            _insert_row(rows, "runs", run)
            for index, answer in enumerate(_answer_rows(result)):
                _insert_row(rows, "answers", {"run": number, "number": index, **answer})
        return number

    def get(self, number: str) -> Row:
        """Return a run with its configuration, result and answers, as JSON values.

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
            answers = rows.execute(
                "SELECT * FROM answers WHERE run = ? ORDER BY number", [run["id"]]
            ).fetchall()
        return {
            **run,
            "config": json.loads(run["config"]),
            "result": json.loads(run["result"]),
            "answers": [_drop_columns(dict(row), "run", "number") for row in answers],
        }

    def leaderboard(
        self, limit: int = 10, since: str | None = None, model: str | None = None
    ) -> Rows:
        """Return statistics of each member, best first; a run is judged if an answer was chosen.

        Each has its "model", the counts of "answers", "failures", "judged" runs and "wins" among
        them, "win_rate" with Wilson's 95 % interval "low" and "high", the means of "rank", "borda"
        (1 is always first, 0 always last), "confidence" and "seconds", and the sums of
        "prompt_tokens", "new_tokens" and "cost". Unknown values are `None`.

        Args:
            limit: Maximum number of members.
            since: Only runs from then on; see `list`.
            model: Only this member.

        Raises:
            UserError: The date is invalid, or the file cannot be read.
        """
        parameters = {"limit": limit, "since": _parse_since(since), "model": model}
        with self.database.open_for_reading() as rows:
            found = [dict(row) for row in rows.execute(LEADERBOARD_QUERY, parameters)]
        return [{**row, **_win_rate(row["wins"], row["judged"])} for row in found]

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


def _answer_rows(result: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the members' answers of every iteration, each followed by the arbiter's reply."""
    for iteration in result.get("iterations", []):
        number, verdict = iteration["iteration"], iteration["synthesis"]
        ranking = verdict.get("ranking") or [] if verdict else []
        counted = verdict is not None and verdict["source"] == "counted"
        # A vote only determines the winners: the first indices, whose answers are equal.
        first = round(verdict["confidence"] * len(ranking)) if counted and ranking else 1
        ranked = None if counted or len(ranking) < 2 else len(ranking)
        for index, response in enumerate(iteration["model_responses"]):
            yield {
                "iteration": number,
                "member": response["model"],
                "instance": response["instance"],
                "role": "member",
                "text": response.get("response"),
                "error": response.get("error"),
                "confidence": response.get("confidence"),
                "ranked": ranked,
                "rank": ranking.index(index) + 1 if ranked and index in ranking else None,
                "chosen": index in ranking[:first] if ranking else None,
                "prompt_tokens": response.get("prompt_tokens"),
                "new_tokens": response.get("completion_tokens"),
                "cost": response.get("cost"),
                "seconds": response.get("seconds"),
            }
        if verdict and not counted:
            yield {
                "iteration": number,
                "member": result["metadata"]["arbiter"],
                "role": "arbiter",
                "text": verdict.get("raw_arbiter_response") or verdict["synthesis"],
                "confidence": verdict["confidence"],
            }


def _insert_row(rows: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    names, placeholders = ", ".join(row), ", ".join(f":{key}" for key in row)
    # SQLite rejects lone surrogates, which models may generate.
    converted = {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in row.items()
    }
    rows.execute(f"INSERT INTO {table} ({names}) VALUES ({placeholders})", converted)


def _win_rate(wins: int, judged: int) -> Row:
    """Return the share of judged runs that were won."""
    if not judged:
        return {"win_rate": None, "low": None, "high": None}
    from swarm.stats.significance import mean_interval

    found = mean_interval([1.0] * wins + [0.0] * (judged - wins))
    return {"win_rate": found.mean, "low": found.low, "high": found.high}


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
