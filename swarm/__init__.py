"""Swarm search, combination and comparison of language models.

In Python: `from swarm import Pool, evaluate, search`; docs/python.md documents the API.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from swarm._version import __version__ as __version__

if TYPE_CHECKING:
    from swarm.api.evaluate import evaluate as evaluate
    from swarm.api.overrides import task as task
    from swarm.api.result import Result as Result
    from swarm.api.result import open_run as open_run
    from swarm.api.search import search as search
    from swarm.errors import UserError as UserError
    from swarm.pool.pool import Pool as Pool
    from swarm.registry.registry import Roster as Roster

PUBLIC_NAMES = {
    "Pool": "swarm.pool.pool",
    "Result": "swarm.api.result",
    "Roster": "swarm.registry.registry",
    "UserError": "swarm.errors",
    "evaluate": "swarm.api.evaluate",
    "open_run": "swarm.api.result",
    "search": "swarm.api.search",
    "task": "swarm.api.overrides",
}

__all__ = list(PUBLIC_NAMES)


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that a script pays only for what it uses."""
    if name not in PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC_NAMES[name]), name)


class _SwarmPackage(ModuleType):
    """This package, in which the functions `search` and `evaluate` override the entries' modules.

    Importing swarm.search or swarm.evaluate would otherwise bind the module to the name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in PUBLIC_NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _SwarmPackage
