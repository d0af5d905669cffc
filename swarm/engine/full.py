"""Full models of one architecture instead of adapters, mixed in all their weights (engine=full)."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from swarm._util.files import parse_json
from swarm.engine.base import Mixer, as_pool
from swarm.engine.base_model import SAFE_FILES, BaseModel, wrap_load_errors
from swarm.engine.hf import HFEngine
from swarm.engine.token_ensemble import ModelPanel, name_pool_models_key
from swarm.engine.tokenization import context_length_of
from swarm.errors import UserError
from swarm.pool.adapter import NOTE_FILE, write_folder_atomic
from swarm.pool.pool import ExpertPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from swarm.pool.discovery import NamedModel

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Tensor types that are mixed, by their safetensors and torch names."""

INTEGER_DTYPES = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
"""Tensor types that are copied unchanged."""

CHUNK_NUMBERS = 1 << 20
"""Numbers of a tensor in memory at once during mixing, unless one row has more."""

SHARD_BYTES = 2 * 10**9
"""Maximum size of a saved model's file, unless one tensor has more; one such file is in memory
while it is written."""

# fmt: off
IGNORED_SETTINGS = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "auto_map",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "problem_type",
    "id2label", "label2id",
}
# fmt: on
"""Settings of a config.json that do not affect a model's output for a given text."""


class StoredTensor(NamedTuple):
    """File, type (safetensors name) and shape of a tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of the model in `folder`, of which only the files' headers are read.

    Attributes:
        tensors: By name.

    Raises:
        UserError: There are none, a shard is missing or damaged, or a type cannot be mixed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        listed: dict[str, str] = {}
        files, index = [folder / WEIGHTS_FILE], folder / INDEX_FILE
        try:
            if index.is_file():
                listed = dict(parse_json(index.read_text(encoding="utf-8"))["weight_map"])
                files = [folder / name for name in sorted(set(listed.values()))]
            for file in files:
                with safe_open(str(file), framework="np") as opened:
                    for name in sorted(opened.keys()):
                        one = opened.get_slice(name)
                        shape = tuple(one.get_shape())
                        self.tensors[name] = StoredTensor(file, one.get_dtype(), shape)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder}: its weights, {WEIGHTS_FILE} or {INDEX_FILE} with all shards, are "
                f"missing or damaged ({error!r})"
            ) from None
        if missing := sorted(set(listed) - set(self.tensors)):
            raise UserError(f"{folder}: {INDEX_FILE} lists {missing[0]}, which is in no shard")
        for name, stored in self.tensors.items():
            if stored.dtype not in (*FLOAT_DTYPES, *INTEGER_DTYPES):
                allowed = ", ".join(FLOAT_DTYPES)
                raise UserError(f"{folder}: {name} is of type {stored.dtype}; allowed: {allowed}")

    def read_rows(self, name: str, rows: Any) -> "Tensor":
        """Return rows (`iterate_row_slices`) of a tensor as in the file; must not be modified."""
        # Reopened each time: pages that stay mapped would count as this process's memory.
        with safe_open(str(self.tensors[name].file), framework="pt") as file:
            return file.get_tensor(name) if rows is ... else file.get_slice(name)[rows]

    def are_tensors_equal(self, one: str, other: str) -> bool:
        """Return whether two of the tensors are equal in type, shape and every number."""
        import torch

        first, second = self.tensors[one], self.tensors[other]
        return first[1:] == second[1:] and all(
            torch.equal(self.read_rows(one, rows), self.read_rows(other, rows))
            for rows in iterate_row_slices(first.shape)
        )


def iterate_row_slices(shape: tuple[int, ...]) -> Iterator[Any]:
    """Yield indices that cut a tensor along its first axis into chunks of `CHUNK_NUMBERS`."""
    if not shape:
        yield ...
        return
    rows = max(1, CHUNK_NUMBERS // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def write_shards(folder: Path, sizes: dict[str, int], make: Callable[[str], "Tensor"]) -> None:
    """Write tensors under transformers' file names; one shard is in memory at a time.

    Args:
        sizes: Bytes of each tensor.
        make: Returns a tensor by name.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: make(name) for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_settings(folders: Sequence[Path], trust_remote_code: bool) -> None:
    """Compare each folder's config.json, with the defaults filled in, with the first folder's.

    Raises:
        UserError: One cannot be read, or they differ in a relevant setting.
    """
    from transformers import AutoConfig

    def drop_ignored(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: drop_ignored(value) if isinstance(value, Mapping) else value
            for key, value in settings.items()
            if key not in IGNORED_SETTINGS
        }

    found = []
    for folder in folders:
        with wrap_load_errors(f"pool.models: {folder}/config.json cannot be read"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        found.append(drop_ignored(config.to_dict()))
    first, *others = found
    for folder, mine in zip(folders[1:], others, strict=True):
        for key in sorted(first.keys() | mine.keys()):
            here, there = mine.get(key), first.get(key)
            if here != there:
                raise UserError(
                    f"pool.models: {folder} is another architecture than {folders[0]}: {key} in "
                    f"config.json is {here!r}, there {there!r}"
                )


def common_tensors(models: Sequence[Checkpoint]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors that all models have.

    A matrix that only some have is left out if it is a copy of another one there: the output layer
    of a model that ties it to its embedding may be in the file or not.

    Raises:
        UserError: Shapes or types differ, or a tensor is missing that is no copy.
    """
    first = models[0]
    common = [name for name in first.tensors if all(name in model.tensors for model in models)]
    for model in models:
        for name in common:
            mine, theirs = model.tensors[name], first.tensors[name]
            floats = {mine.dtype, theirs.dtype} <= set(FLOAT_DTYPES)
            if mine.shape != theirs.shape or (mine.dtype != theirs.dtype and not floats):
                raise UserError(
                    f"pool.models: {name} is {mine.dtype} {list(mine.shape)} in {model.folder} and "
                    f"{theirs.dtype} {list(theirs.shape)} in {first.folder}; only models of equal "
                    "shapes can be mixed"
                )
        for name in sorted(set(model.tensors) - set(common)):
            shape = list(model.tensors[name].shape)
            # Only matrices: equal matrices are tied, but vectors of norms can be equal before
            # training.
            if len(shape) < 2 or not any(model.are_tensors_equal(name, other) for other in common):
                lacking = next(one for one in models if name not in one.tensors)
                raise UserError(
                    f"pool.models: {model.folder} has a tensor {name} of shape {shape}, "
                    f"and {lacking.folder} has none of that name"
                )
    return {name: first.tensors[name].shape for name in common}


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
    """

    saves = "model"
    saves_personal_bests = False

    def open(self, base: "str | NamedModel | None" = None) -> "FullModelPool":
        """Return the pool itself: names are known, and files are read on demand."""
        return self

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The models' files, downloaded if they are not on disk."""
        with name_pool_models_key():
            return [Checkpoint(Path(member.base.resolve())) for member in self.members()]

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of a position."""
        return common_tensors(self.checkpoints)

    def check(self) -> None:
        """Compare configurations, names and shapes, and read every weight of every model once.

        Raises:
            UserError: The models differ, or a weight is not finite; the message names it.
        """
        import torch

        check_settings([one.folder for one in self.checkpoints], self.base.trust_remote_code)
        for name, shape in self.tensors.items():
            for rows in iterate_row_slices(shape):
                for model in self.checkpoints:
                    part = model.read_rows(name, rows)
                    if part.is_floating_point():
                        fine = all(math.isfinite(end) for end in part.aminmax())
                    else:
                        fine = torch.equal(part, self.checkpoints[0].read_rows(name, rows))
                    if not fine:
                        raise UserError(
                            f"pool.models: {name} in {model.folder} contains numbers that are NaN "
                            "or infinite, or other integers than the first model's, which cannot "
                            "be mixed"
                        )

    def are_tensors_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors are copies of each other in every model."""
        return all(model.are_tensors_equal(one, other) for model in self.checkpoints)

    def fill_tensor(self, into: "Tensor", name: str, vector: Sequence[float]) -> "Tensor":
        """Write a tensor of a position [K] into one of its shape and type, and return that one.

        It is rounded once. A position with a single model is that model's tensor, bit for bit if
        the types are equal.
        """
        import torch

        first = self.checkpoints[0]
        for rows in iterate_row_slices(self.tensors[name]):
            if first.tensors[name].dtype not in FLOAT_DTYPES:
                into[rows].copy_(first.read_rows(name, rows))
                continue
            total: Tensor | None = None
            for coefficient, model in zip(vector, self.checkpoints, strict=True):
                if coefficient != 0.0:
                    # A copy, because tensors of the file must not be modified in place.
                    term = model.read_rows(name, rows).to(into.device, torch.float64, copy=True)
                    # Two operations, each of which rounds the same on every device; a fused
                    # multiply-add may not.
                    term.mul_(coefficient)
                    total = term if total is None else total.add_(term)
            into[rows] = 0.0 if total is None else total
        return into

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
        import torch

        folder, vector = Path(folder), self.position(coefficients)
        source = Path(self.base.resolve())
        inputs = [source, *(model.folder for model in self.checkpoints)]
        if any(folder.resolve() == one.resolve() for one in inputs):
            raise UserError(f"{folder}: a model of the pool, which is not overwritten")
        kinds = {name: self._saved_dtype(name) for name in self.tensors}
        sizes = {name: math.prod(self.tensors[name]) * kinds[name].itemsize for name in kinds}

        def make_tensor(name: str) -> "Tensor":
            return self.fill_tensor(
                torch.empty(self.tensors[name], dtype=kinds[name]), name, vector
            )

        def write_files(fresh: Path) -> None:
            texts = [kind for kind in SAFE_FILES if kind != "*.safetensors"]
            texts += ["*.py"] * self.base.trust_remote_code
            for file in sorted({file for kind in texts for file in source.glob(kind)}):
                if not file.name.endswith(".index.json") and file.name != NOTE_FILE:
                    shutil.copyfile(file, fresh / file.name)
            # The type of most of the tensors.
            floats = [
                str(one).removeprefix("torch.") for one in kinds.values() if one.is_floating_point
            ]
            path = fresh / "config.json"
            config = parse_json(path.read_text(encoding="utf-8"))
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config[key] = max(sorted(set(floats)), key=floats.count)
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            write_shards(fresh, sizes, make_tensor)

        write_folder_atomic(folder, write_files, self._build_note(vector, extra), self.saves)

    def save_note(
        self, coefficients: Iterable[float], folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write only the description (swarm.json) of a position [K], without a model."""
        note = self._build_note(self.position(coefficients), extra)
        write_folder_atomic(Path(folder), lambda fresh: None, note, "position")

    def _saved_dtype(self, name: str) -> "torch.dtype":
        """Return the type in which a tensor is saved."""
        import torch

        stored = [model.tensors[name].dtype for model in self.checkpoints]
        if stored[0] not in FLOAT_DTYPES:
            return self.checkpoints[0].read_rows(name, ...).dtype
        names = [FLOAT_DTYPES[one] for one in stored]
        names = names if self.base.dtype == "auto" else [self.base.dtype]
        found: torch.dtype = getattr(torch, names[0])
        for other in names[1:]:
            found = torch.promote_types(found, getattr(torch, other))
        return found

    def _build_note(self, vector: list[float], extra: dict[str, Any] | None) -> dict[str, Any]:
        made_of = {"experts": self.names, "models": self.models}
        return {**(extra or {}), **made_of, "coefficients": vector, "space": "weights"}


class FullWeightsEngine(HFEngine):
    """Answers with mixtures of full models' weights, one position after the other.

    Its memory is that of one model, independent of the number of experts.

    Args:
        max_tokens: See `swarm.engine.hf.HFEngine`.
    """

    embeds = differentiable = exchanges = fixed_weights = False

    def __init__(self, max_tokens: int | None = None) -> None:
        super().__init__("merged", max_tokens)

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`."""
        models = as_pool(pool, FullModelPool, "full")
        folders = [models.checkpoints[0].folder, Path(base.resolve())]
        check_settings(folders, base.trust_remote_code)
        model, tokenizer = base.load_without_weights()
        ResidentModel(model, models)
        self.context = context_length_of(model.config)
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`."""
        models = as_pool(pool, FullModelPool, "full")
        self.load_base(base, device)
        self._set_mixer(ResidentModel(self._model, models))


class ResidentModel(Mixer):
    """A model in memory that is set to one position after the other.

    Args:
        model: Its weights are overwritten; tied weights once.
        pool: The models to mix.
    """

    def __init__(self, model: Any, pool: FullModelPool) -> None:
        self._pool = pool
        self._weights = named_weights(model, pool)
        self._held: list[float] | None = None

    def set_positions(self, coefficients: "Tensor", merge: bool = False) -> None:
        """Set the position in [1, K], unless it is already set."""
        import torch

        vector = coefficients[0].tolist()
        if vector == self._held:
            return
        # If this is interrupted, the weights are a mixture of two positions.
        self._held = None
        with torch.no_grad():
            for weight, name in self._weights:
                self._pool.fill_tensor(weight, name, vector)
        self._held = vector


def named_weights(model: Any, pool: FullModelPool) -> list[tuple["Tensor", str]]:
    """Return each weight of a model with its tensor's name in the pool; tied ones count once.

    Buffers that the files leave out are left out here too.
    """
    from torch.nn import Parameter

    folder = pool.checkpoints[0].folder
    known: dict[int, tuple[Any, list[str]]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        known.setdefault(id(weight), (weight, []))[1].append(name)
    found = []
    for weight, names in known.values():
        mine = [name for name in names if name in pool.tensors]
        if not mine:
            if not isinstance(weight, Parameter):
                continue
            raise UserError(
                f"pool.models: {folder} has no tensor {names[0]}, which the loaded model has; "
                "models whose tensors differ between memory and file cannot be mixed"
            )
        if (shape := pool.tensors[mine[0]]) != tuple(weight.shape):
            raise UserError(
                f"pool.models: {mine[0]} has shape {list(shape)} in {folder} and "
                f"{list(weight.shape)} in the base ({pool.base.path})"
            )
        for other in mine[1:]:
            if not pool.are_tensors_equal(mine[0], other):
                raise UserError(
                    f"pool.models: {mine[0]} and {other} differ in the files but are tied by "
                    "config.json; set tie_word_embeddings to false there"
                )
        found.append((weight, mine[0]))
    return found
