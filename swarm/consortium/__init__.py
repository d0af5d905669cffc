"""Consortia by name and by the llm command: what is asked of one, its runs, and its saved ones."""

from importlib import import_module
from typing import Any

OF_LLM_CONSORTIUM = (
    "create_consortium",
    "ConsortiumConfig",
    "ConsortiumOrchestrator",
    "ConsortiumModel",
)


def __getattr__(name: str) -> Any:
    """The names of llm-consortium's Python API, loaded when asked for."""
    if name in OF_LLM_CONSORTIUM:
        found = name == "ConsortiumModel"
        module = "swarm.consortium.llm_plugin" if found else "swarm.consortium.api"
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
