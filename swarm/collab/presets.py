"""Presets: mixtures of agents as small yaml files, those of conf/moa and your own."""

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from swarm.collab import AgentSpec
from swarm.collab.moa import MixtureOfAgents
from swarm.collab.prompts import AnswersPrompt
from swarm.collab.yamls import check_mapping, preset_path, list_shipped_presets
from swarm.errors import UserError
from swarm.files import read_yaml
from swarm.models import Model
from swarm.models.trace import Trace

PRESET_KEYS = tuple(key for key in signature(MixtureOfAgents.__init__).parameters
             if key not in ("self", "trace"))  # fmt: skip
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
            raise UserError(f"{place}.model: this preset leaves the model to you; name one in a "
                            "yaml of your own, or with candidate.model=NAME")  # fmt: skip
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
