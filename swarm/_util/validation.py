"""Checks of a task's configuration keys: a wrong value ends a run at once, with the key's name."""

from collections.abc import Sequence

from swarm.errors import UserError

TOO_LONG = ("refuse", "drop", "truncate")
"""What a task may do with items that do not fit into the model's context."""


def check_one_of(key: str, value: object, allowed: Sequence[str]) -> str:
    """`value` if it is one of the `allowed` words.

    Raises:
        UserError: It is not.
    """
    if isinstance(value, str) and value in allowed:
        return value
    raise UserError(f"task.{key}: {value!r} is not one of {', '.join(allowed)}.")


def check_positive_int(key: str, value: object) -> int:
    """`value` if it is a whole number from 1 on.

    Raises:
        UserError: It is not; `true` and `1.0` are not whole numbers either.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UserError(f"task.{key}: {value!r} is not a whole number from 1 on.")


def check_non_negative_int(key: str, value: object) -> int:
    """`value` if it is a whole number from 0 on.

    Raises:
        UserError: It is not.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise UserError(f"task.{key}: {value!r} is not a whole number from 0 on.")


def check_optional_int(key: str, value: object) -> int | None:
    """`value` if it is `None` or a whole number from 1 on.

    Raises:
        UserError: It is neither.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UserError(f"task.{key}: {value!r} is neither null nor a whole number from 1 on.")


def check_text(key: str, value: object) -> str:
    """`value` if it is a text with something in it.

    Raises:
        UserError: It is not.
    """
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(f"task.{key}: {value!r} is not a text.")


def check_optional_text(key: str, value: object) -> str | None:
    """`value` if it is a text; `None` for `None` and for the empty text.

    Raises:
        UserError: It is something else.
    """
    if value is None or value == "":
        return None
    return check_text(key, value)


def check_bool(key: str, value: object) -> bool:
    """`value` if it is true or false.

    Raises:
        UserError: It is neither; "0" and 0 are not false here.
    """
    if isinstance(value, bool):
        return value
    raise UserError(f"task.{key}: {value!r} is not one of true, false.")
