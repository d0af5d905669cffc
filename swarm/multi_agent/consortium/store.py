"""Database of saved consortia and their runs, in llm's folder."""

import json
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import click

from swarm._util.files import parse_json
from swarm._util.settings import parse_settings
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


def user_folder() -> Path:
    """Return the folder of the `llm` command: $LLM_USER_PATH, or the system's default."""
    return Path(os.environ.get("LLM_USER_PATH") or click.get_app_dir("io.datasette.llm"))


class SQLiteDatabase:
    """A SQLite file shared by threads and processes; each use opens a connection.

    Args:
        path: The file; `None` is `DATABASE_FILE` in `user_folder()`. It must not be on a network
            file system: SQLite's write-ahead log does not work there.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path).expanduser() if path else user_folder() / DATABASE_FILE

    @contextmanager
    def open_transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction; creates the file if needed.

        Raises:
            UserError: The file cannot be used.
        """
        with self._translate_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect(self.path)) as opened:
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
        """Open a connection for reading; without a file, to an empty in-memory database.

        Raises:
            UserError: The file cannot be used.
        """
        with self._translate_errors(), ExitStack() as stack:
            path = self.path if self.path.is_file() else ":memory:"
            opened = stack.enter_context(closing(self._connect(path)))
            select = partial(opened.execute, SELECT_LAST_INDEX)
            if not retry_while_locked(lambda: select().fetchone()):
                opened = stack.enter_context(closing(self._connect(":memory:")))
                for table in CREATE_TABLES:
                    opened.execute(table)
            yield opened

    def _connect(self, path: str | Path) -> sqlite3.Connection:
        opened = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        opened.row_factory = sqlite3.Row
        return opened

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"{self.path} cannot be used: {error}; set its folder with LLM_USER_PATH"
            ) from None


class ConsortiumStore:
    """Saved consortia.

    Args:
        path: The file; `None` is consortium.db in llm's folder. It is created on the first write.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.database = SQLiteDatabase(path)

    def list_names(self) -> list[str]:
        """Return the sorted names of all saved consortia, including invalid ones.

        Raises:
            UserError: The file cannot be used.
        """
        with self.database.open_for_reading() as rows:
            return [name for (name,) in rows.execute("SELECT name FROM consortia ORDER BY name")]

    def get(self, name: str) -> ConsortiumSettings:
        """Return the configuration of a name.

        Raises:
            UserError: It does not exist or is invalid.
        """
        with self.database.open_for_reading() as rows:
            found = rows.execute("SELECT config FROM consortia WHERE name = ?", [name]).fetchone()
        if found is None:
            raise UserError(self._unknown_message(name))
        try:
            return parse_settings(ConsortiumSettings, parse_json(found["config"]), name)
        except ValueError as error:
            raise UserError(f"{name}: the saved config is not JSON: {error}") from None

    def save(self, name: str, config: ConsortiumSettings) -> bool:
        """Save a configuration; return whether it replaced one of this name.

        Args:
            name: A valid name; see `validate_name`.
            config: The configuration.

        Raises:
            UserError: The name is invalid, or the file cannot be written.
        """
        row = (
            validate_name(name),
            json.dumps(config.to_dict()),
            f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}",
        )
        with self.database.open_transaction() as rows:
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
        with self.database.open_transaction() as rows:
            rows.execute("DELETE FROM consortia WHERE name = ?", [name])

    def _unknown_message(self, name: str) -> str:
        names = self.list_names()
        matches = get_close_matches(str(name), names, 1)
        suggestion = f"did you mean {matches[0]}? There" if matches else "there"
        others = f"{suggestion} are {', '.join(names)}" if names else "none is saved"
        return f"{name}: no consortium of this name is saved; {others}"


def validate_name(name: str) -> str:
    """Return the name if a consortium can be saved under it.

    Raises:
        UserError: It could be mistaken for something else.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+@-]*", name) or is_preset_path(name):
        raise UserError(f"{name!r} is not a consortium name: take letters, digits, . - and _")
    return name


def load_config(name: str) -> ConsortiumSettings:
    """Load the configuration of a saved consortium, a preset, or a YAML file.

    Raises:
        UserError: It does not exist or is invalid.
    """
    store = ConsortiumStore()
    saved = store.list_names() if not is_preset_path(name) else []
    if name in saved:
        return store.get(name)
    names = preset_names("consortium")
    if name in names or is_preset_path(name):
        return read_preset(name)
    matches = get_close_matches(name, [*saved, *names], 1)
    suggestion = f"did you mean {matches[0]}? Saved" if matches else "saved"
    raise UserError(
        f"consortium {name!r}: not found; {suggestion} are {', '.join(saved) or 'none'}"
        f", presets are {', '.join(names)}, and a yaml file is given by its path, as in ./mine.yaml"
    )
