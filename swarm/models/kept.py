"""What a file of kept answers holds, and how some of them are removed."""

import time
from typing import Any, NamedTuple

from swarm.models.cache import Cache

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
