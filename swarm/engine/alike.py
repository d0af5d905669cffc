"""Whether whole models are of one architecture, so that their weights can be mixed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.engine.checkpoint import FLOAT_DTYPES, Checkpoint
from swarm.engine.sources import wrap_load_errors, quiet_transformers
from swarm.errors import UserError

# Settings that do not change what a model makes of a text that it is given.
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
        UserError: One cannot be read, or they differ in a setting that counts.
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

    with quiet_transformers(), wrap_load_errors(f"pool.models: {folder}/config.json cannot be read"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return _drop_ignored(config.to_dict())


def _drop_ignored(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _drop_ignored(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in IGNORED_SETTINGS
    }


def common_tensors(models: Sequence[Checkpoint]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that all models have.

    A matrix that only some have is left out where it is a copy of another one there: the output
    layer of a model that ties it to its embedding may be in the file or not.

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
            # Vectors of norms are alike before training; equal matrices are tied.
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
            f"and {list(theirs.shape)} in {first.folder}; models of one shape can be mixed"
        )
    if mine.dtype != theirs.dtype and not {mine.dtype, theirs.dtype} <= set(FLOAT_DTYPES):
        raise UserError(
            f"pool.models: {name} is of type {mine.dtype} in {model.folder} "
            f"and {theirs.dtype} in {first.folder}"
        )
