"""Presets of a kind: the yaml files of its folder in conf, and the user's own."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.places import conf_folder


def list_shipped_presets(kind: str) -> list[str]:
    """The presets of a kind that ship."""
    return sorted(path.stem for path in (conf_folder() / kind).glob("*.yaml"))


def is_preset_path(name: str) -> bool:
    """Whether a preset's name is the path of a file."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def preset_path(kind: str, name: str) -> Path:
    """The file of a preset.

    Args:
        name: One of `shipped`, or a path.

    Raises:
        UserError: None that ships has this name.
    """
    if is_preset_path(name):
        return Path(name).expanduser()
    names = list_shipped_presets(kind)
    if name not in names:
        near = get_close_matches(name, names, 1)
        meant = f"did you mean {near[0]}? There" if near else "there"
        raise UserError(
            f"preset {name!r}: there is none of this name; {meant} are {', '.join(names)}, "
            "and your own yaml by its path, as in ./mine.yaml"
        )
    return conf_folder() / kind / f"{name}.yaml"


def check_mapping(place: str, value: Any, allowed: Sequence[str]) -> dict[str, Any]:
    """A mapping of nothing but the keys that are allowed.

    Raises:
        UserError: It is something else, or has another key.
    """
    if not isinstance(value, dict):
        raise UserError(f"{place}: {value!r} is no mapping of {', '.join(allowed)}")
    for key in value:
        if key not in allowed:
            near = get_close_matches(str(key), allowed, 1)
            meant = f"did you mean {near[0]}? Keys" if near else "keys"
            raise UserError(f"{place}: {key!r} is not known; {meant}: {', '.join(allowed)}")
    return dict(value)
