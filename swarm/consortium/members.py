"""The models that are asked for in the commands of a consortium: by names as its members have."""

from pathlib import Path
from typing import Literal

from swarm.models import Model
from swarm.models.cache import Cache
from swarm.models.providers import Providers
from swarm.roster import Roster


class MemberRegistry(Roster):
    """A roster of which every name is found as a member's; see `Roster.member`.

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

    @property
    def uses_local(self) -> bool:
        """Whether a model of this machine was asked for, whose weights the first question loads."""
        return any(name.startswith("local/") for name in self._models)

    def is_known_name(self, name: str) -> bool:
        """Whether a model has just this name, so that no part of it is a count."""
        return self._name_resolver.is_known_name(name)

    def model(self, name: str) -> Model:
        """See `Roster.member`."""
        return self.member(name)
