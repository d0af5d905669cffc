"""Model-specific request parameters, added before a request is sent."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from swarm.compare.settings import CompareSettings
from swarm.errors import InvalidArgument

Selector = Callable[[str], bool]
PrepareFunction = Callable[[dict[str, Any], str], dict[str, Any]]

REASONING_MODEL_PATTERN = re.compile(r"(o1|o3|o4|gpt-5)")
"""Prefix of the names of OpenAI's reasoning models, after a vendor's name if any."""


@lru_cache(maxsize=1024)
def is_reasoning_model(model: str) -> bool:
    """Return whether this is one of OpenAI's reasoning models, at any router."""
    return bool(REASONING_MODEL_PATTERN.match(model.rsplit("/", 1)[-1]))


def _add_model_name(params: dict[str, Any], model: str) -> dict[str, Any]:
    return {"model": model, **params}


def _add_reasoning_effort(params: dict[str, Any], model: str) -> dict[str, Any]:
    return {"reasoning_effort": CompareSettings.reasoning_effort, **params}


def _use_completion_tokens(params: dict[str, Any], model: str) -> dict[str, Any]:
    if "max_tokens" not in params:
        return params
    others = {key: value for key, value in params.items() if key != "max_tokens"}
    if others.get("max_completion_tokens") is not None:
        return others  # set by the user; max_tokens may be the question's default
    return {**others, "max_completion_tokens": params["max_tokens"]}


def _builtin_handlers() -> list[tuple[Selector, PrepareFunction]]:
    return [
        (lambda model: True, _add_model_name),
        (is_reasoning_model, _add_reasoning_effort),
        (is_reasoning_model, _use_completion_tokens),
    ]


def validate_params(params: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the parameters if they are well-formed; the endpoint may still reject them.

    Raises:
        InvalidArgument: "messages" is not a list of turns, or a token limit is not an integer.
    """
    turns = params.get("messages")
    valid = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str | list | None)
        for turn in turns
    )
    if not valid:
        raise InvalidArgument(f"{model}: messages={turns!r:.60} is not a list of turns")
    for key in ("max_tokens", "max_completion_tokens"):
        if not isinstance(params.get(key), int | None):
            raise InvalidArgument(f"{model}: {key}={params[key]!r:.60}: must be an integer")
    return params


class ModelAdapter:
    """Registry of functions that change the request parameters of some models.

    Handlers run both when a request is sent and when its cached answer is looked up: a handler that
    changes the parameters changes the cache key.
    """

    _handlers = _builtin_handlers()

    @classmethod
    def register(cls, model_selector: Selector, prepare_function: PrepareFunction) -> None:
        """Add a handler; all matching handlers are called in the order of registration.

        Args:
            model_selector: Called with a model's name; returns whether the handler applies.
            prepare_function: Called with the parameters and the model's name; returns the
                parameters, and may modify them in place.

        Raises:
            InvalidArgument: An argument is not callable.
        """
        if not (callable(model_selector) and callable(prepare_function)):
            raise InvalidArgument("ModelAdapter.register: must be given two functions")
        cls._handlers.append((model_selector, prepare_function))

    @classmethod
    def reset(cls) -> None:
        """Remove all registered handlers."""
        cls._handlers = _builtin_handlers()

    @classmethod
    def prepare(cls, params: dict[str, Any], model: str) -> dict[str, Any]:
        """Return the parameters after all matching handlers.

        Raises:
            InvalidArgument: A handler does not return a dict.
        """
        for selects, prepared in cls._handlers:
            if selects(model):
                params = prepared(params, model)
                if not isinstance(params, dict):
                    name = getattr(prepared, "__name__", "a handler")
                    raise InvalidArgument(
                        f"ModelAdapter: {name} gave {params!r:.60} in place of a dict"
                    )
        return params

    @classmethod
    def test_request_params(cls, model: str) -> dict[str, Any]:
        """Return the parameters of the request that probes whether an endpoint has a model."""
        params = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "timeout": 30}
        if not is_reasoning_model(model):
            return {**params, "max_tokens": 1}
        effort = "none" if model.rsplit("/", 1)[-1].startswith("gpt-5.") else "low"
        return {**params, "max_completion_tokens": 32, "reasoning_effort": effort}
