"""Checks of a task's configuration keys; the errors name the key."""

from collections.abc import Sequence

from swarm.errors import UserError

TOO_LONG = ("refuse", "drop", "truncate")
"""Policies for items that do not fit into the model's context."""


def check_one_of(key: str, value: object, allowed: Sequence[str]) -> str:
    """Return `value` if it is one of `allowed`.

    Raises:
        UserError: It is not.
    """
    if isinstance(value, str) and value in allowed:
        return value
    raise UserError(f"task.{key}: {value!r} is not one of {', '.join(allowed)}.")


def check_positive_int(key: str, value: object) -> int:
    """Return `value` if it is a positive integer.

    Raises:
        UserError: It is not; `true` and `1.0` are not integers either.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UserError(f"task.{key}: {value!r} is not a positive integer.")


def check_non_negative_int(key: str, value: object) -> int:
    """Return `value` if it is a non-negative integer.

    Raises:
        UserError: It is not.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise UserError(f"task.{key}: {value!r} is not an integer, 0 or more.")


def check_optional_int(key: str, value: object) -> int | None:
    """Return `value` if it is `None` or a positive integer.

    Raises:
        UserError: It is neither.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UserError(f"task.{key}: {value!r} is neither null nor a positive integer.")


def check_text(key: str, value: object) -> str:
    """Return `value` if it is a string that is not blank.

    Raises:
        UserError: It is not.
    """
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(f"task.{key}: {value!r} is not a string.")


def check_optional_text(key: str, value: object) -> str | None:
    """Return `value` if it is a string; `None` for `None` and for the empty string.

    Raises:
        UserError: It is something else.
    """
    if value is None or value == "":
        return None
    return check_text(key, value)


def check_bool(key: str, value: object) -> bool:
    """Return `value` if it is a boolean.

    Raises:
        UserError: It is not; "0" and 0 do not count as false.
    """
    if isinstance(value, bool):
        return value
    raise UserError(f"task.{key}: {value!r} is not one of true, false.")
