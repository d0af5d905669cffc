"""SQLite cache of model answers, shared by processes and threads.

Only SQLite opens the file: a process that closes any descriptor of a file loses all its locks on
it, and other processes may then delete the write-ahead log that it still writes. A process has one
connection to a file, which its threads use in turn and which is closed before a fork.

`swarm.models.sampling` answers requests from the cache; `swarm.cache` reports and removes entries.
"""

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from swarm._util.files import cache_folder, make_folder
from swarm.errors import UserError

T = TypeVar("T")

log = logging.getLogger(__name__)

CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS responses (key TEXT PRIMARY KEY, value TEXT NOT NULL, "
    "sha256 BLOB NOT NULL, time REAL NOT NULL, label TEXT)"
)
# As bytes: damaged text may be invalid UTF-8, which sqlite3 cannot return as a string.
SELECT_ROWS = (
    "SELECT CAST(key AS BLOB), CAST(IFNULL(value, '') AS BLOB), CAST(sha256 AS BLOB) "
    "FROM responses WHERE "
)
INSERT_ROW = "INSERT OR {} INTO responses (key, value, sha256, time, label) VALUES (?, ?, ?, ?, ?)"
INSERT_NEW, REPLACE_ROW = INSERT_ROW.format("IGNORE"), INSERT_ROW.format("REPLACE")

_encode_sorted_json = json.JSONEncoder(sort_keys=True).encode

KEYS_PER_QUERY = 500
"""Number of keys in one query."""

LOCK_TIMEOUT_S = 30.0
"""Seconds to wait for another process to finish writing."""

Restore = Callable[[Any], Any]
"""Validates and converts a stored value; raises `TypeError` or `ValueError` if it is damaged."""

_lock = threading.RLock()
"""Held during each operation of this process on a file, and while it forks."""
_databases: "WeakValueDictionary[Path, SqliteFile]" = WeakValueDictionary()
_damaged: set[Path] = set()
"""Files with a damaged row, of which this process has warned."""


class SqliteFile:
    """The connection of this process to a file.

    Args:
        path: The file; its folder is created.
        tables: Statements that create what it consists of.
    """

    def __init__(self, path: Path, tables: Sequence[str]) -> None:
        self.path, self.tables = path, tables
        self.connection: sqlite3.Connection | None = None
        self._paths: list[str] = []
        self._opened: list[int] = []

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run work on the connection; once more on a new one if the old one or its file is lost."""
        with _lock:
            try:
                found = work(self.connection or self._connect())
                if self._inodes() == self._opened:
                    return found
            except sqlite3.Error as error:
                failed = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR
                if not failed and (not self.connection or self._inodes() == self._opened):
                    raise
            # The file was deleted or replaced: no other process sees what was written.
            self.close()
            return work(self._connect())

    def _connect(self) -> sqlite3.Connection:
        make_folder(self.path.parent, private=True)
        # Create the file first: SQLite gives its write-ahead log the same permissions. No other
        # thread has a connection to a new file whose locks this would release.
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(
            self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            retry_while_locked(lambda: connection.execute("PRAGMA journal_mode=WAL"))
            connection.execute("PRAGMA synchronous=NORMAL")
            for table in self.tables:
                retry_while_locked(partial(connection.execute, table))
            real = os.path.realpath(self.path)
            # SQLite has these two files open beside the database.
            self._paths = [str(self.path), f"{real}-wal", f"{real}-shm"]
            self._opened = self._inodes()
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        return connection

    def _inodes(self) -> list[int]:
        """Return the inodes of the files at the paths that SQLite opened; 0 if there is none."""
        found = []
        for path in self._paths:
            try:
                found.append(os.stat(path).st_ino)
            except FileNotFoundError:
                found.append(0)
        return found

    def close(self) -> None:
        """Close the connection; `run` opens a new one."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def __del__(self) -> None:
        with _lock:  # another thread may have found this object just before, and use it
            self.close()


def open_sqlite(path: Path, *tables: str) -> SqliteFile:
    """Return the connection to a file, which all of this process share."""
    with _lock:
        return _databases.setdefault(path.absolute(), SqliteFile(path.absolute(), tables))


def _close_before_fork() -> None:
    """Close all connections: SQLite in a child that inherits one assumes locks it does not have."""
    _lock.acquire()
    for database in list(_databases.values()):
        database.close()


os.register_at_fork(
    before=_close_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release
)


class Cache:
    """JSON values by key; several processes and threads may use the same file at once.

    Each value has a SHA-256. A damaged one counts as missing, with one warning per file, and is
    replaced by the next value that is stored for its key.

    Args:
        file: Path of the file; `None` is answers.sqlite in `swarm._util.files.cache_folder()`. It
            must not be on a network file system: SQLite's write-ahead log does not work there.

    Raises:
        UserError: The path is not a string.
    """

    def __init__(self, file: str | None = None) -> None:
        if file is not None and (not isinstance(file, str) or not file.strip()):
            raise UserError(f"cache.file={file!r}: must be null or the path of a file")
        self.file = file
        self._database: SqliteFile | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def path(self) -> Path:
        """Path of the file."""
        return Path(self.file).expanduser() if self.file else cache_folder() / "answers.sqlite"

    def get(self, keys: Sequence[str], restore: Restore | None = None) -> dict[str, Any]:
        """Return the stored values of these keys.

        Args:
            restore: Converts each value; values that it refuses are damaged.

        Raises:
            UserError: The file cannot be read or created.
        """
        return self.run(lambda connection: self._read_keys(connection, keys, restore))

    def delete(self, keys: Sequence[str]) -> int:
        """Delete these keys and return how many existed.

        Raises:
            UserError: The file cannot be written.
        """
        rows, statement = [(key,) for key in keys], "DELETE FROM responses WHERE key = ?"
        return self.run(lambda connection: connection.executemany(statement, rows).rowcount)

    def put(
        self, key: str, value: Any, label: str | None = None, restore: Restore | None = None
    ) -> Any:
        """Store one value and return the stored one; see `put_many`."""
        return self.put_many({key: value}, label, restore)[key]

    def put_many(
        self, values: Mapping[str, Any], label: str | None = None, restore: Restore | None = None
    ) -> dict[str, Any]:
        """Store values immediately, in one transaction.

        Args:
            values: Values by key.
            label: Name of the model that gave the answers.
            restore: See `get`.

        Returns:
            The stored values: for each key the one that was written first.

        Raises:
            UserError: The file cannot be written.
        """
        rows = [_encode_row(key, value, label) for key, value in values.items()]

        def write(connection: sqlite3.Connection) -> dict[str, Any]:
            if len(rows) == 1 and connection.execute(INSERT_NEW, rows[0]).rowcount:
                return {}
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if connection.executemany(INSERT_NEW, rows).rowcount == len(rows):
                    return {}
                stored = self._read_keys(connection, list(values), restore)
                lost = [row for row in rows if row[0] not in stored]
                connection.executemany(REPLACE_ROW, lost)
            return stored

        return {**values, **self.run(write)}

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run work on this process's connection to the file, and return its result.

        It is run again on a new connection if the file was deleted or replaced meanwhile, or after
        an I/O error.

        Raises:
            UserError: The file cannot be opened, or the operation fails.
        """
        try:
            if self._database is None:
                self._database = open_sqlite(self.path, CREATE_TABLE)
            return self._database.run(work)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # the latter: a damaged name
            raise UserError(
                f"the cache {self.path} cannot be used: {error}; name another file (cache.file, or "
                "its folder in MODEL_SWARMS_CACHE), or disable the cache (cache=null, --no_cache)"
            ) from None

    def _read_keys(
        self, connection: sqlite3.Connection, keys: Sequence[str], restore: Restore | None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for first in range(0, len(keys), KEYS_PER_QUERY):
            chunk = keys[first : first + KEYS_PER_QUERY]
            query = f"{SELECT_ROWS} key IN ({','.join('?' * len(chunk))})"
            found |= self._decode_rows(connection.execute(query, chunk).fetchall(), restore)
        return found

    def _decode_rows(self, rows: Sequence[Any], restore: Restore | None) -> dict[str, Any]:
        """Return the values of undamaged rows by key."""
        found: dict[str, Any] = {}
        intact = [
            (key.decode(), data)
            for key, data, digest in rows
            if sha256(b"%b\n%b" % (key, data)).digest() == digest
        ]
        try:
            # One joined document decodes faster than many small ones.
            values = json.loads(b"[%b]" % b",".join([data for _, data in intact]))
            restored = map(restore, values) if restore else values
            found = dict(zip((key for key, _ in intact), restored, strict=True))
        except (TypeError, ValueError, RecursionError):
            if len(rows) > 1:
                for row in rows:
                    found |= self._decode_rows([row], restore)
                return found
        if len(found) < len(rows) and self.path not in _damaged:
            _damaged.add(self.path)
            log.warning("%s is damaged; damaged answers are requested again", self.path)
        return found


def _encode_row(key: str, value: Any, label: str | None) -> tuple[Any, ...]:
    text = json.dumps(value)
    return key, text, sha256(f"{key}\n{text}".encode()).digest(), time.time(), label


def make_cache_key(*parts: Any) -> str:
    """Return a key that depends on all parts, which are JSON values."""
    return sha256(_encode_sorted_json(parts).encode()).hexdigest()


def retry_while_locked(work: Callable[[], T]) -> T:
    """Retry work while the database is locked.

    SQLite's own timeout does not apply when two processes create the same file.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
