"""A cache of scores that several searches share, to avoid repeated scoring."""

import hashlib
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from swarm._util.files import encode_json, path_fault, read_gzip_json, write_gzip_json
from swarm.errors import UserError
from swarm.tasks.base import Score

log = logging.getLogger(__name__)


class ScoreCache:
    """A folder with one file per position and scored items; may be shared among processes.

    Cached answers may come from batches of another shape, so that texts may differ by rounding from
    what this search would compute.

    Args:
        folder: Folder of the files.

    Raises:
        UserError: It is not a valid path.
    """

    def __init__(self, folder: str | Path) -> None:
        fault = path_fault(folder) if isinstance(folder, str | Path) else "is no text"
        if fault:
            raise UserError(
                f"shared={folder!r:.80}: must be null or the path of a folder; it {fault}"
            )
        self.folder = Path(folder)
        self._context = ""

    def set_context(self, context: Mapping[str, Any]) -> None:
        """Set everything the scores depend on besides position and items: weights, settings, data.

        Raises:
            UserError: The folder is not writable.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"shared={self.folder}: {error.strerror}; choose another") from None
        text = json.dumps(dict(context), sort_keys=True, default=str)
        self._context = hashlib.sha256(text.encode()).hexdigest()

    def load_scores(
        self, position: Sequence[float], split: str, items: Sequence[int]
    ) -> list[Score] | None:
        """Return the scores of a position on some indices of a split; `None` if not cached."""
        path = self._scores_file(position, split, items)
        if not path.exists() and not path.is_symlink():
            return None
        with suppress(OSError, LookupError, EOFError, TypeError, ValueError, zlib.error):
            stored = read_gzip_json(path)
            if stored["sha256"] == _digest(path, stored["scores"]):
                return [Score(*row) for row in stored["scores"]]
        log.warning("shared=%s: %s is damaged; evaluated again", self.folder, path.name)
        return None

    def save_scores(
        self, position: Sequence[float], split: str, items: Sequence[int], scores: Sequence[Score]
    ) -> None:
        """Store a position's scores, before any scale of the task is applied, if all are finite."""
        rows = [astuple(score) for score in scores]
        path = self._scores_file(position, split, items)
        with suppress(ValueError):  # not finite: not JSON
            write_gzip_json(path, {"scores": rows, "sha256": _digest(path, rows)})

    def _scores_file(self, position: Sequence[float], split: str, items: Sequence[int]) -> Path:
        where = [float(c).hex() for c in position]
        text = json.dumps([self._context, where, split, list(items)])
        name = hashlib.sha256(text.encode()).hexdigest()
        return self.folder / name[:2] / f"{name[2:26]}.json.gz"


def _digest(path: Path, rows: Sequence[Any]) -> str:
    """Return the SHA-256 of rows and of the file's name, which identifies position and items."""
    return hashlib.sha256(path.name.encode() + encode_json(rows)).hexdigest()
