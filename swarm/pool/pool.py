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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from swarm._util.files import find_path, short_digest
from swarm._util.settings import Count, Positive, Text, checked
from swarm.errors import UserError
from swarm.merging import lora_math
from swarm.pool.adapter import (
    CONFIG_FILE,
    NOTE_FILE,
    WEIGHTS_FILE,
    Adapter,
    PoolRow,
    read_adapter,
    write_adapters,
)
from swarm.pool.discovery import (
    NamedModel,
    check_compatible,
    combined_adapter,
    find_equal_experts,
    find_experts,
    find_pool,
    name_of,
)
from swarm.pool.extra_rows import ExtraRows, RandomTwin
from swarm.pool.groups import ALL_MODULES, AUTO, GroupKind, divide_modules, route_group_names
from swarm.pool.prompt_router import MAX_ROUTES, PromptRouter, read_router

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.merging.lora_math import FactorPair


log = logging.getLogger(__name__)

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, NOTE_FILE)
Coefficients = Iterable[float] | Mapping[str, float]
"""G * K numbers, group by group; or those of some rows by name, the same in all groups."""

NEW_RANK = 16
"""Rank of `new_adapter=auto`."""


Recipe = Literal["slerp", "model_stock", "ties", "dare_linear", "dare_ties"]
Routes = Annotated[int, Field(ge=1, le=MAX_ROUTES)] | Literal["auto"] | Mapping[str, Any]


class ExpertPool:
    """The experts that a position mixes: a pool of adapters, or a panel of full models.

    Attributes:
        names: Names of the K experts, in the order of a position's coefficients; set by `open`.
        expert_count: Number of leading names that are the user's models, not generated experts.
        saves: The kind of artifact that `save` writes.
        saves_personal_bests: Whether personal bests are saved as the global one is, not as notes.
        groups: Names of the module groups with separate coefficients; a single group is "all".
        router: Routes prompts to parts of a position; `None` for a single route.
        wanted_routes: Number of routes that a search decides on: 1, "auto", or 2 to 16.
        control: "random" if each expert is replaced by a random twin; else `None`.
        new_adapter: Rank of the adapter that is learned beside the experts; `None` for none.
        learned: Files of learned adapters by position [G * K], of one route.
        experts: Names of those of the folder that are mixed; `None` is all.
        most: Number of experts to which a search cuts a larger pool; `None` is no limit.
    """

    names: list[str]
    expert_count: int
    saves: str
    saves_personal_bests = True
    groups: Sequence[str] = ("all",)
    router: PromptRouter | None = None
    wanted_routes: int | str = 1
    control: Literal["random"] | None = None
    new_adapter: int | str | None = None
    learned: Mapping[tuple[float, ...], str] = {}
    experts: list[str] | None = None
    most: int | None = None

    @property
    def routes(self) -> int:
        """Number of kinds of prompts with coefficients of their own."""
        return len(self.router.names) if self.router else 1

    def split_routes(self, position: Sequence[float]) -> list[list[float]]:
        """Return the position of each route: parts of a position, or the position itself."""
        vector = list(position)
        size = len(vector) // self.routes
        return [vector[start : start + size] for start in range(0, len(vector), size)]

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """Keys of pool that a search resolves from "auto", with the values in effect."""
        return {}

    def divide(self, gradients: bool, learns: bool) -> None:
        """Choose the groups of modules and the learned adapter; see `Pool.divide`."""

    def open(self, base: "str | NamedModel | None" = None) -> "ExpertPool":
        """Read the pool without any weights, and return it; fast, and may be called again.

        Args:
            base: The base model that the experts have to belong to, or its name, if they have one.

        Raises:
            UserError: Something is missing or inconsistent.
        """
        raise NotImplementedError

    def subset(self, experts: Sequence[str]) -> "ExpertPool":
        """Return a closed pool of some of the experts."""
        raise NotImplementedError

    def check(self) -> None:
        """Check, before anything is written, that the weights exist and are finite.

        Raises:
            UserError: They are not.
        """
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with the experts."""
        raise NotImplementedError

    def update_norms(self) -> list[float]:
        """Return the norm of each row's update; equal if experts are not updates of a base."""
        return [1.0] * len(self.names)

    def save(
        self, coefficients: Any, folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the artifact of a position [K], and a swarm.json describing it, with `extra`."""
        raise NotImplementedError

    def save_note(
        self, coefficients: Any, folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write what is kept of a personal best."""
        self.save(coefficients, folder, extra)


@checked("pool")
class Pool(ExpertPool):
    """K rows: the experts of `folder`, then, if configured, rows made by the pool.

    Experts are in the order of `experts` or of their names; base and recipes follow. The
    arguments are the keys pool.*, explained in docs/pool.md.

    Available after `open`: `names` (K), `groups` (G), `modules` (name of the module -> (in, out,
    rank) of a combination, sorted by name), `rank`, the highest of them, and `expert_count`, the
    number of first rows that are experts of the folder. `division` is the value of pool.groups in
    effect.

    Raises:
        UserError: A value is invalid; no file has been opened.
    """

    saves = "adapter"

    def __init__(
        self,
        folder: Path | Text,
        experts: Sequence[str] | None = None,
        space: Literal["factor", "delta"] = "factor",
        groups: GroupKind = "global",
        base_row: bool = False,
        recipes: Sequence[Recipe] = (),
        density: Annotated[float, Field(gt=0, le=1)] = 0.5,
        base: Literal["check", "ignore"] = "check",
        routes: Routes = 1,
        control: Literal["random"] | None = None,
        control_seed: Count = 0,
        new_adapter: Positive | Literal["auto"] | None = "auto",
        most: Positive | None = 30,
    ) -> None:
        if isinstance(new_adapter, int) and space != "delta":
            raise UserError(f"""pool.new_adapter={new_adapter} needs pool.space=delta, in which it
                is one more term of the sum; use null with pool.space={space}""")
        if most == 1:
            raise UserError(
                "pool.most=1: a pool needs at least two experts; use 2 or more, or null"
            )
        if len(set(recipes)) < len(recipes):
            raise UserError(f"pool.recipes={list(recipes)}: names one more than once")
        self.folder = find_pool(folder)
        self._places = str(self.folder if self.folder == find_path(folder) else folder)
        self.experts = None if experts is None else list(experts)
        self.space, self.division = space, groups
        self.new_adapter = self._given_adapter = new_adapter
        self._base_check, self._extra = base, ExtraRows(base_row, list(recipes), density)
        self.control, self._control_seed, self.most = control, control_seed, most
        self._least = 2
        self.router = read_router(routes) if isinstance(routes, Mapping) else None
        self.wanted_routes = 1 if isinstance(routes, Mapping) else routes
        self.names: list[str] = []
        self.groups: Sequence[str] = [ALL_MODULES]
        self.modules: dict[str, tuple[int, int, int]] = {}
        self.rank = self.expert_count = 0
        self._rows: list[PoolRow] = []
        self._group_of: dict[str, int] = {}
        self._files: list[Adapter] = []
        self._base_name: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that construct the same pool, closed."""
        return {
            "folder": self._places,
            "experts": self.experts,
            "space": self.space,
            "groups": self.division,
            **vars(self._extra),
            "control": self.control,
            "control_seed": self._control_seed,
            "most": self.most,
            **({"base": "ignore"} if self._base_check == "ignore" else {}),
            "routes": self.router.to_dict() if self.router else self.wanted_routes,
            "new_adapter": self.new_adapter,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings only; a worker opens its own files."""
        return partial(Pool, **self.settings), ()

    def divide(self, gradients: bool, learns: bool) -> None:
        """Resolve pool.groups=auto and pool.new_adapter=auto, for the next `open`.

        Args:
            gradients: Whether a search has gradients for the coefficients: it can then learn those
                of each module, while a black box of so many dimensions could not be searched.
            learns: Whether it can learn an adapter beside them, which differs by module anyway:
                coefficients of each module then overfit more and gain nothing.

        Raises:
            UserError: A learned adapter is wanted, and nothing learns it.
        """
        if self._given_adapter == AUTO:
            self.new_adapter = NEW_RANK if learns and self.space == "delta" else None
        elif self.new_adapter and not learns:
            raise UserError(f"""pool.new_adapter={self.new_adapter}: nothing learns it in this
                search, which has no descent by gradients; use auto or null""")
        if self.division == AUTO:
            alone = gradients and not self.new_adapter
            self.division = "per_module" if alone else "global"

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """Values in effect of pool.experts, groups, routes (1, or the router's) and new_adapter."""
        routes = self.router.to_dict() if self.router else 1
        found = {"experts": self.experts, "groups": self.division, "routes": routes}
        return {**found, "new_adapter": self.new_adapter}

    def subset(self, experts: Sequence[str]) -> "Pool":
        """Return a closed pool of some experts of the folder; one alone is the pool's only row."""
        settings = {**self.settings, "experts": list(experts)}
        if len(experts) == 1:
            settings |= {"groups": "global", "base_row": False, "recipes": ()}
            settings |= {"routes": 1, "new_adapter": None}
        found = Pool(**settings)
        found._least = min(2, len(experts))
        return found

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
        names = find_experts(self.folder, self.experts, self._least)
        self._files = [read_adapter(self.folder / name) for name in names]
        self.expert_count = len(self._files)
        shapes = check_compatible(self._files, base, self._base_check)
        rows: list[PoolRow] = list(self._files)
        if self.control:
            rows = [RandomTwin(one.name, one.shapes, one, self._control_seed) for one in rows]
        self._rows = [*rows, *self._extra.make_rows(rows, self.space)]
        self.names = [row.name for row in self._rows]
        for name in names:
            if self.names.count(name) > 1:
                raise UserError(
                    f"{self.folder / name}: the pool's settings add an expert of the name "
                    f"{name!r}; rename the folder, or omit it from pool.experts"
                )
        ranks = {
            name: [row.shapes[name][2] for row in self._rows if name in row.shapes]
            for name in sorted(shapes)
        }
        # Factors are padded to a common rank; concatenated, a module's ranks add up.
        widths = {name: sum(found) if self.space == "delta" else max(found)
                  for name, found in ranks.items()}  # fmt: skip
        self.rank = max(widths.values())
        self.modules = {
            name: (*shapes[name], width if self.space == "delta" else self.rank)
            for name, width in widths.items()
        }
        groups, self._group_of = divide_modules(list(self.modules), self.division)
        self.groups = route_group_names(self.router.names if self.router else (), groups)
        self._base_name = name_of(base)
        return self

    def _require_open(self) -> None:
        if not self._rows:
            raise RuntimeError("the pool is not open: call Pool.open(base_name) first")

    def check(self) -> None:
        """Read every weight of every expert once and raise UserError if one is not finite.

        Logs a warning for experts that are equal in all weights, as they are a redundant dimension
        of the search. Costs one pass over the files, about a second per gigabyte.
        """
        self._require_open()
        for names in find_equal_experts(self._files):
            log.warning(
                "%s: %s have equal weights; list only one of them in pool.experts",
                self.folder,
                ", ".join(names),
            )

    def expert_factors(self, module: str) -> tuple["Tensor", "Tensor", "Tensor"]:
        """Return the tensors of `module` for an engine, float32: A, B and coefficient indices.

        The third tensor contains, for each entry of A's first axis, the index of its coefficient in
        a position [G * K]. In the factor space A is [K, rank, in] and B [K, out, rank], where rows
        that lack the module are zero; in the delta space A is [R, in] and B [out, R] of all rows
        concatenated, with R the sum of their ranks. The scaling is folded into B. Raises UserError
        if a weight is not finite.
        """
        import torch

        self._require_open()
        count = len(self._rows)
        places = torch.arange(count) + self._group_of[module] * count
        if self.space == "factor":
            pairs = [self._combine_group(module, row) for row in torch.eye(count).tolist()]
            a, b = (torch.stack([one.float() for one in side]) for side in zip(*pairs, strict=True))
            return a, b, places
        ranks = [row.shapes[module][2] if module in row.shapes else 0 for row in self._rows]
        a, b = self._combine_group(module, [1.0] * count)
        return a.float(), b.float(), places.repeat_interleave(torch.tensor(ranks))

    def _combine_group(self, module: str, part: Sequence[float]) -> "FactorPair":
        """Return A and B of one module with the K coefficients of its group, float64.

        Summed in the order of the rows, so the result does not depend on threads or machines.
        """
        inputs, outputs, rank = self.modules[module]
        terms = (
            (coefficient, *row.load_factors(module))
            for coefficient, row in zip(part, self._rows, strict=True)
            if coefficient != 0.0 and module in row.shapes
        )
        if self.space == "factor":
            return lora_math.sum_factors(terms, inputs, outputs, rank)
        return lora_math.concatenate_factors(terms, inputs, outputs)

    def _combine_modules(self, vector: Sequence[float]) -> Iterator[tuple[str, "FactorPair"]]:
        """Yield each module with its A and B at a position [G * K]."""
        learned: dict[str, FactorPair] = {}
        if file := self.learned.get(tuple(vector)):
            from swarm.pool.learned import LearnedAdapter

            adapter = LearnedAdapter.load(file)
            learned = {module: adapter.load_factors(module) for module in adapter.factors}
        for module, group in self._group_of.items():
            start = group * len(self._rows)
            pair = self._combine_group(module, vector[start : start + len(self._rows)])
            if module in learned:
                terms = [(1.0, *pair), (1.0, *learned.pop(module))]
                pair = lora_math.concatenate_factors(terms, *self.modules[module][:2])
            yield module, pair
        yield from learned.items()

    def mixture(self, part: Sequence[float]) -> list[tuple[float, PoolRow]]:
        """Return the rows with their coefficients [K], of one route; the learned adapter is last.

        Rows that change nothing are left out.
        """
        found = [
            (c, row) for c, row in zip(part, self._rows, strict=True) if c != 0.0 and row.shapes
        ]
        if file := self.learned.get(tuple(part)):
            from swarm.pool.learned import LearnedAdapter

            found.append((1.0, LearnedAdapter.load(file)))
        return found

    def update_norms(self) -> list[float]:
        """Return the Frobenius norm of each row's update over all modules; reads all weights."""
        self._require_open()
        return [
            sum(lora_math.update_norm(*row.load_factors(m)) ** 2 for m in row.shapes) ** 0.5
            for row in self._rows
        ]

    def combine(self, coefficients: Coefficients) -> dict[str, tuple["Tensor", "Tensor"]]:
        """Return the adapter at a position [G * K]: module -> A [rank, in], B [out, rank], float32.

        A position may be given by names too, {"rooms": 0.6, "roads": 0.4}; the others' are 0.
        Summed in float64 in the order of the rows and rounded once, so the result does not depend
        on threads or machines. The scaling is in B; in the delta space the rank is the sum of the
        ranks whose coefficient is not 0. Raises UserError for a vector that is not G * K finite
        numbers.
        """
        vector, *others = self.split_routes(self._to_vector(coefficients))
        if any(other != vector for other in others):
            raise UserError(
                f"{self.folder}: the position has an adapter for each of {len(self.groups)} groups "
                "of prompts and modules; combine those of one route (Pool.split_routes)"
            )
        return {name: (a.float(), b.float()) for name, (a, b) in self._combine_modules(vector)}

    def _to_vector(self, coefficients: Coefficients) -> list[float]:
        self._require_open()
        names, groups = self.names, len(self.groups)
        if isinstance(coefficients, Mapping):
            if unknown := [name for name in coefficients if name not in names]:
                raise UserError(
                    f"{self.folder}: no expert {unknown[0]!r}; it contains: {', '.join(names)}"
                )
            coefficients = [coefficients.get(name, 0.0) for name in names] * groups
        given = [] if isinstance(coefficients, str) else coefficients
        vector = [float(value) for value in given]
        if len(vector) != len(names) * groups or not all(map(math.isfinite, vector)):
            each = f"one an expert in each of {groups} groups" if groups > 1 else "one an expert"
            raise UserError(
                f"{self.folder}: a position needs {len(names) * groups} finite coefficients, "
                f"{each}, or a dict by expert name, not {coefficients}"
            )
        return vector

    def save(
        self, coefficients: Coefficients, folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the adapter at a position as a PEFT folder, atomically.

        A position [R * G * K] of several routes is written as one PEFT folder for each that differs
        beside the router (`swarm.pool.adapter.read_routed_adapter`).

        The weights are float32, with the scaling in B: alpha equals the rank. swarm.json contains
        the composition and `extra`. An adapter that was saved there before is replaced. Raises
        UserError if the folder cannot be written or contains anything else.
        """
        folder, vector = Path(folder), self._to_vector(coefficients)
        if any(folder.resolve() == one.folder.resolve() for one in self._files):
            raise UserError(f"{folder}: an expert of the pool, which is not overwritten")
        note = {**(extra or {}), "experts": self.names, "coefficients": vector, "space": self.space}
        if len(self.groups) > 1:
            note["groups"] = self.groups
        if self.control:
            note["control"] = self.control
        parts = self.split_routes(vector)
        owners = [parts.index(part) for part in parts]
        if any(tuple(part) in self.learned for part in parts):
            note["learned"] = True  # beside the coefficients
        adapters = []
        for owner in sorted(set(owners)):
            mixed = self._combine_modules(parts[owner])
            pairs = {name: (a.float(), b.float()) for name, (a, b) in mixed}
            # One rank for all modules, but where a learned adapter alone changes most of them.
            more = len(pairs) > len(self.modules)
            if not more:
                rank = max(1, *(len(down) for down, _ in pairs.values()))
                pairs = {name: lora_math.pad_rank(pair, rank) for name, pair in pairs.items()}
            adapters.append(combined_adapter(self._files, pairs, self._base_name, not more))
        router = self.router.merge(owners) if self.router and len(adapters) > 1 else None
        write_adapters(folder, adapters, note, router)

    def describe_files(self) -> str:
        """Return 16 hexadecimal digits of the experts' names, shapes and scalings; no weights."""
        self._require_open()
        return short_digest([[one.name, one.shapes, one.scalings] for one in self._files])

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of the rows' names, order, scaling and all weights.

        A run must not be resumed on a pool with another fingerprint, as the same coefficients would
        be other adapters. Reads every file once, about a second per gigabyte.
        """
        self._require_open()
        digest = hashlib.sha256(self.space.encode())
        for row in self._rows:
            digest.update(row.identity_bytes())
        if len(self.groups) > 1:
            digest.update(json.dumps(self.groups).encode())
        if self.router:
            digest.update(self.router.digest().encode())
        return digest.hexdigest()[:16]

    def parts(self) -> dict[str, list[Path]]:
        """Return the files of the open pool, by sub-folder as in `with_folder`."""
        found = {}
        for one in self._files:
            files = [one.folder / name for name in ADAPTER_FILES]
            found[one.name] = [file for file in files if file.is_file()]
        return found

    def with_folder(self, folder: Path) -> "Pool":
        """Return the same pool, closed, with its parts below `folder`."""
        return Pool(**{**self.settings, "folder": str(folder)})
