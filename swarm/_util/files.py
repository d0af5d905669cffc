"""Paths, atomic writes and safe reads of files."""

import contextlib
import errno
import fcntl
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

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of the files that a task reads (`swarm.tasks.dataset.read_rows`)."""

# In a checkout, conf/, data/ and initial_experts/ are beside the package; in an installed wheel
# they are inside it.


def conf_folder() -> Path:
    """Return the folder of the Hydra configuration."""
    checkout = PACKAGE_FOLDER.parent / "conf"
    return checkout if (checkout / "search.yaml").is_file() else PACKAGE_FOLDER / "conf"


def in_checkout(path: str) -> Path:
    """Return `path` below the checkout; relative to the working folder if installed."""
    root = PACKAGE_FOLDER.parent
    return root / path if conf_folder().parent == root else Path(path)


def as_path(path: str | Path) -> Path:
    """Return the path with "~" expanded.

    Raises:
        UserError: It is not a valid path: too long, or the home of an unknown user.
    """
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{str(path)[:80]}: cannot be a path ({reason})") from None
    return expanded


def find_path(path: str | Path) -> Path:
    """Return `path` if it exists, else below the checkout or the installed package.

    The path is returned unchanged if no such file exists, so that the caller's message shows the
    user's input.

    Raises:
        UserError: It is not a valid path.
    """
    expanded = as_path(path)
    # An absolute path replaces the root that it is joined to.
    places = (expanded, PACKAGE_FOLDER.parent / expanded, PACKAGE_FOLDER / expanded)
    return next((place for place in places if place.exists()), expanded)


def cache_folder() -> Path:
    """Return the folder of downloads: $MODEL_SWARMS_CACHE, else the user's cache folder."""
    if configured := os.environ.get("MODEL_SWARMS_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "model-swarms"


LONGEST_NAME = 200
"""Maximum bytes of a name; most file systems have 255, of which a temporary file needs a part."""

LONGEST_PATH = 3_000
"""Maximum bytes of a path; Linux has 4,096."""


def name_fault(name: str) -> str:
    """Return why a text is not a readable name of a file or folder; empty if it is."""
    if not name.strip():
        return "is blank"
    if not name.isprintable():
        return "contains unprintable characters, such as control characters or line breaks"
    return f"is longer than {LONGEST_NAME} bytes" if len(os.fsencode(name)) > LONGEST_NAME else ""


def path_fault(path: str | Path) -> str:
    """Return the `name_fault` of any part of a path; an empty path is blank."""
    if len(str(path).encode("utf-8", "replace")) > LONGEST_PATH:
        return f"is longer than {LONGEST_PATH:,} bytes"
    parts = [part for part in Path(path).parts if part != os.sep] if str(path) else [""]
    return next(filter(None, map(name_fault, parts)), "")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically.

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
        # Only after the fsync: a power failure could otherwise leave the name with an empty file.
        rename(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise _not_written(path, error) from None


def append(path: Path, data: bytes) -> None:
    """Append to a file, all or nothing; the cost is independent of the file's size.

    Only a process killed during the write leaves a part.

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
                if not size:
                    sync_folder(path.parent)
            except BaseException:
                # Remove what was written in part, such as on a full disk.
                os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        raise _not_written(path, error) from None


def _not_written(path: Path, error: OSError) -> UserError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space; the same command resumes" if full else "choose another folder"
    return UserError(f"cannot write {path}: {error.strerror}; {remedy}")


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder whose content is synced; a replaced file is gone for good.

    Raises:
        OSError: It cannot be renamed.
    """
    source.replace(target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk: a power failure undoes new names that are not synced.

    Some file systems, such as network mounts, cannot sync folders; nothing is done there.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def make_folder(folder: Path, private: bool = False) -> None:
    """Create a folder and its missing parents, with the permissions of their parent.

    Args:
        private: If it is created, whether only the owner may enter it.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(0o700 if private else _openness(folder.parent) | 0o700, exist_ok=True)
    sync_folder(folder.parent)


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: limits a new file's permissions to those of its folder."""
    return os.open(path, flags, _openness(Path(path).parent) & 0o666 | 0o600)


def _openness(folder: Path) -> int:
    """Return the permissions a folder grants to others; the umask still applies to new files."""
    mode = folder.stat().st_mode
    # Without execute permission on the folder, its files are unreadable whatever their mode.
    return (0o070 if mode & 0o010 else 0) | (0o007 if mode & 0o001 else 0)


def acquire_lock(descriptor: int, timeout: float | None = None, shared: bool = False) -> bool:
    """Lock an open file or folder against other processes, and return whether it is locked.

    The lock is the kernel's (flock): it belongs to the open file, so that a child process which
    inherits the descriptor holds it too, and ends when the last copy is closed, however a process
    ends. It works on folders and needs no file beside them.

    Args:
        descriptor: Descriptor of the open file or folder.
        timeout: Seconds to wait for other processes; 0 tries once, `None` waits without a limit.
        shared: Allow other shared locks.

    Returns:
        False if another process still holds a lock. True on a network file system that supports no
            locks, too: work there goes on without one.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if timeout is None else fcntl.LOCK_NB)
    deadline = time.monotonic() + (timeout or 0)
    while True:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        except OSError:
            return True
        else:
            return True


def encode_json(value: Any, indent: int | None = None) -> bytes:
    """Encode portable JSON: no NaN, no infinity, and lone surrogates escaped."""
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    # Unencodable characters become \udXXX, which JSON decodes to the same character.
    return text.encode("utf-8", "backslashreplace")


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text from outside, such as a user's file or a response.

    Raises:
        ValueError: It is not JSON (`json.JSONDecodeError`), or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON."""
    write_atomic(path, encode_json(value, 1) + b"\n")


def write_gzip_json(path: Path, value: Any) -> None:
    """Write compressed JSON; the same value gives the same bytes."""
    write_atomic(path, gzip.compress(encode_json(value), 6, mtime=0))


def read_gzip_json(path: Path) -> Any:
    """Read a file written by `write_gzip_json`."""
    return parse_json(gzip.decompress(read_bytes(path)))


def remove(path: Path) -> None:
    """Remove a file, or a link, a pipe or an empty folder of that name.

    Raises:
        UserError: It cannot be removed, or is a folder that is not empty.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove {path}: {error.strerror}; move it away") from None


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; pipes and devices, which may block, are not opened.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise OSError(errno.EINVAL, f"is {kind}, not a file", str(path))
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file, with all line ends converted to newlines.

    Raises:
        OSError: It cannot be read, or is not a regular file.
        UnicodeDecodeError: It is not UTF-8.
    """
    return io.StringIO(read_bytes(path).decode(), newline=None).read()


def read_yaml(path: Path, what: str = "preset") -> Any:
    """Read a yaml file.

    Args:
        path: The file.
        what: Name of its kind in errors.

    Raises:
        UserError: It cannot be read.
    """
    import yaml

    try:
        return yaml.safe_load(read_text(path))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{what} {path} cannot be read: {reason}") from None


def short_digest(value: Any) -> str:
    """Return 16 hexadecimal digits that change with a value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_file(path: Path) -> str:
    """Return a file's SHA-256, 64 hexadecimal digits; one pass, about a gigabyte per second.

    Use `hash_file_cached` for inputs, which may be large and are read at every start.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MIN_CACHED_HASH_SIZE = 1 << 20
"""Minimum size in bytes for caching a file's hash; smaller files are hashed again."""

MIN_FILE_AGE_S = 2.0
"""Minimum seconds since a file's last change for caching its hash.

Two changes within one tick of the file system's clock leave size and times equal.
"""


def hash_file_cached(path: Path) -> str:
    """Return `hash_file`, with the hash of a large file cached in the cache folder.

    The cache key is the file's device, inode, size and times of change (of the content and of the
    inode, in nanoseconds), so that only changed files are read again.
    """
    about = path.stat()
    if about.st_size < MIN_CACHED_HASH_SIZE:
        return hash_file(path)
    numbers = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    cached = cache_folder() / "hashes" / "-".join(format(number, "x") for number in numbers)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"[0-9a-f]{64}", found := cached.read_text()):
            return found
    found = hash_file(path)
    changed = max(about.st_mtime, about.st_ctime)
    if time.time() - changed > MIN_FILE_AGE_S and path.stat().st_mtime_ns == about.st_mtime_ns:
        # Without a cache folder every start reads the file, which is slower but correct.
        with contextlib.suppress(UserError):
            write_atomic(cached, found.encode())
    return found
