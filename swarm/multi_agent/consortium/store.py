"""Database of saved consortia and their runs, in llm's folder."""

import json
import os
import re
import sqlite3
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from swarm._util.files import parse_json
from swarm._util.settings import parse_settings
from swarm._util.terminal import suggest
from swarm.errors import UserError
from swarm.models.cache import open_sqlite
from swarm.multi_agent.consortium.settings import ConsortiumSettings, read_preset
from swarm.multi_agent.presets import is_preset_path, preset_names

T = TypeVar("T")

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


class ConsortiumDatabase:
    """A SQLite file shared by threads and processes.

    Args:
        path: The file, created on the first write; `None` is consortium.db in the folder of `llm`:
            $LLM_USER_PATH, or the system's default. It must not be on a network file system:
            SQLite's write-ahead log does not work there.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        folder = os.environ.get("LLM_USER_PATH") or click.get_app_dir("io.datasette.llm")
        self.path = Path(path).expanduser() if path else Path(folder) / DATABASE_FILE

    def read(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of a query; none if there is no file.

        Raises:
            UserError: The file cannot be used.
        """

        def select(connection: sqlite3.Connection) -> list[dict[str, Any]]:
            cursor = connection.execute(query, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

        return self._run(select) if self.path.is_file() else []

    def write(self, *statements: tuple[str, Sequence[Any]]) -> int:
        """Run statements in one transaction; return how many rows the first has changed.

        Raises:
            UserError: The file cannot be used.
        """

        def change(connection: sqlite3.Connection) -> int:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                first, *_ = [connection.execute(*one).rowcount for one in statements]
                return first

        return self._run(change)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return open_sqlite(self.path, *CREATE_TABLES).run(work)
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"{self.path} cannot be used: {error}; set its folder with LLM_USER_PATH"
            ) from None


class ConsortiumStore(ConsortiumDatabase):
    """Saved consortia; every method raises a `UserError` if the file cannot be used."""

    def list_names(self) -> list[str]:
        """Return the sorted names of all saved consortia, including invalid ones."""
        return [row["name"] for row in self.read("SELECT name FROM consortia ORDER BY name")]

    def get(self, name: str) -> ConsortiumSettings:
        """Return the configuration of a name.

        Raises:
            UserError: It does not exist or is invalid.
        """
        found = self.read("SELECT config FROM consortia WHERE name = ?", [name])
        if not found:
            raise UserError(self._unknown_message(name))
        try:
            return parse_settings(ConsortiumSettings, parse_json(found[0]["config"]), name)
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
        delete = ("DELETE FROM consortia WHERE name = ?", [name])
        return self.write(delete, ("INSERT INTO consortia VALUES (?, ?, ?)", row)) > 0

    def remove(self, name: str) -> None:
        """Remove a configuration; its runs remain.

        Raises:
            UserError: It does not exist.
        """
        if name not in self.list_names():
            raise UserError(self._unknown_message(name))
        self.write(("DELETE FROM consortia WHERE name = ?", [name]))

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
        self.write((f"INSERT INTO runs ({', '.join(run)}) VALUES ({places})", values))
        return str(run["id"])

    def get(self, number: str) -> dict[str, Any]:
        """Return a run with its configuration and result, as JSON values.

        Args:
            number: The id, or a unique prefix of it.

        Raises:
            UserError: No or several runs match.
        """
        found = self.read("SELECT * FROM runs WHERE substr(id, 1, length(?)) = ?", [number, number])
        if not found or not number:
            raise UserError(f"{number}: no run with this id; `runs` lists them")
        if len(found) > 1:
            some = ", ".join(row["id"][:12] for row in found[:5])
            raise UserError(f"{number}: {len(found)} runs have this prefix: {some}")
        (run,) = found
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
        found = self.read(
            "SELECT * FROM runs WHERE time >= ? AND (? IS NULL OR name = ?) "
            "ORDER BY time DESC, rowid DESC LIMIT ?",
            [first, name, name, limit],
        )
        left_out = ("config", "result", "best")
        return [{k: v for k, v in row.items() if k not in left_out} for row in found]


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds")
