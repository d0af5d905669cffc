"""Consortia for the llm command and Python: questions, recorded runs, and saved consortia."""

from importlib import import_module
from typing import Any

OF_LLM_CONSORTIUM = (
    "create_consortium",
    "ConsortiumConfig",
    "ConsortiumOrchestrator",
    "ConsortiumModel",
)


def __getattr__(name: str) -> Any:
    """Import the names of llm-consortium's Python API when they are used."""
    if name in OF_LLM_CONSORTIUM:
        found = name == "ConsortiumModel"
        module = "swarm.consortium.llm_plugin" if found else "swarm.consortium.api"
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
