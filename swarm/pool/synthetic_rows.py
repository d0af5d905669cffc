"""Rows of a pool's basis other than experts: base, noise, elites, sparsified experts, recipes."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarm._util.files import find_path, parse_json
from swarm.errors import UserError
from swarm.merging.lora_math import update_norm
from swarm.pool.adapter import ROUTER_FILE, Adapter, read_adapter
from swarm.runs.manifest import verify_run_file

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EliteExperts:
    """Elites: the personal bests of an earlier run (folder `elites`), at most `elite_count`."""

    elites: str | None = None
    elite_count: int = 3

    def __post_init__(self) -> None:
        """Raise UserError for invalid settings."""
        if self.elites is not None and not (isinstance(self.elites, str) and self.elites.strip()):
            raise UserError(
                f"pool.elites must be the folder of a run, e.g. search/NAME, or null, not "
                f"{self.elites!r}"
            )
        if type(self.elite_count) is not int or self.elite_count < 1:
            raise UserError(
                f"pool.elite_count must be a positive integer, not {self.elite_count!r}"
            )

    def load_adapters(self, experts: Sequence[str]) -> list[Adapter]:
        """Return the adapters, best first, named elite_0 and so on.

        Of equal positions the first particle's counts; a position that is one of `experts` alone is
        skipped, and so are positions of several routes, which are no single adapter. Raises
        UserError if the folder is not a run's, or has no elite.
        """
        if self.elites is None:
            return []
        run = find_path(self.elites)
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
        folders = list(chosen.values())[: self.elite_count]
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


FactorShape = tuple[int, int, int]

MOST_NOISE_ROWS = 1_000
"""Maximum of pool.noise_rows; each is as large as an expert."""

MAX_NOISE_ROWS = 1000
"""Maximum of pool.noise_scale; larger updates drown the model's own weights."""


class PoolRow(Protocol):
    """A row of the basis, multiplied by one coefficient; an expert on disk is one (`Adapter`).

    Attributes:
        name: Unique in the pool.
        shapes: (in, out, rank) of every module that it changes.
    """

    @property
    def name(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, FactorShape]: ...

    def lora_scaling(self, module: str) -> float:
        """Return the factor s of delta W = s B A at `module`."""
        ...

    def load_factors(self, module: str) -> tuple["Tensor", "Tensor"]:
        """Return A [rank, in] and B [out, rank] of `module`, unscaled; the same at each call."""
        ...

    def identity_bytes(self) -> bytes:
        """Return bytes that change with the weights, for a fingerprint."""
        ...


@dataclass(frozen=True)
class BaseRow:
    """The base model itself: a zero update, whose coefficient takes what the others leave."""

    name: str = "base"
    shapes: Mapping[str, FactorShape] = field(default_factory=dict)

    def lora_scaling(self, module: str) -> float:
        raise KeyError(module)

    def load_factors(self, module: str) -> tuple["Tensor", "Tensor"]:
        raise KeyError(module)

    def identity_bytes(self) -> bytes:
        return self.name.encode()


@dataclass(frozen=True)
class NoiseRow:
    """A random update of the experts' modules and ranks.

    At every module the norm of A is the mean of the experts', and the norm of the update `scale`
    times the mean of theirs, in the Frobenius norm, over the experts that adapt the module.
    """

    name: str
    experts: Sequence[PoolRow]
    scale: float
    seed: int

    @cached_property
    def shapes(self) -> Mapping[str, FactorShape]:
        """The highest rank of the experts at each module."""
        return _max_rank_shapes(self.experts)

    def lora_scaling(self, module: str) -> float:
        return 1.0

    def load_factors(self, module: str) -> tuple["Tensor", "Tensor"]:
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
        return a.float(), b.float()

    def identity_bytes(self) -> bytes:
        return json.dumps([self.name, self.scale, self.seed]).encode()


@dataclass(frozen=True)
class MergedRow:
    """A static merge of the experts (`swarm.merging`), computed once per module and cached."""

    name: str
    experts: Sequence[PoolRow]
    density: float
    space: str
    rank: int
    _made: dict[str, tuple["Tensor", "Tensor"]] = field(default_factory=dict, repr=False)

    @cached_property
    def shapes(self) -> Mapping[str, FactorShape]:
        """Shapes of every module at the rank to which the merge is truncated."""
        return {
            name: (*shape[:2], self.rank) for name, shape in _max_rank_shapes(self.experts).items()
        }

    def lora_scaling(self, module: str) -> float:
        return 1.0

    def load_factors(self, module: str) -> tuple["Tensor", "Tensor"]:
        import torch

        from swarm.merging import merge_factors

        if module not in self._made:
            inputs, outputs, _ = self.shapes[module]
            nothing = torch.zeros(1, inputs), torch.zeros(outputs, 1)
            pairs = [
                _scaled_factors(one, module) if module in one.shapes else nothing
                for one in self.experts
            ]
            seed = _hash_seed("recipes", module)
            self._made[module] = merge_factors(
                self.name, pairs, self.density, seed, self.space, self.rank
            )
        return self._made[module]

    def identity_bytes(self) -> bytes:
        return json.dumps([self.name, self.density]).encode()


@dataclass(frozen=True)
class SparseRow:
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
    _made: dict[str, tuple["Tensor", "Tensor"]] = field(default_factory=dict, repr=False)

    @cached_property
    def shapes(self) -> Mapping[str, FactorShape]:
        """Shapes of the expert's modules at the rank of the row."""
        return {
            name: (ins, outs, self.rank if self.space == "factor" else min(self.rank, ins, outs))
            for name, (ins, outs, _) in self.expert.shapes.items()
        }

    def lora_scaling(self, module: str) -> float:
        return 1.0

    def load_factors(self, module: str) -> tuple["Tensor", "Tensor"]:
        from swarm.merging import merge_factors

        if module not in self._made:
            pair, rank = [_scaled_factors(self.expert, module)], self.shapes[module][2]
            seed = _hash_seed("sparse", self.name, module)
            merged = merge_factors("dare_linear", pair, 1 - self.drop, seed, self.space, rank)
            self._made[module] = merged
        return self._made[module]

    def identity_bytes(self) -> bytes:
        return json.dumps([self.name, self.drop]).encode()


@dataclass(frozen=True)
class SyntheticRowConfig:
    """Configuration of the rows that a pool makes itself (config keys pool.base_row and so on)."""

    base_row: bool = False
    noise_rows: int = 0
    noise_scale: float = 1.0
    noise_seed: int = 0
    recipes: Sequence[str] = ()
    density: float = 0.5
    sparse_rows: float | None = None

    def __post_init__(self) -> None:
        """Raise UserError for invalid values."""
        if not isinstance(self.base_row, bool):
            raise UserError(f"pool.base_row must be true or false, not {self.base_row!r}")
        for key in ("noise_rows", "noise_seed"):
            value = getattr(self, key)
            if type(value) is not int or value < 0:
                raise UserError(f"pool.{key} must be an integer, 0 or more, not {value!r}")
        if self.noise_rows > MOST_NOISE_ROWS:
            raise UserError(
                f"pool.noise_rows must be at most {MOST_NOISE_ROWS:,}, not {self.noise_rows}"
            )
        if not (_is_number(self.noise_scale) and 0 < self.noise_scale <= MAX_NOISE_ROWS):
            raise UserError(
                f"pool.noise_scale must be a number above 0 and at most {MAX_NOISE_ROWS}, "
                f"not {self.noise_scale!r}"
            )
        if not (_is_number(self.density) and 0 < self.density <= 1):
            raise UserError(f"pool.density must be above 0 and at most 1, not {self.density!r}")
        drop = self.sparse_rows
        if drop is not None and not (_is_number(drop) and 0 < drop < 1):
            raise UserError(
                "pool.sparse_rows must be the fraction of entries to drop, above 0 and below "
                f"1, or null, not {drop!r}"
            )
        self._check_recipes()

    def _check_recipes(self) -> None:
        if isinstance(self.recipes, str) or not isinstance(self.recipes, Sequence):
            raise UserError(f"pool.recipes must be a list of recipes, not {self.recipes!r}")
        if not self.recipes:
            return
        from swarm.merging import MERGE_NAMES

        for name in self.recipes:
            if name not in MERGE_NAMES:
                raise UserError(f"pool.recipes has {name!r}; allowed: {', '.join(MERGE_NAMES)}")
            if list(self.recipes).count(name) > 1:
                raise UserError(f"pool.recipes names {name!r} more than once")

    @property
    def has_weights(self) -> bool:
        """True if any synthetic row has weights."""
        return bool(self.noise_rows or self.recipes or self.sparse_rows)

    def rows_before_elites(self, experts: Sequence[PoolRow]) -> list[PoolRow]:
        """Return the rows between the experts and the elites: base and noise."""
        rows: list[PoolRow] = [BaseRow()] if self.base_row else []
        for number in range(self.noise_rows):
            rows.append(NoiseRow(f"noise_{number}", experts, self.noise_scale, self.noise_seed))
        return rows

    def rows_after_elites(self, experts: Sequence[PoolRow], space: str) -> list[PoolRow]:
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


def _scaled_factors(row: PoolRow, module: str) -> tuple["Tensor", "Tensor"]:
    """Return A and B in float32 with the scaling in B."""
    a, b = row.load_factors(module)
    return a.float(), (b.double() * row.lora_scaling(module)).float()


def _factor_norms(experts: Sequence[PoolRow], module: str) -> list[tuple[float, float]]:
    """Return the Frobenius norms of A and of the update of each expert that adapts `module`."""
    pairs = [_scaled_factors(one, module) for one in experts if module in one.shapes]
    return [(float(a.norm()), update_norm(a.double(), b.double())) for a, b in pairs]


def _hash_seed(*parts: Any) -> int:
    """Return an integer below 2^32 that depends on every part."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:4], "big")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
