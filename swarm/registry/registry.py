"""Registry of models of all kinds by name; the same name gives the same model."""

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swarm.errors import UserError
from swarm.models.base import Model
from swarm.models.cache import Cache
from swarm.models.function import FunctionModel
from swarm.models.llm import LLM
from swarm.models.openai import OpenAI
from swarm.models.providers import Provider, Providers, split_sample_count
from swarm.models.sampling import CachedModel, SampledModel
from swarm.multi_agent.consortium.consortium import Consortium, build_consortium
from swarm.multi_agent.consortium.store import ConsortiumStore, load_config
from swarm.multi_agent.moa import MixtureOfAgents, build_mixture, read_preset

if TYPE_CHECKING:
    from swarm.engine.base_model import BaseModel
    from swarm.registry.local_models import LocalModels

PLUGIN_MODULE_PREFIX = "swarm.consortium."
"""Modules of the classes that represent saved consortia as llm models."""


class Roster:
    """Registry of models by name.

    - PROVIDER/MODEL: a model of one of the `providers`.
    - local/base, local/EXPERT, local/search/RUN, local/FOLDER: see `swarm.registry.local_models`.
    - llm/NAME: a model known to the `llm` package.
    - function/package.module:name: a Python function.
    - moa/PRESET or moa/FILE.yaml: a mixture of agents.
    - consortium/NAME or consortium/FILE.yaml: a consortium; a saved one takes precedence over a
      preset.
    - Any other name is a model of the default provider.

    Args:
        providers: `None`: `Providers.load()`, when needed.
        base: Base of local names; `None` is the one named by the pool's experts. Nothing is read
            before the first local name.
        pool: Folder of the experts.
        device: Device of local models; see `swarm.registry.local_models.LocalModels`.
        cache: Cache of the answers of endpoints and of llm's models; "default" is `Cache()`, `None`
            stores none.
    """

    def __init__(
        self,
        providers: Providers | None = None,
        base: "str | BaseModel | None" = None,
        pool: str | Path = "initial_experts",
        device: str | None = None,
        cache: Cache | Literal["default"] | None = "default",
    ) -> None:
        self._given, self.base, self.pool, self.device = providers, base, pool, device
        self.cache = Cache() if cache == "default" else cache
        self._models: dict[str, Model] = {}
        self._building: list[str] = []
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_lock", "_llm_models", "_saved_consortia")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    @cached_property
    def providers(self) -> Providers:
        """The endpoints by name.

        Raises:
            UserError: The user's file is invalid.
        """
        return Providers.load() if self._given is None else self._given

    def model(self, name: str) -> Model:
        """Return the model of a name without a sample count; nothing heavy is loaded yet.

        Raises:
            UserError: It does not exist, or the name is ambiguous.
        """
        return self._get_model(name)

    def member(self, name: str) -> Model:
        """Return the model of a name in a consortium.

        A name without a prefix is first an exact name in llm, if installed, then a saved
        consortium; others are resolved like in `model`.

        Raises:
            UserError: See `model`.
        """
        full = self._resolve_member(name)
        try:
            return self._get_model(full)
        except UserError:
            known = [*self._llm_models, *self._saved_consortia]
            matches = get_close_matches(name, known, 1) if full == name and "/" not in name else []
            if not matches:
                raise
            raise UserError(f"{name}: no such model; did you mean {matches[0]}?") from None

    def is_known_name(self, name: str) -> bool:
        """Return whether a member has exactly this name; no part of it is then a sample count."""
        bare = _strip_llm_prefix(name)
        return bare is not None and (bare in self._llm_models or bare in self._saved_consortia)

    def _resolve_member(self, name: str) -> str:
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

    @cached_property
    def _llm_models(self) -> dict[str, Any]:
        """llm's models by name and alias, including those of all its plugins."""
        try:
            import llm
        except ImportError:
            return {}
        return llm.get_model_aliases()

    @cached_property
    def _saved_consortia(self) -> list[str]:
        return ConsortiumStore().list_names()

    def blend(self, coefficients: Mapping[str, float]) -> Model:
        """Return a blend of local experts, named without local/; see `LocalModels`.

        Raises:
            UserError: An expert does not exist, or a coefficient is invalid.
        """
        from swarm.registry.local_models import BlendedModel

        return BlendedModel(self.local, coefficients)

    def check(self, names: Iterable[str] = ()) -> None:
        """Check that all models can be used, these and those resolved before.

        Args:
            names: Further names, with or without sample counts.

        Raises:
            UserError: A key, a package, an expert or a folder is missing.
        """
        for name in names:
            self.model(split_sample_count(name)[0])
        for model in list(self._models.values()):
            model.check()

    def open(self, device: str) -> None:
        """Load the resolved models on `device`.

        Raises:
            UserError: The files do not form a model, or the device lacks memory.
        """
        for model in list(self._models.values()):
            model.open(device)

    @cached_property
    def local(self) -> "LocalModels":
        """The models of this machine."""
        from swarm.registry.local_models import LocalModels

        return LocalModels(self.base, self.pool, self.device)

    def _get_model(self, name: str) -> Model:
        with self._lock:
            if name not in self._models:
                self._models[name] = self._create_model(name)
            return self._models[name]

    def _create_model(self, name: str) -> Model:
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            raise UserError(f"{name!r} is not a model name, such as local/base or ollama/qwen2:7b")
        first, slash, rest = name.partition("/")
        if slash and not rest and (first in MODEL_KINDS or first in self.providers):
            raise UserError(f"{name}: the model name is missing after {first}/")
        if slash and first in self.providers:
            return self.providers[first].create_model(rest, cache=self.cache)
        if not slash or first not in MODEL_KINDS:
            return default_provider(name, self.providers).create_model(name, cache=self.cache)
        # A mixture or a consortium builds its members in here.
        if name in self._building:
            cycle = [*self._building[self._building.index(name) :], name]
            raise UserError(f"{name} contains itself: {' -> '.join(cycle)}")
        self._building.append(name)
        try:
            return MODEL_KINDS[first](self, rest)
        finally:
            self._building.pop()


MODEL_KINDS: dict[str, Callable[[Roster, str], Model]] = {
    "local": lambda roster, name: roster.local.get_model(name),
    "llm": lambda roster, name: LLM(name, cache=roster.cache),
    "function": lambda _, name: FunctionModel(name),
    "moa": lambda roster, name: build_mixture(read_preset(name), roster._get_model),
    "consortium": lambda roster, name: build_consortium(load_config(name), roster.member),
}
"""Models by the prefix of their names; the other prefixes are providers."""


def _strip_llm_prefix(name: str) -> str | None:
    """Return a name as in llm; `None` for other kinds, since importing llm is slow."""
    if name.startswith(tuple(f"{kind}/" for kind in MODEL_KINDS if kind != "llm")):
        return None
    return name.removeprefix("llm/")


def default_provider(name: str, providers: Providers) -> Provider:
    """Return the provider of a name without one; see docs/models.md.

    Raises:
        UserError: The environment does not determine it, or the name resembles another one.
    """
    likely = ("together", "openai") if "/" in name else ("openai", "together")
    known = [providers[one] for one in likely if one in providers]
    overridden = [one for one in known if one.is_url_overridden]
    with_key = [one for one in known if os.environ.get(one.api_key_env or "", "").strip()]
    found = next(iter(overridden + with_key), None)
    first, slash, rest = name.partition("/")
    prefixes = (*MODEL_KINDS, *providers)
    # Vendor names on a hub, such as mistralai or deepseek-ai, are no misspelled endpoints.
    vendor = first in prefixes or re.sub("-?ai$", "", first) in prefixes
    if slash and not vendor and (matches := get_close_matches(first.lower(), prefixes, 1, 0.75)):
        suggestion = f"{name}: did you mean {matches[0]}/{rest}?"
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
        agents = [
            one and {**one.model_dump(exclude={"model"}), "model": model_identity(one.model)}
            for one in (*model.proposers, last, model.fallback)
        ]
        return {"agents": agents, **model.options.model_dump(mode="json")}
    return model.fingerprint()


def store_answers(
    model: Model, name: str, cache: Cache, batch_size: int, batches: int = 1
) -> SampledModel:
    """Return a model whose answers are stored, also those of weights and functions.

    Args:
        model: The model.
        name: Its name, which is in the keys beside `model_identity`.
        cache, batch_size, batches: See `CachedModel`.

    Raises:
        UserError: A local model's files are missing.
    """
    if isinstance(model, SampledModel) and model.cache:
        return model
    identity = ("named", name, model_identity(model))
    return CachedModel(model, cache, identity, name, batch_size, batches)
