"""Settings of a consortium: one model for files, saved consortia, commands, llm and Python."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from swarm._util.settings import (
    Count,
    Number,
    Positive,
    Settings,
    Share,
    Text,
    parse_settings,
)
from swarm.errors import UserError
from swarm.models.providers import split_sample_count
from swarm.multi_agent.presets import read_preset_file
from swarm.multi_agent.types import AgentSettings

Strategy = Literal["default", "pick-one", "rank", "vote", "elimination", "roles", "peer-review"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

UNSURE = ("pick-one", "rank", "elimination")
"""Strategies without a confidence, for which a threshold has no effect."""

ORIGINAL_STRATEGIES = {"voting": "vote", "role": "roles", "semantic": "default"}
"""Strategies of llm-consortium; here answers are not clustered, so that semantic is the default."""


def normalize_confidence(given: Any) -> Any:
    """Return a confidence from 0 to 1: of 0.8, 80, "80%" or "0.8"; anything else unchanged.

    A number from above 1 to below 10 is ambiguous, and therefore out of range.
    """
    try:
        percent = isinstance(given, str) and given.strip().endswith("%")
        number = float(given.strip().removesuffix("%") if isinstance(given, str) else given)
    except (TypeError, ValueError):
        return given
    if isinstance(given, bool):
        return given
    return number / 100 if percent or 10 <= number <= 100 else number


Confidence = Annotated[Share, BeforeValidator(normalize_confidence), "or 10 to 100 as percent"]


class MemberSpec(AgentSettings):
    """A member of a consortium, also in text form: "gpt-4o:2,temperature=1,role=critic".

    Attributes:
        role: Description of its role in the consortium; `None` is none.
    """

    model: Text
    role: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, given: Any) -> Any:
        return read_member(given) if isinstance(given, str) else given

    @property
    def name(self) -> str:
        """The model, and how many answers it gives if these are several."""
        return self.model if self.count == 1 else f"{self.model} x {self.count}"

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}

    @property
    def own_settings(self) -> dict[str, Any]:
        """The settings that are set, without model and count."""
        return self.model_dump(exclude={"model", "count"})

    def __str__(self) -> str:
        settings = ", ".join(f"{key} {value!r}" for key, value in self.own_settings.items())
        return f"{self.name} ({settings})" if settings else self.name


MEMBER_OPTIONS = tuple(key for key in MemberSpec.model_fields if key not in ("model", "count"))


def parse_member(
    spec: str, known: Callable[[str], bool] = lambda name: False, count: int = 1
) -> MemberSpec:
    """Parse a member: `NAME[:count][,key=value...]`; see `read_member`.

    Raises:
        UserError: A key is unknown, or a value is invalid.
    """
    found = read_member(spec, known, count)
    return parse_settings(MemberSpec, found, found["model"])


def read_member(
    spec: str, known: Callable[[str], bool] = lambda name: False, count: int = 1
) -> dict[str, Any]:
    """Return the settings in a member's text.

    A comma inside a value belongs to the value, unless a known key follows.

    Args:
        spec: Text form of the member.
        known: Returns whether a model has exactly this name: "x:8" is then a name, otherwise 8
            samples of x.
        count: Default number of samples.

    Raises:
        UserError: A key is unknown or given twice.
    """
    if known(spec.strip()):
        return {"model": spec.strip(), "count": count}
    name, *options = re.split(rf",(?=\s*(?:{'|'.join(MEMBER_OPTIONS)})\s*=)", spec)
    name = name.strip()
    if unknown := re.search(r",\s*(\w+)\s*=", name):
        raise UserError(f"{spec}: {unknown[1]}: no such key; allowed: {', '.join(MEMBER_OPTIONS)}")
    model, times = (name, count) if known(name) else split_sample_count(name)
    found: dict[str, Any] = {"model": model, "count": count if model == name else times}
    for option in options:
        key, _, value = (part.strip() for part in option.partition("="))
        if key in found:
            raise UserError(f"{spec}: {key} is given twice")
        found[key] = value
        for kind in (int, float) if key not in ("system", "role") else ():
            with suppress(ValueError):  # the settings refuse what is no number
                found[key] = kind(value)
                break
    return found


class ConsortiumOptions(Settings):
    """Settings of a consortium besides its models."""

    strategy: Annotated[
        Strategy, BeforeValidator(lambda name: ORIGINAL_STRATEGIES.get(str(name), name))
    ] = Field(
        "default",
        description="how answers are combined; `strategies` describes each",
        validation_alias=AliasChoices("strategy", "judging_method"),
    )
    confidence_threshold: Confidence = Field(
        0.8, description="stop at this confidence of the arbiter: 0.8, 80 or 80%"
    )
    max_iterations: Positive = Field(3, description="maximum number of iterations")
    min_iterations: Positive = Field(
        1,
        description="minimum number of iterations",
        validation_alias=AliasChoices("min_iterations", "minimum_iterations"),
    )
    system: str | None = Field(
        None,
        description='system prompt of all models, as text or a file; "" is none',
        validation_alias=AliasChoices("system", "system_prompt"),
    )
    quorum: Positive = Field(1, description="minimum number of members that answer")
    seed: Count = Field(0, description="random seed of sampling and of the order of answers")
    budget: Positive | None = Field(None, description="maximum number of calls per question")
    max_cost: Number | None = Field(
        None, description="start no iteration beyond this cost, in the prices' currency"
    )
    roles: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="roles: a name or a text; assigned to the members cyclically",
        validation_alias=AliasChoices("roles", "role"),
    )
    eliminate: Positive = Field(1, description="elimination: members removed per iteration")
    keep: Positive = Field(2, description="elimination: minimum number of members")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.min_iterations > self.max_iterations:
            raise UserError(
                f"min_iterations={self.min_iterations}: is above max_iterations="
                f"{self.max_iterations}; raise that, or lower this"
            )
        if self.roles is not None and self.strategy != "roles":
            raise UserError(f"roles: strategy={self.strategy} has no roles; set strategy=roles")
        return self


class ConsortiumSettings(ConsortiumOptions):
    """A consortium by the names of its models, as in a file, a saved consortium or a command.

    The keys of llm-consortium are accepted, too: `models` (also name -> count), `system_prompt`,
    `minimum_iterations` and `judging_method`.
    """

    members: Annotated[tuple[MemberSpec, ...], Field(strict=False, min_length=1)] = Field(
        validation_alias=AliasChoices("members", "models")
    )
    arbiter: MemberSpec | None = None
    fallback: MemberSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_original(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        found = dict(given)
        if "judging_method" in found and found.get("strategy") in (None, "default"):
            found["strategy"] = found["judging_method"]
        found.pop("judging_method", None)
        for key in ("members", "models"):
            if isinstance(found.get(key), Mapping):
                found[key] = [{"model": name, "count": n} for name, n in found[key].items()]
        return found

    @field_validator("members")
    @classmethod
    def _add_up_counts(cls, members: tuple[MemberSpec, ...]) -> tuple[MemberSpec, ...]:
        counts: Counter[MemberSpec] = Counter()
        for one in members:
            counts[one.model_copy(update={"count": 1})] += one.count
        return tuple(one.model_copy(update={"count": count}) for one, count in counts.items())

    @property
    def agents(self) -> list[MemberSpec]:
        """The members, and the arbiter and the fallback if there are."""
        return [*self.members, *filter(None, (self.arbiter, self.fallback))]

    def changed(self, **settings: Any) -> "ConsortiumSettings":
        """Return the settings with others in place of some.

        Raises:
            UserError: A value is invalid.
        """
        return parse_settings(ConsortiumSettings, {**dict(self), **settings})

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON, without the unset settings of each model."""
        return self.model_dump(mode="json")

    def __str__(self) -> str:
        names = ", ".join(one.name for one in self.members)
        answer = "answers" if len(self.members) == self.members[0].count == 1 else "answer"
        judge = self.arbiter.model if self.arbiter else "nobody"
        return f"{names} {answer}, {judge} judges; strategy {self.strategy}"


def read_preset(name: str | Path) -> ConsortiumSettings:
    """Read a preset of conf/consortium, or a yaml file by its path.

    Raises:
        UserError: It does not exist or is invalid.
    """
    return read_preset_file("consortium", name, ConsortiumSettings)
