"""Mistakes in how an experiment is set up."""

from swarm.errors import UserError


class WrongValue(UserError, ValueError):
    """An argument has a value that it cannot have."""


class NoClientForModel(UserError):
    """No endpoint that is known has a model of this name."""
