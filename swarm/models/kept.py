"""What a file of kept answers holds, and how some of them are removed."""

import time
from typing import Any, NamedTuple

from swarm.models.cache import Cache

BYTES = "LENGTH(key) + LENGTH(CAST(value AS BLOB))"
BY_LABEL = (
    f"SELECT label, COUNT(*), SUM({BYTES}), MIN(time), MAX(time) FROM answers "
    "GROUP BY label ORDER BY 3 DESC"
)
BEYOND = (
    "key IN (SELECT key FROM (SELECT key, "
    f"SUM({BYTES}) OVER (ORDER BY time DESC NULLS LAST, key) AS so_far FROM answers) "
    "WHERE so_far > ?)"
)


class Kept(NamedTuple):
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


class Which(NamedTuple):
    """Some of the answers: an SQL condition on the columns of a `Cache`, and its values."""

    condition: str
    values: tuple[Any, ...] = ()


EVERYTHING = Which("TRUE")
UNDATED = Which("time IS NULL")
"""Answers that were kept before their time was written down."""


def older(seconds: float) -> Which:
    """Answers of known time that are older than so many seconds."""
    return Which("time < ?", (time.time() - seconds,))


def of(label: str | None) -> Which:
    """The answers of one model, or those of which no model was written down."""
    return Which("label IS ?", (label,))


def beyond(size: int) -> Which:
    """The oldest answers, as many as are too many for `size` bytes; of unknown time is oldest."""
    return Which(BEYOND, (size,))


def by_label(cache: Cache) -> list[Kept]:
    """What the file holds of each label; the largest part first.

    Raises:
        UserError: The file cannot be read or made.
    """
    with cache.connected() as connection:
        return [Kept(*row) for row in connection.execute(BY_LABEL).fetchall()]


def count(cache: Cache, which: Which) -> tuple[int, int]:
    """How many answers these are, and their bytes.

    Raises:
        UserError: The file cannot be read or made.
    """
    asked = f"SELECT COUNT(*), COALESCE(SUM({BYTES}), 0) FROM answers WHERE {which.condition}"
    with cache.connected() as connection:
        number, size = connection.execute(asked, which.values).fetchone()
        return number, size


def remove(cache: Cache, which: Which) -> tuple[int, int]:
    """Remove answers and give the disk its space back; gives how many, and their bytes.

    Raises:
        UserError: The file cannot be written, or another process held it for too long.
    """
    found = count(cache, which)
    with cache.connected() as connection:
        connection.execute(f"DELETE FROM answers WHERE {which.condition}", which.values)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return found
