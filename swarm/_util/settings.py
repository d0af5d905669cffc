"""Settings whose types hold their ranges: one check for constructors, yaml, commands and JSON."""

import functools
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, validate_call

from swarm._util.terminal import suggest
from swarm.errors import InvalidArgument

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(pattern=r"\S")]

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

# Strict: `true` is no number and "1" no integer. An integer is accepted as a float.
STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, frozen=True)

NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict: "a mapping",
    Mapping: "a mapping",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
}


class Settings(BaseModel):
    """Base of settings read from a file, a command line or a request; unknown keys are refused."""

    model_config = STRICT


def checked(key: str = "") -> Callable[[type[T]], type[T]]:
    """Decorate a class so that its constructor checks its arguments by their annotations.

    Args:
        key: Prefix of the arguments in errors: "task" makes `limit` "task.limit".

    The constructor raises:
        UserError: A value does not fit its annotation, or an argument is missing or unknown.
    """

    def decorate(cls: type[T]) -> type[T]:
        original = cls.__init__  # type: ignore[misc]
        config = ConfigDict(strict=True, arbitrary_types_allowed=True)
        validated = validate_call(config=config)(original)

        @functools.wraps(original)
        def construct(self: Any, *args: Any, **named: Any) -> None:
            try:
                validated(self, *args, **named)
            except ValidationError as error:
                if error.title != validated.__qualname__:
                    raise  # of another object, made inside of this constructor
                hints = get_type_hints(original, include_extras=True)
                raise explain(error, hints, key) from None

        cls.__init__ = construct  # type: ignore[method-assign]
        return cls

    return decorate


def parse_settings(model: type[M], values: object, key: str = "") -> M:
    """Check `values` and return them as a `model`.

    Args:
        values: A mapping, from yaml, JSON or options.
        key: Prefix of the keys in errors, such as a file's name.

    Raises:
        UserError: A key is unknown or missing, or a value does not fit its annotation.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(error, field_types(model), key) from None


def explain(error: ValidationError, fields: Mapping[str, Any], key: str = "") -> InvalidArgument:
    """Return the first complaint of pydantic as an error that names the key and what it takes.

    Args:
        fields: Name -> annotation of the settings that were checked.
        key: Prefix of the names in the message.
    """
    first = error.errors(include_url=False)[0]
    # Arguments by position are numbered, and 0 is `self`.
    place = [list(fields)[one - 1] if n == 0 and isinstance(one, int) else one
             for n, one in enumerate(first["loc"])]  # fmt: skip
    where, annotation = key, None
    for step, one in enumerate(place):
        if isinstance(one, int):
            where += f"[{one}]"
            continue
        if step:  # a key of nested settings; otherwise the name of a union's variant
            nested = _find_settings(annotation)
            if nested is None:
                break
            fields = field_types(nested)
        where, annotation = f"{where}.{one}" if where else str(one), fields.get(str(one))
    name = str(place[-1]) if place else ""
    kind = first["type"]
    if kind == "value_error":  # raised by a validator of ours, in our words
        return InvalidArgument(f"{where}: {first['ctx']['error']}" if where else first["msg"])
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return InvalidArgument(f"{where}: is missing; it must be {describe_type(annotation)}")
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known = [one for one in fields if one != "return"]
        meant = suggest(name, known)
        return InvalidArgument(f"{where}: no such key; {meant}allowed: {', '.join(known)}")
    wanted = describe_type(annotation) if name else "a mapping"
    return InvalidArgument(
        f"{where}={format_value(first['input'])}".lstrip("=")
        + f": must be {wanted or first['msg']}"
    )


def field_types(model: type[BaseModel]) -> dict[str, Any]:
    """Return the annotations of a model's fields by name."""
    hints = get_type_hints(model, include_extras=True)
    return {name: hints[name] for name in model.model_fields}


def _find_settings(annotation: Any) -> type[BaseModel] | None:
    """Return the settings inside an annotation, such as those of a list or an optional key."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_find_settings, get_args(annotation))), None)


def format_value(value: object) -> str:
    """Format a value as in yaml, shortened: true, null, 'a text', [1, 2]."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def describe_type(annotation: Any) -> str:
    """Describe what an annotation allows: "an integer, at least 1, or null"; empty if unknown."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [text for one in arguments[1:] for text in _describe_limits(one)]
        return ", ".join([describe_type(arguments[0]), *limits])
    if origin is Literal:
        return _join_or([format_value(one) for one in arguments])
    if origin in (Union, types.UnionType):
        return ", or ".join(filter(None, map(describe_type, arguments)))
    if origin is not None and arguments and origin in (list, tuple, Sequence):
        inner = describe_type(arguments[0])
        return f"a list, each {inner}" if inner else "a list"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping of {', '.join(annotation.model_fields)}"
    found = NAMES.get(origin or annotation, "")
    return found or getattr(annotation, "DESCRIPTION", "")


def _describe_limits(limit: Any) -> list[str]:
    if hasattr(limit, "metadata"):  # a Field of pydantic
        return [text for one in limit.metadata for text in _describe_limits(one)]
    match limit:
        case annotated_types.Ge(ge=value):
            return [f"at least {value}"]
        case annotated_types.Gt(gt=value):
            return [f"above {value}"]
        case annotated_types.Le(le=value):
            return [f"at most {value}"]
        case annotated_types.Lt(lt=value):
            return [f"below {value}"]
        case annotated_types.MinLen(min_length=1):
            return ["not empty"]
        case StringConstraints(pattern=r"\S"):
            return ["not empty"]
        case str():
            return [limit]
    return []


def _join_or(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else words[0]
