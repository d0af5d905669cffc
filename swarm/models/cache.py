"""Answers that were paid for once, kept in one SQLite file by all that could change them.

Before an answer is asked for its key is claimed in the same file, so that of several processes
that want it one pays. A claim counts as long as its process lives: that holds a lock of the
kernel's on a byte of a file beside the cache, the byte whose number the claim has. Claims hold back
no thread of their own process, which may be waiting for that thread's answer.
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
        file: Path of the file; `None` is answers.sqlite in `swarm._util.files.cache_folder()`. Not
            on a network file system: SQLite's write-ahead log does not work there.

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


# A model whose answers are kept: what was asked once is not asked again.

REQUESTS_PER_BATCH = 64
"""Requests that are asked before their answers are kept; an interrupt loses no more."""


class CachedModel:
    """Asks a model for what is not kept of it, and keeps its answers; failures are not kept.

    A key is made of the identity and of everything in a request that changes its answer. Of equal
    requests in a call, the k-th has the k-th sample of their answer from `Request.sample` on, and
    the same again at the next call; those with a temperature of 0 have one answer. A model is not
    told when it may stop (`Request.decided`): what is kept is whole.

    Args:
        model: Whose answers are kept.
        cache: Where.
        identity: What tells the model from all others that share the cache, as JSON has it.
        label: The model's name in `python -m swarm.cache info`.
    """

    def __init__(self, model: Model, cache: Cache, identity: Sequence[Any], label: str) -> None:
        self.model, self.cache = model, cache
        self.identity, self.label = list(identity), label

    def check(self) -> None:
        """See `swarm.tasks.base.RequiresSetup.check`; the model's, if it has one."""
        if check := getattr(self.model, "check", None):
            check()

    def open(self, device: str) -> None:
        """See `swarm.tasks.base.RequiresSetup.open`; the model's, if it has one."""
        if opened := getattr(self.model, "open", None):
            opened(device)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Model.generate`; what was answered beside a failure is kept nevertheless."""
        return require_completions(self.generate_each(requests))

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.base.generate_each`."""
        asked = self._keyed_requests(requests)
        kept = self.cache.get([key for key, _ in asked])
        found: dict[str, Completion | UserError] = {
            k: _restore_completion(v) for k, v in kept.items()
        }
        new = {key: request for key, request in asked if key not in found}

        def once(keys: Sequence[str]) -> dict[str, Completion | UserError]:
            came = zip(keys, generate_each(self.model, [new[key] for key in keys]), strict=True)
            return {
                k: a if isinstance(a, UserError) else self._store_completion(k, a) for k, a in came
            }

        for first in range(0, len(new), REQUESTS_PER_BATCH):
            said, others = self.cache.once(list(new)[first : first + REQUESTS_PER_BATCH], once)
            found |= said | {key: _restore_completion(value) for key, value in others.items()}
        return [found[key] for key, _ in asked]

    def stream(self, request: Request) -> Stream:
        """See `swarm.models.base.stream`; an answer that is kept comes in one piece."""
        ((key, whole),) = self._keyed_requests([request])
        if key in (kept := self.cache.get([key])):
            answer = _restore_completion(kept[key])
            yield Delta(answer.text, answer.reasoning)
            return answer
        answer = yield from stream(self.model, whole)
        return self._store_completion(key, answer)

    def request_key(self, request: Request) -> str:
        """Under which, with the sample's number, an answer is kept; greedy ones have number 0."""
        return make_cache_key("model", self.identity, request_to_json(replace(request, sample=0)))

    def _keyed_requests(self, requests: Sequence[Request]) -> list[tuple[str, Request]]:
        """The requests as the model gets them, each with the key of its answer."""
        seen: Counter[tuple[str, int]] = Counter()
        asked = []
        for request in requests:
            key = self.request_key(request)
            sample = 0 if request.temperature == 0 else request.sample + seen[key, request.sample]
            seen[key, request.sample] += 1
            asked.append(
                (make_sample_key(key, sample), replace(request, sample=sample, decided=None))
            )
        return asked

    def _store_completion(self, key: str, answer: Completion) -> Completion:
        return completion_from_json(self.cache.put(key, completion_to_json(answer), self.label))


def _restore_completion(value: Any) -> Completion:
    return replace(completion_from_json(value), cached=True)


# Answers on their way into the cache: those that come at the same moment are written together.


class CacheWriter:
    """Keeps answers as they come, and says in the end which are kept.

    What has come in one turn of the event loop is written before the next: an answer is in the file
    before anybody is told of it.

    Args:
        cache: Where; `None` keeps nothing.
        label: Whose answers they are.
    """

    def __init__(self, cache: Cache | None, label: str | None) -> None:
        self._cache, self._label = cache, label
        self._waiting: dict[str, Any] = {}
        self._written: dict[str, Any] = {}
        self._error: UserError | None = None

    def add(self, key: str, answer: Any) -> None:
        """Keep an answer; called on the event loop.

        Raises:
            UserError: An earlier one could not be written.
        """
        if self._error:
            raise self._error
        if self._cache and not self._waiting:
            asyncio.get_running_loop().call_soon(self._write_pending)
        self._waiting[key] = answer

    def _write_pending(self) -> None:
        waiting, self._waiting = self._waiting, {}
        try:
            assert self._cache
            self._written |= self._cache.put_many(waiting, self._label)
        except UserError as error:
            self._error = error

    def get_stored(self, key: str, answer: Any) -> Any:
        """The answer of a key that is kept: another's, if that came first.

        Raises:
            UserError: One could not be written.
        """
        if self._error:
            raise self._error
        return self._written.get(key, answer)


# What a file of kept answers holds, and how some of them are removed.

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
    """What a file holds of one label.

    Attributes:
        label: The model's name; `None` where none was written down.
        answers: How many.
        bytes: Of their keys and values.
        oldest, newest: When they were kept, as `time.time` has it; `None` if unknown.
    """

    label: str | None
    answers: int
    bytes: int
    oldest: float | None
    newest: float | None


class CacheFilter(NamedTuple):
    """Some of the answers: an SQL condition on the columns of a `Cache`, and its values."""

    condition: str
    values: tuple[Any, ...] = ()


ALL_ENTRIES = CacheFilter("TRUE")
UNDATED_ENTRIES = CacheFilter("time IS NULL")
"""Answers that were kept before their time was written down."""


def filter_older_than(seconds: float) -> CacheFilter:
    """Answers of known time that are older than so many seconds."""
    return CacheFilter("time < ?", (time.time() - seconds,))


def filter_by_label(label: str | None) -> CacheFilter:
    """The answers of one model, or those of which no model was written down."""
    return CacheFilter("label IS ?", (label,))


def filter_beyond_size(size: int) -> CacheFilter:
    """The oldest answers, as many as are too many for `size` bytes; of unknown time is oldest."""
    return CacheFilter(OLDEST_BEYOND_SIZE, (size,))


def stats_by_label(cache: Cache) -> list[CacheEntryStats]:
    """What the file holds of each label; the largest part first.

    Raises:
        UserError: The file cannot be read or made.
    """
    with cache.open_connection() as connection:
        return [CacheEntryStats(*row) for row in connection.execute(SELECT_BY_LABEL).fetchall()]


def count_entries(cache: Cache, which: CacheFilter) -> tuple[int, int]:
    """How many answers these are, and their bytes.

    Raises:
        UserError: The file cannot be read or made.
    """
    asked = f"SELECT COUNT(*), COALESCE(SUM({ENTRY_BYTES}), 0) FROM answers WHERE {which.condition}"
    with cache.open_connection() as connection:
        number, size = connection.execute(asked, which.values).fetchone()
        return number, size


def remove_entries(cache: Cache, which: CacheFilter) -> tuple[int, int]:
    """Remove answers and give the disk its space back; gives how many, and their bytes.

    Raises:
        UserError: The file cannot be written, or another process held it for too long.
    """
    found = count_entries(cache, which)
    with cache.open_connection() as connection:
        connection.execute(f"DELETE FROM answers WHERE {which.condition}", which.values)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return found
