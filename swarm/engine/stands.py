"""What lies in model folders, sorted into groups that one resident model can answer for."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from swarm.pool.agreement import check_bases, check_names, common_shapes

if TYPE_CHECKING:
    from torch import Tensor


class Stand(Protocol):
    """Voices that one model answers for together.

    Attributes:
        places: Of the voices among all folders.
        positions: A row each, for the engine.
    """

    places: list[int]

    @property
    def positions(self) -> np.ndarray: ...

    def tokenizer(self) -> Any:
        """What writes the prompts; nothing else is loaded.

        Raises:
            UserError: The model is not there.
        """
        ...

    def load(self, device: str) -> Engine:
        """An engine with the model in it."""
        ...

    def fingerprint(self) -> str:
        """A text that changes with the weights."""
        ...


@dataclass
class Adapted:
    """A base with adapters of which each answers as it is; without any, the base itself."""

    base: Base
    places: list[int]
    adapters: list[Adapter] = field(default_factory=list)

    @property
    def positions(self) -> np.ndarray:
        """The unit vectors, [K, K]; [1, 0] for the base itself."""
        return np.eye(len(self.adapters)) if self.adapters else np.zeros((1, 0))

    def tokenizer(self) -> Any:
        """See `Stand.tokenizer`."""
        return self.base.tokenizer(self.base.resolve())

    def load(self, device: str) -> Engine:
        """See `Stand.load`."""
        engine = HFEngine()
        folder = self.adapters[0].folder.parent if self.adapters else ""
        engine.load(self.base, device, basis(self.adapters), folder)
        return engine

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

    def tokenizer(self) -> Any:
        """See `Stand.tokenizer`."""
        return TokenEngine().check(self.panel.base, self.panel)

    def load(self, device: str) -> Engine:
        """See `Stand.load`."""
        engine = TokenEngine()
        engine.open(self.panel.base, self.panel, device)
        return engine

    def fingerprint(self) -> str:
        """See `Stand.fingerprint`."""
        return f"{self.panel.fingerprint()} {self.positions.tolist()}"


def stands(folders: Sequence[Path], base: Base) -> list[Stand]:
    """The folders in groups, adapters first; no folder at all is the base.

    Raises:
        UserError: A folder is missing or holds no model, or adapters belong to another base.
    """
    adapters: dict[int, Adapter] = {}
    mixtures: dict[Any, Mixtures] = {}
    whole: list[Stand] = []
    for place, folder in enumerate(folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
        if is_adapter(str(folder)):
            adapters[place] = read_adapter(folder)
        elif (folder / MIXTURE).is_file():
            panel, weights = read_mixture(folder, base.trust_remote_code)
            key = (tuple(panel.models), panel.base)
            found = mixtures.setdefault(key, Mixtures(panel, [], []))
            found.places.append(place)
            found.weights.append(weights)
        else:
            own = replace(base, path=str(folder), name=None, **WITHOUT_WHEEL)
            own.resolve()
            whole.append(Adapted(own, [place]))
    check_bases([*adapters.values()], base.name)
    check_names([*adapters.values()])
    if adapters or not folders:
        whole.insert(0, Adapted(base, [*adapters] or [0], [*adapters.values()]))
    return [*whole, *mixtures.values()]


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
