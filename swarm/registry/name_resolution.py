"""Model names without a prefix, as in `llm -m NAME`; provider defaults and model identities."""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError
from swarm.models.base import Model
from swarm.models.openai import OpenAI
from swarm.models.providers import Provider, Providers
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.multi_agent.consortium.store import ConsortiumStore
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec

if TYPE_CHECKING:
    from llm import Model as LLMModel


def model_identity(model: Model) -> Any:
    """Return what a model's answers depend on besides its name and the request, as JSON.

    For an endpoint its URL and default fields; for a function the text of its file; for a mixture
    or a consortium its settings and members; for a model with a `fingerprint`, such as local ones,
    the fingerprint. `None` for all others, which are identified by name alone.

    Raises:
        UserError: A local model's files are missing.
    """
    if isinstance(model, OpenAI):
        return [model.client.url, model.fixed]
    if isinstance(model, MixtureOfAgents | Consortium):
        last = model.arbiter if isinstance(model, Consortium) else model.aggregator
        agents = [_agent_identity(one) for one in (*model.proposers, last, model.fallback)]
        return {"agents": agents, **model.options.model_dump(mode="json")}
    return model.fingerprint()


def _agent_identity(agent: AgentSpec | None) -> Any:
    if agent is None:
        return None
    return {**agent.model_dump(exclude={"model"}), "model": model_identity(agent.model)}


MODEL_KINDS = ("local", "llm", "function", "moa", "consortium")
"""Prefixes of names other than providers."""


def suggest_prefix(name: str, known: Iterable[str]) -> str | None:
    """Return the known prefix that a name's first segment resembles, or `None`.

    Vendor names on a hub, such as mistralai or deepseek-ai, are not treated as misspelled
    endpoints.
    """
    first, slash, _ = name.partition("/")
    if not slash or first in known or re.sub("-?ai$", "", first) in known:
        return None
    matches = get_close_matches(first.lower(), known, 1, 0.75)
    return matches[0] if matches else None


def default_provider(name: str, providers: Providers) -> Provider:
    """Return the provider of a name without one; see docs/models.md.

    Raises:
        UserError: The environment does not determine it, or the name resembles another one.
    """
    matches = suggest_prefix(name, (*MODEL_KINDS, *providers))
    likely = ("together", "openai") if "/" in name else ("openai", "together")
    known = [providers[one] for one in likely if one in providers]
    overridden = [one for one in known if one.is_url_overridden]
    with_key = [one for one in known if os.environ.get(one.api_key_env or "", "").strip()]
    found = next(iter(overridden + with_key), None)
    if matches is not None:
        suggestion = f"{name}: did you mean {matches}/{name.partition('/')[2]}?"
        if found is not None:
            suggestion += f" If {found.name} has this model, write {found.name}/{name}"
        raise UserError(suggestion)
    if found is None:
        raise UserError(
            f"{name}: the model's location is unknown: set OPENAI_API_KEY, TOGETHER_API_KEY for "
            "Together's models, or OPENAI_BASE_URL for another server; or add a prefix, "
            f"as in local/base, ollama/NAME or PROVIDER/MODEL ({', '.join(providers)})"
        )
    return found


PLUGIN_MODULE_PREFIX = "swarm.consortium."
"""Modules of the classes that represent saved consortia as llm models."""


class NameResolver:
    """Resolves names without a prefix; looked up on first use and cached."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def is_known_name(self, name: str) -> bool:
        """Return whether a model has exactly this name, so that no part of it is a sample count."""
        bare = _strip_llm_prefix(name)
        return bare is not None and (bare in self._llm_models or bare in self._saved_consortia)

    def resolve_name(self, name: str) -> str:
        """Return the full name: llm/NAME or consortium/NAME if it is one of theirs, else unchanged.

        A saved consortium resolves to itself under all names that llm has for it, so that a
        consortium containing itself is detected.
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
        """Return a similar known name, or `None`."""
        found = get_close_matches(name, [*self._llm_models, *self._saved_consortia], 1)
        return found[0] if found and "/" not in name else None

    @cached_property
    def _llm_models(self) -> "dict[str, LLMModel]":
        """llm's models by name and alias, including those of all its plugins."""
        try:
            import llm
        except ImportError:
            return {}
        return llm.get_model_aliases()

    @cached_property
    def _saved_consortia(self) -> list[str]:
        return ConsortiumStore().list_names()


def _strip_llm_prefix(name: str) -> str | None:
    """Return a name as in llm; `None` for other kinds, since importing llm is slow."""
    if name.startswith(tuple(f"{kind}/" for kind in MODEL_KINDS if kind != "llm")):
        return None
    return name.removeprefix("llm/")
