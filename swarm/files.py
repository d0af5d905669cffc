"""Files that are written whole or not at all, and how they are read."""

import contextlib
import errno
import gzip
import hashlib
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


def as_json(value: Any, indent: int | None = None) -> bytes:
    """JSON that any reader takes: no NaN, no infinity, and half a surrogate pair escaped."""
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    # What cannot be encoded becomes \udXXX, which JSON reads as the same character.
    return text.encode("utf-8", "backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people to read too."""
    write_whole(path, as_json(value, 1) + b"\n")


def write_packed(path: Path, value: Any) -> None:
    """Write JSON compressed; the same value gives the same bytes."""
    write_whole(path, gzip.compress(as_json(value), 6, mtime=0))


def read_packed(path: Path) -> Any:
    """Read what `write_packed` wrote."""
    return json.loads(gzip.decompress(path.read_bytes()))


def read_yaml(path: Path, what: str = "preset") -> Any:
    """What a yaml holds.

    Args:
        path: Where it is.
        what: What an error calls it.

    Raises:
        UserError: It cannot be read.
    """
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{what} {path} cannot be read: {why}") from None


def digest(value: Any) -> str:
    """16 hexadecimal digits that change with a value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
