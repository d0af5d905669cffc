"""Rows of a pool's basis other than experts: base, elites, sparse ones, recipes; random twins."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.files import parse_json
from swarm.errors import UserError
from swarm.merging.lora_math import update_norm
from swarm.pool.adapter import (
    NOTE_FILE,
    ROUTER_FILE,
    Adapter,
    FactorShape,
    PoolRow,
    read_adapter,
)
from swarm.runs.folder import verify_run_file

if TYPE_CHECKING:
    from swarm.merging.lora_math import FactorPair


def load_elites(run: Path, count: int, experts: Sequence[str]) -> list[Adapter]:
    """Return the personal bests of a run, best first, named elite_0 and so on, at most `count`.

    Of equal positions the first particle's counts; a position that is one of `experts` alone is
    skipped, and so are positions of several routes, which are no single adapter.

    Raises:
        UserError: The folder is not a run's, or has no elite.
    """
    found = []
    for path in run.glob(f"particle_*/personal_best/{NOTE_FILE}"):
        try:
            note = parse_json(path.read_text(encoding="utf-8"))
            particle = int(re.sub(r"\D", "", path.parent.parent.name) or 0)
            position = [float(value) for value in note["coefficients"]]
            names = [str(name) for name in note["experts"]]
            groups = len(position) // len(names)
            rank = (-float(note["validation_utility"]), particle)
        except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
            raise UserError(
                f"pool.elites: {path} does not describe the result of a search ({error})"
            ) from None
        used = {names[i % len(names)] for i, value in enumerate(position) if value}
        ones = [value for value in position if value] == [1.0] * groups
        is_expert = ones and len(used) == 1 and used <= set(experts)
        if not is_expert and not (path.parent / ROUTER_FILE).is_file():
            found.append((rank, path.parent, position))
    chosen: dict[str, Path] = {}
    for _, folder, position in sorted(found):
        chosen.setdefault(json.dumps(position), folder)
    if not chosen:
        raise UserError(
            f"pool.elites: {run} is not a run with personal bests (particle_*/personal_best), or "
            "all of them are experts of this pool or have several routes; give another search/NAME"
        )
    folders = list(chosen.values())[:count]
    for folder in folders:
        verify_run_file(folder)
    return [replace(read_adapter(one), name=f"elite_{i}") for i, one in enumerate(folders)]


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
        method: "dare_linear" and so on; of a single expert it is a sparsified one.
        density: Share of entries that are kept.
        seed: What the random numbers depend on, besides the module.
        shapes: Of the modules, at the rank to which the merge is truncated.
    """

    name: str
    experts: Sequence[PoolRow]
    shapes: Mapping[str, FactorShape]
    method: str
    density: float
    seed: Sequence[str]
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
            seed = _hash_seed(*self.seed, module)
            a, b = merge_factors(self.method, pairs, self.density, seed, self.space, rank)
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
    sparse_rows: float | None

    def make_rows(self, experts: Sequence[PoolRow], space: str) -> list[PoolRow]:
        """Return the sparsified experts and recipes.

        Their rank suffices for a sum of all experts.
        """
        ranks = [max(rank for _, _, rank in one.shapes.values()) for one in experts]
        rank = sum(ranks) if space == "delta" else max(ranks)
        rows: list[PoolRow] = []
        if self.sparse_rows is not None:
            rows += [sparse_row(one, self.sparse_rows, space, rank) for one in experts]
        shapes = {name: (*shape[:2], rank) for name, shape in _max_rank_shapes(experts).items()}
        for name in self.recipes:
            rows.append(MergedRow(name, experts, shapes, name, self.density, ["recipes"], space))
        return rows


def sparse_row(expert: PoolRow, drop: float, space: str, rank: int) -> MergedRow:
    """Return a sparsified expert: a share of its entries is dropped, the rest rescaled.

    As in DARE (Yu et al. 2023, arXiv 2311.03099) each entry is 0 with the probability `drop` and
    divided by 1 - drop otherwise. In the delta space these are the entries of the update, which is
    then truncated to `rank` by SVD; in the factor space those of A and of B.
    """
    shapes = {
        module: (ins, outs, rank if space == "factor" else min(rank, ins, outs))
        for module, (ins, outs, _) in expert.shapes.items()
    }
    name = f"sparse_{expert.name}"
    return MergedRow(name, [expert], shapes, "dare_linear", 1 - drop, ["sparse", name], space)


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
