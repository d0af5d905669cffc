"""What tells a model from another one that had its name before."""

from dataclasses import fields
from inspect import signature
from typing import Any

from swarm.collab import Slot
from swarm.collab.consortium import Consortium
from swarm.collab.moa import MixtureOfAgents
from swarm.collab.presets import KEYS
from swarm.models import Model
from swarm.models.cached import Cached
from swarm.models.function import Function
from swarm.models.openai import OpenAI

OF_CONSORTIUM = tuple(key for key in signature(Consortium.__init__).parameters
                      if key not in ("self", "members", "trace"))  # fmt: skip


def identity(model: Model) -> Any:
    """What an answer of a model depends on besides its name and the request, as JSON.

    Of an endpoint, where it is and what it is told in every request; of a function, the text of its
    own file; of a mixture or a consortium, its settings and its members; of a model with a
    `fingerprint`, as those on this machine have it, that. `None` of all others: they are told apart
    by their names alone.

    Raises:
        UserError: A local model's files are not there.
    """
    if isinstance(model, Cached):
        return identity(model.model)
    if isinstance(model, OpenAI):
        return [model.client.url, model.fixed]
    if isinstance(model, Function):
        return model.source()
    if isinstance(model, MixtureOfAgents):
        return {key: _told(getattr(model, key)) for key in KEYS}
    if isinstance(model, Consortium):
        return {key: _told(getattr(model, key)) for key in ("proposers", *OF_CONSORTIUM)}
    return model.fingerprint() if hasattr(model, "fingerprint") else None


def _told(value: Any) -> Any:
    """A setting of a mixture or a consortium as JSON."""
    if isinstance(value, tuple):
        return [_told(one) for one in value]
    if not isinstance(value, Slot):
        return repr(value)
    told = {one.name: getattr(value, one.name) for one in fields(value)}
    return {**told, "model": identity(value.model)}
