"""The models that a consortium's members are: those of the llm package first, then all others."""

from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swarm.collab.shelf import Shelf
from swarm.errors import UserError
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
        bare = _bare(name)
        return bare is not None and (bare in self._of_llm or bare in self._saved)

    def _found(self, name: str) -> Model:
        bare = _bare(name)
        if bare is None:
            return super()._found(name)
        found = self._of_llm.get(bare)
        if found is None:
            saved = bare in self._saved
            return self.model(f"consortium/{bare}") if saved else self._elsewhere(name)
        if type(found).__module__.startswith(OURS):  # whose name is another one, by an alias
            return self.model(f"consortium/{found.model_id}")
        return self._llm(bare)

    def _elsewhere(self, name: str) -> Model:
        try:
            return super()._found(name)
        except UserError:
            near = get_close_matches(name, [*self._of_llm, *self._saved], 1)
            if "/" in name or not near:
                raise
            raise UserError(f"{name}: there is no such model; did you mean {near[0]}?") from None

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


def _bare(name: str) -> str | None:
    """A name as llm would have it; `None` of another kind's: llm takes its time to load."""
    if name.startswith(tuple(f"{kind}/" for kind in KINDS if kind != "llm")):
        return None
    return name.removeprefix("llm/")
