"""Mistakes in how an experiment is set up."""

from swarm.errors import UserError


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
