"""What lies in model folders, sorted into groups that one resident model can answer for."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from swarm.engine.base import Engine
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.token_ensemble.engine import TokenEnsembleEngine, read_mixture
from swarm.engine.token_ensemble.members import MIXTURE_FILE, ModelEnsemble, is_adapter_folder
from swarm.errors import UserError
from swarm.pool.adapter import Adapter, read_adapter
from swarm.pool.discovery import check_base_models, check_module_names, common_shapes
from swarm.runs.manifest import verify_run_file
from swarm.runs.run_reader import RunFolder

if TYPE_CHECKING:
    from torch import Tensor


class ModelGroup(Protocol):
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
    def group_key(self) -> object: ...

    def merge_with(self, other: Any) -> "ModelGroup":
        """This stand with the voices of another one of the same key after its own.

        Raises:
            UserError: Two of the adapters do not go together.
        """
        ...

    def load_tokenizer(self) -> Any:
        """What writes the prompts; nothing else is loaded.

        Raises:
            UserError: The model is not there.
        """
        ...

    def context_length(self) -> float:
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
class AdapterGroup:
    """A base with adapters of which each answers as it is, and perhaps the base itself.

    Attributes:
        members: The adapter of each voice; `None` is the base.
    """

    base: BaseModel
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
    def group_key(self) -> object:
        """See `Stand.key`."""
        return self.base

    def merge_with(self, other: "AdapterGroup") -> "AdapterGroup":
        """See `Stand.joined`."""
        both = replace(
            self, places=[*self.places, *other.places], members=[*self.members, *other.members]
        )
        check_base_models(both.adapters, self.base)
        check_module_names(both.adapters)
        common_shapes(both.adapters)
        return both

    def load_tokenizer(self) -> Any:
        """See `Stand.tokenizer`."""
        return self.base.load_tokenizer(self.base.resolve())

    def context_length(self) -> float:
        """See `Stand.context`."""
        return self.base.context_length()

    def check(self) -> None:
        """See `Stand.check`; every weight of the adapters is read once."""
        from swarm.engine.batched_lora import install_lora_layers

        model, _ = load_cached_without_weights(self.base)
        factors = {
            name: [one.to("meta") for one in pair] for name, pair in self._build_basis().items()
        }
        install_lora_layers(
            model, factors, "meta", self.base, self._experts_folder()
        ).remove_layers()

    def load(self, device: str, engine: HFEngine | None = None) -> HFEngine:
        """See `Stand.load`."""
        if engine is not None:
            engine.replace_adapters(self.base, device, self._build_basis(), self._experts_folder())
            return engine
        engine = HFEngine()
        engine.load_base(self.base, device, self._build_basis(), self._experts_folder())
        return engine

    def _experts_folder(self) -> str | Path:
        return self.adapters[0].folder.parent if self.adapters else ""

    def _build_basis(self) -> dict[str, tuple["Tensor", "Tensor"]]:
        return build_basis(self.adapters)

    def fingerprint(self) -> str:
        """See `Stand.fingerprint`."""
        digest = hashlib.sha256(self.base.fingerprint().encode())
        for adapter in self.adapters:
            digest.update(adapter.identity_bytes())
        return digest.hexdigest()[:16]


@dataclass
class EnsembleGroup:
    """Mixtures of the same panel of whole models."""

    panel: ModelEnsemble
    places: list[int]
    weights: list[np.ndarray]

    @property
    def positions(self) -> np.ndarray:
        """The mixtures' weights, [P, K]."""
        return np.stack(self.weights)

    @property
    def group_key(self) -> object:
        """See `Stand.key`."""
        return (*self.panel.models, self.panel.base)

    def merge_with(self, other: "EnsembleGroup") -> "EnsembleGroup":
        """See `Stand.joined`."""
        return EnsembleGroup(
            self.panel, [*self.places, *other.places], [*self.weights, *other.weights]
        )

    def load_tokenizer(self) -> Any:
        """See `Stand.tokenizer`."""
        return TokenEnsembleEngine().check(self.panel.base, self.panel)

    def context_length(self) -> float:
        """See `Stand.context`."""
        engine = TokenEnsembleEngine()
        engine.check(self.panel.base, self.panel)
        return engine.context

    def check(self) -> None:
        """See `Stand.check`."""
        self.panel.check()
        self.load_tokenizer()

    def load(self, device: str, engine: TokenEnsembleEngine | None = None) -> TokenEnsembleEngine:
        """See `Stand.load`."""
        if engine is None:
            engine = TokenEnsembleEngine()
            engine.open(self.panel.base, self.panel, device)
        return engine

    def fingerprint(self) -> str:
        """See `Stand.fingerprint`."""
        return f"{self.panel.fingerprint()} {self.positions.tolist()}"


def group_models(folders: Sequence[Path | None], base: BaseModel) -> list[ModelGroup]:
    """The folders in groups, that of the base first; `None`, or no folder at all, is the base.

    Raises:
        UserError: A folder is missing or holds no model, or adapters belong to another base.
    """
    found: dict[object, ModelGroup] = {}
    for place, folder in enumerate(folders or [None]):
        stand = model_group(folder, base, place)
        known = found.get(stand.group_key)
        found[stand.group_key] = known.merge_with(stand) if known else stand
    return sorted(
        found.values(), key=lambda one: (one.group_key != base, isinstance(one, EnsembleGroup))
    )


def model_group(folder: Path | None, base: BaseModel, place: int = 0) -> ModelGroup:
    """The stand of one folder alone.

    Raises:
        UserError: As `stands`.
    """
    if folder is None:
        return AdapterGroup(base, [place], [None])
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    verify_run_file(folder)
    if is_adapter_folder(str(folder)):
        adapter = read_adapter(folder)
        check_base_models([adapter], base)
        return AdapterGroup(base, [place], [adapter])
    if (folder / MIXTURE_FILE).is_file():
        panel, weights = read_mixture(folder, base.trust_remote_code)
        return EnsembleGroup(panel, [place], [weights])
    own = replace(base, path=str(folder), name=None, **WITHOUT_WHEEL)
    own.resolve()
    return AdapterGroup(own, [place], [None])


@lru_cache(maxsize=1)
def load_cached_without_weights(base: BaseModel) -> tuple[Any, Any]:
    """See `Base.outline`; kept for the next adapter of the same base, so leave it as it was."""
    return base.load_without_weights()


WITHOUT_WHEEL: Mapping[str, Any] = {"wheel": None, "wheel_sha256": None, "wheel_file": None}


def build_basis(adapters: Sequence[Adapter]) -> dict[str, tuple["Tensor", "Tensor"]]:
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
            a, b = one.load_factors(module)
            down[k, : len(a)] = a
            up[k, :, : len(a)] = b.double() * one.lora_scaling(module)
        found[module] = (down, up)
    return found


# Search runs as models: what a finished run has found, and on which base.


def load_finished_run(folder: str | Path, otherwise: str) -> RunFolder:
    """A run whose best is chosen for good.

    Args:
        otherwise: What to do with a run that is not over, besides going on with it.

    Raises:
        UserError: The folder holds no search, or one that is not over.
    """
    run = RunFolder(folder)
    # Between the last iteration and the verdict another model may still be chosen as the best.
    if run.finished is None or not run.metrics:
        raise UserError(
            f"{run.path}: the search is not over; go on with the search by the command that began "
            f"it, or {otherwise}"
        )
    return run


def best_folder(run: RunFolder) -> Path:
    """The folder of the best that a run has found."""
    return run.path / "global_best"


def base_of_run(run: RunFolder) -> BaseModel:
    """The base that a run's configuration names.

    Raises:
        UserError: It names none.
    """
    try:
        return base_from_settings(run.config["model"])
    except (KeyError, TypeError, AttributeError):
        raise UserError(
            f"{run.path / 'config.json'} names no base; say which it is, of a candidate by "
            "model@candidate.base=local candidate.base.path=FOLDER_OR_HUB_ID"
        ) from None


def base_from_settings(settings: Mapping[str, Any]) -> BaseModel:
    """The base of an option of the configuration group `model`."""
    return BaseModel(**{key: value for key, value in settings.items() if key != "_target_"})
