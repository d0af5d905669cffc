"""Rows of a pool's basis other than experts: the base and recipes; random twins."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarm.merging.lora_math import update_norm
from swarm.pool.adapter import FactorShape, PoolRow

if TYPE_CHECKING:
    from swarm.merging.lora_math import FactorPair


@dataclass(frozen=True)
class BaseRow(PoolRow):
    """The base model itself: a zero update, whose coefficient takes what the others leave."""

    name: str = "base"
    shapes: Mapping[str, FactorShape] = field(default_factory=dict)

    def identity_bytes(self) -> bytes:
        return self.name.encode()


@dataclass(frozen=True)
class RandomTwin(PoolRow):
    """A random update in place of an expert, of the same shapes (pool.control=random).

    Its factors are Gaussian; at every module A and the update B A have the Frobenius norms of the
    expert's. What a search finds without the experts' content, it finds with their twins.
    """

    name: str
    shapes: Mapping[str, FactorShape]
    expert: PoolRow
    seed: int

    def load_factors(self, module: str) -> "FactorPair":
        import numpy as np
        import torch

        inputs, outputs, rank = self.shapes[module]
        # Philox, as for all randomness of a search: the same numbers on every machine.
        generator = np.random.Philox(_hash_seed(self.seed, self.name, module))
        draw = np.random.Generator(generator).standard_normal
        a, b = (torch.from_numpy(draw(size)) for size in ((rank, inputs), (outputs, rank)))
        first, second = (one.double() for one in self.expert.load_factors(module))
        a *= first.norm() / a.norm()
        # Avoid division by zero: an expert may be zero at this module.
        b *= update_norm(first, second) / (update_norm(a, b) or 1.0)
        return a.float().double(), b.float().double()

    def identity_bytes(self) -> bytes:
        return json.dumps(["random twin", self.seed]).encode() + self.expert.identity_bytes()


@dataclass(frozen=True)
class MergedRow(PoolRow):
    """A static merge of experts (`swarm.merging`), computed once per module and cached.

    Args:
        shapes: Of the modules, at the rank to which the merge is truncated.
    """

    name: str
    experts: Sequence[PoolRow]
    shapes: Mapping[str, FactorShape]
    density: float
    space: str
    _made: "dict[str, FactorPair]" = field(default_factory=dict, repr=False)

    def load_factors(self, module: str) -> "FactorPair":
        import torch

        from swarm.merging import merge_factors

        if module not in self._made:
            inputs, outputs, rank = self.shapes[module]
            nothing = torch.zeros(1, inputs), torch.zeros(outputs, 1)
            pairs = [
                _single_precision(one, module) if module in one.shapes else nothing
                for one in self.experts
            ]
            seed = _hash_seed("recipes", module)
            a, b = merge_factors(self.name, pairs, self.density, seed, self.space, rank)
            self._made[module] = a.double(), b.double()
        return self._made[module]

    def identity_bytes(self) -> bytes:
        return json.dumps([self.name, self.density]).encode()


@dataclass(frozen=True)
class ExtraRows:
    """Settings of the rows that a pool makes of its experts (pool.recipes and so on)."""

    base_row: bool
    recipes: Sequence[str]
    density: float

    def make_rows(self, experts: Sequence[PoolRow], space: str) -> list[PoolRow]:
        """Return the base and recipes, of a rank that suffices for a sum of all experts."""
        ranks = [max(rank for _, _, rank in one.shapes.values()) for one in experts]
        rank = sum(ranks) if space == "delta" else max(ranks)
        rows: list[PoolRow] = [BaseRow()] if self.base_row else []
        shapes = {name: (*shape[:2], rank) for name, shape in _max_rank_shapes(experts).items()}
        for name in self.recipes:
            rows.append(MergedRow(name, experts, shapes, self.density, space))
        return rows


def _max_rank_shapes(experts: Sequence[PoolRow]) -> dict[str, FactorShape]:
    """Return (in, out, highest rank) of every module that any of the experts changes."""
    found: dict[str, FactorShape] = {}
    for one in experts:
        for module, (inputs, outputs, rank) in one.shapes.items():
            found[module] = (inputs, outputs, max(rank, found.get(module, (0, 0, 0))[2]))
    return found


def _single_precision(row: PoolRow, module: str) -> "FactorPair":
    a, b = row.load_factors(module)
    return a.float(), b.float()


def _hash_seed(*parts: Any) -> int:
    """Return an integer below 2^32 that depends on every part."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:4], "big")
