"""The file in llm's folder where consortia and their runs are kept, for many at a time."""

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from swarm.errors import UserError
from swarm.models.cache import LOCK_TIMEOUT_S, retry_while_locked

DATABASE_FILE = "consortium.db"
CREATE_TABLES = (
    "CREATE TABLE IF NOT EXISTS consortia (name TEXT PRIMARY KEY, config TEXT NOT NULL, "
    "saved TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, time TEXT NOT NULL, name TEXT, "
    "strategy TEXT, status TEXT NOT NULL, error TEXT, prompt TEXT, answer TEXT, confidence REAL, "
    "iterations INTEGER, best INTEGER, calls INTEGER, prompt_tokens INTEGER, "
    "new_tokens INTEGER, cost REAL, seconds REAL, config TEXT, result TEXT)",
    "CREATE TABLE IF NOT EXISTS answers (run TEXT NOT NULL REFERENCES runs(id), number INTEGER, "
    "iteration INTEGER, member TEXT, instance INTEGER, role TEXT, text TEXT, error TEXT, "
    "confidence REAL, rank INTEGER, ranked INTEGER, chosen INTEGER, prompt_tokens INTEGER, "
    "new_tokens INTEGER, cost REAL, seconds REAL, PRIMARY KEY (run, number))",
    "CREATE INDEX IF NOT EXISTS runs_time ON runs (time)",
)
SELECT_LAST_INDEX = "SELECT 1 FROM sqlite_master WHERE name = 'runs_time'"
"""Finds something in a file in which all of the above is."""


def user_folder() -> Path:
    """The folder of the `llm` command: $LLM_USER_PATH, or where each system keeps such things."""
    if own := os.environ.get("LLM_USER_PATH"):
        return Path(own)
    return default_folder()


def default_folder() -> Path:
    """The folder of the `llm` command where nothing else is said."""
    if sys.platform == "win32":
        home = Path(os.environ.get("APPDATA") or Path.home())
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Application Support"
    else:
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return home / "io.datasette.llm"


class SQLiteDatabase:
    """A SQLite file that several threads and processes use at once; each use has its connection.

    Args:
        path: The file; `None` is `NAME` in `user_folder()`. Not on a network file system: SQLite's
            write-ahead log does not work there.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path).expanduser() if path else user_folder() / DATABASE_FILE

    @contextmanager
    def open_transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all that is done inside is kept, or nothing; makes the file.

        Raises:
            UserError: The file cannot be used.
        """
        with self._translate_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None)) as opened:
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
        """A connection to read by; where there is no file, one to an empty database, and no file.

        Raises:
            UserError: The file cannot be used.
        """
        with self._translate_errors(), closing(self._connect_for_reading()) as opened:
            opened.row_factory = sqlite3.Row
            yield opened

    def _connect_for_reading(self) -> sqlite3.Connection:
        if self.path.is_file():
            name = f"{self.path.absolute().as_uri()}?mode=rw"
            there = sqlite3.connect(name, timeout=LOCK_TIMEOUT_S, uri=True)
            if retry_while_locked(lambda: there.execute(SELECT_LAST_INDEX).fetchone()):
                return there
            there.close()
        empty = sqlite3.connect(":memory:")
        for table in CREATE_TABLES:
            empty.execute(table)
        return empty

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"{self.path} cannot be used: {error}; its folder can be named by LLM_USER_PATH"
            ) from None
