"""Which endpoint had a model, remembered beside the kept answers for later processes."""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.compare.asking.cache import kept_answers

if TYPE_CHECKING:
    from swarm.compare.asking.client import Client
    from swarm.compare.settings import Pair

TABLE = (
    "CREATE TABLE IF NOT EXISTS places "
    "(model TEXT, among TEXT, url TEXT, variable TEXT, time REAL, PRIMARY KEY (model, among))"
)

ORIGINS = "CREATE TABLE IF NOT EXISTS origins (model TEXT PRIMARY KEY, url TEXT)"
"""The endpoint that a model had answered at before it failed there for good."""


def _among(possible: "Sequence[Pair]") -> str:
    """The endpoints without their keys."""
    return json.dumps([(url, variable) for url, _, variable in possible])


def remembered(model: str, possible: "Sequence[Pair]") -> "Pair | None":
    """The endpoint that had the model when these were the ones that could."""
    with kept_answers().connected() as connection:
        connection.execute(TABLE)
        asked = "SELECT url, variable FROM places WHERE model = ? AND among = ?"
        row = connection.execute(asked, (model, _among(possible))).fetchone()
    return next((pair for pair in possible if row and (pair[0], pair[2]) == row), None)


def remember(model: str, possible: "Sequence[Pair]", client: "Client") -> None:
    """Write down where the model is."""
    row = (model, _among(possible), client.base_url, client.variable, time.time())
    with kept_answers().connected() as connection:
        connection.execute(TABLE)
        connection.execute("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?, ?)", row)


def forget(model: str, origin: str | None) -> None:
    """Look for the model anew the next time.

    Args:
        origin: The base URL whose answers another endpoint's will continue; `None`: unknown.
    """
    with kept_answers().connected() as connection:
        connection.execute(TABLE)
        connection.execute(ORIGINS)
        connection.execute("DELETE FROM places WHERE model = ?", (model,))
        if origin is not None:
            connection.execute("INSERT OR REPLACE INTO origins VALUES (?, ?)", (model, origin))


def origin_of(model: str, possible: "Sequence[Pair]") -> "Pair | None":
    """The endpoint whose kept answers are continued; `None` where it is no longer a setting."""
    with kept_answers().connected() as connection:
        connection.execute(ORIGINS)
        row = connection.execute("SELECT url FROM origins WHERE model = ?", (model,)).fetchone()
    return next((pair for pair in possible if row and pair[0] == row[0]), None)
