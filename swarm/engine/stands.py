"""What lies in model folders, sorted into groups that one resident model can answer for."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from swarm.adapters import Adapter, read_adapter
from swarm.engine import Engine
from swarm.engine.base import Base
from swarm.engine.hf import HFEngine
from swarm.engine.mixture import TokenEngine, read_mixture
from swarm.engine.panel import MIXTURE, Panel, is_adapter
from swarm.errors import UserError
from swarm.manifest import verify
from swarm.pool.agreement import check_bases, check_names, common_shapes

if TYPE_CHECKING:
    from torch import Tensor


class Stand(Protocol):
    """Voices that one model answers for together.

    Attributes:
        places: Of the voices among all folders.
        positions: A row each, for the engine.
        key: Stands with the same one can be one stand.
    """

    places: list[int]

    @property
    def positions(self) -> np.ndarray: ...

    @property
    def key(self) -> object: ...

    def joined(self, other: Any) -> "Stand":
        """This stand with the voices of another one of the same key after its own.

        Raises:
            UserError: Two of the adapters do not go together.
        """
        ...

    def tokenizer(self) -> Any:
        """What writes the prompts; nothing else is loaded.

        Raises:
            UserError: The model is not there.
        """
        ...

    def context(self) -> float:
        """Tokens that the model can have; infinity where its configuration says nothing.

        Raises:
            UserError: As `tokenizer`.
        """
        ...

    def check(self) -> None:
        """Do what `load` does without the model's weights.

        Raises:
            UserError: What `load` would raise, as far as it can be told.
        """
        ...

    def load(self, device: str, engine: Any = None) -> Engine:
        """An engine with the model in it; `engine`, if it is given, has it from a stand that was
        joined to this one, and goes on."""
        ...

    def fingerprint(self) -> str:
        """A text that changes with the weights."""
        ...


@dataclass
class Adapted:
    """A base with adapters of which each answers as it is, and perhaps the base itself.

    Attributes:
        members: The adapter of each voice; `None` is the base.
    """

    base: Base
    places: list[int]
    members: list[Adapter | None]

    @property
    def adapters(self) -> list[Adapter]:
        """Those of the voices that are not the base."""
        return [member for member in self.members if member]

    @property
    def positions(self) -> np.ndarray:
        """A unit vector for each adapter, zeros for the base, [P, K]."""
        found = np.zeros((len(self.members), len(self.adapters)))
        own = [row for row, member in enumerate(self.members) if member]
        found[own, range(len(own))] = 1
        return found

    @property
    def key(self) -> object:
        """See `Stand.key`."""
        return self.base

    def joined(self, other: "Adapted") -> "Adapted":
        """See `Stand.joined`."""
        both = replace(
            self, places=[*self.places, *other.places], members=[*self.members, *other.members]
        )
        check_bases(both.adapters, self.base)
        check_names(both.adapters)
        common_shapes(both.adapters)
        return both

    def tokenizer(self) -> Any:
        """See `Stand.tokenizer`."""
        return self.base.tokenizer(self.base.resolve())

    def context(self) -> float:
        """See `Stand.context`."""
        return self.base.context()

    def check(self) -> None:
        """See `Stand.check`; every weight of the adapters is read once."""
        from swarm.engine.stacked import stack

        model, _ = outline(self.base)
        factors = {name: [one.to("meta") for one in pair] for name, pair in self._basis().items()}
        stack(model, factors, "meta", self.base, self._folder()).remove()

    def load(self, device: str, engine: HFEngine | None = None) -> HFEngine:
        """See `Stand.load`."""
        if engine is not None:
            engine.adapt(self.base, device, self._basis(), self._folder())
            return engine
        engine = HFEngine()
        engine.load(self.base, device, self._basis(), self._folder())
        return engine

    def _folder(self) -> str | Path:
        return self.adapters[0].folder.parent if self.adapters else ""

    def _basis(self) -> dict[str, tuple["Tensor", "Tensor"]]:
        return basis(self.adapters)

    def fingerprint(self) -> str:
        """See `Stand.fingerprint`."""
        digest = hashlib.sha256(self.base.fingerprint().encode())
        for adapter in self.adapters:
            digest.update(adapter.identity())
        return digest.hexdigest()[:16]


@dataclass
class Mixtures:
    """Mixtures of the same panel of whole models."""

    panel: Panel
    places: list[int]
    weights: list[np.ndarray]

    @property
    def positions(self) -> np.ndarray:
        """The mixtures' weights, [P, K]."""
        return np.stack(self.weights)

    @property
    def key(self) -> object:
        """See `Stand.key`."""
        return (*self.panel.models, self.panel.base)

    def joined(self, other: "Mixtures") -> "Mixtures":
        """See `Stand.joined`."""
        return Mixtures(self.panel, [*self.places, *other.places], [*self.weights, *other.weights])

    def tokenizer(self) -> Any:
        """See `Stand.tokenizer`."""
        return TokenEngine().check(self.panel.base, self.panel)

    def context(self) -> float:
        """See `Stand.context`."""
        engine = TokenEngine()
        engine.check(self.panel.base, self.panel)
        return engine.context

    def check(self) -> None:
        """See `Stand.check`."""
        self.panel.check()
        self.tokenizer()

    def load(self, device: str, engine: TokenEngine | None = None) -> TokenEngine:
        """See `Stand.load`."""
        if engine is None:
            engine = TokenEngine()
            engine.open(self.panel.base, self.panel, device)
        return engine

    def fingerprint(self) -> str:
        """See `Stand.fingerprint`."""
        return f"{self.panel.fingerprint()} {self.positions.tolist()}"


def stands(folders: Sequence[Path | None], base: Base) -> list[Stand]:
    """The folders in groups, that of the base first; `None`, or no folder at all, is the base.

    Raises:
        UserError: A folder is missing or holds no model, or adapters belong to another base.
    """
    found: dict[object, Stand] = {}
    for place, folder in enumerate(folders or [None]):
        stand = stand_of(folder, base, place)
        known = found.get(stand.key)
        found[stand.key] = known.joined(stand) if known else stand
    return sorted(found.values(), key=lambda one: (one.key != base, isinstance(one, Mixtures)))


def stand_of(folder: Path | None, base: Base, place: int = 0) -> Stand:
    """The stand of one folder alone.

    Raises:
        UserError: As `stands`.
    """
    if folder is None:
        return Adapted(base, [place], [None])
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    verify(folder)
    if is_adapter(str(folder)):
        adapter = read_adapter(folder)
        check_bases([adapter], base)
        return Adapted(base, [place], [adapter])
    if (folder / MIXTURE).is_file():
        panel, weights = read_mixture(folder, base.trust_remote_code)
        return Mixtures(panel, [place], [weights])
    own = replace(base, path=str(folder), name=None, **WITHOUT_WHEEL)
    own.resolve()
    return Adapted(own, [place], [None])


@lru_cache(maxsize=1)
def outline(base: Base) -> tuple[Any, Any]:
    """See `Base.outline`; kept for the next adapter of the same base, so leave it as it was."""
    return base.outline()


WITHOUT_WHEEL: Mapping[str, Any] = {"wheel": None, "wheel_sha256": None, "wheel_file": None}


def basis(adapters: Sequence[Adapter]) -> dict[str, tuple["Tensor", "Tensor"]]:
    """A [K, rank, in] and B [K, out, rank], with the scaling in it, of each adapted module.

    Raises:
        UserError: A module has another shape in one adapter than in another, or a weight is not
            finite.
    """
    import torch

    found = {}
    for module, (inputs, outputs) in common_shapes(adapters).items():
        mine = [(k, one) for k, one in enumerate(adapters) if module in one.shapes]
        rank = max(one.shapes[module][2] for _, one in mine)
        down = torch.zeros(len(adapters), rank, inputs)
        up = torch.zeros(len(adapters), outputs, rank)
        for k, one in mine:
            a, b = one.factors(module)
            down[k, : len(a)] = a
            up[k, :, : len(a)] = b.double() * one.scaling(module)
        found[module] = (down, up)
    return found
