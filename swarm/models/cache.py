"""SQLite cache of model answers, shared by processes and threads, and the model that uses it.

Only SQLite opens the file: a process that closes any descriptor of a file loses all its locks on
it, and other processes may then delete the write-ahead log that it still writes. A process has one
connection to a file, which its threads use in turn and which is closed before a fork.

`CachedModel` answers from the cache, `CacheWriter` batches writes on an event loop, and the
functions at the end report and remove entries.
"""

import asyncio
import json
import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

from swarm._util.files import cache_folder, make_folder
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Delta,
    Model,
    Request,
    Stream,
    completion_fields,
    completion_from_fields,
    completion_from_json,
    completion_to_json,
    generate_each,
    request_to_json,
    stream,
)
from swarm.models.trace import require_completions

T = TypeVar("T")

log = logging.getLogger(__name__)

CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS responses (key TEXT PRIMARY KEY, value TEXT NOT NULL, "
    "sha256 BLOB NOT NULL, time REAL NOT NULL, label TEXT)"
)
DELETE_ROW = "DELETE FROM responses WHERE key = ?"
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

LOG_SUFFIXES = ("-wal", "-shm")
"""Of the files that SQLite has open beside the database."""

Restore = Callable[[Any], Any]
"""Validates and converts a stored value; raises `TypeError` or `ValueError` if it is damaged."""

_lock = threading.RLock()
"""Held during each operation of this process on a file, and while it forks."""
_databases: "WeakValueDictionary[Path, _Database]" = WeakValueDictionary()
_damaged: set[Path] = set()
"""Files with a damaged row, of which this process has warned."""


class _Database:
    """The connection of this process to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
            retry_while_locked(lambda: connection.execute(CREATE_TABLE))
            real = os.path.realpath(self.path)
            self._paths = [str(self.path), *(f"{real}{suffix}" for suffix in LOG_SUFFIXES)]
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

    __del__ = close


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
        self._database: _Database | None = None

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

    def get_range(self, first: str, last: str, restore: Restore | None = None) -> dict[str, Any]:
        """Return the stored values of all keys in a range (inclusive), in key order; see `get`."""
        query = f"{SELECT_ROWS} key BETWEEN ? AND ? ORDER BY key"
        rows = self.run(lambda connection: connection.execute(query, (first, last)).fetchall())
        return self._decode_rows(rows, restore)

    def delete(self, keys: Sequence[str]) -> int:
        """Delete these keys and return how many existed.

        Raises:
            UserError: The file cannot be written.
        """
        rows = [(key,) for key in keys]
        return self.run(lambda connection: connection.executemany(DELETE_ROW, rows).rowcount)

    def put(
        self, key: str, value: Any, label: str | None = None, restore: Restore | None = None
    ) -> Any:
        """Store a value immediately; return the stored one, which is the first written for its key.

        Args:
            label: Name of the model that gave the answer.
            restore: See `get`; also applied to `value`.

        Raises:
            UserError: The file cannot be written.
        """
        return self.put_many({key: value}, label, restore)[key]

    def put_many(
        self, values: Mapping[str, Any], label: str | None = None, restore: Restore | None = None
    ) -> dict[str, Any]:
        """Store several values in one transaction; see `put`."""
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

        stored = self.run(write)
        return {
            key: stored[key] if key in stored else restore(value) if restore else value
            for key, value in values.items()
        }

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run work on this process's connection to the file, and return its result.

        It is run again on a new connection if the file was deleted or replaced meanwhile, or after
        an I/O error.

        Raises:
            UserError: The file cannot be opened, or the operation fails.
        """
        try:
            if self._database is None:
                path = self.path.absolute()
                with _lock:
                    self._database = _databases.setdefault(path, _Database(path))
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
    text = _encode_sorted_json(parts)
    return sha256(text.encode()).hexdigest()


def make_sample_key(key: str, sample: int) -> str:
    """Return the key of one sample: `make_cache_key(key, sample)`, computed three times as fast."""
    return sha256(f'["{key}", {sample}]'.encode()).hexdigest()


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


REQUESTS_PER_BATCH = 64
"""Requests sent before their answers are stored; an interrupt loses at most this many."""


class CachedModel:
    """Answers from a cache; requests missing answers from a model and stores them, except failures.

    A key depends on the identity and on everything in a request that affects its answer. The k-th
    of equal requests in a call gets the k-th sample, counted from `Request.sample`, and the same
    one in the next call; requests with temperature 0 share one answer. `Request.stop_check` is not
    passed on, so that cached answers are complete.

    Args:
        model: Model that answers on a cache miss.
        cache: Cache of the answers.
        identity: JSON value that distinguishes the model from all others sharing the cache.
        label: The model's name in `python -m swarm.cache info`.
    """

    def __init__(self, model: Model, cache: Cache, identity: Sequence[Any], label: str) -> None:
        self.model, self.cache = model, cache
        self.identity, self.label = list(identity), label

    def check(self) -> None:
        """Check the model if it supports it; see `swarm.tasks.base.RequiresSetup.check`."""
        if check := getattr(self.model, "check", None):
            check()

    def open(self, device: str) -> None:
        """Load the model if it supports it; see `swarm.tasks.base.RequiresSetup.open`."""
        if opened := getattr(self.model, "open", None):
            opened(device)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Model.generate`; if a request fails, the other answers are stored anyway."""
        return require_completions(self.generate_each(requests))

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.base.generate_each`."""
        keyed = self._keyed_requests(requests)
        found: dict[str, Completion | UserError]
        found = dict(self.cache.get([key for key, _ in keyed], restore_completion))
        new = {key: request for key, request in keyed if key not in found}
        for first in range(0, len(new), REQUESTS_PER_BATCH):
            keys = list(new)[first : first + REQUESTS_PER_BATCH]
            answers = generate_each(self.model, [new[key] for key in keys])
            for key, one in zip(keys, answers, strict=True):
                found[key] = one if isinstance(one, UserError) else self._store_completion(key, one)
        return [found[key] for key, _ in keyed]

    def stream(self, request: Request) -> Stream:
        """Stream one answer (see `swarm.models.base.stream`); a cached one is a single piece."""
        ((key, keyed),) = self._keyed_requests([request])
        for answer in self.cache.get([key], restore_completion).values():
            yield Delta(answer.text, answer.reasoning)
            return cast(Completion, answer)
        answer = yield from stream(self.model, keyed)
        return self._store_completion(key, answer)

    def request_key(self, request: Request) -> str:
        """Return the key shared by all samples of a request."""
        return make_cache_key("model", self.identity, request_to_json(replace(request, sample=0)))

    def _keyed_requests(self, requests: Sequence[Request]) -> list[tuple[str, Request]]:
        """Return the requests to pass to the model, each with its cache key."""
        seen: Counter[tuple[str, int]] = Counter()
        keyed = []
        for request in requests:
            key = self.request_key(request)
            sample = 0 if request.temperature == 0 else request.sample + seen[key, request.sample]
            seen[key, request.sample] += 1
            keyed.append(
                (make_sample_key(key, sample), replace(request, sample=sample, stop_check=None))
            )
        return keyed

    def _store_completion(self, key: str, answer: Completion) -> Completion:
        value = completion_to_json(answer)
        return cast(Completion, self.cache.put(key, value, self.label, completion_from_json))


def restore_completion(value: Any) -> Completion:
    """Restore a completion from the cache; see `Restore`."""
    return completion_from_fields({**completion_fields(value), "cached": True})


class CacheWriter:
    """Stores the fields of completions as they arrive, batching those of one event loop iteration.

    An answer is written before the next iteration starts, so it is in the file before any consumer
    sees it.

    Args:
        cache: Cache to write to; `None` stores nothing.
        label: Name of the model that gave the answers.
    """

    def __init__(self, cache: Cache | None, label: str | None) -> None:
        self._cache, self._label = cache, label
        self._pending: dict[str, Any] = {}
        self._written: dict[str, Any] = {}
        self._error: UserError | None = None

    def add(self, key: str, answer: Any) -> None:
        """Schedule an answer for writing; must be called on the event loop.

        Raises:
            UserError: An earlier answer could not be written.
        """
        if self._error:
            raise self._error
        if self._cache and not self._pending:
            asyncio.get_running_loop().call_soon(self._write_pending)
        self._pending[key] = answer

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, {}
        try:
            assert self._cache
            self._written |= self._cache.put_many(pending, self._label, completion_fields)
        except UserError as error:
            self._error = error

    def get_stored(self, key: str, answer: Any) -> Any:
        """Return the stored answer of a key: another process's if that was written first.

        Raises:
            UserError: An answer could not be written.
        """
        if self._error:
            raise self._error
        return self._written.get(key, answer)


ENTRY_BYTES = "LENGTH(key) + LENGTH(CAST(value AS BLOB))"
SELECT_BY_LABEL = (
    f"SELECT label, COUNT(*), SUM({ENTRY_BYTES}), MIN(time), MAX(time) FROM responses "
    "GROUP BY label ORDER BY 3 DESC"
)
OLDEST_BEYOND_SIZE = (
    "key IN (SELECT key FROM (SELECT key, "
    f"SUM({ENTRY_BYTES}) OVER (ORDER BY time DESC, key) AS so_far FROM responses) "
    "WHERE so_far > ?)"
)


class CacheEntryStats(NamedTuple):
    """Statistics of the entries with one label.

    Attributes:
        label: The model's name; `None` if not recorded.
        answers: Number of answers.
        bytes: Size of their keys and values.
        oldest, newest: Times of storage as of `time.time`.
    """

    label: str | None
    answers: int
    bytes: int
    oldest: float
    newest: float


class CacheFilter(NamedTuple):
    """A subset of the entries: an SQL condition on the columns of a `Cache`, and its parameters."""

    condition: str
    values: tuple[Any, ...] = ()


ALL_ENTRIES = CacheFilter("TRUE")


def filter_older_than(seconds: float) -> CacheFilter:
    """Select entries older than a number of seconds."""
    return CacheFilter("time < ?", (time.time() - seconds,))


def filter_by_label(label: str | None) -> CacheFilter:
    """Select the entries of one model, or those without a recorded model."""
    return CacheFilter("label IS ?", (label,))


def filter_beyond_size(size: int) -> CacheFilter:
    """Select the oldest entries beyond `size` bytes."""
    return CacheFilter(OLDEST_BEYOND_SIZE, (size,))


def stats_by_label(cache: Cache) -> list[CacheEntryStats]:
    """Return the statistics of each label, largest first.

    Raises:
        UserError: The file cannot be read or created.
    """
    rows = cache.run(lambda connection: connection.execute(SELECT_BY_LABEL).fetchall())
    return [CacheEntryStats(*row) for row in rows]


def count_entries(cache: Cache, which: CacheFilter) -> tuple[int, int]:
    """Return the number of matching entries and their size in bytes.

    Raises:
        UserError: The file cannot be read or created.
    """
    query = "SELECT COUNT(*), COALESCE(SUM({}), 0) FROM responses WHERE {}"
    query = query.format(ENTRY_BYTES, which.condition)
    number, size = cache.run(lambda connection: connection.execute(query, which.values).fetchone())
    return number, size


def remove_entries(cache: Cache, which: CacheFilter) -> tuple[int, int]:
    """Remove entries and free their disk space; return their number and size in bytes.

    Raises:
        UserError: The file cannot be written, or another process locked it for too long.
    """
    found = count_entries(cache, which)

    def remove(connection: sqlite3.Connection) -> None:
        connection.execute(f"DELETE FROM responses WHERE {which.condition}", which.values)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    cache.run(remove)
    return found
