"""Model folders grouped so that one resident engine can serve each group; finished runs."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.token_ensemble import (
    MIXTURE_FILE,
    ModelEnsemble,
    TokenEnsembleEngine,
    is_adapter_folder,
    read_mixture,
)
from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Request
from swarm.pool.adapter import Adapter, read_adapter, read_routed_adapter
from swarm.pool.discovery import check_base_models, check_compatible, common_shapes
from swarm.pool.prompt_router import PromptRouter
from swarm.runs.folder import RunFolder, verify_run_file

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class AdapterGroup:
    """A base with adapters, each of which is one model, and optionally the base itself.

    Attributes:
        places: Indices of the models among all folders.
        members: Adapter of each model; `None` is the base.
    """

    base: BaseModel
    places: list[int]
    members: list[Adapter | None]

    @property
    def adapters(self) -> list[Adapter]:
        """Adapters of the models other than the base."""
        return [member for member in self.members if member]

    @property
    def positions(self) -> np.ndarray:
        """Engine positions, one row per model: a unit vector, or zeros for the base; [P, K]."""
        found = np.zeros((len(self.members), len(self.adapters)))
        rows = [row for row, member in enumerate(self.members) if member]
        found[rows, range(len(rows))] = 1
        return found

    @property
    def group_key(self) -> object:
        """Groups with equal keys can be merged."""
        return self.base

    def merge_with(self, other: Any) -> "AdapterGroup":
        """Append the models of another group with the same key.

        Raises:
            UserError: Two of the adapters are incompatible.
        """
        places, members = [*self.places, *other.places], [*self.members, *other.members]
        both = replace(self, places=places, members=members)
        check_compatible(both.adapters, self.base)
        return both

    def load_context(self) -> tuple[Any, float]:
        """Return the tokenizer with its chat template, and the context length in tokens.

        Nothing else is loaded; the length is infinite if the configuration has none.

        Raises:
            UserError: The model is missing.
        """
        return self.base.load_tokenizer(self.base.resolve()), self.base.context_length()

    def check(self) -> None:
        """Check everything that `load` requires; reads every weight of the adapters once.

        Raises:
            UserError: Errors of `load`, as far as they can be detected.
        """
        from swarm.engine.lora import LoraLayers

        model, _ = load_cached_without_weights(self.base)
        basis = build_basis(self.adapters)
        factors = {name: [one.to("meta") for one in parts] for name, parts in basis.items()}
        where = f"pool.folder={self._experts_folder()} on {self.base.path}"
        LoraLayers(model, factors, where).remove()

    def load(self, device: str, engine: Any = None) -> HFEngine:
        """Load an engine; a given `engine` of a group merged into this one is extended instead."""
        if engine is None:
            # One plan for all rounds, so that an answer does not depend on the number of requests.
            engine = HFEngine("stacked")
            engine.load_base(self.base, device)
        engine.set_adapters(build_basis(self.adapters), self._experts_folder())
        found: HFEngine = engine
        return found

    def _experts_folder(self) -> str | Path:
        return self.adapters[0].folder.parent if self.adapters else ""

    def fingerprint(self) -> str:
        """Return a string that depends on the weights."""
        digest = hashlib.sha256(self.base.fingerprint().encode())
        for adapter in self.adapters:
            digest.update(adapter.identity_bytes())
        return digest.hexdigest()[:16]


@dataclass
class RoutedGroup(AdapterGroup):
    """The adapters of a routed result, which are one model: each answers its kind of prompts."""

    folder: Path
    router: PromptRouter

    @property
    def positions(self) -> np.ndarray:
        """One model without coefficients of its own; shape [1, 0]."""
        return np.zeros((1, 0))

    @property
    def group_key(self) -> object:
        return self.base, self.folder, tuple(self.places)

    def load(self, device: str, engine: Any = None) -> Any:
        return RoutedEngine(super().load(device, engine), self.router)

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {self.router.digest()}"


class RoutedEngine:
    """Answers each prompt with the adapter of its route, for `RoutedGroup`.

    Args:
        engine: Has the R adapters.
    """

    def __init__(self, engine: HFEngine, router: PromptRouter) -> None:
        self._engine, self._router = engine, router

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """See `swarm.engine.base.Engine.generate`; positions [1, 0] are of one model."""
        (asked,) = requests
        if not asked:
            return [[]]
        states = self._engine.embed_prompts([one.prompt for one in asked], [self._router.layer])
        routes = self._router.assign(states)
        used = np.unique(routes)
        parts = [np.flatnonzero(routes == route).tolist() for route in used]
        own = [[asked[index] for index in part] for part in parts]
        unit = np.eye(len(self._router.names))
        try:
            answers = self._engine.generate(unit[used], own)
        except NotFinite as error:
            raise NotFinite(0, error.quantity) from None
        found: dict[int, Completion] = {}
        for part, completions in zip(parts, answers, strict=True):
            found.update(zip(part, completions, strict=True))
        return [[found[index] for index in range(len(asked))]]


@dataclass
class EnsembleGroup:
    """Mixtures of the same panel of complete models; see `AdapterGroup` for the methods.

    Attributes:
        positions: Weights of the mixtures, shape [P, K].
    """

    panel: ModelEnsemble
    places: list[int]
    positions: np.ndarray

    @property
    def group_key(self) -> object:
        return (*self.panel.models, self.panel.base)

    def merge_with(self, other: Any) -> "EnsembleGroup":
        positions = np.concatenate([self.positions, other.positions])
        return EnsembleGroup(self.panel, [*self.places, *other.places], positions)

    def load_context(self) -> tuple[Any, float]:
        engine = TokenEnsembleEngine()
        tokenizer = engine.check(self.panel.base, self.panel)
        return tokenizer, engine.context

    def check(self) -> None:
        self.panel.check()
        self.load_context()

    def load(self, device: str, engine: Any = None) -> TokenEnsembleEngine:
        found: TokenEnsembleEngine = engine or TokenEnsembleEngine()
        if engine is None:
            found.open(self.panel.base, self.panel, device)
        return found

    def fingerprint(self) -> str:
        return f"{self.panel.fingerprint()} {self.positions.tolist()}"


ModelGroup = AdapterGroup | EnsembleGroup
"""Models served together by one engine."""


def group_models(folders: Sequence[Path | None], base: BaseModel) -> list[ModelGroup]:
    """Group the folders, the base's group first; `None`, or no folder at all, is the base.

    Raises:
        UserError: A folder is missing or contains no model, or adapters belong to another base.
    """
    found: dict[object, ModelGroup] = {}
    for index, folder in enumerate(folders or [None]):
        group = model_group(folder, base, index)
        known = found.get(group.group_key)
        found[group.group_key] = known.merge_with(group) if known else group
    return sorted(
        found.values(), key=lambda one: (one.group_key != base, isinstance(one, EnsembleGroup))
    )


def model_group(folder: Path | None, base: BaseModel, index: int = 0) -> ModelGroup:
    """Return the group of a single folder.

    Raises:
        UserError: See `group_models`.
    """
    if folder is None:
        return AdapterGroup(base, [index], [None])
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    verify_run_file(folder)
    adapter = is_adapter_folder(str(folder))
    routed = None if adapter else read_routed_adapter(folder)
    if adapter or routed:
        adapters = [read_adapter(one) for one in (routed[1] if routed else [folder])]
        check_base_models(adapters, base)
        if routed:
            return RoutedGroup(base, [index], [*adapters], folder, routed[0])
        return AdapterGroup(base, [index], [*adapters])
    if (folder / MIXTURE_FILE).is_file():
        panel, weights = read_mixture(folder, base.trust_remote_code)
        return EnsembleGroup(panel, [index], weights[None])
    wheel: dict[str, Any] = {"wheel": None, "wheel_sha256": None, "wheel_file": None}
    full_model = replace(base, path=str(folder), name=None, **wheel)
    full_model.resolve()
    return AdapterGroup(full_model, [index], [None])


@lru_cache(maxsize=1)
def load_cached_without_weights(base: BaseModel) -> tuple[Any, Any]:
    """Cached `BaseModel.load_without_weights`; the result must not be modified."""
    return base.load_without_weights()


def build_basis(adapters: Sequence[Adapter]) -> dict[str, list["Tensor"]]:
    """Return A [R, in], B [out, R] including the scaling, and the adapter of each of R rows.

    See `swarm.engine.lora.Factors`; by name of the adapted module.

    Raises:
        UserError: A module's shape differs between adapters, or a weight is not finite.
    """
    import torch

    found = {}
    for module in common_shapes(adapters):
        adapting = [(k, one) for k, one in enumerate(adapters) if module in one.shapes]
        pairs = [one.load_factors(module) for _, one in adapting]
        places = [k for (k, _), (a, _) in zip(adapting, pairs, strict=True) for _ in a]
        found[module] = [
            torch.cat([a.float() for a, _ in pairs]),
            torch.cat([b.float() for _, b in pairs], dim=1),
            torch.tensor(places),
        ]
    return found


def load_finished_run(folder: str | Path, otherwise: str) -> RunFolder:
    """Return a run whose best model, in its folder global_best, is final.

    Args:
        otherwise: Advice for an unfinished run, besides resuming it.

    Raises:
        UserError: The folder contains no search, or an unfinished one.
    """
    run = RunFolder(folder)
    # Between the last iteration and the final selection another model may still become the best.
    if run.finished is None or run.verdict is None:
        raise UserError(
            f"{run.path}: the search is not finished; resume it with the command that "
            f"started it, or {otherwise}"
        )
    return run


def base_of_run(run: RunFolder) -> BaseModel:
    """Return the base named in a run's configuration.

    Raises:
        UserError: It names none.
    """
    try:
        return base_from_settings(run.config["model"])
    except (KeyError, TypeError, AttributeError):
        raise UserError(
            f"{run.path / 'config.json'} names no base; set it for a candidate with "
            "model@candidate.base=local candidate.base.path=FOLDER_OR_HUB_ID"
        ) from None


def base_from_settings(settings: Mapping[str, Any]) -> BaseModel:
    """Create the base from an option of the configuration group `model`."""
    return BaseModel(**{key: value for key, value in settings.items() if key != "_target_"})
