"""Swarm search, combination and comparison of language models.

`from swarm.api import Pool, evaluate, search` is the Python API, documented in docs/python.md. Its
names are here too, but for `evaluate` and `search`, which are modules of commands.
"""

from importlib import import_module
from typing import Any

from swarm._version import __version__ as __version__


def __dir__() -> list[str]:
    names = {*import_module("swarm.api").__all__, "__version__", "api", "compare"}
    return sorted(names - {"evaluate", "search"})


def __getattr__(name: str) -> Any:
    """Import names of the API lazily; what is not here may be a module."""
    if name[:1] != "_" and name in __dir__() and hasattr(api := import_module("swarm.api"), name):
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
