"""Answers that were paid for once, kept in one SQLite file by all that could change them."""

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from swarm.errors import UserError
from swarm.files import make_folder
from swarm.places import cache_folder

T = TypeVar("T")

TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT, time REAL, label TEXT)"
)
DROP = "DELETE FROM answers WHERE key = ?"
BETWEEN = "SELECT key, value FROM answers WHERE key BETWEEN ? AND ? ORDER BY key"
PUT = "INSERT OR IGNORE INTO answers (key, value, time, label) VALUES (?, ?, ?, ?)"
ADDED = {"time": "REAL", "label": "TEXT"}
"""Columns that the files of earlier versions lack; NULL in the rows that were there."""

_as_text = json.JSONEncoder(sort_keys=True).encode

AT_ONCE = 500
"""Keys in one look-up."""

WAIT = 30.0
"""Seconds to wait for another process that writes."""

_inherited: list[sqlite3.Connection] = []


class Cache:
    """Keeps JSON values by key; several processes and threads may use the same file at once.

    Args:
        file: Path of the file; `None` is answers.sqlite in `swarm.places.cache_folder()`. Not on
            a network file system: SQLite's write-ahead log does not work there.

    Raises:
        UserError: The path is no text.
    """

    def __init__(self, file: str | None = None) -> None:
        if file is not None and (not isinstance(file, str) or not file.strip()):
            raise UserError(f"cache.file={file!r}: must be null or the path of a file")
        self.file = file
        self._own = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return Path(self.file).expanduser() if self.file else cache_folder() / "answers.sqlite"

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values that are kept of these keys.

        Raises:
            UserError: The file cannot be read or made.
        """
        found: dict[str, Any] = {}
        with self.connected() as connection:
            for first in range(0, len(keys), AT_ONCE):
                some = keys[first : first + AT_ONCE]
                places = ",".join("?" * len(some))
                asked = f"SELECT key, value FROM answers WHERE key IN ({places})"
                found.update(connection.execute(asked, some).fetchall())
        return _read(found)

    def between(self, first: str, last: str) -> dict[str, Any]:
        """The values of all keys that are kept from one to another, in their order.

        Raises:
            UserError: The file cannot be read or made.
        """
        with self.connected() as connection:
            return _read(dict(connection.execute(BETWEEN, (first, last)).fetchall()))

    def drop(self, keys: Sequence[str]) -> int:
        """Keep these no longer; gives how many there were.

        Raises:
            UserError: The file cannot be written.
        """
        if not keys:
            return 0
        with self.connected() as connection:
            return connection.executemany(DROP, [(key,) for key in keys]).rowcount

    def put(self, key: str, value: Any, label: str | None = None) -> Any:
        """Keep a value, at once; gives the one that is kept, which is the first of its key.

        Args:
            label: Whose answer it is, a model's name.

        Raises:
            UserError: The file cannot be written.
        """
        return self.put_all({key: value}, label)[key]

    def put_all(self, values: Mapping[str, Any], label: str | None = None) -> dict[str, Any]:
        """Keep several values in one go; see `put`."""
        rows = [(key, json.dumps(value), time.time(), label) for key, value in values.items()]
        with self.connected() as connection:
            if len(rows) == 1:
                new = connection.execute(PUT, rows[0]).rowcount
            else:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    new = connection.executemany(PUT, rows).rowcount
        found = {key: json.loads(value) for key, value, *_ in rows}
        return found if new == len(rows) else found | self.get(list(values))

    def _connection(self) -> sqlite3.Connection:
        """This thread's connection; none is carried over a fork."""
        process, connection = getattr(self._own, "opened", (None, None))
        if connection is not None and process == os.getpid():
            return connection
        if connection is not None:
            # To close it here could harm the file that the parent has open.
            _inherited.append(connection)
        # SQLite gives its write-ahead log the mode of the file.
        make_folder(self.path.parent, private=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        if self.file is None:  # who names another file may share it
            with suppress(PermissionError):
                self.path.parent.chmod(0o700)
                self.path.chmod(0o600)
        connection = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
        patiently(lambda: connection.execute("PRAGMA journal_mode=WAL"))
        connection.execute("PRAGMA synchronous=NORMAL")
        patiently(lambda: _prepare(connection))
        self._own.opened = (os.getpid(), connection)
        return connection

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """This thread's connection, for one use of it.

        Raises:
            UserError: The file cannot be opened, or what is done inside fails.
        """
        try:
            yield self._connection()
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"the cache {self.path} cannot be used: {error}; name another file (cache.file, or "
                "its folder in MODEL_SWARMS_CACHE), or keep no answers (cache=null, --no_cache)"
            ) from None


def key_of(*parts: Any) -> str:
    """A key that changes with any of the parts, which are JSON values."""
    text = _as_text(parts)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(found: dict[str, str]) -> dict[str, Any]:
    """Values out of their JSON; one text is read in a third of the time that many take."""
    return dict(zip(found, json.loads(f"[{','.join(found.values())}]"), strict=True))


def sample_key(key: str, sample: int) -> str:
    """The key of one of several answers: `key_of(key, sample)`, made in a third of the time."""
    return hashlib.sha256(f'["{key}", {sample}]'.encode()).hexdigest()


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the table, or give the one of an earlier version its columns; one process does it."""
    if _columns(connection) >= set(ADDED):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(TABLE)
        for name in sorted(set(ADDED) - _columns(connection)):
            connection.execute(f"ALTER TABLE answers ADD COLUMN {name} {ADDED[name]}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _columns(connection: sqlite3.Connection) -> set[str]:
    return {row[1] for row in connection.execute("PRAGMA table_info(answers)")}


def patiently(work: Callable[[], T]) -> T:
    """SQLite does not wait by itself where two processes make the same new file."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
