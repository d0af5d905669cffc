"""The local database of fine-tuning jobs and uploaded files: one SQLite file in a folder."""

import fcntl
import json
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.models.cache import WAIT, patiently

FILE = "finetuning.sqlite"

KINDS = ("jobs", "files", "notes")
"""The tables; each has an id and a JSON object a row."""

FINAL = ("succeeded", "failed", "cancelled", "deleted")
"""States that do not change by themselves."""

Row = dict[str, Any]


class Store:
    """Keeps rows; several processes may use one folder at once. Each change is on disk at once.

    Args:
        folder: Where the file is; made when it is needed. Not on a network file system.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def add(self, kind: str, row: Row) -> Row:
        """Keep a new row, with an id and the time; gives it."""
        whole = {"id": f"{kind[:-1]}-{secrets.token_hex(6)}", "created": time.time(), **row}
        with self._changing() as connection:
            connection.execute(f"INSERT INTO {kind} VALUES (?, ?)", (whole["id"], _text(whole)))
        return whole

    def change(self, kind: str, id: str, **values: Any) -> Row:
        """Set keys of a row as it is now; gives the whole.

        Raises:
            UserError: There is no such row.
        """
        with self._changing() as connection:
            asked = f"SELECT value FROM {kind} WHERE id = ?"
            found = connection.execute(asked, (id,)).fetchone()
            if found is None:
                raise UserError(f"{self.folder}: there is no {id} in {kind}")
            whole = json.loads(found[0]) | values | {"updated": time.time()}
            connection.execute(f"UPDATE {kind} SET value = ? WHERE id = ?", (_text(whole), id))
        return dict(whole)

    def rows(self, kind: str) -> list[Row]:
        """All rows, the oldest first; none where nothing was kept yet."""
        if not (self.folder / FILE).is_file():
            return []
        with self._connected() as connection:
            found = connection.execute(f"SELECT value FROM {kind} ORDER BY rowid").fetchall()
        return [json.loads(value) for (value,) in found]

    def row(self, kind: str, id: str) -> Row | None:
        """One row, if it is there."""
        return next((row for row in self.rows(kind) if row["id"] == id), None)

    def salt(self) -> str:
        """What is hashed with a key, drawn once a database."""
        with self._changing() as connection:
            drawn = _text({"value": secrets.token_hex(16)})
            connection.execute("INSERT OR IGNORE INTO notes VALUES ('salt', ?)", (drawn,))
            found = connection.execute("SELECT value FROM notes WHERE id = 'salt'").fetchone()
        return str(json.loads(found[0])["value"])

    @contextmanager
    def held(self, name: str, wait: bool = True) -> Iterator[Any]:
        """Hold a lock of this folder, which ends with the process at the latest.

        Gives the open file, or `None` where another has it and `wait` is false.
        """
        path = self.folder / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            yield file

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process can come between."""
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        path = self.folder / FILE
        connection = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            opened = connection = sqlite3.connect(path, timeout=WAIT, isolation_level=None)
            patiently(lambda: opened.execute("PRAGMA journal_mode=WAL"))
            for kind in KINDS:
                made = f"CREATE TABLE IF NOT EXISTS {kind} (id TEXT PRIMARY KEY, value TEXT)"
                patiently(lambda made=made: opened.execute(made))  # type: ignore[misc]
            yield opened
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"{path} cannot be used: {error}; name another folder as data_dir"
            ) from None
        finally:
            if connection is not None:
                connection.close()


def _text(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False)
