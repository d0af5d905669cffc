"""Names alone, as `llm -m NAME` has them: models of the llm package, and saved consortia."""

from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

from swarm.collab.shelf import ConsortiumStore
from swarm.roster.names import MODEL_KINDS

if TYPE_CHECKING:
    from llm import Model as LLMModel

PLUGIN_MODULE_PREFIX = "swarm.consortium."
"""Where the classes are of which a saved consortium is a model of llm's."""


class NameResolver:
    """What names alone stand for; looked up when one is first asked for, and kept."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def is_known_name(self, name: str) -> bool:
        """Whether a model has just this name, so that no part of it is a count."""
        bare = _strip_llm_prefix(name)
        return bare is not None and (bare in self._llm_models or bare in self._saved_consortia)

    def resolve_name(self, name: str) -> str:
        """The whole name: llm/NAME or consortium/NAME where it is one of theirs, else as it is.

        A saved consortium is one by all names that llm has for it, so that none contains itself.
        """
        bare = _strip_llm_prefix(name)
        if bare is None:
            return name
        found = self._llm_models.get(bare)
        if found is None:
            return f"consortium/{bare}" if bare in self._saved_consortia else name
        if type(found).__module__.startswith(PLUGIN_MODULE_PREFIX):
            return f"consortium/{found.model_id}"
        return f"llm/{bare}"

    def suggest_name(self, name: str) -> str | None:
        """A name that may have been meant."""
        found = get_close_matches(name, [*self._llm_models, *self._saved_consortia], 1)
        return found[0] if found and "/" not in name else None

    @cached_property
    def _llm_models(self) -> "dict[str, LLMModel]":
        """What llm knows by names and aliases; all its plugins are asked for it."""
        try:
            import llm
        except ImportError:
            return {}
        return llm.get_model_aliases()

    @cached_property
    def _saved_consortia(self) -> list[str]:
        return ConsortiumStore().list_names()


def _strip_llm_prefix(name: str) -> str | None:
    """A name as llm would have it; `None` of another kind's: llm takes its time to load."""
    if name.startswith(tuple(f"{kind}/" for kind in MODEL_KINDS if kind != "llm")):
        return None
    return name.removeprefix("llm/")
