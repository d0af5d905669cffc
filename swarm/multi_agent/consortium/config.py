"""Configuration of a consortium: settings with model names, from any source."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from swarm._util.files import read_yaml
from swarm.errors import UserError
from swarm.models.base import Completion, Model, Request
from swarm.models.trace import Trace
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.multi_agent.consortium.legacy_config import LEGACY_KEYS, convert_settings
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
