"""Validation of a question's arguments, before any request."""

import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from swarm.errors import InvalidArgument

NAME_PATTERN = re.compile(r"[a-zA-Z0-9_\-\[\].()]+")
UNNAMED_QUESTION = "__unnamed"


def list_arguments(kind: type) -> list[str]:
    """Return the arguments of a class, including those of its bases."""
    found: dict[str, None] = {}
    for one in kind.__mro__[:-1]:
        if init := vars(one).get("__init__"):
            for parameter in inspect.signature(init).parameters.values():
                if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                    found[parameter.name] = None
    return [name for name in found if name != "self"]


def refuse_unknown(what: str, unknown: Sequence[str], known: Sequence[str]) -> None:
    """Reject unknown arguments.

    Raises:
        InvalidArgument: There are some.
    """
    for name in unknown:
        matches = get_close_matches(str(name), known, 1)
        suggestion = f"did you mean {matches[0]}? Arguments" if matches else "arguments"
        raise InvalidArgument(f"{what} has no argument {name!r}; {suggestion}: {', '.join(known)}")


def validate_name(name: str | None) -> str:
    """Return a question's name.

    Raises:
        InvalidArgument: It is not a valid name.
    """
    if name is None:
        return UNNAMED_QUESTION
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or not name.strip("."):
        raise InvalidArgument(
            f"name={name!r}: a name may contain only letters, digits and _ - [ ] ( ) . and not "
            f"only dots"
        )
    return name


def validate_int(key: str, value: Any, minimum: int = 1) -> int:
    """Return an integer.

    Raises:
        InvalidArgument: It is not an integer, or below `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgument(f"{key}={value!r}: must be an integer, {minimum} or more")
    return value


def validate_number(key: str, value: Any, minimum: float | None = None) -> float:
    """Return a number.

    Raises:
        InvalidArgument: It is not a finite number, or below `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value - value != 0:
        raise InvalidArgument(f"{key}={value!r}: must be a number")
    if minimum is not None and value < minimum:
        raise InvalidArgument(f"{key}={value!r}: must be {minimum} or more")
    return value


def validate_conversations(
    paraphrases: Any, messages: Any, system: Any
) -> tuple[list[Any] | None, list[list[dict[str, Any]]] | None]:
    """Return the paraphrases and the messages, one of which is `None`.

    Raises:
        InvalidArgument: Both or neither are given, or they are malformed.
    """
    if (paraphrases is None) == (messages is None):
        raise InvalidArgument("a question needs either paraphrases=[...] or messages=[[...]]")
    if system is not None and not isinstance(system, str):
        raise InvalidArgument(f"system={system!r}: must be a string")
    if paraphrases is not None:
        if isinstance(paraphrases, str) or not isinstance(paraphrases, Sequence) or not paraphrases:
            raise InvalidArgument(
                f"paraphrases={paraphrases!r}: must be a list of at least one string"
            )
        for one in paraphrases:
            validate_content(f"paraphrases: {one!r}", one)
        return list(paraphrases), None
    if system is not None:
        raise InvalidArgument("system requires paraphrases; add it to messages as the first turn")
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgument(f"messages={messages!r}: must be a list of at least one conversation")
    return None, [validate_conversation(one) for one in messages]


def validate_conversation(turns: Any) -> list[dict[str, Any]]:
    """Return one conversation as a list of turns.

    Raises:
        InvalidArgument: It is not one.
    """
    form = '[{"role": "user", "content": "..."}, ...]'
    if isinstance(turns, Mapping):
        raise InvalidArgument(f"messages is a list of conversations, each of them a list: [{form}]")
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not turns:
        raise InvalidArgument(f"messages: {turns!r} is not a conversation such as {form}")
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise InvalidArgument(f"messages: {turn!r} is not a turn such as {form}")
    validate_content(f"messages: the last turn {turns[-1]!r}", turns[-1].get("content"))
    return [dict(turn) for turn in turns]


def validate_content(place: str, value: Any) -> None:
    """Check a turn's content: a text, or a list of parts in the chat format.

    Raises:
        InvalidArgument: It is neither.
    """
    parts = isinstance(value, Sequence) and bool(value) and all(isinstance(p, dict) for p in value)
    if not (isinstance(value, str) or parts):
        raise InvalidArgument(
            f'{place}: must be a string, or a list of parts such as {{"type": "text"}}'
        )


def validate_logit_bias(value: Any) -> dict[Any, float] | None:
    """Return a logit_bias.

    Raises:
        InvalidArgument: It is malformed.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(
            f"logit_bias={value!r}: must map token ids to numbers from -100 to 100"
        )
    for token, amount in value.items():
        if not str(token).isdecimal():
            raise InvalidArgument(f"logit_bias: {token!r} is not a token id, an integer")
        validate_number(f"logit_bias[{token}]", amount)
    return dict(value)


def parse_metadata(
    metadata: Any, paraphrases: int, taken: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the metadata of each paraphrase, and their column names.

    Raises:
        InvalidArgument: There is not one mapping per paraphrase, or a column name is taken.
    """
    if metadata is None:
        return [{} for _ in range(paraphrases)], []
    if isinstance(metadata, (str, Mapping)) or not isinstance(metadata, Sequence):
        raise InvalidArgument("metadata must be a list of mappings, one for each paraphrase")
    if len(metadata) != paraphrases or not all(isinstance(one, Mapping) for one in metadata):
        raise InvalidArgument(
            f"metadata must have one mapping for each of the {paraphrases} paraphrases; "
            f"there are {len(metadata)}"
        )
    names = list(dict.fromkeys(name for one in metadata for name in one))
    for name in names:
        if not isinstance(name, str) or not name or name in taken:
            raise InvalidArgument(
                f"metadata: {name!r} cannot be the name of a column; taken are {', '.join(taken)}"
            )
    return [dict(one) for one in metadata], names


def parse_model_groups(groups: Any) -> dict[str, list[str]]:
    """Return the models by group, without duplicates within a group.

    Raises:
        InvalidArgument: The groups are malformed.
    """
    form = 'models are given as {"a group": ["a model", "another"], ...}'
    if not isinstance(groups, Mapping):
        raise InvalidArgument(f"{form}, not as {type(groups).__name__}: {shorten_repr(groups)}")
    if not groups:
        raise InvalidArgument(f"no models; {form}")
    found: dict[str, list[str]] = {}
    for group, models in groups.items():
        # Accept a column of a data frame like a list.
        models = models.tolist() if hasattr(models, "tolist") else models
        if not isinstance(group, str):
            raise InvalidArgument(f"group {group!r}: its name must be a string; {form}")
        if isinstance(models, str) or not isinstance(models, (Sequence, set, frozenset)):
            raise InvalidArgument(
                f"group {group!r}: {shorten_repr(models)} is not a list of models; {form}"
            )
        for model in models:
            if not isinstance(model, str) or not model.strip():
                raise InvalidArgument(
                    f"group {group!r}: {shorten_repr(model)} is not a model's name; {form}"
                )
        if not models:
            raise InvalidArgument(f"group {group!r} has no models; name some or remove it")
        ordered = sorted(models) if isinstance(models, set | frozenset) else models
        found[group] = list(dict.fromkeys(ordered))
    return found


def shorten_repr(value: Any) -> str:
    """Return a value's repr for an error, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
