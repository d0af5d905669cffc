"""A mixture of experts by hand: another voice of the base that is in memory, and no file."""

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError
from swarm.roster.voice import SharedLocalModel
from swarm.words import describe_position

if TYPE_CHECKING:
    from swarm.roster.local import LocalModels


class BlendedModel(SharedLocalModel):
    """The sum of experts by coefficients, as a position of a search in the factor space is.

    It is asked together with the other voices of the base, and loads nothing but experts that were
    not asked before.

    Args:
        home: Whose experts.
        coefficients: By the experts' names, as `Locals.model` takes them; without any, or with all
            of them 0, it is the base.

    Raises:
        UserError: A coefficient is not a finite number, or there is no such expert.
    """

    def __init__(self, home: "LocalModels", coefficients: Mapping[str, float]) -> None:
        for name, share in coefficients.items():
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise UserError(f"{name}: {share!r} is no coefficient; give a number")
            if not math.isfinite(share):
                raise UserError(f"{name}: {share} is no coefficient; give a finite number")
        self.parts = {name: float(share) for name, share in coefficients.items() if share}
        super().__init__(
            home, describe_position(list(self.parts), list(self.parts.values())), None, home.base
        )
        self._voices = [home.get_model(name) for name in self.parts or ("base",)]

    def __reduce__(self) -> tuple[Any, ...]:
        return BlendedModel, (self.home, self.parts)

    def check(self) -> None:
        """See that the experts are there and go together; see `Voice.check`.

        Raises:
            UserError: They do not.
        """
        if self._together is not None:
            return
        for voice in self._voices:
            voice.check()
        first, *others = self._voices
        if alone := [one.name for one in others if one._together is not first._together]:
            raise UserError(
                f"{alone[0]} and {first.name} cannot be mixed: they are no adapters of one base"
            )
        places = [voice._place for voice in self._voices]
        shares = self.parts.values() or [1.0]
        self._place = tuple(
            (place, share)
            for place, share in zip(places, shares, strict=True)
            if isinstance(place, int)
        )
        self._together = first._together

    def fingerprint(self) -> str:
        """A text that changes with the weights and with the coefficients."""
        told = [(voice.fingerprint(), self.parts.get(voice.name)) for voice in self._voices]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
