"""Which endpoint had a model, remembered beside the kept answers for later processes."""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.compare.asking.cache import open_answer_cache

if TYPE_CHECKING:
    from swarm.compare.asking.client import EndpointClient
    from swarm.compare.settings import EndpointPair

CREATE_ENDPOINT_TABLE = (
    "CREATE TABLE IF NOT EXISTS places "
    "(model TEXT, among TEXT, url TEXT, variable TEXT, time REAL, PRIMARY KEY (model, among))"
)

ORIGINS = "CREATE TABLE IF NOT EXISTS origins (model TEXT PRIMARY KEY, url TEXT)"
"""The endpoint that a model had answered at before it failed there for good."""


def _endpoints_as_json(possible: "Sequence[EndpointPair]") -> str:
    """The endpoints without their keys."""
    return json.dumps([(url, variable) for url, _, variable in possible])


def load_endpoint(model: str, possible: "Sequence[EndpointPair]") -> "EndpointPair | None":
    """The endpoint that had the model when these were the ones that could."""
    with open_answer_cache().open_connection() as connection:
        connection.execute(CREATE_ENDPOINT_TABLE)
        asked = "SELECT url, variable FROM places WHERE model = ? AND among = ?"
        row = connection.execute(asked, (model, _endpoints_as_json(possible))).fetchone()
    return next((pair for pair in possible if row and (pair[0], pair[2]) == row), None)


def save_endpoint(model: str, possible: "Sequence[EndpointPair]", client: "EndpointClient") -> None:
    """Write down where the model is."""
    row = (model, _endpoints_as_json(possible), client.base_url, client.variable, time.time())
    with open_answer_cache().open_connection() as connection:
        connection.execute(CREATE_ENDPOINT_TABLE)
        connection.execute("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?, ?)", row)


def forget_endpoint(model: str, origin: str | None) -> None:
    """Look for the model anew the next time.

    Args:
        origin: The base URL whose answers another endpoint's will continue; `None`: unknown.
    """
    with open_answer_cache().open_connection() as connection:
        connection.execute(CREATE_ENDPOINT_TABLE)
        connection.execute(ORIGINS)
        connection.execute("DELETE FROM places WHERE model = ?", (model,))
        if origin is not None:
            connection.execute("INSERT OR REPLACE INTO origins VALUES (?, ?)", (model, origin))


def origin_of(model: str, possible: "Sequence[EndpointPair]") -> "EndpointPair | None":
    """The endpoint whose kept answers are continued; `None` where it is no longer a setting."""
    with open_answer_cache().open_connection() as connection:
        connection.execute(ORIGINS)
        row = connection.execute("SELECT url FROM origins WHERE model = ?", (model,)).fetchone()
    return next((pair for pair in possible if row and pair[0] == row[0]), None)
