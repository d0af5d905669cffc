"""What tells a model from another one that had its name before."""

from dataclasses import fields
from inspect import signature
from typing import Any

from swarm.collab import AgentSpec
from swarm.collab.consortium import Consortium
from swarm.collab.moa import MixtureOfAgents
from swarm.collab.presets import PRESET_KEYS
from swarm.models import Model
from swarm.models.cached import CachedModel
from swarm.models.function import FunctionModel
from swarm.models.openai import OpenAI

CONSORTIUM_SETTINGS = tuple(key for key in signature(Consortium.__init__).parameters
                      if key not in ("self", "members", "trace"))  # fmt: skip


def model_identity(model: Model) -> Any:
    """What an answer of a model depends on besides its name and the request, as JSON.

    Of an endpoint, where it is and what it is told in every request; of a function, the text of its
    own file; of a mixture or a consortium, its settings and its members; of a model with a
    `fingerprint`, as those on this machine have it, that. `None` of all others: they are told apart
    by their names alone.

    Raises:
        UserError: A local model's files are not there.
    """
    if isinstance(model, CachedModel):
        return model_identity(model.model)
    if isinstance(model, OpenAI):
        return [model.client.url, model.fixed]
    if isinstance(model, FunctionModel):
        return model.source()
    if isinstance(model, MixtureOfAgents):
        return {key: _setting_to_json(getattr(model, key)) for key in PRESET_KEYS}
    if isinstance(model, Consortium):
        return {key: _setting_to_json(getattr(model, key)) for key in ("proposers", *CONSORTIUM_SETTINGS)}
    return model.fingerprint() if hasattr(model, "fingerprint") else None


def _setting_to_json(value: Any) -> Any:
    """A setting of a mixture or a consortium as JSON."""
    if isinstance(value, tuple):
        return [_setting_to_json(one) for one in value]
    if not isinstance(value, AgentSpec):
        return repr(value)
    told = {one.name: getattr(value, one.name) for one in fields(value)}
    return {**told, "model": model_identity(value.model)}
