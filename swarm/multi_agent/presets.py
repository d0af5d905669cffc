"""Presets of mixtures and consortia: yaml files in conf/, and the user's."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from swarm._util.files import conf_folder, read_yaml
from swarm._util.settings import parse_settings
from swarm._util.terminal import suggest
from swarm.errors import UserError

M = TypeVar("M", bound=BaseModel)


def preset_names(kind: str) -> list[str]:
    """Return the names of the shipped presets of a kind, "moa" or "consortium"."""
    return sorted(path.stem for path in (conf_folder() / kind).glob("*.yaml"))


def is_preset_path(name: str) -> bool:
    """Return whether a preset's name is a path."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def read_preset_file(kind: str, name: str | Path, settings: type[M]) -> M:
    """Read a preset: one of `preset_names(kind)`, or a yaml file by its path.

    Raises:
        UserError: It does not exist, or is invalid.
    """
    path = Path(name).expanduser()
    if not is_preset_path(str(name)):
        names = preset_names(kind)
        if name not in names:
            raise UserError(
                f"preset {name!r}: not found; {suggest(str(name), names)}allowed: "
                f"{', '.join(names)}, and your own yaml by its path, as in ./mine.yaml"
            )
        path = conf_folder() / kind / f"{name}.yaml"
    content = read_yaml(path)
    try:
        return parse_settings(settings, content)
    except UserError as error:
        raise UserError(f"preset {path}: {error}") from None
