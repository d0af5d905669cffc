"""An adapter added to its base: a whole model, which needs no PEFT."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm.adapters import Adapter
from swarm.engine.base import BaseModel
from swarm.engine.sources import SAFE_FILES, wrap_load_errors, quiet_transformers
from swarm.errors import UserError

MAX_SHARD_SIZE = "5GB"
"""The most bytes of one file of weights."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def write_merged(base: BaseModel, adapter: Adapter, dtype: str, folder: Path) -> None:
    """Write W + s B A at each adapted module, summed in float32 and rounded once to `dtype`.

    Loads the base once, in float32: 4 bytes a weight of main memory. Tokenizer files are copied.

    Raises:
        UserError: The base is not there, or the adapter does not fit it.
    """
    base = replace(base, path=base.resolve(), name=None, wheel=None, wheel_sha256=None,
                   wheel_file=None, dtype="float32")  # fmt: skip
    copy_model(Path(str(base.path)), folder, weights=False, code=base.trust_remote_code)
    model = merge_adapter(base, adapter, dtype)
    with quiet_transformers(), wrap_load_errors(f"{folder.name}: the model cannot be written"):
        model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)


def merge_adapter(base: BaseModel, adapter: Adapter, dtype: str) -> Any:
    """The base with the adapter added, of type `dtype`, on the CPU."""
    import torch

    model, _ = base.load("cpu")
    for name in adapter.shapes:
        layer = _find_layer(model, name, adapter)
        first, second = adapter.load_factors(name)
        change = adapter.lora_scaling(name) * (second.float() @ first.float())
        # A weight of its own: one that is shared with the embedding must not change there.
        layer.weight = torch.nn.Parameter(layer.weight.detach() + change, requires_grad=False)
        if layer is model.get_output_embeddings():
            model.config.tie_word_embeddings = False
    return model.to(getattr(torch, dtype))


def _find_layer(model: Any, name: str, adapter: Adapter) -> Any:
    inputs, outputs, _ = adapter.shapes[name]
    try:
        layer = model.get_submodule(name)
        if tuple(layer.weight.shape) == (outputs, inputs):
            return layer
    except AttributeError:
        pass
    raise UserError(
        f"{adapter.folder}: it adapts {name}, {inputs} to {outputs}, which this base does not have "
        "as a linear layer; give the base it was made for as base="
    )


def copy_model(source: Path, folder: Path, weights: bool = True, code: bool = False) -> None:
    """Copy a model's files: configuration and tokenizer, weights and code as wished."""
    kinds = [*SAFE_FILES, *(["*.py"] if code else []), "LICENSE*", "NOTICE*"]
    left_out = set() if weights else {path for kind in WEIGHT_FILES for path in source.glob(kind)}
    for path in sorted({path for kind in kinds for path in source.glob(kind)} - left_out):
        if path.is_file() and path.name != "swarm.json":
            shutil.copyfile(path, folder / path.name)
