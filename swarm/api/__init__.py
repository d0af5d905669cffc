"""The Python API: `from swarm.api import Pool, evaluate, search`; docs/python.md documents it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.api.composition import learn_composition as learn_composition
    from swarm.api.functions import evaluate as evaluate
    from swarm.api.functions import search as search
    from swarm.api.functions import task as task
    from swarm.api.result import Result as Result
    from swarm.api.result import open_run as open_run
    from swarm.errors import UserError as UserError
    from swarm.pool.pool import Pool as Pool
    from swarm.registry.registry import Roster as Roster

PUBLIC_NAMES = {
    "Pool": "swarm.pool.pool",
    "Result": "swarm.api.result",
    "Roster": "swarm.registry.registry",
    "UserError": "swarm.errors",
    "evaluate": "swarm.api.functions",
    "learn_composition": "swarm.api.composition",
    "open_run": "swarm.api.result",
    "search": "swarm.api.functions",
    "task": "swarm.api.functions",
}

__all__ = list(PUBLIC_NAMES)


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that a script pays only for what it uses."""
    if name not in PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC_NAMES[name]), name)
