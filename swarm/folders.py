"""Folders of adapters and models that are written whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from swarm.adapters import CONFIG_FILE, WEIGHTS_FILE
from swarm.errors import UserError
from swarm.files import make_folder

if TYPE_CHECKING:
    from torch import Tensor

NOTE_FILE = "swarm.json"


def write_adapter(
    folder: Path, config: dict[str, Any], weights: dict[str, "Tensor"], note: dict[str, Any]
) -> None:
    """Write a PEFT folder and its swarm.json, as `write_folder` does."""
    from safetensors.torch import save_file

    def write_files(fresh: Path) -> None:
        save_file(weights, str(fresh / WEIGHTS_FILE), metadata={"format": "pt"})
        (fresh / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    write_folder_atomic(folder, write_files, note, "adapter")


def write_folder_atomic(
    folder: Path,
    fill: Callable[[Path], None],
    note: dict[str, Any],
    kind: str,
    ours: Callable[[dict[str, Any]], bool] = bool,
) -> None:
    """Let `fill` write files into a folder beside `folder`, add swarm.json, put it in its place.

    At any moment `folder` is the old one or the new one, except for the instant between two
    renames (POSIX cannot swap folders); a process killed there leaves the old one beside it under
    `.<name>.old`, and the next write puts it back first.

    Args:
        note: The content of swarm.json.
        kind: What is saved, in a word, for errors.
        ours: Whether a folder with this swarm.json may be replaced.

    Raises:
        UserError: The disk is full or may not be written, or `folder` is something else than was
            written here; nothing half-written is left.
    """
    folder = folder.resolve()
    fresh, old = (folder.with_name(f".{folder.name}.{end}") for end in ("new", "old"))
    try:
        _remove_leftovers(folder, fresh, old)
        if not is_replaceable(folder, ours):
            raise UserError(f"{folder}: holds something else than a saved {kind}; not replaced")
        make_folder(fresh)
        fill(fresh)
        (fresh / NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        _sync_files(fresh)
        _replace_folder(folder, fresh, old)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the {kind} could not be saved ({error})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _remove_leftovers(folder: Path, fresh: Path, old: Path) -> None:
    """Undo what a killed write has left."""
    shutil.rmtree(fresh, ignore_errors=True)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def is_replaceable(folder: Path, ours: Callable[[dict[str, Any]], bool] = bool) -> bool:
    """Whether nothing is lost where a new folder takes this one's place."""
    if not folder.exists():
        return True
    return folder.is_dir() and (not any(folder.iterdir()) or ours(read_note(folder)))


def read_note(folder: Path) -> dict[str, Any]:
    """What a folder's swarm.json says; empty if there is none."""
    try:
        note = json.loads((folder / NOTE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _sync_files(folder: Path) -> None:
    # As open as a file that is made there, see `swarm.files.private`.
    mode = (folder / NOTE_FILE).stat().st_mode & (folder.stat().st_mode | ~0o077)
    # On the disk before the rename, or a power cut could leave a whole name with empty files.
    for path in folder.iterdir():
        # Weights come out of safetensors closed to everybody else, whatever the user's umask.
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _replace_folder(folder: Path, fresh: Path, old: Path) -> None:
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
