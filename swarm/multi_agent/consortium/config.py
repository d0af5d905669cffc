"""Configuration of a consortium: settings with model names, from any source.

That includes configurations saved by llm-consortium 0.3 to 0.8, which are converted.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from swarm._util.files import read_yaml
from swarm.errors import UserError
from swarm.models.base import Completion, Model, Request
from swarm.models.trace import Trace
from swarm.multi_agent.consortium.consortium import LEGACY_STRATEGIES, Consortium
from swarm.multi_agent.consortium.member_spec import (
    MemberSpec,
    member_from_config,
    merge_members,
    parse_member,
)
from swarm.multi_agent.consortium.prompts import ROLES, role_prompt
from swarm.multi_agent.presets import (
    check_mapping,
    is_preset_path,
    list_shipped_presets,
    preset_path,
)
from swarm.multi_agent.types import AgentSpec

__all__ = [
    "ConsortiumSettings",
    "MemberSpec",
    "build_consortium",
    "parse_member",
    "preset_names",
    "read_preset",
]

log = logging.getLogger(__name__)

RENAMED_KEYS = {
    "models": "members",
    "system_prompt": "system",
    "minimum_iterations": "min_iterations",
}
IGNORED_KEYS = (
    "manual_context",
    "category",
    "expected_agreement",
    "status",
    "created_at",
    "embedding_cache_enabled",
)
"""Settings of a single run or of stored conversations, which have no effect."""
UNSUPPORTED_KEYS = (
    "embedding_backend",
    "embedding_model",
    "clustering_algorithm",
    "cluster_eps",
    "cluster_min_samples",
)
"""Settings of embedding-based clustering, which is not supported."""
LEGACY_KEYS = (*RENAMED_KEYS, *IGNORED_KEYS, *UNSUPPORTED_KEYS, "judging_method", "strategy_params")

STRATEGY_PARAMETERS: dict[str, tuple[str, type]] = {
    "similarity_threshold": ("similarity", float),
    "eliminate_count": ("eliminate", int),
    "keep_minimum": ("keep", int),
    "roles": ("roles", list),
}

PRESET_KIND = "consortium"

TIMEOUT = 300.0
"""Default timeout in seconds of remote models: one that hangs would block all others. Local and
composite models have none.
"""

PATIENT = ("local", "search", "initial_experts", "function", "moa", "consortium")
"""Name prefixes, before the slash, of models without a default timeout."""


@dataclass(frozen=True)
class ConsortiumSettings:
    """Settings of a consortium; see `Consortium` for their meaning.

    Counts of equal members are added up; a threshold of 10 or more is a percentage.

    Raises:
        UserError: A value is invalid.
    """

    members: tuple[MemberSpec, ...]
    arbiter: MemberSpec | None = None
    strategy: str = "default"
    confidence_threshold: float = 0.8
    max_iterations: int = 3
    min_iterations: int = 1
    system: str | None = None
    quorum: int = 1
    fallback: MemberSpec | None = None
    seed: int = 0
    context: int | None = None
    budget: int | None = None
    max_cost: float | None = None
    roles: tuple[str, ...] | None = None
    eliminate: int = 1
    keep: int = 2
    similarity: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", present_strategy(self.strategy))
        threshold: Any = self.confidence_threshold
        if isinstance(threshold, (int, float)) and not isinstance(threshold, bool):
            object.__setattr__(self, "confidence_threshold", normalize_threshold(threshold))
        self.check()
        object.__setattr__(self, "members", merge_members(tuple(self.members)))

    def check(self) -> None:
        """Check that a consortium can be built, independent of its models.

        Raises:
            UserError: A value is invalid.
        """
        build_consortium(self, lambda name: PLACEHOLDER_MODEL)

    @classmethod
    def from_dict(
        cls,
        settings: Mapping[str, Any],
        remark: Callable[[str], None] = lambda words: log.warning("%s", words),
    ) -> "ConsortiumSettings":
        """Read the configuration from a mapping: from `to_dict`, a preset or llm-consortium.

        Args:
            settings: The mapping.
            remark: Receives messages about legacy settings that are not supported.

        Raises:
            UserError: A key is unknown, or a value is invalid.
        """
        keys = [field.name for field in fields(cls)]
        current: Any = settings
        if isinstance(settings, Mapping):
            current = {key: value for key, value in settings.items() if key not in LEGACY_KEYS}
        check_mapping("the consortium", current, keys)
        found, warnings = convert_settings(settings)
        for words in warnings:
            remark(words)
        members = found.get("members")
        if not isinstance(members, (list, tuple)) or not members:
            raise UserError("members: name at least one model")
        found["members"] = tuple(
            member_from_config(f"members[{n}]", m) for n, m in enumerate(members)
        )
        for key in ("arbiter", "fallback"):
            if found.get(key) is not None:
                found[key] = member_from_config(key, found[key])
        if (roles := found.get("roles")) is not None:
            if not isinstance(roles, (list, tuple)):
                raise UserError(f"roles: {roles!r} is not a list of roles")
            found["roles"] = tuple(roles)
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON; `from_dict` reads it."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["members"] = [one.to_dict() for one in self.members]
        for key in ("arbiter", "fallback"):
            found[key] = found[key].to_dict() if found[key] else None
        return {**found, "roles": list(self.roles) if self.roles is not None else None}


NO_CLUSTERING = "strategy=semantic is replaced by default: answers are not clustered here"


def present_strategy(name: Any) -> Any:
    """Return the strategy for a name of llm-consortium's; other names are returned unchanged."""
    if name == "semantic":
        log.warning("%s", NO_CLUSTERING)
    return LEGACY_STRATEGIES.get(str(name), name)


def normalize_threshold(given: float) -> float:
    """Normalize a confidence to 0 to 1; values from 10 on are percentages.

    Raises:
        UserError: It is ambiguous or out of range.
    """
    if 0 <= given <= 1:
        return given
    if 10 <= given <= 100:
        return given / 100
    raise UserError(
        f"confidence_threshold={given!r}: must be a number from 0 to 1, or 10 to 100 as percent"
    )


class _PlaceholderModel:
    """Placeholder for a model, to validate a configuration."""

    def generate(self, requests: list[Request]) -> list[Completion]:
        raise UserError("name at least one model")


PLACEHOLDER_MODEL: Any = _PlaceholderModel()


def build_consortium(
    config: ConsortiumSettings, model_of: Callable[[str], Model], trace: Trace | None = None
) -> Consortium:
    """Build the consortium of a configuration.

    Args:
        config: The settings.
        model_of: Returns the model of a name; called once per name.
        trace: Trace of the calls.

    Raises:
        UserError: A value is invalid, or `model_of` has no such model.
    """
    models: dict[str, Model] = {}

    def build_agent(one: MemberSpec) -> AgentSpec:
        if one.model not in models:
            models[one.model] = model_of(one.model)
        timeout = one.timeout
        if timeout is None and one.model.partition("/")[0] not in PATIENT:
            timeout = TIMEOUT
        return AgentSpec(
            models[one.model],
            one.model,
            one.temperature,
            one.max_tokens,
            _member_system_prompt(config, one),
            one.count,
            timeout,
        )

    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings["members"] = [build_agent(one) for one in config.members]
    settings["roles"] = _resolve_roles(config)
    for key in ("arbiter", "fallback"):
        settings[key] = build_agent(settings[key]) if settings[key] else None
    return Consortium(**settings, trace=trace)


def _member_system_prompt(config: ConsortiumSettings, one: MemberSpec) -> str | None:
    """Return a member's additional system prompt: its `system` text and its role."""
    role = one.role if config.strategy != "roles" else None
    return "\n\n".join(text for text in (one.system, role and role_prompt(role)) if text) or None


def _resolve_roles(config: ConsortiumSettings) -> tuple[str, ...] | None:
    """Return the roles per seat for the strategy "roles" if any member specifies its role."""
    if config.strategy != "roles" or not any(one.role for one in config.members):
        return config.roles
    others = config.roles or tuple(ROLES)
    member_roles = [one.role for one in config.members for _ in range(one.count)]
    return tuple(role or others[index % len(others)] for index, role in enumerate(member_roles))


def preset_names() -> list[str]:
    """Return the names of the shipped presets."""
    return list_shipped_presets(PRESET_KIND)


def read_preset(name: str | Path) -> ConsortiumSettings:
    """Read the configuration of a preset.

    Args:
        name: One of `preset_names`, or the path of a YAML file.

    Raises:
        UserError: It does not exist or is invalid.
    """
    path = preset_path(PRESET_KIND, str(name))
    kind = PRESET_KIND if is_preset_path(str(name)) else "preset"
    found = read_yaml(path, kind)
    try:
        return ConsortiumSettings.from_dict(found)
    except UserError as error:
        raise UserError(f"{kind} {path}: {error}") from None


def convert_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert settings to the present names; also return a remark on each that is lost.

    Raises:
        UserError: A setting is given under both names, or has the wrong type.
    """
    found = {key: value for key, value in settings.items() if key not in LEGACY_KEYS}
    warnings = [
        f"{key}={settings[key]!r} is ignored: answers are not clustered here"
        for key in UNSUPPORTED_KEYS
        if settings.get(key) is not None
    ]
    for old, new in RENAMED_KEYS.items():
        if old not in settings:
            continue
        if new in settings:
            raise UserError(f"{old} and {new} are the same setting; give one of them")
        found[new] = settings[old]
    if isinstance(members := found.get("members"), Mapping):
        found["members"] = [{"model": name, "count": count} for name, count in members.items()]
    if "system_prompt" in settings and not str(found["system"] or "").strip():
        found["system"] = None
    lowest, highest = found.get("min_iterations"), found.get("max_iterations")
    if (
        "minimum_iterations" in settings
        and type(lowest) is type(highest) is int
        and lowest > highest
    ):
        found["max_iterations"] = lowest
        warnings.append(f"max_iterations={highest} is below minimum_iterations: set to {lowest}")
    warnings += _convert_strategy(found, settings.get("judging_method"))
    warnings += _convert_parameters(found, settings.get("strategy_params"))
    if "models" in settings and found["strategy"] == "elimination":
        warnings += _replace_elimination(found)
    return found, warnings


def _convert_strategy(found: dict[str, Any], judging: Any) -> list[str]:
    """Combine strategy and judging method into one strategy."""
    strategy = present_strategy(found.get("strategy", "default") or "default")
    warnings = []
    if judging not in (None, "default"):
        if strategy == "default":
            strategy = judging
        elif judging != strategy and not (judging == "rank" and strategy == "elimination"):
            warnings.append(
                f"judging_method={judging} is ignored: strategy={strategy} has its own judging"
            )
    found["strategy"] = strategy
    return warnings


def _convert_parameters(found: dict[str, Any], parameters: Any) -> list[str]:
    """Move the strategy's parameters to the settings; numbers are often strings."""
    if parameters and not isinstance(parameters, Mapping):
        raise UserError(f"strategy_params: {parameters!r} is not a mapping")
    warnings = []
    for key, value in (parameters or {}).items():
        name, kind = STRATEGY_PARAMETERS.get(key, ("", str))
        if not name:
            warnings.append(f"strategy_params.{key}={value!r} is ignored: no such setting")
        elif name == "roles":
            found[name] = [value] if isinstance(value, str) else value
        else:
            try:
                found[name] = kind(value)
            except (TypeError, ValueError):
                raise UserError(f"strategy_params.{key}={value!r} is not a number") from None
    return warnings


def _replace_elimination(found: dict[str, Any]) -> list[str]:
    """Replace elimination by ranking if there are too few members to eliminate any."""
    counts = [one.get("count", 1) if isinstance(one, Mapping) else 1 for one in found["members"]]
    keep = found.get("keep", 2)
    if not all(type(count) is int for count in counts) or sum(counts) > keep:
        return []
    found["strategy"] = "rank"
    return [f"strategy=elimination is replaced by rank: {keep} of {sum(counts)} members are kept"]
