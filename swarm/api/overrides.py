"""Conversion between Python values, command-line keys and configurations."""

import inspect
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from swarm._util.cli import normalize_arguments, to_user_error
from swarm._util.files import conf_folder
from swarm._util.secrets import plain_config
from swarm.errors import UserError

_COMPOSING = threading.Lock()  # Hydra's state is that of the process

OverrideKeys = Mapping[str, Any] | Sequence[str]
"""Keys with values, {"optimizer.particles": 8}, or arguments, ["optimizer.particles=8"]."""


def to_overrides(keys: OverrideKeys) -> list[str]:
    """Convert keys to command-line overrides; {"job": {"items": 9}} is {"job.items": 9}.

    Raises:
        UserError: A value cannot be represented.
    """
    if isinstance(keys, Mapping):
        words = [word for key, value in keys.items() for word in _flatten(str(key), value)]
    else:
        words = [keys] if isinstance(keys, str) or not isinstance(keys, Sequence) else list(keys)
    for word in words:
        if not isinstance(word, str):
            raise UserError(f"overrides={word!r:.60}: must be a dict of keys, or KEY=VALUE")
    return normalize_arguments(words)


def _flatten(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and "." not in key:
        return [word for name, one in value.items() for word in _flatten(f"{key}.{name}", one)]
    if isinstance(value, str) and (conf_folder() / key).is_dir():
        return [f"{key}={value}"]  # an option's name: Hydra reports unknown ones best
    return [f"{key}={_format_value(key, value)}"]


def _format_value(key: str, value: Any) -> str:
    """Format a value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        if re.fullmatch(r"[\w.-]*/[\w./-]*", str(value)):  # text to Hydra, as it is easier to read
            return str(value)
        text = re.sub(r"(\\*)'", r"\1\1\\'", str(value))
        text += "\\" * (len(text) - len(text.rstrip("\\")))
        return f"'{text}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_format_value(key, v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(_format_value(key, one) for one in value) + "]"
    raise UserError(
        f"{key}={value!r:.60}: must be a string, a number, a bool, None, or a list or a dict "
        "of these"
    )


@contextmanager
def compose_config(
    entry: str, arguments: Sequence[str], config_dir: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Compose the configuration of an entry with these arguments, as plain values.

    Args:
        config_dir: Folder of further options, as of `--config-dir`.

    Raises:
        UserError: The one-line message of the command line for any Hydra error, also inside the
            context.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _COMPOSING:
            # Save Hydra's global state: a calling program may itself be started by Hydra.
            hydra = GlobalHydra.instance().hydra
            GlobalHydra.instance().clear()
            try:
                with initialize_config_dir(str(conf_folder()), version_base="1.3"):
                    folders = [config_dir] if config_dir else []
                    given = normalize_arguments(arguments, folders)
                    if config_dir:
                        given.append(
                            f"hydra.searchpath=[{_format_value('', config_dir.resolve())}]"
                        )
                    found = compose(entry, overrides=given)
                    if "out" in found:  # depends on choices that only the command line has
                        found.out = None
                    config = plain_config(found)
            finally:
                GlobalHydra.instance().hydra = hydra
        yield config
    except (HydraException, OmegaConfBaseException) as error:
        raise to_user_error(error) from None


def instantiate_part(part: Any) -> Any:
    """Instantiate a part of the configuration; plain values are returned unchanged."""
    from hydra.utils import instantiate

    if isinstance(part, Mapping) and "_target_" in part:
        return instantiate(part, _convert_="all")
    return part


def describe_object(thing: Any) -> dict[str, Any]:
    """Describe an object as in a configuration: its class, and its known arguments.

    These are its `settings`, if it has such a dict; else the parameters of its class that are
    attributes of the same names and can be written as JSON.
    """
    kind = type(thing)
    known = getattr(thing, "settings", None)
    if not isinstance(known, Mapping):
        parameters = inspect.signature(kind).parameters
        known = {name: getattr(thing, name) for name in parameters if hasattr(thing, name)}
    found: dict[str, Any] = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
    for name, value in known.items():
        with suppress(TypeError, ValueError):
            found[name] = json.loads(json.dumps(value, default=_describe_value))
    return found


def _describe_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value):
        return describe_object(value)
    raise TypeError(f"{value!r} cannot be part of a configuration")
