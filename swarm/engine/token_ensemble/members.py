"""A panel: full models of any architectures that share a tokenizer, mixed during decoding."""

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util import files
from swarm._util.files import write_json
from swarm.engine.base_model import BaseModel, find_in_hub_cache
from swarm.errors import UserError
from swarm.pool.adapter import CONFIG_FILE, Adapter, read_adapter
from swarm.pool.pool import ExpertPool

if TYPE_CHECKING:
    from swarm.pool.discovery import NamedModel

MIXTURE_FILE = "mixture.json"


@dataclass(frozen=True)
class EnsembleMember:
    """One model of a panel.

    Attributes:
        name: The name in results.
        base: The model, or the base of its adapter.
        adapter: A LoRA; `None` if the base is the model.
    """

    name: str
    base: BaseModel
    adapter: Adapter | None = None


class ModelPanel(ExpertPool):
    """Complete models; a position has a coefficient for each.

    Args:
        models: Two or more folders or hub ids.
        base: How they are opened; `None` is the first one, opened with the defaults.

    Raises:
        UserError: Fewer than two models, or one of them twice.
    """

    def __init__(self, models: Sequence[str] | None, base: BaseModel | None = None) -> None:
        self.models, self.names = parse_models(models)
        self.expert_count = len(self.names)
        self.base = base or BaseModel(self.models[0])

    def position(self, coefficients: Iterable[float]) -> list[float]:
        """Return the coefficients as a list.

        Raises:
            UserError: They are not K finite numbers.
        """
        vector = [float(value) for value in coefficients]
        if len(vector) != len(self.models) or not all(map(math.isfinite, vector)):
            raise UserError(f"expected {len(self.models)} finite numbers, one per model: {vector}")
        return vector


class ModelEnsemble(ModelPanel):
    """K models; a position is their weights in the mixture of their next-token distributions.

    Args:
        models: Folders or hub ids of models, or folders with a PEFT LoRA adapter of one.
        base: How models are opened (dtype, trust_remote_code), and the base of the adapters that
            name it or none; `None` is the first model, opened with the defaults.

    Raises:
        UserError: Fewer than two models, or one of them twice.
    """

    saves = "mixture"

    def __init__(self, models: Sequence[str] | None, base: BaseModel | None = None) -> None:
        super().__init__(models, base)
        self._members: list[EnsembleMember] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the panel as its settings, closed; a worker opens its own files."""
        return ModelEnsemble, (self.models, self.base)

    def open(self, base: "str | NamedModel | None" = None) -> "ModelEnsemble":
        """Resolve each member, from configurations alone, and return the panel itself.

        Args:
            base: Ignored: models need no common base.

        Raises:
            UserError: An adapter cannot be read, or its base is unknown.
        """
        if is_adapter_folder(self.base.path):
            raise UserError(
                f"pool.models: the first, {self.base.path}, is an adapter: set its base model, "
                "e.g. model=local model.path=BASE"
            )
        self._members = [
            self._build_member(*pair) for pair in zip(self.names, self.models, strict=True)
        ]
        return self

    def _build_member(self, name: str, path: str) -> EnsembleMember:
        if not is_adapter_folder(path):
            return EnsembleMember(name, base_model_like(self.base, path))
        adapter = read_adapter(files.find_path(path))
        known = {Path(one).name for one in (self.base.path, self.base.name) if one}
        if adapter.base_model is None or Path(adapter.base_model).name in known:
            return EnsembleMember(name, self.base, adapter)
        return EnsembleMember(name, base_model_like(self.base, adapter.base_model), adapter)

    def members(self) -> list[EnsembleMember]:
        """Return the models, once the panel is open."""
        if not self._members:
            raise RuntimeError("the models are not open: call ModelEnsemble.open first")
        return self._members

    def check(self) -> None:
        """Resolve every model's files on this disk, and read every weight of the adapters once.

        Raises:
            UserError: A model is missing and cannot be downloaded, or a weight is not finite.
        """
        for member in self.members():
            with name_pool_models_key():
                member.base.resolve()
            if member.adapter:
                for module in member.adapter.shapes:
                    member.adapter.load_factors(module)

    def load_members(self, device: str) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, model and tokenizer of each member on `device`; "meta" is without weights.

        Adapters of one base share its weights.

        Raises:
            UserError: A model cannot be opened, or an adapter does not fit its base.
        """
        opened: dict[BaseModel, tuple[Any, Any]] = {}
        for member in self.members():
            base = member.base
            with name_pool_models_key():
                if base not in opened:
                    opened[base] = (
                        base.load_without_weights() if device == "meta" else base.load(device)
                    )
            model, tokenizer = opened[base]
            if member.adapter:
                model = with_adapter(model, member, device)
            yield member.name, model, tokenizer

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of the search's models: names, order and weights."""
        digest = hashlib.sha256()
        for member in self.members():
            digest.update(f"{member.name}\n{member.base.fingerprint()}\n".encode())
            if member.adapter:
                digest.update(member.adapter.identity_bytes())
        return digest.hexdigest()[:16]

    def save(
        self, coefficients: Iterable[float], folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the mixture at a position [K] as a mixture.json.

        It is read by `swarm.engine.token_ensemble.engine.TokenEnsembleModel`. A swarm.json with its
        components and `extra` is written last.

        Raises:
            UserError: The vector is not K finite numbers, or the folder cannot be written.
        """
        vector = self.position(coefficients)
        settings = {
            "path": _portable_path(self.base),
            "name": self.base.name or self.base.path,
            "dtype": self.base.dtype,
        }
        models = [
            str(member.adapter.folder.absolute()) if member.adapter else _portable_path(member.base)
            for member in self.members()
        ]
        content = {"models": models, "weights": vector, "base": settings}
        write_json(Path(folder) / MIXTURE_FILE, content)
        note = {"experts": self.names, "coefficients": vector, "space": "tokens"}
        write_json(Path(folder) / "swarm.json", {**(extra or {}), **note})


def parse_models(models: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the models in pool.models and their names: the last path component, or the full path.

    Raises:
        UserError: Fewer than two models, or one of them twice.
    """
    given = [] if models is None or isinstance(models, str) else list(models)
    if len(given) < 2 or not all(isinstance(one, str) and one.strip() for one in given):
        raise UserError(
            f"pool.models={models}: give two or more folders or hub ids of models, "
            "e.g. pool.models='[models/mine,models/other]'"
        )
    if duplicates := sorted({one for one in given if given.count(one) > 1}):
        raise UserError(f"pool.models names {duplicates[0]} more than once")
    last = [Path(one).name for one in given]
    return given, last if len(set(last)) == len(last) else given


def base_model_like(base: BaseModel, path: str) -> BaseModel:
    """Return the model at `path`, opened with the settings of `base`."""
    if path in (base.path, base.name):
        return base
    # The wheel replaces the base alone.
    return BaseModel(path, None, base.dtype, base.trust_remote_code)


def is_adapter_folder(path: str | None) -> bool:
    """Return whether `path` is a folder with an adapter and no model."""
    folder = files.find_path(path or "")
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def with_adapter(model: Any, member: EnsembleMember, device: str) -> Any:
    """Return a copy of the model with a member's adapter in its layers; weights are shared.

    Raises:
        UserError: The adapter does not fit.
    """
    import torch

    from swarm.engine.lora import LoraLayers

    adapter = member.adapter
    assert adapter is not None
    shared = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    basis = {}
    for module in adapter.shapes:
        down, up = adapter.load_factors(module)
        basis[module] = (down.float(), up.float(), torch.zeros(len(down), dtype=torch.long))
    try:
        LoraLayers(twin, basis).set_positions(torch.ones(1, 1))
    except ValueError as error:
        raise UserError(
            f"pool.models: {member.name} does not fit {member.base.path}: {error}"
        ) from None
    return twin


@contextmanager
def name_pool_models_key() -> Iterator[None]:
    """Replace the base model's key in errors by pool.models, which the member was set with."""
    try:
        yield
    except UserError as error:
        message = str(error.args[0]).replace("model.path=", "pool.models: ", 1)
        raise UserError(message, error.code) from None


def _portable_path(base: BaseModel) -> str:
    """Return a model's location valid from any folder: its hub id, or an absolute path."""
    path, folder = str(base.path), Path(base.resolve())
    hub = not files.find_path(path).is_dir() and folder == find_in_hub_cache(path)
    return path if hub else str(folder.absolute())
