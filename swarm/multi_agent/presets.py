"""Presets of mixtures of agents: YAML files in conf/moa, and the user's files."""

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


def list_shipped_presets(kind: str) -> list[str]:
    """Return the names of the shipped presets of a kind."""
    return sorted(path.stem for path in (conf_folder() / kind).glob("*.yaml"))


def is_preset_path(name: str) -> bool:
    """Return whether a preset's name is a path."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def preset_path(kind: str, name: str) -> Path:
    """Return the file of a preset.

    Args:
        name: One of `list_shipped_presets`, or a path.

    Raises:
        UserError: No shipped preset has this name.
    """
    if is_preset_path(name):
        return Path(name).expanduser()
    names = list_shipped_presets(kind)
    if name not in names:
        matches = get_close_matches(name, names, 1)
        suggestion = f"did you mean {matches[0]}? There" if matches else "there"
        raise UserError(
            f"preset {name!r}: not found; {suggestion} are {', '.join(names)}, "
            "and your own yaml by its path, as in ./mine.yaml"
        )
    return conf_folder() / kind / f"{name}.yaml"


def check_mapping(place: str, value: Any, allowed: Sequence[str]) -> dict[str, Any]:
    """Validate a mapping with allowed keys only.

    Raises:
        UserError: It is not a mapping, or has another key.
    """
    if not isinstance(value, dict):
        raise UserError(f"{place}: {value!r} is not a mapping of {', '.join(allowed)}")
    for key in value:
        if key not in allowed:
            matches = get_close_matches(str(key), allowed, 1)
            suggestion = f"did you mean {matches[0]}? Keys" if matches else "keys"
            raise UserError(f"{place}: {key!r} is not known; {suggestion}: {', '.join(allowed)}")
    return dict(value)


PRESET_KEYS = tuple(
    key for key in signature(MixtureOfAgents.__init__).parameters if key not in ("self", "trace")
)
SLOT_KEYS = ("model", "temperature", "max_tokens", "system", "count", "timeout")
PROMPT_KEYS = ("form", "text", "heading")


def preset_names() -> list[str]:
    """Return the names of the shipped presets."""
    return list_shipped_presets("moa")


def read_preset(name: str | Path) -> dict[str, Any]:
    """Read a preset: the arguments of `MixtureOfAgents`, with agents as mappings with model names.

    Args:
        name: One of `preset_names`, or the path of a YAML file.

    Raises:
        UserError: It does not exist, has an unknown key, or a value of the wrong type.
    """
    path = preset_path("moa", str(name))
    found = read_yaml(path)
    try:
        return validate_preset(found)
    except UserError as error:
        raise UserError(f"preset {path}: {error}") from None


def validate_preset(found: Any) -> dict[str, Any]:
    """Validate the content of a preset and convert every agent to a mapping.

    Raises:
        UserError: A key is unknown, or a value has the wrong type.
    """
    preset = check_mapping("the preset", found, PRESET_KEYS)
    layers = preset.get("layers", 2)
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise UserError(f"layers: {layers!r} is not a positive integer")
    slots = preset.get("proposers") or []
    if not isinstance(slots, list):
        raise UserError(f"proposers: {slots!r} is not a list")
    preset["proposers"] = [_parse_slot(f"proposers[{n}]", slot) for n, slot in enumerate(slots)]
    if preset.get("aggregator") is None:
        raise UserError("aggregator: name the model that writes the answer")
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
    """Build the mixture of agents of a preset.

    Args:
        preset: See `read_preset`.
        model_of: Returns the model of a name; equal names must give the same instance, so that it
            is called once per layer.
        model: Model name for agents without one (`model: null`).
        trace: Trace of the calls.

    Raises:
        UserError: A value is invalid, or a model is missing or unknown.
    """
    settings = validate_preset(dict(preset))

    def build_agent(place: str, settings_of: Mapping[str, Any]) -> AgentSpec:
        name = settings_of.get("model") or model
        if name is None:
            raise UserError(
                f"{place}.model: the preset names no model; set it in a "
                "yaml file, or with candidate.model=NAME"
            )
        return AgentSpec(
            model_of(name), name, **{k: v for k, v in settings_of.items() if k != "model"}
        )

    settings["proposers"] = [
        build_agent(f"proposers[{n}]", settings_of)
        for n, settings_of in enumerate(settings["proposers"])
    ]
    for key in ("aggregator", "fallback"):
        if settings.get(key) is not None:
            settings[key] = build_agent(key, settings[key])
    if isinstance(prompt := settings.get("prompt"), dict):
        settings["prompt"] = AnswersPrompt(**prompt)
    return MixtureOfAgents(**settings, trace=trace)


def _parse_slot(location: str, value: Any) -> dict[str, Any]:
    """Parse an agent, which may be written as a model name only."""
    slot = check_mapping(location, {"model": value} if isinstance(value, str) else value, SLOT_KEYS)
    name = slot.get("model")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise UserError(f"{location}.model: {name!r} is not a model name")
    return slot
