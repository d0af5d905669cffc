"""A model's weights on disk: safetensors files or shards, read and written in chunks.

Also the check that models are of one architecture, so that their weights can be mixed.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from swarm._util.files import parse_json
from swarm.engine.base_model import quiet_transformers, wrap_load_errors
from swarm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Tensor types that are mixed, by their safetensors and torch names."""

INTEGER_DTYPES = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
"""Tensor types that are copied unchanged."""

CHUNK_NUMBERS = 1 << 20
"""Numbers of a tensor in memory at once during mixing, unless one row has more."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
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
        listed = _read_index(folder)
        for name in sorted(set(listed.values())):
            self.tensors |= _read_header(folder / name)
        if missing := sorted(set(listed) - {"*"} - set(self.tensors)):
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
        return (first.dtype, first.shape) == (second.dtype, second.shape) and all(
            torch.equal(self.read_rows(one, rows), self.read_rows(other, rows))
            for rows in iterate_row_slices(first.shape)
        )


def iterate_row_slices(shape: tuple[int, ...]) -> Iterator[Any]:
    """Yield indices that cut a tensor along its first axis into chunks of `CHUNK_NUMBERS`."""
    if not shape:
        yield ...
        return
    rows = max(1, CHUNK_NUMBERS // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def write_shards(
    folder: Path, sizes: Mapping[str, int], limit: float, make: Callable[[str], "Tensor"]
) -> None:
    """Write tensors under transformers' file names; one shard is in memory at a time.

    Args:
        sizes: Bytes of each tensor.
        limit: Bytes of a shard, unless one tensor has more.
        make: Returns a tensor by name.
    """
    from safetensors.torch import save_file

    shards = _pack_shards(sizes, limit)
    count = len(shards)
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    files = files if count > 1 else [WEIGHTS_FILE]
    for file, names in zip(files, shards, strict=True):
        save_file({name: make(name) for name in names}, folder / file, metadata={"format": "pt"})
    if count > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _pack_shards(sizes: Mapping[str, int], limit: float) -> list[list[str]]:
    """Divide the names, in order, into shards."""
    shards: list[list[str]] = [[]]
    free = limit
    for name, size in sizes.items():
        if shards[-1] and size > free:
            shards.append([])
            free = limit
        shards[-1].append(name)
        free -= size
    return shards


def _read_index(folder: Path) -> dict[str, str]:
    """Return tensor -> file from the index; "*" means all tensors if there is a single file."""
    if not (path := folder / INDEX_FILE).is_file():
        if (folder / WEIGHTS_FILE).is_file():
            return {"*": WEIGHTS_FILE}
        raise UserError(f"{folder} contains neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    try:
        listed = dict(parse_json(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error!r}") from None
    if missing := [file for file in listed.values() if not (folder / file).is_file()]:
        raise UserError(f"{folder}: {INDEX_FILE} lists {missing[0]}, which is missing")
    return listed


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(str(file), framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in sorted(opened.keys())}
            return {
                name: StoredTensor(file, one.get_dtype(), tuple(one.get_shape()))
                for name, one in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({error})") from None


# Settings that do not affect a model's output for a given text.
# fmt: off
IGNORED_SETTINGS = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "auto_map",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "problem_type",
    "id2label", "label2id",
}
# fmt: on


def check_settings(folders: Sequence[Path], trust_remote_code: bool) -> None:
    """Compare each folder's config.json, with the defaults filled in, with the first folder's.

    Raises:
        UserError: One cannot be read, or they differ in a relevant setting.
    """
    first, *others = [_load_settings(folder, trust_remote_code) for folder in folders]
    for folder, mine in zip(folders[1:], others, strict=True):
        for key in sorted(first.keys() | mine.keys()):
            here, there = mine.get(key), first.get(key)
            if here != there:
                raise UserError(
                    f"pool.models: {folder} is another architecture than {folders[0]}: {key} in "
                    f"config.json is {here!r}, there {there!r}"
                )


def _load_settings(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoConfig

    with (
        quiet_transformers(),
        wrap_load_errors(f"pool.models: {folder}/config.json cannot be read"),
    ):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return _drop_ignored(config.to_dict())


def _drop_ignored(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _drop_ignored(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in IGNORED_SETTINGS
    }


def common_tensors(models: Sequence[Checkpoint]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors that all models have.

    A matrix that only some have is left out if it is a copy of another one there: the output layer
    of a model that ties it to its embedding may be in the file or not.

    Raises:
        UserError: Shapes or types differ, or a tensor is missing that is no copy.
    """
    first = models[0]
    common = [name for name in first.tensors if all(name in model.tensors for model in models)]
    for model in models[1:]:
        for name in common:
            _check_tensor(name, model, first)
    for model in models:
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


def _check_tensor(name: str, model: Checkpoint, first: Checkpoint) -> None:
    mine, theirs = model.tensors[name], first.tensors[name]
    if mine.shape != theirs.shape:
        raise UserError(
            f"pool.models: {name} has shape {list(mine.shape)} in {model.folder} "
            f"and {list(theirs.shape)} in {first.folder}; only models of equal shapes can be mixed"
        )
    if mine.dtype != theirs.dtype and not {mine.dtype, theirs.dtype} <= set(FLOAT_DTYPES):
        raise UserError(
            f"pool.models: {name} is of type {mine.dtype} in {model.folder} "
            f"and {theirs.dtype} in {first.folder}"
        )
