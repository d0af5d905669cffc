"""Answers that were paid for once, kept in one SQLite file by all that could change them.

Before an answer is asked for its key is claimed in the same file, so that of several processes
that want it one pays. A claim counts as long as its process lives: that holds a lock of the
kernel's on a byte of a file beside the cache, the byte whose number the claim has. Claims hold back
no thread of their own process, which may be waiting for that thread's answer.
"""

import fcntl
import hashlib
import json
import math
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

CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT, time REAL, label TEXT)"
)
CLAIMS = "CREATE TABLE IF NOT EXISTS claims (key TEXT PRIMARY KEY, owner INTEGER)"
CLAIM = "INSERT OR REPLACE INTO claims (key, owner) VALUES (?, ?)"
RELEASE = "DELETE FROM claims WHERE key = ? AND owner = ?"
DELETE_ROW = "DELETE FROM answers WHERE key = ?"
SELECT_RANGE = "SELECT key, value FROM answers WHERE key BETWEEN ? AND ? ORDER BY key"
INSERT_ROW = "INSERT OR IGNORE INTO answers (key, value, time, label) VALUES (?, ?, ?, ?)"
ADDED_COLUMNS = {"time": "REAL", "label": "TEXT"}
"""Columns that the files of earlier versions lack; NULL in the rows that were there."""

_encode_sorted_json = json.JSONEncoder(sort_keys=True).encode

KEYS_PER_QUERY = 500
"""Keys in one look-up."""

LOCK_TIMEOUT_S = 30.0
"""Seconds to wait for another process that writes."""

FIRST_LOOK, LAST_LOOK = 0.05, 1.0
"""Seconds between two looks for an answer that another process asks for; they grow."""

_presences: dict[str, "Presence"] = {}
_presence_lock = threading.Lock()
_inherited_connections: list[sqlite3.Connection] = []


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
        with self.open_connection() as connection:
            for first in range(0, len(keys), KEYS_PER_QUERY):
                some = keys[first : first + KEYS_PER_QUERY]
                places = ",".join("?" * len(some))
                asked = f"SELECT key, value FROM answers WHERE key IN ({places})"
                found.update(connection.execute(asked, some).fetchall())
        return _parse_values(found)

    def get_range(self, first: str, last: str) -> dict[str, Any]:
        """The values of all keys that are kept from one to another, in their order.

        Raises:
            UserError: The file cannot be read or made.
        """
        with self.open_connection() as connection:
            return _parse_values(dict(connection.execute(SELECT_RANGE, (first, last)).fetchall()))

    def delete(self, keys: Sequence[str]) -> int:
        """Keep these no longer; gives how many there were.

        Raises:
            UserError: The file cannot be written.
        """
        if not keys:
            return 0
        with self.open_connection() as connection:
            return connection.executemany(DELETE_ROW, [(key,) for key in keys]).rowcount

    def put(self, key: str, value: Any, label: str | None = None) -> Any:
        """Keep a value, at once; gives the one that is kept, which is the first of its key.

        Args:
            label: Whose answer it is, a model's name.

        Raises:
            UserError: The file cannot be written.
        """
        return self.put_many({key: value}, label)[key]

    def put_many(self, values: Mapping[str, Any], label: str | None = None) -> dict[str, Any]:
        """Keep several values in one go; see `put`."""
        rows = [(key, json.dumps(value), time.time(), label) for key, value in values.items()]
        with self.open_connection() as connection:
            if len(rows) == 1:
                new = connection.execute(INSERT_ROW, rows[0]).rowcount
            else:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    new = connection.executemany(INSERT_ROW, rows).rowcount
        found = {key: json.loads(value) for key, value, *_ in rows}
        return found if new == len(rows) else found | self.get(list(values))

    def claim(self, keys: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Claim answers that are about to be asked for; `release` them when they are kept.

        Returns:
            What is kept of the keys by now, and the keys that are now this process's. Any other
            one is asked for by another process, which lives.

        Raises:
            UserError: The file cannot be written.
        """
        kept: dict[str, Any] = {}
        mine: list[str] = []
        with self.open_connection() as connection:
            presence = _presence(self.path)
            connection.execute("BEGIN IMMEDIATE")
            try:
                for first in range(0, len(keys), KEYS_PER_QUERY):
                    some = keys[first : first + KEYS_PER_QUERY]
                    asked = f"FROM answers WHERE key IN ({','.join('?' * len(some))})"
                    found = dict(connection.execute(f"SELECT key, value {asked}", some).fetchall())
                    asked = asked.replace("answers", "claims")
                    claims = dict(connection.execute(f"SELECT key, owner {asked}", some).fetchall())
                    others = {*claims.values()} - {presence.number}
                    alive = {owner for owner in others if presence.sees(owner)}
                    free = [k for k in some if k not in found and claims.get(k) not in alive]
                    connection.executemany(CLAIM, [(key, presence.number) for key in free])
                    kept, mine = kept | found, mine + free
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
        return _parse_values(kept), mine

    def release(self, keys: Sequence[str]) -> None:
        """Give up claims of this process, whether their answers came or not.

        Raises:
            UserError: The file cannot be written.
        """
        if not keys:
            return
        with self.open_connection() as connection:
            number = _presence(self.path).number
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                connection.executemany(RELEASE, [(key, number) for key in keys])

    def once(
        self,
        keys: Sequence[str],
        ask: Callable[[list[str]], dict[str, T]],
        timeout: float | None = None,
    ) -> tuple[dict[str, T], dict[str, Any]]:
        """Ask for answers that are not kept; those that others ask for at the moment are awaited.

        Args:
            ask: Gives what each of some keys comes to, and keeps it where it is an answer.
            timeout: Seconds after which what others owe is asked for nevertheless; `None`: it is
                awaited as long as they live.

        Returns:
            What was asked for, and what is kept of the other keys.

        Raises:
            UserError: The file cannot be used; also what `ask` raises.
        """
        asked: dict[str, T] = {}
        kept: dict[str, Any] = {}
        left, wait, until = list(keys), FIRST_LOOK, time.monotonic() + (timeout or math.inf)
        while left:
            found, mine = self.claim(left)
            kept |= found
            if not found and not mine and time.monotonic() > until:
                mine = left
            try:
                asked |= ask(mine) if mine else {}
            finally:
                self.release(mine)
            left = [key for key in left if key not in found and key not in asked]
            if left and not mine:
                time.sleep(wait)
                wait = min(LAST_LOOK, 1.5 * wait)
        return asked, kept

    def _thread_connection(self) -> sqlite3.Connection:
        """This thread's connection; none is carried over a fork."""
        process, connection = getattr(self._own, "opened", (None, None))
        if connection is not None and process == os.getpid():
            return connection
        if connection is not None:
            # To close it here could harm the file that the parent has open.
            _inherited_connections.append(connection)
        # SQLite gives its write-ahead log the mode of the file.
        make_folder(self.path.parent, private=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        if self.file is None:  # who names another file may share it
            with suppress(PermissionError):
                self.path.parent.chmod(0o700)
                self.path.chmod(0o600)
        connection = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        retry_while_locked(lambda: connection.execute("PRAGMA journal_mode=WAL"))
        connection.execute("PRAGMA synchronous=NORMAL")
        retry_while_locked(lambda: _migrate_table(connection))
        self._own.opened = (os.getpid(), connection)
        return connection

    @contextmanager
    def open_connection(self) -> Iterator[sqlite3.Connection]:
        """This thread's connection, for one use of it.

        Raises:
            UserError: The file cannot be opened, or what is done inside fails.
        """
        try:
            yield self._thread_connection()
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"the cache {self.path} cannot be used: {error}; name another file (cache.file, or "
                "its folder in MODEL_SWARMS_CACHE), or keep no answers (cache=null, --no_cache)"
            ) from None


def make_cache_key(*parts: Any) -> str:
    """A key that changes with any of the parts, which are JSON values."""
    text = _encode_sorted_json(parts)
    return hashlib.sha256(text.encode()).hexdigest()


def _parse_values(found: dict[str, str]) -> dict[str, Any]:
    """Values out of their JSON; one text is read in a third of the time that many take."""
    return dict(zip(found, json.loads(f"[{','.join(found.values())}]"), strict=True))


def make_sample_key(key: str, sample: int) -> str:
    """The key of one of several answers: `key_of(key, sample)`, made in a third of the time."""
    return hashlib.sha256(f'["{key}", {sample}]'.encode()).hexdigest()


def _migrate_table(connection: sqlite3.Connection) -> None:
    """Make the table, or give the one of an earlier version its columns; one process does it."""
    if _column_names(connection) >= set(ADDED_COLUMNS) and _column_names(connection, "claims"):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(CREATE_TABLE)
        connection.execute(CLAIMS)
        for name in sorted(set(ADDED_COLUMNS) - _column_names(connection)):
            connection.execute(f"ALTER TABLE answers ADD COLUMN {name} {ADDED_COLUMNS[name]}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _column_names(connection: sqlite3.Connection, table: str = "answers") -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


class Presence:
    """That this process lives, for others that share a cache; it ends with the process.

    Args:
        cache: Beside which the file lies whose bytes are locked; nothing is written to it.

    Attributes:
        number: Of the byte that is this process's.
    """

    def __init__(self, cache: Path) -> None:
        self.process, self.number = os.getpid(), int.from_bytes(os.urandom(7), "big")
        file = cache.with_name(f"{cache.name}-claims")
        # Never closed: that would release all locks that the process has on the file.
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # who may use the cache may use this
            os.fchmod(self._descriptor, cache.stat().st_mode & 0o777)
        self._lock(self.number)

    def holds(self, cache: Path) -> bool:
        """Whether this process made it, on the file that is there now."""
        file = cache.with_name(f"{cache.name}-claims")
        try:
            return self.process == os.getpid() and os.path.samestat(
                file.stat(), os.fstat(self._descriptor)
            )
        except OSError:
            return False

    def sees(self, number: int) -> bool:
        """Whether another process, of this number, lives."""
        if not self._lock(number):
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)
        return False

    def _lock(self, number: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError:
            return False
        return True


def _presence(cache: Path) -> Presence:
    """This process's for a cache."""
    with _presence_lock:
        found = _presences.get(str(cache))
        if found is None or not found.holds(cache):
            found = _presences[str(cache)] = Presence(cache)
        return found


def retry_while_locked(work: Callable[[], T]) -> T:
    """SQLite does not wait by itself where two processes make the same new file."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
