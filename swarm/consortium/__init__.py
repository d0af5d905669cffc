"""Consortia for the llm command and Python: questions, recorded runs, and saved consortia."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from swarm.errors import UserError

OF_LLM_CONSORTIUM = {
    "create_consortium": "api",
    "ConsortiumConfig": "api",
    "ConsortiumOrchestrator": "api",
    "ConsortiumModel": "llm_plugin",
}
"""Names of llm-consortium's Python API, and the modules here that have them."""


def install_alias() -> None:
    """Make this package importable as `llm_consortium`, for programs written for that one.

    Raises:
        UserError: llm-consortium is installed.
    """
    this = sys.modules[__name__]
    if sys.modules.get("llm_consortium") is this:
        return
    if "llm_consortium" in sys.modules or find_spec("llm_consortium"):
        raise UserError(
            "llm_consortium: llm-consortium is installed; uninstall it (llm uninstall "
            "llm-consortium), or import from swarm.consortium"
        )
    sys.modules["llm_consortium"] = this


def __getattr__(name: str) -> Any:
    """Import the names of llm-consortium's Python API when they are used."""
    if name in OF_LLM_CONSORTIUM:
        return getattr(import_module(f"swarm.consortium.{OF_LLM_CONSORTIUM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
