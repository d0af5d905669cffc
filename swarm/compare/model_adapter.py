"""Model-specific request parameters, added before a request is sent."""

from collections.abc import Callable
from typing import Any, ClassVar

from swarm.compare.config import Config, build_probe, is_reasoning_model
from swarm.errors import InvalidArgument

Selector = Callable[[str], bool]
PrepareFunction = Callable[[dict[str, Any], str], dict[str, Any]]


def _add_model_name(params: dict[str, Any], model: str) -> dict[str, Any]:
    return {"model": model, **params}


def _add_reasoning_effort(params: dict[str, Any], model: str) -> dict[str, Any]:
    return {"reasoning_effort": Config.reasoning_effort, **params}


def _use_completion_tokens(params: dict[str, Any], model: str) -> dict[str, Any]:
    if "max_tokens" not in params:
        return params
    others = {key: value for key, value in params.items() if key != "max_tokens"}
    if others.get("max_completion_tokens") is not None:
        return others  # set by the user; max_tokens may be the question's default
    return {**others, "max_completion_tokens": params["max_tokens"]}


BUILTIN_HANDLERS: tuple[tuple[Selector, PrepareFunction], ...] = (
    (lambda model: True, _add_model_name),
    (is_reasoning_model, _add_reasoning_effort),
    (is_reasoning_model, _use_completion_tokens),
)


def validate_params(params: Any, model: str) -> dict[str, Any]:
    """Return the parameters if they are well-formed; the endpoint may still reject them.

    Raises:
        InvalidArgument: "messages" is not a list of turns, or a token limit is not an integer.
    """
    turns = params.get("messages") if isinstance(params, dict) else None
    valid = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str | list | None)
        for turn in turns
    )
    if not valid:
        raise InvalidArgument(
            f"{model}: {params!r:.60} is not a dict with "
            '"messages": [{"role": ..., "content": ...}]'
        )
    for key in ("max_tokens", "max_completion_tokens"):
        if not isinstance(params.get(key), int | None):
            raise InvalidArgument(f"{model}: {key}={params[key]!r:.60}: must be an integer")
    return dict(params)


class ModelAdapter:
    """Registry of functions that change the request parameters of some models.

    Handlers run both when a request is sent and when its cached answer is looked up: a handler that
    changes the parameters changes the cache key.
    """

    _handlers: ClassVar[list[tuple[Selector, PrepareFunction]]] = [*BUILTIN_HANDLERS]

    @classmethod
    def register(cls, model_selector: Selector, prepare_function: PrepareFunction) -> None:
        """Add a handler; all matching handlers are called in the order of registration.

        Args:
            model_selector: Called with a model's name; returns whether the handler applies.
            prepare_function: Called with the parameters and the model's name; returns the
                parameters, and may modify them in place.
        """
        cls._handlers.append((model_selector, prepare_function))

    @classmethod
    def reset(cls) -> None:
        """Remove all registered handlers."""
        cls._handlers[:] = BUILTIN_HANDLERS

    @classmethod
    def prepare(cls, params: dict[str, Any], model: str) -> dict[str, Any]:
        """Return the parameters after all matching handlers.

        Raises:
            InvalidArgument: The result is not well-formed.
        """
        for selects, prepared in cls._handlers:
            if selects(model):
                params = validate_params(prepared(params, model), model)
        return params

    @classmethod
    def test_request_params(cls, model: str) -> dict[str, Any]:
        """Return the parameters of the request that probes whether an endpoint has a model."""
        return build_probe(model)
