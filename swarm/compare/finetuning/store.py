"""Local database of fine-tuning jobs and uploaded files: one SQLite file in a folder.

Also imports the jobs, files and models that llmcomp has stored in the folder.
"""

import csv
import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm._util.files import acquire_lock
from swarm.compare.finetuning.params import OPENAI_BASE_URL
from swarm.errors import UserError
from swarm.models.cache import LOCK_TIMEOUT_S, retry_while_locked

DATABASE_FILE = "finetuning.sqlite"

TABLES = ("jobs", "files", "notes")
"""Tables; each row has an id and a JSON object."""

FINAL_STATES = ("succeeded", "failed", "cancelled", "deleted")
"""States that never change."""

JobRow = dict[str, Any]


class JobStore:
    """Database of rows; several processes may use it at once. Each change is written immediately.

    Args:
        folder: Folder of the file; created when needed. Not on a network file system, where locks
            are unreliable.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def add_row(self, kind: str, row: JobRow) -> JobRow:
        """Insert a row with a new id and the time, and return it."""
        full_row = {"id": f"{kind[:-1]}-{secrets.token_hex(6)}", "created": time.time(), **row}
        with self._transaction() as connection:
            connection.execute(
                f"INSERT INTO {kind} VALUES (?, ?)", (full_row["id"], _to_json(full_row))
            )
        return full_row

    def update_row(self, kind: str, id: str, **values: Any) -> JobRow:
        """Update keys of a row and return the complete row.

        Raises:
            UserError: The row does not exist.
        """
        with self._transaction() as connection:
            query = f"SELECT value FROM {kind} WHERE id = ?"
            found = connection.execute(query, (id,)).fetchone()
            if found is None:
                raise UserError(f"{self.folder}: there is no {id} in {kind}")
            updated = json.loads(found[0]) | values | {"updated": time.time()}
            connection.execute(f"UPDATE {kind} SET value = ? WHERE id = ?", (_to_json(updated), id))
        return dict(updated)

    def list_rows(self, kind: str) -> list[JobRow]:
        """Return all rows, the oldest first; empty if there is no file yet."""
        if not (self.folder / DATABASE_FILE).is_file():
            return []
        with self._connect() as connection:
            found = connection.execute(f"SELECT value FROM {kind} ORDER BY rowid").fetchall()
        return [json.loads(value) for (value,) in found]

    def get_row(self, kind: str, id: str) -> JobRow | None:
        """Return one row, if it exists."""
        return next((row for row in self.list_rows(kind) if row["id"] == id), None)

    def load_salt(self) -> str:
        """Return the salt of hashed keys, drawn once per database."""
        with self._transaction() as connection:
            drawn = _to_json({"value": secrets.token_hex(16)})
            connection.execute("INSERT OR IGNORE INTO notes VALUES ('salt', ?)", (drawn,))
            found = connection.execute("SELECT value FROM notes WHERE id = 'salt'").fetchone()
        return str(json.loads(found[0])["value"])

    @contextmanager
    def hold_lock(self, name: str, wait: bool = True) -> Iterator[Any]:
        """Hold a lock of this folder; released at the latest when the process ends.

        Yields the open file, or `None` if another process holds it and `wait` is false.
        """
        path = self.folder / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            locked = acquire_lock(file.fileno(), None if wait else 0)
            yield file if locked else None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction with a write lock from its beginning."""
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
            opened = connection = sqlite3.connect(
                path, timeout=LOCK_TIMEOUT_S, isolation_level=None
            )
            retry_while_locked(lambda: opened.execute("PRAGMA journal_mode=WAL"))
            for kind in TABLES:
                statement = f"CREATE TABLE IF NOT EXISTS {kind} (id TEXT PRIMARY KEY, value TEXT)"
                retry_while_locked(lambda statement=statement: opened.execute(statement))  # type: ignore[misc]
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


LLMCOMP_FILES = ("jobs.jsonl", "files.jsonl", "models.csv")

COPIED_FIELDS = (
    "file_name",
    "base_model",
    "suffix",
    "file_id",
    "epochs",
    "batch_size",
    "file_md5",
    "seed",
    "learning_rate_multiplier",
    "organization_id",
)

NUMERIC_FIELDS = (
    "epochs",
    "batch_size",
    "seed",
    "learning_rate_multiplier",
    "learning_rate",
    "lora_rank",
    "checkpoint_step",
)


def import_llmcomp_jobs(store: JobStore) -> int:
    """Import jobs.jsonl, files.jsonl and models.csv of the database's folder, if they exist.

    Existing rows stay unchanged; unchanged files are not read again. Malformed lines are reported
    and skipped.

    Returns:
        Number of new jobs and models.
    """
    paths = [path for name in LLMCOMP_FILES if (path := store.folder / name).is_file()]
    if not paths:
        return 0
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
    if store.get_row("notes", digest):
        return 0
    with store.hold_lock("importing"):
        if store.get_row("notes", digest):
            return 0
        jobs, new = {row.get("job") for row in store.list_rows("jobs")}, 0
        for record in _read_records(store.folder / "jobs.jsonl"):
            if isinstance(record.get("id"), str) and record["id"] not in jobs:
                store.add_row("jobs", _convert_job(record))
                jobs.add(record["id"])
                new += 1
        files = {row["file_id"] for row in store.list_rows("files")}
        for record in _read_records(store.folder / "files.jsonl"):
            if record.get("id") not in files and record.get("md5"):
                store.add_row(
                    "files",
                    {
                        "file_id": record["id"],
                        "name": record.get("name"),
                        "md5": record["md5"],
                        "base_url": OPENAI_BASE_URL,
                    },
                )
        new += _import_models(store)
        store.add_row("notes", {"id": digest})
    return new


def _convert_job(record: JobRow) -> JobRow:
    epochs = record.get("epochs")
    models = []
    # model is that of the last epoch, model-1 that of the one before, and so on.
    for offset in range(10):
        if name := record.get(f"model-{offset}" if offset else "model"):
            epoch = epochs - offset if isinstance(epochs, int) else None
            models.append({"model": name, "epochs": epoch, "step": None})
    state = record.get("status") or ("succeeded" if models else "unknown")
    return {
        **{key: record.get(key) for key in COPIED_FIELDS},
        "kind": "openai",
        "base_url": OPENAI_BASE_URL,
        "job": record["id"],
        "state": state,
        "models": models,
    }


def _import_models(store: JobStore) -> int:
    """Import models without a job, such as those trained by other means."""
    known = {one["model"] for row in store.list_rows("jobs") for one in row.get("models", [])}
    path, new = store.folder / "models.csv", 0
    if not path.is_file():
        return new
    with path.open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if not record.get("model") or record["model"] in known:
                continue
            row: JobRow = {
                key: _parse_number(value) if key in NUMERIC_FIELDS else value or None
                for key, value in record.items()
                if isinstance(key, str)
            }
            one = {
                "model": row.pop("model"),
                "epochs": row.get("epochs"),
                "step": row.pop("checkpoint_step", None),
            }
            store.add_row(
                "jobs", {**row, "kind": "imported", "state": "succeeded", "models": [one]}
            )
            new += 1
    return new


def _parse_number(text: str | None) -> Any:
    """Parse a cell as a number, or return it unchanged."""
    try:
        found = float(text or "")
    except ValueError:
        return text or None
    return int(found) if found.is_integer() else found


def _read_records(path: Path) -> Iterator[JobRow]:
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError:
            print(f"{path}: line {number} is damaged and is ignored")
            continue
        if isinstance(record, dict):
            yield record
