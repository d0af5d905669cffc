"""The adapter that a fine-tuning starts from, and how one is written."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarm.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from swarm.engine.base import BaseModel
from swarm.errors import UserError
from swarm.files import hash_file_cached
from swarm.folders import write_folder_atomic
from swarm.places import find_path
from swarm.pool.agreement import check_base_models
from swarm.report.folder import RunFolder

FRESH_LABEL = "the base"
"""What a fresh LoRA starts from, in a word."""


def find_start_adapter(expert: str | None, run: str | None, pool: Path) -> tuple[str, Path | None]:
    """What training starts from, in a word, and its folder; `None` is a fresh LoRA.

    Args:
        expert: The name of an expert of the pool, or the folder of an adapter.
        run: A run folder, for its best initial expert.
        pool: The folder of the experts.

    Raises:
        UserError: There is no such adapter.
    """
    if run:
        searched = RunFolder(find_path(run))
        name = searched.experts[searched.best_expert()[1]]
        folder = find_path(searched.config["pool"].get("folder") or "")
        if not (folder / name / CONFIG_FILE).is_file():
            raise UserError(
                f"run={run}: its best initial expert {name} is no adapter in {folder}; "
                "give the folder of one as expert="
            )
        return name, folder / name
    if not expert:
        return FRESH_LABEL, None
    for folder in (pool / expert, find_path(expert)):
        if folder.is_dir():
            read_adapter(folder)
            return folder.name, folder
    raise UserError(
        f"expert={expert}: neither an expert in {pool} nor a folder; "
        "give one of the two, or null for a fresh LoRA"
    )


def check_start_adapter(source: Path | None, targets: Sequence[str], base: BaseModel) -> None:
    """See that the adapter in `source`, else a fresh one of `targets`, fits the base.

    Of the base only the shapes are made.

    Raises:
        UserError: It is another base's adapter, or a layer is not there or of another shape.
    """
    import torch

    adapter = read_adapter(source) if source else None
    if adapter:
        check_base_models([adapter], base)
    model, _ = base.load_without_weights()
    layers = {name: (layer.in_features, layer.out_features)
              for name, layer in model.named_modules()
              if isinstance(layer, torch.nn.Linear)}  # fmt: skip
    for name, (inputs, outputs, _) in (adapter.shapes if adapter else {}).items():
        if layers.get(name) != (inputs, outputs):
            raise UserError(
                f"{source}: it adapts {name}, {inputs} to {outputs}, which {base.path} does not "
                "have as a linear layer; give an adapter of this base, or its own base as model="
            )
    for target in [] if adapter else targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            have = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UserError(
                f"targets has {target!r}, no linear layer of {base.path}; it has: {have}"
            )


def write_start_adapter(folder: Path, source: Path | None, fresh: Callable[[], Any], label: str) -> None:
    """Write a copy of the adapter in `source`, else the one that `fresh` puts into its model."""

    def write_files(to: Path) -> None:
        if source:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(source / name, to / name)
        else:
            made = fresh()
            save_adapter(made, to)
            made.unload()

    write_folder_atomic(folder, write_files, {"copy_of": label}, "adapter")


def save_adapter(model: Any, folder: Path) -> None:
    """Write what PEFT writes of an adapter, without its empty model card."""
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


def weights_digest(folder: Path) -> str:
    """16 hexadecimal digits that change with an adapter's weights."""
    return hash_file_cached(folder / WEIGHTS_FILE)[:16]
