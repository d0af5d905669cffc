"""The write of a PEFT folder that is whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from swarm.adapters import CONFIG, WEIGHTS
from swarm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

NOTE = "swarm.json"


def write_adapter(
    folder: Path, config: dict[str, Any], weights: dict[str, "Tensor"], note: dict[str, Any]
) -> None:
    """Write a PEFT folder and its swarm.json beside `folder`, then put it in its place.

    At any moment `folder` is the old adapter or the new one, except for the instant between two
    renames (POSIX cannot swap folders); a process killed there leaves the old one beside it under
    `.<name>.old`, and the next write puts it back first.
    Raises UserError, with nothing half-written left, where the disk is full or may not be written,
    or where `folder` is something else than an adapter written here.
    """
    folder = folder.resolve()
    fresh, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
    try:
        _tidy(folder, fresh, old)
        if folder.exists() and not _is_ours(folder):
            raise UserError(f"{folder}: holds something else than a saved adapter; not replaced")
        fresh.mkdir(parents=True)
        _fill(fresh, config, weights, note)
        _put_in_place(folder, fresh, old)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the adapter could not be saved ({error})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _tidy(folder: Path, fresh: Path, old: Path) -> None:
    """Undo what a killed write has left."""
    shutil.rmtree(fresh, ignore_errors=True)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and ((folder / NOTE).is_file() or not any(folder.iterdir()))


def _fill(
    fresh: Path, config: dict[str, Any], weights: dict[str, "Tensor"], note: dict[str, Any]
) -> None:
    from safetensors.torch import save_file

    save_file(weights, str(fresh / WEIGHTS), metadata={"format": "pt"})
    (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (fresh / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    # On the disk before the rename, or a power cut could leave a whole name with empty files.
    for path in fresh.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _put_in_place(folder: Path, fresh: Path, old: Path) -> None:
    if not folder.exists():
        fresh.rename(folder)
        return
    folder.rename(old)
    try:
        fresh.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
