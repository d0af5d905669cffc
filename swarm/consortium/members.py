"""The models that a consortium's members are: those of the llm package first, then all others."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swarm.collab.shelf import Shelf
from swarm.models import Model
from swarm.models.cache import Cache
from swarm.models.providers import Providers
from swarm.roster import Roster
from swarm.roster.names import KINDS

if TYPE_CHECKING:
    from llm import Model as LLMModel

OURS = "swarm.consortium."
"""Where the classes are of which a saved consortium is a model of llm's."""


class Members(Roster):
    """A roster of which a name alone, as in `llm -m NAME`, is what it is there.

    - A model or alias that llm knows, letter by letter, where the package is installed.
    - A saved consortium, by its name alone, too.
    - All else as `Roster` has it; so are names that begin with local/, function/, moa/ or
      consortium/, whatever llm knows.

    Saved consortia are made here, also where llm knows them: none may contain itself, by any name.

    Args:
        providers, base, pool, device: See `Roster`.
        cache: As of `Roster`; none is kept unless one is given, as an llm user expects.
    """

    def __init__(
        self,
        providers: Providers | None = None,
        base: str | None = None,
        pool: str | Path = "initial_experts",
        device: str | None = None,
        cache: Cache | Literal["default"] | None = None,
    ) -> None:
        super().__init__(providers, base, pool, device, cache)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("_of_llm", "_saved")}

    @property
    def local(self) -> bool:
        """Whether a model of this machine was asked for, whose weights the first question loads."""
        return any(name.startswith("local/") for name in self._models)

    def known(self, name: str) -> bool:
        """Whether a model has just this name, so that no part of it is a count."""
        first, slash, _ = name.partition("/")
        if slash and first in KINDS and first != "llm":
            return False  # and llm, which takes its time to load, is not asked
        bare = name.removeprefix("llm/")
        return bare in self._of_llm or bare in self._saved

    def _found(self, name: str) -> Model:
        first, slash, rest = name.partition("/")
        other = slash and first in KINDS and first != "llm"
        bare = rest if slash and first == "llm" else name
        if other:
            return super()._found(name)
        found = self._of_llm.get(bare)
        if bare in self._saved and (found is None or type(found).__module__.startswith(OURS)):
            return self.model(f"consortium/{bare}")
        return self._llm(bare) if found is not None else super()._found(name)

    @cached_property
    def _of_llm(self) -> "dict[str, LLMModel]":
        """What llm knows by names and aliases; looked up once, as its plugins are all asked."""
        try:
            import llm
        except ImportError:
            return {}
        return llm.get_model_aliases()

    @cached_property
    def _saved(self) -> list[str]:
        return Shelf().names()
