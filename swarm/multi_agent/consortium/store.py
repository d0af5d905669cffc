"""Database of saved consortia and their runs, in llm's folder."""

import json
import os
import re
import sqlite3
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from swarm._util.files import parse_json
from swarm._util.settings import parse_settings
from swarm._util.terminal import suggest
from swarm.errors import UserError
from swarm.models.cache import LOCK_TIMEOUT_S, retry_while_locked
from swarm.multi_agent.consortium.settings import ConsortiumSettings, read_preset
from swarm.multi_agent.presets import is_preset_path, preset_names

DATABASE_FILE = "consortium.db"
CREATE_TABLES = (
    "CREATE TABLE IF NOT EXISTS consortia (name TEXT PRIMARY KEY, config TEXT NOT NULL, "
    "saved TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, time TEXT NOT NULL, name TEXT, "
    "strategy TEXT, status TEXT NOT NULL, error TEXT, prompt TEXT, answer TEXT, confidence REAL, "
    "iterations INTEGER, best INTEGER, calls INTEGER, prompt_tokens INTEGER, "
    "new_tokens INTEGER, cost REAL, seconds REAL, config TEXT, result TEXT)",
    "CREATE INDEX IF NOT EXISTS runs_time ON runs (time)",
)
SELECT_LAST_INDEX = "SELECT 1 FROM sqlite_master WHERE name = 'runs_time'"
"""Tests that the file contains all of the above: the index is created last."""


class ConsortiumDatabase:
    """A SQLite file shared by threads and processes; each use opens a connection.

    Args:
        path: The file, created on the first write; `None` is consortium.db in the folder of `llm`:
            $LLM_USER_PATH, or the system's default. It must not be on a network file system:
            SQLite's write-ahead log does not work there.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        folder = os.environ.get("LLM_USER_PATH") or click.get_app_dir("io.datasette.llm")
        self.path = Path(path).expanduser() if path else Path(folder) / DATABASE_FILE

    @contextmanager
    def open_transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction; creates the file if needed.

        Raises:
            UserError: The file cannot be used.
        """
        with self._connect(self.path, create=True) as opened:
            retry_while_locked(lambda: opened.execute("PRAGMA journal_mode=WAL"))
            opened.execute("PRAGMA synchronous=NORMAL")
            retry_while_locked(lambda: opened.execute("BEGIN IMMEDIATE"))
            try:
                for table in CREATE_TABLES:
                    opened.execute(table)
                yield opened
                opened.execute("COMMIT")
            except BaseException:
                opened.execute("ROLLBACK")
                raise

    @contextmanager
    def open_for_reading(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for reading; without tables, to an empty in-memory database.

        Raises:
            UserError: The file cannot be used.
        """
        with self._connect(self.path if self.path.is_file() else ":memory:") as opened:
            if retry_while_locked(lambda: opened.execute(SELECT_LAST_INDEX).fetchone()):
                yield opened
                return
        with self._connect(":memory:") as empty:
            for table in CREATE_TABLES:
                empty.execute(table)
            yield empty

    @contextmanager
    def _connect(self, path: str | Path, create: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
            with closing(connection) as opened:
                opened.row_factory = sqlite3.Row
                yield opened
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"{self.path} cannot be used: {error}; set its folder with LLM_USER_PATH"
            ) from None


class ConsortiumStore(ConsortiumDatabase):
    """Saved consortia; every method raises a `UserError` if the file cannot be used."""

    def list_names(self) -> list[str]:
        """Return the sorted names of all saved consortia, including invalid ones."""
        with self.open_for_reading() as rows:
            return [name for (name,) in rows.execute("SELECT name FROM consortia ORDER BY name")]

    def get(self, name: str) -> ConsortiumSettings:
        """Return the configuration of a name.

        Raises:
            UserError: It does not exist or is invalid.
        """
        with self.open_for_reading() as rows:
            found = rows.execute("SELECT config FROM consortia WHERE name = ?", [name]).fetchone()
        if found is None:
            raise UserError(self._unknown_message(name))
        try:
            return parse_settings(ConsortiumSettings, parse_json(found["config"]), name)
        except ValueError as error:
            raise UserError(f"{name}: the saved config is not JSON: {error}") from None

    def save(self, name: str, config: ConsortiumSettings) -> bool:
        """Save a configuration; return whether it replaced one of this name.

        Raises:
            UserError: The name could be mistaken for something else.
        """
        valid = isinstance(name, str) and re.fullmatch(r"\w[\w.+@-]*", name)
        if not valid or is_preset_path(name):
            raise UserError(f"{name!r} is not a consortium name: take letters, digits, . - and _")
        saved = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}"
        row = (name, json.dumps(config.to_dict()), saved)
        with self.open_transaction() as rows:
            found = rows.execute("DELETE FROM consortia WHERE name = ?", [name]).rowcount
            rows.execute("INSERT INTO consortia VALUES (?, ?, ?)", row)
        return found > 0

    def remove(self, name: str) -> None:
        """Remove a configuration; its runs remain.

        Raises:
            UserError: It does not exist.
        """
        if name not in self.list_names():
            raise UserError(self._unknown_message(name))
        with self.open_transaction() as rows:
            rows.execute("DELETE FROM consortia WHERE name = ?", [name])

    def _unknown_message(self, name: str) -> str:
        names = self.list_names()
        others = f"{suggest(name, names)}allowed: {', '.join(names)}"
        return f"{name}: no consortium of this name is saved; {others if names else 'none is'}"


def load_config(name: str) -> ConsortiumSettings:
    """Load the configuration of a saved consortium, a preset, or a YAML file.

    Raises:
        UserError: It does not exist or is invalid.
    """
    if is_preset_path(name):
        return read_preset(name)
    store, presets = ConsortiumStore(), preset_names("consortium")
    saved = store.list_names()
    if name in saved:
        return store.get(name)
    if name in presets:
        return read_preset(name)
    raise UserError(
        f"consortium {name!r}: not found; {suggest(name, [*saved, *presets])}saved are "
        f"{', '.join(saved) or 'none'}, presets are {', '.join(presets)}, and a yaml file is given "
        "by its path, as in ./mine.yaml"
    )


class RunLog(ConsortiumDatabase):
    """The recorded runs; every method raises a `UserError` if the file cannot be used."""

    def add(
        self,
        name: str | None,
        config: ConsortiumSettings,
        result: Mapping[str, Any],
        error: str = "",
    ) -> str:
        """Record a finished run in one transaction, and return its id.

        Args:
            name: Name of the consortium, or `None`.
            config: Its settings.
            result: See `result_to_json` of consortium.py; for a failed run at least
                "original_prompt".
            error: Reason for a failure; empty on success.
        """
        about, verdict = result.get("metadata", {}), result.get("synthesis") or {}
        run = {
            "id": uuid.uuid4().hex,
            "time": _format_time(datetime.now(UTC)),
            "name": name,
            "strategy": config.strategy,
            "status": "failed" if error else "done",
            "error": error or None,
            "config": json.dumps(config.to_dict()),
            "result": json.dumps(result),
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
        # SQLite rejects lone surrogates, which models may generate.
        values = [
            value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for value in run.values()
        ]
        places = ", ".join("?" * len(run))
        with self.open_transaction() as rows:
            rows.execute(f"INSERT INTO runs ({', '.join(run)}) VALUES ({places})", values)
        return str(run["id"])

    def get(self, number: str) -> dict[str, Any]:
        """Return a run with its configuration and result, as JSON values.

        Args:
            number: The id, or a unique prefix of it.

        Raises:
            UserError: No or several runs match.
        """
        with self.open_for_reading() as rows:
            found = rows.execute(
                "SELECT * FROM runs WHERE substr(id, 1, length(:id)) = :id", {"id": number}
            ).fetchall()
        if not found or not number:
            raise UserError(f"{number}: no run with this id; `runs` lists them")
        if len(found) > 1:
            some = ", ".join(row["id"][:12] for row in found[:5])
            raise UserError(f"{number}: {len(found)} runs have this prefix: {some}")
        run = dict(found[0])
        return {**run, "config": json.loads(run["config"]), "result": json.loads(run["result"])}

    def list(
        self, limit: int = 10, since: str | None = None, name: str | None = None
    ) -> "list[dict[str, Any]]":
        """Return the last runs, newest first, without their answers.

        Args:
            limit: Maximum number of runs.
            since: Only runs from then on: a day as in 2026-01-31, or a local time.
            name: Only runs of the consortium with this name.

        Raises:
            UserError: The date is invalid.
        """
        try:
            first = _format_time(datetime.fromisoformat(since)) if since is not None else ""
        except (ValueError, TypeError):
            raise UserError(f"since: {since!r} is not a date; use the form 2026-01-31") from None
        with self.open_for_reading() as rows:
            found = rows.execute(
                "SELECT * FROM runs WHERE time >= :since AND (:name IS NULL OR name = :name) "
                "ORDER BY time DESC, rowid DESC LIMIT :limit",
                {"limit": limit, "since": first, "name": name},
            ).fetchall()
        left_out = ("config", "result", "best")
        return [{k: v for k, v in dict(row).items() if k not in left_out} for row in found]


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds")
