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


def forget(model: str) -> None:
    """The model is where it was no longer."""
    with kept_answers().connected() as connection:
        connection.execute(TABLE)
        connection.execute("DELETE FROM places WHERE model = ?", (model,))
