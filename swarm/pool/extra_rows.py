"""Rows of a pool's basis other than experts: base, noise, elites, sparsified experts, recipes."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.files import parse_json
from swarm.errors import UserError
from swarm.merging.lora_math import update_norm
from swarm.pool.adapter import ROUTER_FILE, Adapter, FactorShape, PoolRow, read_adapter
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
    found = [_load_facts(folder) for folder in _find_personal_bests(run)]
    ranked = sorted(found, key=lambda one: (-one["validation_utility"], one["particle"]))
    chosen: dict[str, Path] = {}
    for facts in ranked:
        routed = (facts["folder"] / ROUTER_FILE).is_file()
        if not routed and not _is_single_expert(facts, experts):
            chosen.setdefault(json.dumps(facts["coefficients"]), facts["folder"])
    if not chosen:
        raise UserError(
            f"pool.elites: all personal bests in {run} are experts of this pool, or have "
            "several routes (search with pool.routes=1); choose another run or null"
        )
    folders = list(chosen.values())[:count]
    for folder in folders:
        verify_run_file(folder)
    return [replace(read_adapter(one), name=f"elite_{i}") for i, one in enumerate(folders)]


def _find_personal_bests(run: Path) -> list[Path]:
    found = [path.parent for path in run.glob("particle_*/personal_best/swarm.json")]
    if not found:
        raise UserError(
            f"pool.elites: {run} is not a run with personal bests (particle_*/personal_best); "
            "give the folder of a search, e.g. search/NAME"
        )
    return found


def _load_facts(folder: Path) -> dict[str, Any]:
    """Return the content of a personal best's swarm.json, with its folder and particle number."""
    path = folder / "swarm.json"
    try:
        facts = parse_json(path.read_text(encoding="utf-8"))
        return {
            "coefficients": [float(value) for value in facts["coefficients"]],
            "experts": [str(name) for name in facts["experts"]],
            "validation_utility": float(facts["validation_utility"]),
            "particle": int(re.sub(r"\D", "", folder.parent.name) or 0),
            "folder": folder,
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"pool.elites: {path} does not describe the result of a search ({error})"
        ) from None


def _is_single_expert(facts: dict[str, Any], experts: Sequence[str]) -> bool:
    """Return whether a position is one of `experts` alone, in each of its groups."""
    names, values = facts["experts"], facts["coefficients"]
    used = {names[i % len(names)] for i, value in enumerate(values) if value}
    ones = [value for value in values if value]
    single = ones == [1.0] * (len(values) // max(1, len(names)))
    return single and len(used) == 1 and used <= set(experts)


@dataclass(frozen=True)
class BaseRow(PoolRow):
    """The base model itself: a zero update, whose coefficient takes what the others leave."""

    name: str = "base"
    shapes: Mapping[str, FactorShape] = field(default_factory=dict)

    def identity_bytes(self) -> bytes:
        return self.name.encode()


@dataclass(frozen=True)
class NoiseRow(PoolRow):
    """A random update of the experts' modules and ranks.

    At every module the norm of A is the mean of the experts', and the norm of the update `scale`
    times the mean of theirs, in the Frobenius norm, over the experts that adapt the module.
    """

    name: str
    experts: Sequence[PoolRow]
    scale: float
    seed: int

    @cached_property
    def shapes(self) -> Mapping[str, FactorShape]:  # type: ignore[override]
        """The highest rank of the experts at each module."""
        return _max_rank_shapes(self.experts)

    def load_factors(self, module: str) -> "FactorPair":
        import numpy as np
        import torch

        inputs, outputs, rank = self.shapes[module]
        seed = _hash_seed(self.seed, self.name, module)
        # Philox, as for all randomness of a search: the same numbers on every machine.
        draw = np.random.Generator(np.random.Philox(seed)).standard_normal
        a, b = (torch.from_numpy(draw(size)) for size in ((rank, inputs), (outputs, rank)))
        lengths, norms = zip(*_factor_norms(self.experts, module), strict=True)
        a *= sum(lengths) / len(lengths) / float(a.norm())
        # Avoid division by zero: one or all experts may be zero at this module.
        b *= self.scale * sum(norms) / len(norms) / (update_norm(a, b) or 1.0)
        return a.float().double(), b.float().double()

    def identity_bytes(self) -> bytes:
        return json.dumps([self.name, self.scale, self.seed]).encode()


@dataclass(frozen=True)
class MergedRow(PoolRow):
    """A static merge of the experts (`swarm.merging`), computed once per module and cached."""

    name: str
    experts: Sequence[PoolRow]
    density: float
    space: str
    rank: int
    _made: "dict[str, FactorPair]" = field(default_factory=dict, repr=False)

    @cached_property
    def shapes(self) -> Mapping[str, FactorShape]:  # type: ignore[override]
        """Shapes of every module at the rank to which the merge is truncated."""
        return {
            name: (*shape[:2], self.rank) for name, shape in _max_rank_shapes(self.experts).items()
        }

    def load_factors(self, module: str) -> "FactorPair":
        import torch

        from swarm.merging import merge_factors

        if module not in self._made:
            inputs, outputs, _ = self.shapes[module]
            nothing = torch.zeros(1, inputs), torch.zeros(outputs, 1)
            pairs = [
                _single_precision(one, module) if module in one.shapes else nothing
                for one in self.experts
            ]
            seed = _hash_seed("recipes", module)
            merge = self.name, pairs, self.density, seed, self.space, self.rank
            self._made[module] = _double_precision(merge_factors(*merge))
        return self._made[module]

    def identity_bytes(self) -> bytes:
        return json.dumps([self.name, self.density]).encode()


@dataclass(frozen=True)
class SparseRow(PoolRow):
    """A sparsified expert: a share of its entries is dropped, the rest rescaled.

    As in DARE (Yu et al. 2023, arXiv 2311.03099) each entry is 0 with the probability `drop` and
    divided by 1 - drop otherwise. In the delta space these are the entries of the update, which is
    then truncated to `rank` by SVD; in the factor space those of A and of B. Computed once per
    module and cached.
    """

    name: str
    expert: PoolRow
    drop: float
    space: str
    rank: int
    _made: "dict[str, FactorPair]" = field(default_factory=dict, repr=False)

    @cached_property
    def shapes(self) -> Mapping[str, FactorShape]:  # type: ignore[override]
        """Shapes of the expert's modules at the rank of the row."""
        return {
            name: (ins, outs, self.rank if self.space == "factor" else min(self.rank, ins, outs))
            for name, (ins, outs, _) in self.expert.shapes.items()
        }

    def load_factors(self, module: str) -> "FactorPair":
        from swarm.merging import merge_factors

        if module not in self._made:
            pair, rank = [_single_precision(self.expert, module)], self.shapes[module][2]
            seed = _hash_seed("sparse", self.name, module)
            merged = merge_factors("dare_linear", pair, 1 - self.drop, seed, self.space, rank)
            self._made[module] = _double_precision(merged)
        return self._made[module]

    def identity_bytes(self) -> bytes:
        return json.dumps([self.name, self.drop]).encode()


@dataclass(frozen=True)
class ExtraRows:
    """Settings of the rows that a pool makes itself (pool.base_row and so on)."""

    base_row: bool
    noise_rows: int
    noise_scale: float
    noise_seed: int
    recipes: Sequence[str]
    density: float
    sparse_rows: float | None

    def before_elites(self, experts: Sequence[PoolRow]) -> list[PoolRow]:
        """Return the rows between the experts and the elites: base and noise."""
        rows: list[PoolRow] = [BaseRow()] if self.base_row else []
        for number in range(self.noise_rows):
            rows.append(NoiseRow(f"noise_{number}", experts, self.noise_scale, self.noise_seed))
        return rows

    def after_elites(self, experts: Sequence[PoolRow], space: str) -> list[PoolRow]:
        """Return the rows after the elites: sparsified experts and recipes.

        Their rank suffices for a sum of all experts.
        """
        ranks = [max(rank for _, _, rank in one.shapes.values()) for one in experts]
        rank = sum(ranks) if space == "delta" else max(ranks)
        rows: list[PoolRow] = []
        if self.sparse_rows is not None:
            for one in experts:
                rows.append(SparseRow(f"sparse_{one.name}", one, self.sparse_rows, space, rank))
        rows += [MergedRow(name, experts, self.density, space, rank) for name in self.recipes]
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


def _double_precision(pair: "FactorPair") -> "FactorPair":
    return pair[0].double(), pair[1].double()


def _factor_norms(experts: Sequence[PoolRow], module: str) -> list[tuple[float, float]]:
    """Return the Frobenius norms of A and of the update of each expert that adapts `module`."""
    pairs = [_single_precision(one, module) for one in experts if module in one.shapes]
    return [(float(a.norm()), update_norm(a.double(), b.double())) for a, b in pairs]


def _hash_seed(*parts: Any) -> int:
    """Return an integer below 2^32 that depends on every part."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:4], "big")
