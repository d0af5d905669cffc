"""Consortia for the llm command and Python: questions, recorded runs, and saved consortia."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the Python API on use: commands of llm import this package at every start."""
    if name == "create_consortium":
        from swarm.consortium.api import create_consortium

        return create_consortium
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
