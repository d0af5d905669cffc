"""Lock of a run folder: one process holds it, and writes its search's status to the folder."""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from swarm._util.files import acquire_lock, make_folder, parse_json, write_json
from swarm._util.threads import PeriodicThread
from swarm.errors import UserError

STATUS_FILE = "running.json"

STUDY_LOCK_FILE = ".lock"
"""Lock file of a folder of several searches: a sweep, a study or a comparison of methods."""

UPDATE_INTERVAL_S = 1.0
"""Seconds between two writes of the status file."""

LOCK_TIMEOUT_S = 1.0
"""Time to wait for the lock; readers hold it only for an instant."""


class RunLock:
    """A run folder locked by this process, with a status file, written again within a second.

    The lock is on the folder itself: see `acquire_lock`. `close` releases it before the process
    ends.

    Args:
        folder: The run folder; created if missing.
        status: Returns the current `activity` (description), `iteration`, `max_iterations`, `done`
            and `total` (items of the current evaluation), `share` (of the search, done),
            `prompts_per_second`, `seconds_left`, `best`, `answers` (the latest ones of the first
            iteration: `model`, `text`, `value`). Called in another thread.

    Raises:
        UserError: Another process holds the lock, or the folder is not writable.
    """

    def __init__(
        self, folder: Path, status: Callable[[], Mapping[str, Any]] = lambda: {"activity": "begins"}
    ) -> None:
        self._path, self._status = folder / STATUS_FILE, status
        self._descriptor = _acquire_lock(folder)
        self._written: dict[str, Any] = {}
        self._process = {"pid": os.getpid(), "host": socket.gethostname(), "started": _now()}
        try:
            self._write_status()
        except UserError:
            os.close(self._descriptor)
            raise
        self._writer = PeriodicThread(self._rewrite_status, UPDATE_INTERVAL_S, "swarm-lock")

    def close(self) -> None:
        """Remove the status file and release the lock."""
        if self._writer.closed:
            return
        self._writer.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _rewrite_status(self) -> None:
        # A full disk is reported by the search itself, which writes more than this.
        with contextlib.suppress(UserError):
            self._write_status()

    def _write_status(self) -> None:
        status = dict(self._status())
        if status != self._written:
            write_json(self._path, {**self._process, "updated": _now(), **status})
            self._written = status


def running_info(folder: Path) -> dict[str, Any] | None:
    """Return the status of the process that holds a run folder; `None` if none does.

    Returns:
        The status: `pid`, `host`, `started` and `updated` (ISO times), `activity`, and further
            values of the status of `RunLock`. A status left by a killed process is ignored.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        # A shared lock: two concurrent readers must not take each other for a search.
        if acquire_lock(descriptor, timeout=0, shared=True):
            return None
    finally:
        os.close(descriptor)
    return _read_status(folder) or {"activity": "begins"}


def _acquire_lock(folder: Path) -> int:
    """Return the descriptor that holds the lock of a folder."""
    try:
        make_folder(folder, private=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another folder") from None
    if not acquire_lock(descriptor, LOCK_TIMEOUT_S):
        os.close(descriptor)
        pid = (_read_status(folder) or {}).get("pid", "unknown")
        raise UserError(
            f"{folder}: in use by another search (process {pid}); wait for it, stop it "
            f"(kill {pid}), or choose another name="
        )
    return descriptor


def _read_status(folder: Path) -> dict[str, Any] | None:
    try:
        found = parse_json((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
