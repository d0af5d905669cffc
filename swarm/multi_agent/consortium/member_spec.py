"""Members of a consortium in text form: "gpt-4o:2,temperature=1,role=critic"."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from swarm.errors import UserError
from swarm.models.providers import split_sample_count
from swarm.multi_agent.presets import check_mapping

__all__ = ["MemberSpec", "member_from_config", "merge_members", "parse_member"]

NUMBER_OPTIONS: dict[str, Callable[[str], float]] = {
    "temperature": float,
    "max_tokens": int,
    "timeout": float,
}
MEMBER_OPTIONS = (*NUMBER_OPTIONS, "system", "role")
MEMBER_KEYS = ("model", "count", *MEMBER_OPTIONS)


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member's model and settings.

    Attributes:
        model: Name of the model.
        count: Number of answers.
        temperature, max_tokens, system, timeout: See `swarm.multi_agent.types.AgentSpec`.
        role: Description of its role in the consortium; `None` is none.
    """

    model: str
    count: int = 1
    temperature: float | None = None
    max_tokens: int | None = None
    timeout: float | None = None
    system: str | None = None
    role: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise UserError(f"model: {self.model!r} is not a model name")
        if self.role is not None and (not isinstance(self.role, str) or not self.role.strip()):
            raise UserError(f"{self.model}: role={self.role!r}: must be null or a string")

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON, without `None` values."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def parse_member(
    spec: str, known: Callable[[str], bool] = lambda name: False, count: int = 1
) -> MemberSpec:
    """Parse a member: NAME[:count][,key=value...].

    A comma inside a value belongs to the value, unless a known key follows.

    Args:
        spec: Text form of the member.
        known: Returns whether a model has exactly this name: "x:8" is then a name, otherwise 8
            samples of x.
        count: Default number of samples.

    Raises:
        UserError: A key is unknown, or a value is invalid.
    """
    if not isinstance(spec, str):
        raise UserError(f"{spec!r} is not a member; write it as in gpt-4o:2,temperature=1")
    if known(spec.strip()):
        return MemberSpec(spec.strip(), count)
    name, *options = re.split(rf",(?=\s*(?:{'|'.join(MEMBER_OPTIONS)})\s*=)", spec)
    if unknown := re.search(r",\s*(\w+)\s*=", name):
        check_mapping(spec, {unknown[1]: ""}, MEMBER_OPTIONS)
    name = name.strip()
    model, times = (name, count) if known(name) else split_sample_count(name)
    if model == name:
        times = count
    found: dict[str, Any] = {}
    for option in options:
        key, _, value = (part.strip() for part in option.partition("="))
        if key in found:
            raise UserError(f"{spec}: {key} is given twice")
        found[key] = _parse_value(spec, key, value)
    return MemberSpec(model, times, **found)


def _parse_value(spec: str, key: str, value: str) -> Any:
    if not value:
        raise UserError(f"{spec}: {key}= has no value")
    try:
        return NUMBER_OPTIONS[key](value) if key in NUMBER_OPTIONS else value
    except ValueError:
        raise UserError(
            f"{spec}: {key}={value} is not a number; other keys are {', '.join(MEMBER_OPTIONS)}"
        ) from None


def member_from_config(place: str, given: Any) -> MemberSpec:
    """Parse a member of a configuration, in text form or as a mapping.

    Args:
        place: Its location, for messages.
        given: Its value.

    Raises:
        UserError: See `parse_member`.
    """
    if isinstance(given, MemberSpec):
        return given
    if isinstance(given, str):
        return parse_member(given)
    settings = check_mapping(place, given, MEMBER_KEYS)
    if "model" not in settings:
        raise UserError(f"{place}.model: name the model")
    return MemberSpec(**settings)


def merge_members(members: tuple[MemberSpec, ...]) -> tuple[MemberSpec, ...]:
    """Merge members that differ only in their counts."""
    counts: dict[tuple[Any, ...], int] = {}
    for one in members:
        key = (one.model, *(getattr(one, option) for option in MEMBER_OPTIONS))
        counts[key] = counts.get(key, 0) + one.count
    return tuple(
        MemberSpec(key[0], count, **dict(zip(MEMBER_OPTIONS, key[1:], strict=True)))
        for key, count in counts.items()
    )
