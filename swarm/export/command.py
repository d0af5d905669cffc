"""The command line that makes a configuration again, by comparing it with what ships."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from swarm.places import conf_folder
from swarm.secrets import clean

UNQUOTED_TEXT = re.compile(r"(?!(?:true|false|null|inf|nan)$)[a-z_/.][\w/.@-]*", re.IGNORECASE)
"""Texts that Hydra reads as they are."""


def build_command(entry: str, config: Mapping[str, Any]) -> str:
    """`python -m swarm.ENTRY ...`, with the options and keys that differ from the defaults.

    Args:
        entry: "search" or "finetune".
        config: A whole configuration, as plain values; secrets are taken out.
    """
    config = clean(config)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        default = compose(entry, ["name=''"], return_hydra_config=True).hydra.runtime.choices
        options = {
            group: _nearest_option(group, config[group])
            for group in default
            if isinstance(config.get(group), Mapping)
        }
        words = [
            f"{group}={option}"
            for group, option in options.items()
            if option != default[group] or group == "task"
        ]
        # The root first, as keys deeper in the tree refer to it.
        for part in ({k: v for k, v in config.items() if not isinstance(v, Mapping)}, config):
            known = _compose_flat(entry, words)
            words += [
                f"{'' if key in known else '++'}{key}={_format_value(value)}"
                for key, value in _flatten(part).items()
                if key not in known or known[key] != value
            ]
    return shlex.join(["python", "-m", f"swarm.{entry}", *words])


def _nearest_option(group: str, part: Mapping[str, Any]) -> str:
    """The option of a group from which the fewest keys differ."""
    options = {path.stem: path for path in sorted((conf_folder() / group).glob("*.yaml"))}
    if part.get("name") in options:
        return str(part["name"])

    def count_differences(name: str) -> int:
        written = _flatten(OmegaConf.to_container(OmegaConf.load(options[name])))  # type: ignore[arg-type]
        pairs = [(written.get(key), value) for key, value in _flatten(part).items()]
        # A key that an option leaves open is meant to be set, and a reference may be anything.
        return sum(1 + (one is not None) for one, value in pairs
                   if one != value and "${" not in str(one))  # fmt: skip

    return min(options, key=count_differences)


def _compose_flat(entry: str, words: Sequence[str]) -> dict[str, Any]:
    """What the command line stands for, with dotted keys."""
    whole = compose(entry, overrides=["name=''", *words])
    return _flatten(OmegaConf.to_container(whole, resolve=True))  # type: ignore[arg-type]


def _flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted keys; lists and empty objects stay whole."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        deep = isinstance(value, Mapping) and value
        found |= _flatten(value, f"{path}{name}.") if deep else {f"{path}{name}": value}
    return found


def _format_value(value: Any) -> str:
    """A value as Hydra's command line takes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_format_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_format_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str) and not UNQUOTED_TEXT.fullmatch(value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)
