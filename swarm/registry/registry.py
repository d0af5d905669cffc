"""Registry of models of all kinds by name; the same name gives the same model."""

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swarm.errors import UserError
from swarm.models.base import Model
from swarm.models.cache import Cache
from swarm.models.function import FunctionModel
from swarm.models.llm import LLM
from swarm.models.providers import Providers, split_sample_count
from swarm.registry.name_resolution import NameResolver, default_provider

if TYPE_CHECKING:
    from swarm.engine.base_model import BaseModel
    from swarm.registry.local_models import LocalModels

__all__ = ["Roster", "split_sample_count"]


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
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

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
        full = self._name_resolver.resolve_name(name)
        try:
            return self._get_model(full)
        except UserError:
            suggestion = self._name_resolver.suggest_name(name) if full == name else None
            if suggestion is None:
                raise
            raise UserError(f"{name}: no such model; did you mean {suggestion}?") from None

    def _get_model(self, name: str) -> Model:
        with self._lock:
            if name not in self._models:
                self._models[name] = self._create_model(name)
            return self._models[name]

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

    def _create_model(self, name: str) -> Model:
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            raise UserError(f"{name!r} is not a model name, such as local/base or ollama/qwen2:7b")
        first, slash, rest = name.partition("/")
        factories: dict[str, Callable[[str], Model]] = {
            "local": lambda name: self.local.get_model(name),
            "llm": lambda name: LLM(name, cache=self.cache),
            "function": FunctionModel,
            "moa": self._moa_model,
            "consortium": self._consortium_model,
        }
        factory = factories.get(first)
        if slash and not rest and (factory or first in self.providers):
            raise UserError(f"{name}: the model name is missing after {first}/")
        if slash and factory:
            return factory(rest)
        if slash and first in self.providers:
            return self.providers[first].create_model(rest, cache=self.cache)
        return default_provider(name, self.providers).create_model(name, cache=self.cache)

    @cached_property
    def _name_resolver(self) -> NameResolver:
        return NameResolver()

    @cached_property
    def local(self) -> "LocalModels":
        """The models of this machine."""
        from swarm.registry.local_models import LocalModels

        return LocalModels(self.base, self.pool, self.device)

    def _moa_model(self, name: str) -> Model:
        from swarm.multi_agent.moa import build_mixture, read_preset

        return self._build_composite(
            f"moa/{name}", lambda: build_mixture(read_preset(name), self._get_model)
        )

    def _consortium_model(self, name: str) -> Model:
        from swarm.multi_agent.consortium.consortium import build_consortium
        from swarm.multi_agent.consortium.store import load_config

        return self._build_composite(
            f"consortium/{name}", lambda: build_consortium(load_config(name), self.member)
        )

    def _build_composite(self, name: str, make: Callable[[], Model]) -> Model:
        """Build a model of other models; raise if it contains itself."""
        if name in self._building:
            cycle = [*self._building[self._building.index(name) :], name]
            raise UserError(f"{name} contains itself: {' -> '.join(cycle)}")
        self._building.append(name)
        try:
            return make()
        finally:
            self._building.pop()
