"""Files that are written whole or not at all, and how they are read."""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

from swarm.errors import UserError

# Where files lie: in a checkout beside the package, or inside an installed wheel.

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


def conf_folder() -> Path:
    """The folder of the Hydra configuration."""
    checkout = PACKAGE_FOLDER.parent / "conf"
    return checkout if (checkout / "search.yaml").is_file() else PACKAGE_FOLDER / "conf"


def in_checkout(path: str) -> Path:
    """`path` below the checkout; from the working folder where the package is installed."""
    root = PACKAGE_FOLDER.parent
    return root / path if (root / "conf" / "search.yaml").is_file() else Path(path)


def as_path(path: str | Path) -> Path:
    """The path with "~" expanded.

    Raises:
        UserError: It cannot be a path: too long, or the home of nobody.
    """
    try:
        given = Path(path).expanduser()
        given.exists()
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{str(path)[:80]}: cannot be a path ({why})") from None
    return given


def find_path(path: str | Path) -> Path:
    """`path` as given if it exists from here, else below the checkout or the installed package.

    The path comes back unchanged where nothing of that name exists, so that the caller's message
    names what the user wrote.

    Raises:
        UserError: It cannot be a path.
    """
    given = as_path(path)
    if given.is_absolute() or given.exists():
        return given
    for root in (PACKAGE_FOLDER.parent, PACKAGE_FOLDER):
        if (root / given).exists():
            return root / given
    return given


def cache_folder() -> Path:
    """Where downloads are kept: $MODEL_SWARMS_CACHE, else the user's cache folder."""
    if own := os.environ.get("MODEL_SWARMS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "model-swarms"


MIN_CACHED_HASH_SIZE = 1 << 20
"""Bytes from which on the hash of a file is kept; a smaller one is read again at once."""

LONGEST_NAME = 200
"""Bytes of a name; most file systems have 255."""

LONGEST_PATH = 3_000
"""Bytes of a path; Linux has 4,096."""

MIN_FILE_AGE_S = 2.0
"""Seconds after its last change from which on the hash of a file is kept: two changes within one
tick of a file system's clock give a file of the same size the same times."""


def name_fault(name: str) -> str:
    """What makes a text no name for a file or folder that people will read; empty: nothing."""
    if not name.strip():
        return "is blank"
    if not name.isprintable():
        return "has characters that do not print, such as controls or line ends"
    # A draft's name is longer by its prefix and the process's number.
    if len(os.fsencode(name)) > LONGEST_NAME:
        return f"is longer than {LONGEST_NAME} bytes"
    return ""


def path_fault(path: str | Path) -> str:
    """As `name_fault`, of a path: of any of its parts; an empty path is blank."""
    parts = [part for part in Path(path).parts if part != os.sep] if str(path) else [""]
    if len(os.fsencode(str(path).encode("utf-8", "replace"))) > LONGEST_PATH:
        return f"is longer than {LONGEST_PATH:,} bytes"
    return next((fault for part in parts if (fault := name_fault(part))), "")


def write_atomic(path: Path, data: bytes) -> None:
    """Put a file in place whole, or not at all.

    Raises:
        UserError: It cannot be written (no space, no permission).
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        make_folder(path.parent)
        with open(draft, "wb", opener=private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise UserError(_not_written(path, error)) from None


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file, all or nothing; the cost does not depend on the file's size.

    Only a process that is killed meanwhile leaves a part.

    Raises:
        UserError: It cannot be written (no space, no permission).
    """
    try:
        with open(path, "ab", buffering=0, opener=private) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException:
                os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        raise UserError(_not_written(path, error)) from None


def _not_written(path: Path, error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "make room, and the same command goes on" if full else "choose another folder"
    return f"cannot write {path}: {error.strerror}; {remedy}"


def make_folder(folder: Path, private: bool = False) -> None:
    """Make a folder and its parents, if they are not there; new ones are as open as their parent.

    Args:
        private: Whether only the owner may enter it, if it is made here.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    mode = 0o700 if private else _openness(folder.parent) | 0o700
    folder.mkdir(mode, exist_ok=True)


def private(path: str, flags: int) -> int:
    """An `opener` of `open`: a new file is no more open than the folder that it is in."""
    return os.open(path, flags, _openness(Path(path).parent) & 0o666 | 0o600)


def _openness(folder: Path) -> int:
    """What a folder lets others do; the umask still applies to what is made in it."""
    mode = folder.stat().st_mode
    # Who may not enter cannot read a file either, whatever its own mode.
    return (0o070 if mode & 0o010 else 0) | (0o007 if mode & 0o001 else 0)


def encode_json(value: Any, indent: int | None = None) -> bytes:
    """JSON that any reader takes: no NaN, no infinity, and half a surrogate pair escaped."""
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    # What cannot be encoded becomes \udXXX, which JSON reads as the same character.
    return text.encode("utf-8", "backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people to read too."""
    write_atomic(path, encode_json(value, 1) + b"\n")


def write_gzip_json(path: Path, value: Any) -> None:
    """Write JSON compressed; the same value gives the same bytes."""
    write_atomic(path, gzip.compress(encode_json(value), 6, mtime=0))


def read_gzip_json(path: Path) -> Any:
    """Read what `write_packed` wrote."""
    return json.loads(gzip.decompress(read_bytes(path)))


def remove(path: Path) -> None:
    """Remove a file, or what stands in its place: a link, a pipe, an empty folder.

    Raises:
        UserError: It cannot be removed, or is a folder with something in it.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove {path}: {error.strerror}; move it away") from None


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. A pipe or a device, whose end may never come, is not opened.

    Raises:
        OSError: It cannot be read, or is no regular file.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    return path.read_bytes()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a regular file, as `read_bytes` has it; every end of a line is a newline.

    Raises:
        OSError: It cannot be read, or is no regular file.
        UnicodeDecodeError: It holds other bytes than the encoding's.
    """
    return io.StringIO(read_bytes(path).decode(encoding), newline=None).read()


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
        return yaml.safe_load(read_text(path))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{what} {path} cannot be read: {why}") from None


def short_digest(value: Any) -> str:
    """16 hexadecimal digits that change with a value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's content, 64 hexadecimal digits; one pass, about a gigabyte a second.

    Use `content_hash` for inputs, which may be large and are read at every start.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_file_cached(path: Path) -> str:
    """As `file_hash`, but the hash of a large file is kept in the cache folder.

    It is found there by the file's device, inode, size and times of change (of the content and of
    the inode, in nanoseconds), so that only a file that was changed is read again.
    """
    about = path.stat()
    if about.st_size < MIN_CACHED_HASH_SIZE:
        return hash_file(path)
    numbers = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    kept = cache_folder() / "hashes" / "-".join(format(number, "x") for number in numbers)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"[0-9a-f]{64}", found := kept.read_text()):
            return found
    found = hash_file(path)
    changed = max(about.st_mtime, about.st_ctime)
    if time.time() - changed > MIN_FILE_AGE_S and path.stat().st_mtime_ns == about.st_mtime_ns:
        # Without a cache folder every start reads the file, which is slower and right.
        with contextlib.suppress(UserError):
            write_atomic(kept, found.encode())
    return found
