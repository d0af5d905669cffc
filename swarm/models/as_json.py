"""Requests and completions as JSON, without what is as it is by default."""

from collections.abc import Mapping
from dataclasses import asdict, field, fields, make_dataclass
from typing import Any, cast

from swarm.models import Completion, Request, Token

OMITTED_FIELDS = ("prompt", "decided", "timeout")
"""Of a request: the first is written in a way of its own, the others do not say what is asked."""


def request_to_json(request: Request) -> dict[str, Any]:
    """The "prompt" of a request or its "messages", and the settings."""
    if isinstance(request.prompt, str):
        asked: dict[str, Any] = {"prompt": request.prompt}
    else:
        asked = {"messages": [turn._asdict() for turn in request.prompt]}
    for key, value in _non_default_fields(request).items():
        if key not in OMITTED_FIELDS:
            asked[key] = list(value) if isinstance(value, tuple) else value
    return asked


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """What `completion_of` reads."""
    whole = asdict(completion)
    return {"text": completion.text, **{key: whole[key] for key in _non_default_fields(completion)}}


def completion_from_json(said: Mapping[str, Any]) -> Completion:
    """The completion.

    Raises:
        TypeError: It is none; or `ValueError`.
    """
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in said.items()
    }
    if "tokens" in values:
        values["tokens"] = tuple(
            Token(text, logprob, tuple((word, chance) for word, chance in top))
            for text, logprob, top in values["tokens"]
        )
    return Completion(**values)


_MutableCompletion: Any = make_dataclass(
    "_Open", [(f.name, f.type, field(default=f.default)) for f in fields(Completion)], slots=True
)


def completion_from_fields(values: Mapping[str, Any]) -> Completion:
    """The completion of values that are as they should be, in half the time.

    A frozen class sets each of its attributes the long way; one that is alike and not frozen does
    not, and is then called by the other's name.
    """
    made = _MutableCompletion(**values)
    made.__class__ = Completion
    return cast(Completion, made)


def _non_default_fields(value: Any) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: field.default for field in fields(value)}
    return {name: one for name, one in found.items() if one != defaults[name]}
