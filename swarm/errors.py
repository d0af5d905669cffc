"""The one exception that is meant for people."""

from swarm._util.terminal import escape_control_chars


class UserError(Exception):
    """A mistake the user can mend; entries print it as one line and exit with `code`.

    Say which key or file it is about, what is allowed there and what to do. Control characters,
    which a file's name or a service's words may hold, become visible.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(escape_control_chars(" ".join(message.split())))
        self.code = code


class NotFinite(UserError):
    """Numbers of a model that are NaN or infinite, so that what it answers means nothing.

    Attributes:
        position: Which of the positions that were asked.
        what: "weights" or "activations".
    """

    def __init__(self, position: int, what: str) -> None:
        super().__init__(
            f"the mixed model's {what} are not finite: its weights are far from the experts', or "
            "model.dtype holds no such numbers (float16 ends at 65,504; try bfloat16 or float32)"
        )
        self.position, self.what = position, what


# Mistakes in how an experiment is set up.


class InvalidArgument(UserError, ValueError):
    """An argument has a value that it cannot have."""


def missing_extra_error(error: ImportError) -> UserError:
    """What to tell of a library of the extra that is not installed."""
    return UserError(f"{error.name} is missing: pip install 'model-swarms[compare]' brings it")


class NoClientForModel(UserError):
    """No endpoint that is known has a model of this name.

    Attributes:
        lasting: Whether it holds for this process: looking again would take long, or change
            nothing as long as the settings are the same.
    """

    lasting = True
