"""Which sub-folders of a pool's folder are its experts, and what they may be called."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from swarm.adapters import CONFIG_FILE, WEIGHTS_FILE
from swarm.errors import UserError
from swarm.files import name_fault


def parse_expert_names(folder: Path, experts: Any) -> list[str]:
    """The value of pool.experts as a list; raises UserError for one that can never work."""
    if isinstance(experts, str) or not isinstance(experts, Sequence):
        raise UserError(f"pool.experts must be a list of sub-folders of {folder}, not {experts!r}")
    names = list(experts)
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise UserError(f"pool.experts: {name!r} is not the name of a sub-folder of {folder}")
        if names.count(name) > 1:
            raise UserError(f"pool.experts names {name!r} of {folder} more than once")
    if len(names) < 2:
        find_experts(folder, names)  # a name that is wrong comes first
        raise UserError(
            f"pool.experts must name at least two experts of {folder}, not {names}; "
            f"it has: {_format_names(_list_adapters(folder))}"
        )
    return names


def find_experts(folder: Path, experts: list[str] | None) -> list[str]:
    """The names of the experts' folders: those asked for, else all that hold an adapter.

    Raises UserError where the folder is none, lacks one or holds fewer than two.
    """
    if not folder.is_dir():
        raise UserError(f"pool.folder: there is no folder {folder}")
    found = _list_adapters(folder)
    if experts is None:
        _check_incomplete_experts(folder)
        if len(found) < 2:
            have = f"{folder} holds {len(found)} with an {CONFIG_FILE}"
            raise UserError(f"pool.folder: a pool needs at least two experts, and {have}")
        return found
    for name in experts:
        if not (folder / name).is_dir():
            near = get_close_matches(name, found, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(
                f"pool.experts: {folder} has no {name!r}; {meant}it has: {_format_names(found)}"
            )
    return experts


def _list_adapters(folder: Path) -> list[str]:
    """The sub-folders that hold an adapter.

    Raises UserError where one has a name that cannot be written or shown.
    """
    found = sorted(
        path.parent.name
        for path in folder.glob(f"*/{CONFIG_FILE}")
        if not path.parent.name.startswith(".")
    )
    for name in found:
        if fault := name_fault(name):
            raise UserError(
                f"pool.folder: {folder} holds {name[:80]!r}, whose name {fault}; rename it"
            )
    return found


def _check_incomplete_experts(folder: Path) -> None:
    """Raise UserError where a sub-folder is an expert of which a part is missing.

    One with weights and no configuration, and a link that leads nowhere or to itself: looked for
    by configurations alone, they would be left out of the search without a word.
    """
    try:
        places = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    except OSError as error:
        raise UserError(f"pool.folder: {folder} cannot be read: {error.strerror}") from None
    for place in places:
        config = place / CONFIG_FILE
        wrong = ""
        if any(one.is_symlink() and not one.exists() for one in (place, config, place / WEIGHTS_FILE)):
            wrong = "is, or holds, a symbolic link that leads nowhere or to itself"
        elif place.is_dir() and not config.is_file():
            halves = [WEIGHTS_FILE, "adapter_model.bin", f"{WEIGHTS_FILE}.index.json"]
            if held := [name for name in halves if (place / name).exists()]:
                wrong = f"holds {held[0]} and no {CONFIG_FILE}: it was fetched by half"
        if wrong:
            raise UserError(
                f"pool.folder: {place} {wrong}; mend or remove it, or name the others in "
                "pool.experts"
            )


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def check_row_names(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError where an expert's folder has the name of a row that the pool adds."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{folder / name}: the settings of the pool add an expert named {name!r} to those "
                "of the folder; rename the folder, or leave it out of pool.experts"
            )
