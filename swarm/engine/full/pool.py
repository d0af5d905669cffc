"""A pool of full models of one architecture, mixed in all their weights."""

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.files import parse_json
from swarm._util.settings import PositiveNumber, checked
from swarm.engine.base_model import SAFE_FILES, BaseModel
from swarm.engine.full.checkpoint import (
    FLOAT_DTYPES,
    Checkpoint,
    check_settings,
    common_tensors,
    iterate_row_slices,
    write_shards,
)
from swarm.engine.token_ensemble.members import (
    ModelPanel,
    base_model_like,
    name_pool_models_key,
)
from swarm.errors import UserError
from swarm.pool.adapter import NOTE_FILE, write_folder_atomic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from swarm.pool.discovery import NamedModel

GIGABYTE = 10**9


@checked("pool")
class FullModelPool(ModelPanel):
    """K models; a position [K] is x = sum_j c_j W_j at each of their tensors W.

    Each tensor is summed in float64 in the order of the models and rounded once, chunk by chunk
    from the files, so that no second model is ever in memory. Integer tensors, which have to be the
    same in all models, are copied.

    Args:
        models: Folders or hub ids; single files or shards of safetensors.
        base: How the models are opened (dtype, trust_remote_code), and the source of a saved
            model's configuration and tokenizer; `None` is the first model, opened with the
            defaults.
        shard_gigabytes: Maximum size of a saved model's file, in 10^9 bytes; one such file is in
            memory while it is written.

    Raises:
        UserError: Fewer than two models, one of them twice, or an invalid file size.
    """

    saves = "model"
    saves_personal_bests = False

    def __init__(
        self,
        models: Any,
        base: BaseModel | None = None,
        shard_gigabytes: PositiveNumber = 2.0,
    ) -> None:
        super().__init__(models, base)
        self.shard_gigabytes = shard_gigabytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the pool as its settings; a worker reads the files itself."""
        return FullModelPool, (self.models, self.base, self.shard_gigabytes)

    def open(self, base: "str | NamedModel | None" = None) -> "FullModelPool":
        """Return the pool itself: names are known, and files are read on demand."""
        return self

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The models' files, downloaded if they are not on disk.

        Raises:
            UserError: A model is unavailable, or its files cannot be read.
        """
        with name_pool_models_key():
            bases = [base_model_like(self.base, path) for path in self.models]
            return [Checkpoint(Path(base.resolve())) for base in bases]

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of a position.

        Raises:
            UserError: The models differ in them.
        """
        return common_tensors(self.checkpoints)

    def check(self) -> None:
        """Compare configurations, names and shapes, and read every weight of every model once.

        Raises:
            UserError: The models differ, or a weight is not finite; the message names it.
        """
        check_settings([one.folder for one in self.checkpoints], self.base.trust_remote_code)
        first = self.checkpoints[0]
        for name, shape in self.tensors.items():
            for rows in iterate_row_slices(shape):
                for model in self.checkpoints:
                    _check_rows(name, model.read_rows(name, rows), model, first, rows)

    def are_tensors_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors are copies of each other in every model."""
        return all(model.are_tensors_equal(one, other) for model in self.checkpoints)

    def fill_tensor(self, into: "Tensor", name: str, vector: Sequence[float]) -> None:
        """Write a tensor of a position [K] into one of its shape, rounded to the target's type.

        A position with a single model is that model's tensor, bit for bit if the types are equal.
        """
        for rows in iterate_row_slices(self.tensors[name]):
            into[rows].copy_(self._mix_rows(name, rows, vector, into.device))

    def _mix_rows(
        self, name: str, rows: Any, vector: Sequence[float], device: "torch.device"
    ) -> "Tensor":
        import torch

        first = self.checkpoints[0]
        if first.tensors[name].dtype not in FLOAT_DTYPES:
            return first.read_rows(name, rows)
        total: Tensor | None = None
        for coefficient, model in zip(vector, self.checkpoints, strict=True):
            if coefficient != 0.0:
                # A copy, because tensors of the file must not be modified in place.
                term = model.read_rows(name, rows).to(device, torch.float64, copy=True)
                # Two operations, each of which rounds the same on every device; a fused
                # multiply-add may not.
                term.mul_(coefficient)
                total = term if total is None else total.add_(term)
        return torch.zeros((), dtype=torch.float64) if total is None else total

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of names, order and weights."""
        digest = hashlib.sha256()
        for name, path in zip(self.names, self.models, strict=True):
            model = base_model_like(self.base, path)
            digest.update(f"{name}\n{model.fingerprint()}\n".encode())
        return digest.hexdigest()[:16]

    def save(
        self, coefficients: Iterable[float], folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the model at a position [K] in transformers' format, atomically.

        Its type is `base.dtype` or, if that is "auto", the models' own; configuration, tokenizer
        and generation settings are the base's. A model saved there before is replaced.

        Raises:
            UserError: The vector is not K finite numbers, or the folder cannot be written or
                contains anything else.
        """
        folder, vector = Path(folder), self.position(coefficients)
        source = Path(self.base.resolve())
        inputs = [source, *(model.folder for model in self.checkpoints)]
        if any(folder.resolve() == one.resolve() for one in inputs):
            raise UserError(f"{folder}: a model of the pool, which is not overwritten")

        def write_files(fresh: Path) -> None:
            _copy_text_files(source, fresh, self.base.trust_remote_code)
            kinds = {name: self._saved_dtype(name) for name in self.tensors}
            _set_dtype(fresh / "config.json", kinds.values())
            self._write_tensors(fresh, vector, kinds)

        write_folder_atomic(
            folder, write_files, {**(extra or {}), **self._build_note(vector)}, self.saves
        )

    def save_note(
        self, coefficients: Iterable[float], folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write only the description (swarm.json) of a position [K], without a model."""
        note = {**(extra or {}), **self._build_note(self.position(coefficients))}
        write_folder_atomic(Path(folder), lambda fresh: None, note, "position")

    def _write_tensors(
        self, folder: Path, vector: Sequence[float], kinds: dict[str, "torch.dtype"]
    ) -> None:
        import torch

        def make_tensor(name: str) -> "Tensor":
            made = torch.empty(self.tensors[name], dtype=kinds[name])
            self.fill_tensor(made, name, vector)
            return made

        sizes = {name: math.prod(self.tensors[name]) * kinds[name].itemsize for name in kinds}
        write_shards(folder, sizes, self.shard_gigabytes * GIGABYTE, make_tensor)

    def _saved_dtype(self, name: str) -> "torch.dtype":
        """Return the type in which a tensor is saved."""
        import torch

        stored = [model.tensors[name].dtype for model in self.checkpoints]
        if stored[0] not in FLOAT_DTYPES:
            return self.checkpoints[0].read_rows(name, ...).dtype
        if self.base.dtype != "auto":
            return getattr(torch, self.base.dtype)  # type: ignore[no-any-return]
        kinds = [getattr(torch, FLOAT_DTYPES[one]) for one in stored]
        found: torch.dtype = kinds[0]
        for kind in kinds[1:]:
            found = torch.promote_types(found, kind)
        return found

    def _build_note(self, vector: list[float]) -> dict[str, Any]:
        made_of = {"experts": self.names, "models": self.models}
        return {**made_of, "coefficients": vector, "space": "weights"}


def _check_rows(name: str, part: "Tensor", model: Checkpoint, first: Checkpoint, rows: Any) -> None:
    """Raise UserError if numbers cannot be mixed."""
    import torch

    if part.is_floating_point():
        if not all(math.isfinite(end) for end in part.aminmax()):
            raise UserError(
                f"pool.models: {model.folder}: {name} contains weights that are NaN or infinite"
            )
    elif not torch.equal(part, first.read_rows(name, rows)):
        raise UserError(
            f"pool.models: {name} contains other integers in {model.folder} than in "
            f"{first.folder}; these cannot be mixed"
        )


def _copy_text_files(source: Path, folder: Path, code: bool) -> None:
    """Copy configuration, tokenizer and related files; no weights and no index."""
    kinds = [kind for kind in SAFE_FILES if kind != "*.safetensors"] + ["*.py"] * code
    for file in sorted({file for kind in kinds for file in source.glob(kind)}):
        if not file.name.endswith(".index.json") and file.name != NOTE_FILE:
            shutil.copyfile(file, folder / file.name)


def _set_dtype(path: Path, kinds: Iterable["torch.dtype"]) -> None:
    """Set the type in a config.json to that of most of the tensors."""
    floats = [str(kind).removeprefix("torch.") for kind in kinds if kind.is_floating_point]
    config = parse_json(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = max(sorted(set(floats)), key=floats.count)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
