"""SQLite cache of model answers, shared by processes and threads, and the model that uses it.

A process claims an answer's key in the same file before it requests the answer, so that only one of
several processes pays for it. A claim is valid while its process lives: the process holds a kernel
lock on one byte of a file beside the cache, at the offset stored in the claim. Claims never block
threads of the same process, because one of them may be waiting for the other's answer.

`CachedModel` answers from the cache, `CacheWriter` batches writes on an event loop, and the
functions at the end report and remove entries.
"""

import asyncio
import fcntl
import hashlib
import json
import math
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from swarm._util.files import cache_folder, make_folder
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Delta,
    Model,
    Request,
    Stream,
    completion_from_json,
    completion_to_json,
    generate_each,
    request_to_json,
    stream,
)
from swarm.models.trace import require_completions

T = TypeVar("T")

CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT, time REAL, label TEXT)"
)
CLAIMS = "CREATE TABLE IF NOT EXISTS claims (key TEXT PRIMARY KEY, owner INTEGER)"
CLAIM = "INSERT OR REPLACE INTO claims (key, owner) VALUES (?, ?)"
DELETE_ROW = "DELETE FROM answers WHERE key = ?"
SELECT_RANGE = "SELECT key, value FROM answers WHERE key BETWEEN ? AND ? ORDER BY key"
INSERT_ROW = "INSERT OR IGNORE INTO answers (key, value, time, label) VALUES (?, ?, ?, ?)"
ADDED_COLUMNS = {"time": "REAL", "label": "TEXT"}
"""Columns missing in files of earlier versions; NULL in rows that existed before."""

_encode_sorted_json = json.JSONEncoder(sort_keys=True).encode

KEYS_PER_QUERY = 500
"""Number of keys in one query."""

LOCK_TIMEOUT_S = 30.0
"""Seconds to wait for another process to finish writing."""

FIRST_LOOK, LAST_LOOK = 0.05, 1.0
"""First and maximum interval in seconds between checks for another process's answer."""

_presences: dict[str, "Presence"] = {}
_presence_lock = threading.Lock()
_inherited_connections: list[sqlite3.Connection] = []


class Cache:
    """JSON values by key; several processes and threads may use the same file at once.

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
        self._own = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def path(self) -> Path:
        """Path of the file."""
        return Path(self.file).expanduser() if self.file else cache_folder() / "answers.sqlite"

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the stored values of these keys.

        Raises:
            UserError: The file cannot be read or created.
        """
        found: dict[str, Any] = {}
        with self.open_connection() as connection:
            for chunk, which in _chunk_keys(keys):
                query = f"SELECT key, value FROM answers WHERE {which}"
                found.update(connection.execute(query, chunk).fetchall())
        return _parse_values(found)

    def get_range(self, first: str, last: str) -> dict[str, Any]:
        """Return the stored values of all keys in a range (inclusive), in key order.

        Raises:
            UserError: The file cannot be read or created.
        """
        with self.open_connection() as connection:
            return _parse_values(dict(connection.execute(SELECT_RANGE, (first, last)).fetchall()))

    def delete(self, keys: Sequence[str]) -> int:
        """Delete these keys and return how many existed.

        Raises:
            UserError: The file cannot be written.
        """
        if not keys:
            return 0
        with self.open_connection() as connection:
            return connection.executemany(DELETE_ROW, [(key,) for key in keys]).rowcount

    def put(self, key: str, value: Any, label: str | None = None) -> Any:
        """Store a value immediately; return the stored one, which is the first written for its key.

        Args:
            label: Name of the model that gave the answer.

        Raises:
            UserError: The file cannot be written.
        """
        return self.put_many({key: value}, label)[key]

    def put_many(self, values: Mapping[str, Any], label: str | None = None) -> dict[str, Any]:
        """Store several values in one transaction; see `put`."""
        rows = [(key, json.dumps(value), time.time(), label) for key, value in values.items()]
        with self.open_connection() as connection:
            if len(rows) == 1:
                new = connection.execute(INSERT_ROW, rows[0]).rowcount
            else:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    new = connection.executemany(INSERT_ROW, rows).rowcount
        return dict(values) if new == len(rows) else {**values, **self.get(list(values))}

    def claim(self, keys: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Claim answers before requesting them; `release` them once they are stored.

        Returns:
            The values stored by now, and the keys claimed by this process. All other keys are
            claimed by other live processes.

        Raises:
            UserError: The file cannot be written.
        """
        stored: dict[str, Any] = {}
        claimed: list[str] = []
        with self.open_connection() as connection:
            presence = _presence(self.path)
            connection.execute("BEGIN IMMEDIATE")
            try:
                for chunk, which in _chunk_keys(keys):
                    query = f"SELECT key, value FROM answers WHERE {which}"
                    found = dict(connection.execute(query, chunk).fetchall())
                    query = f"SELECT key, owner FROM claims WHERE {which}"
                    claims = dict(connection.execute(query, chunk).fetchall())
                    others = {*claims.values()} - {presence.number}
                    alive = {owner for owner in others if presence.sees(owner)}
                    free = [k for k in chunk if k not in found and claims.get(k) not in alive]
                    connection.executemany(CLAIM, [(key, presence.number) for key in free])
                    stored, claimed = stored | found, claimed + free
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
        return _parse_values(stored), claimed

    def release(self, keys: Sequence[str]) -> None:
        """Release claims of this process, whether or not their answers arrived.

        Raises:
            UserError: The file cannot be written.
        """
        if not keys:
            return
        with self.open_connection() as connection:
            number = _presence(self.path).number
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                for chunk, which in _chunk_keys(keys):
                    query = f"DELETE FROM claims WHERE {which} AND owner = ?"
                    connection.execute(query, [*chunk, number])

    def once(
        self,
        keys: Sequence[str],
        ask: Callable[[list[str]], dict[str, T]],
        timeout: float | None = None,
    ) -> tuple[dict[str, T], dict[str, Any]]:
        """Request answers that are not stored; wait for those that other processes are requesting.

        Args:
            ask: Requests the answers of some keys, stores successful ones and returns all results.
            timeout: Seconds after which answers claimed by other processes are requested anyway;
                `None` waits as long as those processes live.

        Returns:
            The requested results, and the stored values of the other keys.

        Raises:
            UserError: The file cannot be used; also errors of `ask`.
        """
        computed: dict[str, T] = {}
        stored: dict[str, Any] = {}
        remaining, delay, until = list(keys), FIRST_LOOK, time.monotonic() + (timeout or math.inf)
        while remaining:
            found, claimed = self.claim(remaining)
            stored |= found
            if not found and not claimed and time.monotonic() > until:
                claimed = remaining
            try:
                computed |= ask(claimed) if claimed else {}
            finally:
                self.release(claimed)
            remaining = [key for key in remaining if key not in found and key not in computed]
            if remaining and not claimed:
                time.sleep(delay)
                delay = min(LAST_LOOK, 1.5 * delay)
        return computed, stored

    def _thread_connection(self) -> sqlite3.Connection:
        """Return this thread's connection; connections are not reused after a fork."""
        process, connection = getattr(self._own, "opened", (None, None))
        if connection is not None and process == os.getpid():
            return connection
        if connection is not None:
            # Closing it here could corrupt the file that the parent process has open.
            _inherited_connections.append(connection)
        # Create the file first: SQLite gives its write-ahead log the same permissions.
        make_folder(self.path.parent, private=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        if self.file is None:  # another file may be shared
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
        """Provide this thread's connection for one operation.

        Raises:
            UserError: The file cannot be opened, or the operation fails.
        """
        try:
            yield self._thread_connection()
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"the cache {self.path} cannot be used: {error}; name another file (cache.file, or "
                "its folder in MODEL_SWARMS_CACHE), or disable the cache (cache=null, --no_cache)"
            ) from None


def make_cache_key(*parts: Any) -> str:
    """Return a key that depends on all parts, which are JSON values."""
    text = _encode_sorted_json(parts)
    return hashlib.sha256(text.encode()).hexdigest()


def _chunk_keys(keys: Sequence[str]) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the keys of each query, and its SQL condition that selects them."""
    for first in range(0, len(keys), KEYS_PER_QUERY):
        chunk = keys[first : first + KEYS_PER_QUERY]
        yield chunk, f"key IN ({','.join('?' * len(chunk))})"


def _parse_values(found: dict[str, str]) -> dict[str, Any]:
    """Decode JSON values; one joined document decodes three times as fast as many small ones."""
    return dict(zip(found, json.loads(f"[{','.join(found.values())}]"), strict=True))


def make_sample_key(key: str, sample: int) -> str:
    """Return the key of one sample: `make_cache_key(key, sample)`, computed three times as fast."""
    return hashlib.sha256(f'["{key}", {sample}]'.encode()).hexdigest()


def _migrate_table(connection: sqlite3.Connection) -> None:
    """Create the table, or add missing columns to an earlier version's, in one transaction."""
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
    """Marks this process as alive for others that share a cache; ends with the process.

    Args:
        cache: Path of the cache; bytes of a file beside it are locked, nothing is written to it.

    Attributes:
        number: Offset of this process's byte.
    """

    def __init__(self, cache: Path) -> None:
        self.process, self.number = os.getpid(), int.from_bytes(os.urandom(7), "big")
        file = cache.with_name(f"{cache.name}-claims")
        # Never closed: POSIX releases all of a process's locks on a file when it closes any
        # descriptor of it.
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # as accessible as the cache
            os.fchmod(self._descriptor, cache.stat().st_mode & 0o777)
        self._lock(self.number)

    def holds(self, cache: Path) -> bool:
        """Return whether this process created it, on the file that exists now."""
        file = cache.with_name(f"{cache.name}-claims")
        try:
            return self.process == os.getpid() and os.path.samestat(
                file.stat(), os.fstat(self._descriptor)
            )
        except OSError:
            return False

    def sees(self, number: int) -> bool:
        """Return whether another process with this number is alive."""
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
    """Return this process's presence for a cache."""
    with _presence_lock:
        found = _presences.get(str(cache))
        if found is None or not found.holds(cache):
            found = _presences[str(cache)] = Presence(cache)
        return found


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
        stored = self.cache.get([key for key, _ in keyed])
        found: dict[str, Completion | UserError] = {
            k: _restore_completion(v) for k, v in stored.items()
        }
        new = {key: request for key, request in keyed if key not in found}

        def once(keys: Sequence[str]) -> dict[str, Completion | UserError]:
            answers = zip(keys, generate_each(self.model, [new[key] for key in keys]), strict=True)
            return {
                k: a if isinstance(a, UserError) else self._store_completion(k, a)
                for k, a in answers
            }

        for first in range(0, len(new), REQUESTS_PER_BATCH):
            computed, others = self.cache.once(list(new)[first : first + REQUESTS_PER_BATCH], once)
            found |= computed | {key: _restore_completion(value) for key, value in others.items()}
        return [found[key] for key, _ in keyed]

    def stream(self, request: Request) -> Stream:
        """Stream one answer (see `swarm.models.base.stream`); a cached one is a single piece."""
        ((key, keyed),) = self._keyed_requests([request])
        if key in (stored := self.cache.get([key])):
            answer = _restore_completion(stored[key])
            yield Delta(answer.text, answer.reasoning)
            return answer
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
        return completion_from_json(self.cache.put(key, completion_to_json(answer), self.label))


def _restore_completion(value: Any) -> Completion:
    return replace(completion_from_json(value), cached=True)


class CacheWriter:
    """Stores answers as they arrive, batching those of one event loop iteration.

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
            self._written |= self._cache.put_many(pending, self._label)
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
    f"SELECT label, COUNT(*), SUM({ENTRY_BYTES}), MIN(time), MAX(time) FROM answers "
    "GROUP BY label ORDER BY 3 DESC"
)
OLDEST_BEYOND_SIZE = (
    "key IN (SELECT key FROM (SELECT key, "
    f"SUM({ENTRY_BYTES}) OVER (ORDER BY time DESC NULLS LAST, key) AS so_far FROM answers) "
    "WHERE so_far > ?)"
)


class CacheEntryStats(NamedTuple):
    """Statistics of the entries with one label.

    Attributes:
        label: The model's name; `None` if not recorded.
        answers: Number of answers.
        bytes: Size of their keys and values.
        oldest, newest: Times of storage as of `time.time`; `None` if unknown.
    """

    label: str | None
    answers: int
    bytes: int
    oldest: float | None
    newest: float | None


class CacheFilter(NamedTuple):
    """A subset of the entries: an SQL condition on the columns of a `Cache`, and its parameters."""

    condition: str
    values: tuple[Any, ...] = ()


ALL_ENTRIES = CacheFilter("TRUE")
UNDATED_ENTRIES = CacheFilter("time IS NULL")
"""Entries stored before times were recorded."""


def filter_older_than(seconds: float) -> CacheFilter:
    """Select entries of known time older than a number of seconds."""
    return CacheFilter("time < ?", (time.time() - seconds,))


def filter_by_label(label: str | None) -> CacheFilter:
    """Select the entries of one model, or those without a recorded model."""
    return CacheFilter("label IS ?", (label,))


def filter_beyond_size(size: int) -> CacheFilter:
    """Select the oldest entries beyond `size` bytes; those of unknown time count as oldest."""
    return CacheFilter(OLDEST_BEYOND_SIZE, (size,))


def stats_by_label(cache: Cache) -> list[CacheEntryStats]:
    """Return the statistics of each label, largest first.

    Raises:
        UserError: The file cannot be read or created.
    """
    with cache.open_connection() as connection:
        return [CacheEntryStats(*row) for row in connection.execute(SELECT_BY_LABEL).fetchall()]


def count_entries(cache: Cache, which: CacheFilter) -> tuple[int, int]:
    """Return the number of matching entries and their size in bytes.

    Raises:
        UserError: The file cannot be read or created.
    """
    query = f"SELECT COUNT(*), COALESCE(SUM({ENTRY_BYTES}), 0) FROM answers WHERE {which.condition}"
    with cache.open_connection() as connection:
        number, size = connection.execute(query, which.values).fetchone()
        return number, size


def remove_entries(cache: Cache, which: CacheFilter) -> tuple[int, int]:
    """Remove entries and free their disk space; return their number and size in bytes.

    Raises:
        UserError: The file cannot be written, or another process locked it for too long.
    """
    found = count_entries(cache, which)
    with cache.open_connection() as connection:
        connection.execute(f"DELETE FROM answers WHERE {which.condition}", which.values)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return found
