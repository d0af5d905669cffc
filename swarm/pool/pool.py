"""A pool of experts: LoRA adapters of one base model, read as a basis that can be combined.

A position of the swarm is a vector of coefficients c over the K rows of the basis, separate for
each group of modules. In the factor space, which is that of Model Swarms (Feng et al. 2024), it
stands for A = sum_j c_j A_j and B = sum_j c_j s_j B_j at every adapted module, with s_j the scaling
of row j, and changes the base weight by B A; in the delta space it changes it by sum_j c_j s_j B_j
A_j.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.files import find_path
from swarm.errors import UserError
from swarm.merging import lora_math
from swarm.pool.adapter import (
    CONFIG_FILE,
    NOTE_FILE,
    WEIGHTS_FILE,
    Adapter,
    read_adapter,
    write_adapter,
)
from swarm.pool.basis import Basis, check_space
from swarm.pool.discovery import (
    NamedModel,
    check_base_models,
    check_module_names,
    check_row_names,
    combined_config,
    common_shapes,
    find_experts,
    name_of,
    parse_expert_names,
    shared_scaling,
)
from swarm.pool.module_groups import ALL_MODULES, AUTO, find_parent_groups, parse_group_kind
from swarm.pool.synthetic_rows import EliteExperts, PoolRow, SyntheticRowConfig

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, NOTE_FILE)
Coefficients = Iterable[float] | Mapping[str, float]
"""G * K numbers, group by group; or those of some rows by name, the same in all groups."""

ELITES_FOLDER = ".elites"
"""Folder of the elites in `Pool.with_folder`; hidden, so that it is not taken for an expert."""


class Pool:
    """K rows: the experts of `folder`, then, if configured, rows made by the pool.

    Experts are in the order of `experts` or of their names; base, noise, elites, sparsified experts
    and recipes follow.

    Available after `open`: `names` (K), `groups` (G), `modules` (name of the module -> (in, out,
    rank) of a combination, sorted by name), `rank`, the highest of them, and `shared`, the (rank,
    alpha, is rsLoRA) of all modules of all rows, None if they differ.
    """

    saves = "adapter"

    def __init__(
        self,
        folder: str | Path,
        experts: Sequence[str] | None = None,
        space: str = "factor",
        export_rank: int | None = None,
        groups: int | str = 1,
        base_row: bool = False,
        noise_rows: int = 0,
        noise_scale: float = 1.0,
        noise_seed: int = 0,
        elites: str | None = None,
        elite_count: int = 3,
        recipes: Sequence[str] = (),
        density: float = 0.5,
        sparse_rows: float | None = None,
        base: str = "check",
    ) -> None:
        """Store the settings (config keys pool.*, explained in docs/pool.md) without opening files.

        Raises UserError for invalid values.
        """
        if not isinstance(folder, str | Path) or not str(folder).strip():
            raise UserError(f"pool.folder must be the path of a folder, not {folder!r}")
        self.folder = find_path(folder)
        self.experts = None if experts is None else parse_expert_names(self.folder, experts)
        self.space, self.export_rank = space, export_rank
        check_space(space, export_rank)
        if base not in ("check", "ignore"):
            raise UserError(f"pool.base={base!r}: must be check or ignore")
        self._base_check = base
        self._division = parse_group_kind(groups)
        made = (base_row, noise_rows, noise_scale, noise_seed, recipes, density, sparse_rows)
        self._made = SyntheticRowConfig(*made)
        self._elites = EliteExperts(elites, elite_count)
        self.names: list[str] = []
        self.groups: Sequence[str] = [ALL_MODULES]
        self.modules: dict[str, tuple[int, int, int]] = {}
        self.rank = 0
        self.shared: tuple[int, float, bool] | None = None
        self._basis: Basis | None = None
        self._files: list[Adapter] = []
        self._experts = 0
        self._base_name: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that construct the same pool, closed."""
        return {
            "folder": str(self.folder),
            "experts": self.experts,
            "space": self.space,
            "export_rank": self.export_rank,
            "groups": self._division,
            **vars(self._made),
            **vars(self._elites),
            **({"base": "ignore"} if self._base_check == "ignore" else {}),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings only; a worker opens its own files."""
        return partial(Pool, **self.settings), ()

    @property
    def division(self) -> int | str:
        """Value of pool.groups in effect."""
        return self._division

    def divide(self, gradients: bool) -> None:
        """Resolve pool.groups=auto; must be called before `open`.

        Args:
            gradients: Whether a search has gradients for the coefficients: it can then learn those
                of each module, while a black box of so many dimensions could not be searched.
        """
        if self._division == AUTO:
            self._division = "per_module" if gradients else 1

    @property
    def expert_count(self) -> int:
        """Number of first rows that are experts of the folder."""
        return self._experts

    @property
    def size(self) -> int:
        """Number D of weights of one combination."""
        return sum(rank * (inputs + outputs) for inputs, outputs, rank in self.modules.values())

    def open(self, base: "str | NamedModel | None" = None) -> "Pool":
        """Read every config and the header of every weights file; return the pool itself.

        Takes milliseconds and imports no torch: the weights are not read, and only `check`, `basis`
        and `combine` verify that they are finite. `base` is the base model that the experts have to
        belong to, or its name; see `swarm.pool.discovery.check_base_models`. Raises UserError,
        naming the folder, for an expert that cannot be combined with the others.
        """
        names = find_experts(self.folder, self.experts)
        experts = [read_adapter(self.folder / name) for name in names]
        elites = self._elites.load_adapters(names)
        self._files, self._experts = [*experts, *elites], len(experts)
        if self._base_check == "check":
            check_base_models(self._files, base)
        check_module_names(self._files)
        before, after = (
            self._made.rows_before_elites(experts),
            self._made.rows_after_elites(experts, self.space),
        )
        rows: list[PoolRow] = [*experts, *before, *elites, *after]
        check_row_names(self.folder, [row.name for row in rows])
        self._basis = Basis(rows, common_shapes(self._files), self.space, self._division)
        self.names, self.groups = self._basis.names, self._basis.groups
        self.modules = self._basis.modules
        self.rank = max(rank for _, _, rank in self.modules.values())
        self.shared = None if self._made.has_weights else shared_scaling(self._files)
        self._base_name = name_of(base)
        return self

    def _require_basis(self) -> Basis:
        if self._basis is None:
            raise RuntimeError("the pool is not open: call Pool.open(base_name) first")
        return self._basis

    def check(self) -> None:
        """Read every weight of every expert once and raise UserError if one is not finite.

        Logs a warning for experts that are equal in all weights, as they are a redundant dimension
        of the search. Costs one pass over the files, about a second per gigabyte.
        """
        self._require_basis()
        equal: dict[bytes, list[str]] = {}
        for adapter in self._files:
            equal.setdefault(adapter.content_digest(), []).append(adapter.name)
        for names in equal.values():
            if len(names) > 1:
                log.warning(
                    "%s: %s have equal weights; list only one of them in pool.experts",
                    self.folder,
                    ", ".join(names),
                )

    def basis(self, module: str) -> tuple["Tensor", "Tensor"]:
        """Return A [K, rank, in] and B [K, out, rank] of `module`, new float32 tensors on the CPU.

        The scaling is folded into B, so that row j changes the base weight by B[j] @ A[j]; rows
        that lack the module are zero. Raises UserError if a weight is not finite.
        """
        return self._require_basis().stack_experts(module)

    def expert_factors(self, module: str) -> tuple["Tensor", "Tensor", "Tensor"]:
        """Return an engine's tensors of `module`; see `swarm.pool.basis.Basis.expert_factors`."""
        return self._require_basis().expert_factors(module)

    def combine(self, coefficients: Coefficients) -> dict[str, tuple["Tensor", "Tensor"]]:
        """Return the adapter at a position [G * K]: module -> A [rank, in], B [out, rank], float32.

        A position may be given by names too, {"rooms": 0.6, "roads": 0.4}; the others' are 0.
        Summed in float64 in the order of the rows and rounded once, so the result does not depend
        on threads or machines. Scaling as in `basis`; in the delta space the rank is the sum of the
        ranks whose coefficient is not 0. Raises UserError for a vector that is not G * K finite
        numbers.
        """
        basis, vector = self._require_basis(), self._to_vector(coefficients)
        pairs = ((module, basis.combine_module(module, vector)) for module in self.modules)
        return {module: (a.float(), b.float()) for module, (a, b) in pairs}

    def _to_vector(self, coefficients: Coefficients) -> list[float]:
        self._require_basis()
        if isinstance(coefficients, Mapping):
            if unknown := [name for name in coefficients if name not in self.names]:
                raise UserError(
                    f"{self.folder}: no expert {unknown[0]!r}; it contains: "
                    + ", ".join(self.names)
                )
            row = [coefficients.get(name, 0.0) for name in self.names]
            coefficients = row * len(self.groups)
        if isinstance(coefficients, str):
            raise UserError(
                f"{coefficients}: must be a dict by expert name, or a list of all coefficients"
            )
        vector = [float(value) for value in coefficients]
        count = len(self.names) * len(self.groups)
        if len(vector) != count or not all(map(math.isfinite, vector)):
            each = "one an expert"
            if len(self.groups) > 1:
                each += f" in each of {len(self.groups)} groups"
            expected = f"{count} finite coefficients, {each}"
            raise UserError(f"{self.folder}: a position needs {expected}, not {vector}")
        return vector

    def save(
        self, coefficients: Coefficients, folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the adapter at a position [G * K] as a PEFT folder, atomically.

        The weights are float32; rank and alpha are the experts' if all share them and factors are
        combined, else alpha equals the rank. swarm.json contains the composition, `extra`, and in
        the delta space the distance of the file from the position
        (`swarm.merging.lora_math.compress_modules`). An adapter that was saved there before is
        replaced. Raises UserError if the folder cannot be written or contains anything else.
        """
        folder, vector = Path(folder), self._to_vector(coefficients)
        if any(folder.resolve() == one.folder.resolve() for one in self._files):
            raise UserError(f"{folder}: an expert of the pool, which is not overwritten")
        note = {"experts": self.names, "coefficients": vector, "space": self.space}
        if len(self.groups) > 1:
            note["groups"] = self.groups
        pairs, scaling, facts = self._export_weights(vector)
        weights = {
            f"base_model.model.{module}.lora_{side}.weight": weight
            for module, pair in pairs.items()
            for side, weight in zip("AB", pair, strict=True)
        }
        config = combined_config(self._files, list(self.modules), scaling, self._base_name)
        write_adapter(folder, config, weights, {**(extra or {}), **note, **facts})

    def _export_weights(
        self, vector: list[float]
    ) -> tuple[dict[str, lora_math.FactorPair], tuple[int, float, bool], dict[str, Any]]:
        """Return the weights of all modules in float32, their scaling and facts for the note."""
        folded = self.space == "delta" or self.shared is None
        mixed = (
            (name, self._require_basis().combine_module(name, vector, folded))
            for name in self.modules
        )
        if self.space == "delta":
            pairs, rank, errors = lora_math.compress_modules(mixed, self.export_rank)
            return pairs, (rank, float(rank), False), {"reconstruction_error": errors}
        pairs = {name: (a.float(), b.float()) for name, (a, b) in mixed}
        return pairs, self.shared or (self.rank, float(self.rank), False), {}

    def parents(self, coarse: int | str) -> list[int]:
        """Return, for each of the G groups, the index of its group in a coarser division.

        See `swarm.pool.module_groups.find_parent_groups`.
        """
        self._require_basis()
        return find_parent_groups(list(self.modules), parse_group_kind(coarse), self._division)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of the rows' names, order, scaling and all weights.

        A run must not be resumed on a pool with another fingerprint, as the same coefficients would
        be other adapters. Reads every file once, about a second per gigabyte.
        """
        digest = hashlib.sha256(self.space.encode())
        for row in self._require_basis().rows:
            digest.update(row.identity_bytes())
        if len(self.groups) > 1:
            digest.update(json.dumps(self.groups).encode())
        return digest.hexdigest()[:16]

    def parts(self) -> dict[str, list[Path]]:
        """Return the files of the open pool, by sub-folder as in `with_folder`."""
        names = [one.name for one in self._files[: self._experts]]
        names += [
            "/".join((ELITES_FOLDER, *one.folder.parts[-2:])) for one in self._files[len(names) :]
        ]
        return {
            label: [one.folder / name for name in ADAPTER_FILES if (one.folder / name).is_file()]
            for label, one in zip(names, self._files, strict=True)
        }

    def with_folder(self, folder: Path) -> "Pool":
        """Return the same pool, closed, with its parts below `folder`."""
        elites = str(folder / ELITES_FOLDER) if self._elites.elites else None
        return Pool(**{**self.settings, "folder": str(folder), "elites": elites})
