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
from swarm.models.cache import LOCK_TIMEOUT_S, retry_while_locked

DATABASE_FILE = "finetuning.sqlite"

TABLES = ("jobs", "files", "notes")
"""The tables; each has an id and a JSON object a row."""

FINAL_STATES = ("succeeded", "failed", "cancelled", "deleted")
"""States that do not change by themselves."""

JobRow = dict[str, Any]


class JobStore:
    """Keeps rows; several processes may use one folder at once. Each change is on disk at once.

    Args:
        folder: Where the file is; made when it is needed. Not on a network file system.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def add_row(self, kind: str, row: JobRow) -> JobRow:
        """Keep a new row, with an id and the time; gives it."""
        whole = {"id": f"{kind[:-1]}-{secrets.token_hex(6)}", "created": time.time(), **row}
        with self._transaction() as connection:
            connection.execute(f"INSERT INTO {kind} VALUES (?, ?)", (whole["id"], _to_json(whole)))
        return whole

    def update_row(self, kind: str, id: str, **values: Any) -> JobRow:
        """Set keys of a row as it is now; gives the whole.

        Raises:
            UserError: There is no such row.
        """
        with self._transaction() as connection:
            asked = f"SELECT value FROM {kind} WHERE id = ?"
            found = connection.execute(asked, (id,)).fetchone()
            if found is None:
                raise UserError(f"{self.folder}: there is no {id} in {kind}")
            whole = json.loads(found[0]) | values | {"updated": time.time()}
            connection.execute(f"UPDATE {kind} SET value = ? WHERE id = ?", (_to_json(whole), id))
        return dict(whole)

    def list_rows(self, kind: str) -> list[JobRow]:
        """All rows, the oldest first; none where nothing was kept yet."""
        if not (self.folder / DATABASE_FILE).is_file():
            return []
        with self._connect() as connection:
            found = connection.execute(f"SELECT value FROM {kind} ORDER BY rowid").fetchall()
        return [json.loads(value) for (value,) in found]

    def get_row(self, kind: str, id: str) -> JobRow | None:
        """One row, if it is there."""
        return next((row for row in self.list_rows(kind) if row["id"] == id), None)

    def load_salt(self) -> str:
        """What is hashed with a key, drawn once a database."""
        with self._transaction() as connection:
            drawn = _to_json({"value": secrets.token_hex(16)})
            connection.execute("INSERT OR IGNORE INTO notes VALUES ('salt', ?)", (drawn,))
            found = connection.execute("SELECT value FROM notes WHERE id = 'salt'").fetchone()
        return str(json.loads(found[0])["value"])

    @contextmanager
    def hold_lock(self, name: str, wait: bool = True) -> Iterator[Any]:
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
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process can come between."""
        with self._connect() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        path = self.folder / DATABASE_FILE
        connection = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            opened = connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
            retry_while_locked(lambda: opened.execute("PRAGMA journal_mode=WAL"))
            for kind in TABLES:
                made = f"CREATE TABLE IF NOT EXISTS {kind} (id TEXT PRIMARY KEY, value TEXT)"
                retry_while_locked(lambda made=made: opened.execute(made))  # type: ignore[misc]
            yield opened
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"{path} cannot be used: {error}; name another folder as data_dir"
            ) from None
        finally:
            if connection is not None:
                connection.close()


def _to_json(row: JobRow) -> str:
    return json.dumps(row, ensure_ascii=False)
