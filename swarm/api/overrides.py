"""Conversion between Python values, command-line keys and configurations, and custom tasks.

A custom task is created by `task` from items and a scoring function.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from swarm._util.cli import allow_omitted_task_keys, normalize_gpu_list, to_user_error
from swarm._util.files import conf_folder, short_digest
from swarm._util.secrets import plain_config
from swarm.errors import UserError
from swarm.scorers.function import FunctionTask
from swarm.tasks.dataset import InMemoryItems

OverrideKeys = Mapping[str, Any] | Sequence[str]
"""Keys with values, {"optimizer.particles": 8}, or arguments, ["optimizer.particles=8"]."""


def list_options(group: str) -> list[str]:
    """Return the options of a group of the configuration."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def to_overrides(keys: OverrideKeys) -> list[str]:
    """Convert keys to command-line overrides; {"job": {"items": 9}} is {"job.items": 9}.

    Raises:
        UserError: A value cannot be represented.
    """
    if not isinstance(keys, Mapping):
        given = [keys] if isinstance(keys, str) or not isinstance(keys, Sequence) else list(keys)
        if unknown := [one for one in given if not isinstance(one, str)]:
            raise UserError(f"overrides={unknown[0]!r:.60}: must be a dict of keys, or KEY=VALUE")
        return [normalize_gpu_list(one) for one in given]
    return [
        normalize_gpu_list(word)
        for key, value in keys.items()
        for word in _iterate_overrides(str(key), value)
    ]


def _iterate_overrides(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and "." not in key:
        for name, one in value.items():
            yield from _iterate_overrides(f"{key}.{name}", one)
    elif isinstance(value, str) and (conf_folder() / key).is_dir():
        yield f"{key}={value}"  # an option's name: Hydra reports unknown ones best
    else:
        yield f"{key}={_format_value(key, value)}"


def _format_value(key: str, value: Any) -> str:
    """Format a value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
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

    # Save Hydra's global state: a calling program may itself be started by Hydra.
    hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            given = allow_omitted_task_keys(arguments)
            if config_dir:
                given.append(f"hydra.searchpath=[{_format_value('', config_dir.resolve())}]")
            found = compose(entry, overrides=given)
            if "out" in found:  # depends on choices that only the command line has
                found.out = None
            config = plain_config(found)
        yield config
    except (HydraException, OmegaConfBaseException) as error:
        raise to_user_error(error) from None
    finally:
        GlobalHydra.instance().hydra = hydra


def instantiate_part(part: Any) -> Any:
    """Instantiate a part of the configuration; plain values are returned unchanged."""
    from hydra.utils import instantiate

    if isinstance(part, Mapping) and "_target_" in part:
        return instantiate(part, _convert_="all")
    return part


def describe_object(thing: Any) -> dict[str, Any]:
    """Describe an object as in a configuration: its class, and its known arguments.

    These are its `settings`, if it has such a dict; else the parameters of its class that are
    attributes of the same names.
    """
    kind = type(thing)
    known = getattr(thing, "settings", None)
    if not isinstance(known, Mapping):
        parameters = inspect.signature(kind).parameters
        known = {name: getattr(thing, name) for name in parameters if hasattr(thing, name)}
    plain = {name: _to_json_value(value) for name, value in known.items()}
    target = f"{kind.__module__}.{kind.__qualname__}"
    return {"_target_": target, **{k: v for k, v in plain.items() if v is not _UNREPRESENTABLE}}


_UNREPRESENTABLE = object()


def _to_json_value(value: Any) -> Any:
    """Return a JSON value, or `_UNREPRESENTABLE`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        found = [_to_json_value(one) for one in value]
        return _UNREPRESENTABLE if any(one is _UNREPRESENTABLE for one in found) else found
    if is_dataclass(value):
        return describe_object(value)
    return _UNREPRESENTABLE


TaskItems = str | Path | Sequence[Mapping[str, Any]] | Mapping[str, Any]

ITEMS_MISSING = "task: a function needs items: task=swarm.task(items, function)"


class CustomTask(FunctionTask):
    """A task that scores with a Python function.

    Attributes:
        settings: Its arguments as in a configuration; of the function the name and a digest of its
            source, since a changed function scores differently.
    """

    def __init__(self, name: str, function: Callable[..., Any], **more: Any) -> None:
        super().__init__(name, function, **more)
        file = more.get("file")
        keys = {**more, "file": None if isinstance(file, InMemoryItems) else file}
        path = self.scorer.path  # type: ignore[attr-defined]
        self.settings = {"name": name, "function": path, "source": function_digest(function)}
        self.settings |= keys


def task(
    items: TaskItems,
    score: Callable[[str, str, dict[str, Any]], float],
    *,
    name: str | None = None,
    template: str = "{prompt}",
    highest: float | None = None,
    chat: bool = False,
    max_new_tokens: int = 200,
    dev_limit: int | None = None,
    test_limit: int | None = None,
) -> CustomTask:
    """Create a task from items and a function, for `search` and `evaluate`.

    Args:
        items: A list of dicts, each with a "prompt" or the fields of `template`, and anything the
            function needs. If each has a "split", "dev" or "test", it decides; else a third of
            them, by content, is dev. Or {"dev": [...], "test": [...]}; or the path of a data file
            (docs/tasks.md).
        score: Called as score(prompt, answer, item); returns a number, higher is better.
        name: Name in records and reports; `None` is the function's.
        template: The prompt, with an item's fields in braces.
        highest: Maximum of `score`; 1.0 if an answer is right or wrong.
        chat: Send the prompt as one user turn through the model's chat template.
        max_new_tokens: Maximum number of tokens of an answer.
        dev_limit: Maximum number of dev items; `None` is all.
        test_limit: Maximum number of test items; `None` is all.

    Raises:
        UserError: A value is not allowed. Invalid items are reported at their first use.
    """
    if not callable(score):
        raise UserError(f"score={score!r:.60}: must be a function of (prompt, answer, item)")
    if not isinstance(items, str | Path | Mapping | Sequence):
        raise UserError(
            f"items={items!r:.60}: must be a list of dicts, a dict of a list for each of dev and "
            "test, or the path of a data file"
        )
    return CustomTask(
        name or getattr(score, "__name__", "function").strip("<>"),
        score,
        highest=highest,
        template=template,
        file=str(items) if isinstance(items, str | Path) else InMemoryItems(items),
        dev_limit=dev_limit,
        test_limit=test_limit,
        chat=chat,
        max_new_tokens=max_new_tokens,
    )


def function_digest(function: Callable[..., Any]) -> str | None:
    """Return 16 hexadecimal digits that depend on a function's source; `None` without source."""
    try:
        return short_digest(inspect.getsource(function))
    except (OSError, TypeError):
        return None
