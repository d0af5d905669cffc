"""Presets: mixtures of agents as small yaml files, those of conf/moa and your own."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from swarm._util.files import conf_folder, read_yaml
from swarm.errors import UserError
from swarm.models.base import Model
from swarm.models.trace import Trace
from swarm.multi_agent.moa import AnswersPrompt, MixtureOfAgents
from swarm.multi_agent.types import AgentSpec

# Presets of a kind: the yaml files of its folder in conf, and the user's own.


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


PRESET_KEYS = tuple(
    key for key in signature(MixtureOfAgents.__init__).parameters if key not in ("self", "trace")
)
SLOT_KEYS = ("model", "temperature", "max_tokens", "system", "count", "timeout")
PROMPT_KEYS = ("form", "text", "heading")


def preset_names() -> list[str]:
    """The presets that ship."""
    return list_shipped_presets("moa")


def read_preset(name: str | Path) -> dict[str, Any]:
    """A preset: the arguments of `MixtureOfAgents`, a slot as a mapping with its model's name.

    Args:
        name: One of `preset_names`, or the path of a yaml file.

    Raises:
        UserError: There is none, or it has a key that is not known, or a value of the wrong kind.
    """
    path = preset_path("moa", str(name))
    found = read_yaml(path)
    try:
        return validate_preset(found)
    except UserError as error:
        raise UserError(f"preset {path}: {error}") from None


def validate_preset(found: Any) -> dict[str, Any]:
    """The content of a preset, every slot of it as a mapping.

    Raises:
        UserError: A key is not known, or a value is of the wrong kind.
    """
    preset = check_mapping("the preset", found, PRESET_KEYS)
    layers = preset.get("layers", 2)
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise UserError(f"layers: {layers!r} is no whole number from 1 on")
    slots = preset.get("proposers") or []
    if not isinstance(slots, list):
        raise UserError(f"proposers: {slots!r} is no list")
    preset["proposers"] = [_parse_slot(f"proposers[{n}]", slot) for n, slot in enumerate(slots)]
    if preset.get("aggregator") is None:
        raise UserError("aggregator: name the model that makes the answer")
    for key in ("aggregator", "fallback"):
        if preset.get(key) is not None:
            preset[key] = _parse_slot(key, preset[key])
    prompt = preset.get("prompt", "safe")
    if not isinstance(prompt, str):
        preset["prompt"] = check_mapping("prompt", prompt, PROMPT_KEYS)
    return preset


def build_mixture(
    preset: Mapping[str, Any],
    model_of: Callable[[str], Model],
    model: str | None = None,
    trace: Trace | None = None,
) -> MixtureOfAgents:
    """The mixture of agents of a preset.

    Args:
        preset: See `read_preset`.
        model_of: Gives the model of a name; the same one for the same name, so that it is asked
            once a layer.
        model: The name for slots that leave it open (`model: null`).
        trace: Where calls are recorded.

    Raises:
        UserError: A value is not allowed, a model is not named, or `model_of` has none.
    """
    settings = validate_preset(dict(preset))

    def build_agent(place: str, given: Mapping[str, Any]) -> AgentSpec:
        name = given.get("model") or model
        if name is None:
            raise UserError(
                f"{place}.model: this preset leaves the model to you; name one in a "
                "yaml of your own, or with candidate.model=NAME"
            )
        return AgentSpec(model_of(name), name, **{k: v for k, v in given.items() if k != "model"})

    settings["proposers"] = [
        build_agent(f"proposers[{n}]", given) for n, given in enumerate(settings["proposers"])
    ]
    for key in ("aggregator", "fallback"):
        if settings.get(key) is not None:
            settings[key] = build_agent(key, settings[key])
    if isinstance(prompt := settings.get("prompt"), dict):
        settings["prompt"] = AnswersPrompt(**prompt)
    return MixtureOfAgents(**settings, trace=trace)


def _parse_slot(place: str, given: Any) -> dict[str, Any]:
    """A slot, which may be written as a model's name alone."""
    slot = check_mapping(place, {"model": given} if isinstance(given, str) else given, SLOT_KEYS)
    name = slot.get("model")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise UserError(f"{place}.model: {name!r} is no name of a model")
    return slot
