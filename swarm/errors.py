"""Exceptions that are shown to users."""

from swarm._util.terminal import escape_control_chars


class UserError(Exception):
    """A mistake the user can fix; entries print it as one line and exit with `code`.

    The message should name the key or file, the allowed values and the remedy. Control characters,
    which file names or responses of services may contain, are made visible.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(escape_control_chars(" ".join(message.split())))
        self.code = code


class NotFinite(UserError):
    """A model produced NaN or infinite numbers, so that its answers are meaningless.

    Attributes:
        position: Index of the position in the request.
        quantity: "weights" or "activations".
    """

    def __init__(self, position: int, quantity: str) -> None:
        super().__init__(
            f"the mixed model's {quantity} are not finite: its weights are far from the experts', "
            "or exceed the range of model.dtype (float16: 65,504; try bfloat16 or float32)"
        )
        self.position, self.quantity = position, quantity


class InvalidArgument(UserError, ValueError):
    """An argument has an invalid value."""


def missing_extra_error(error: ImportError) -> UserError:
    """Return the error for a missing library of the optional dependencies."""
    return UserError(f"{error.name} is not installed: pip install 'model-swarms[compare]'")


class NoClientForModel(UserError):
    """No known endpoint has a model of this name.

    Attributes:
        lasting: Whether the failure persists in this process: retrying would be slow, or useless as
            long as the settings are unchanged.
    """

    lasting = True
