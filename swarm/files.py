"""Files that are written whole or not at all."""

import contextlib
import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

from swarm.errors import UserError


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in place whole, or not at all.

    Raises:
        UserError: It cannot be written (no space, no permission).
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room, and the same command goes on" if full else "choose another folder"
        raise UserError(f"cannot write {path}: {error.strerror}; {remedy}") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON that any reader takes: no NaN, no infinity."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    write_whole(path, (text + "\n").encode())


def write_packed(path: Path, value: Any) -> None:
    """Write JSON compressed; the same value gives the same bytes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    write_whole(path, gzip.compress(text.encode(), 6, mtime=0))


def read_packed(path: Path) -> Any:
    """Read what `write_packed` wrote."""
    return json.loads(gzip.decompress(path.read_bytes()))
