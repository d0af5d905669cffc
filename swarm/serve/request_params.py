"""Parameters of completion requests: applied, passed on, ignored or rejected; served models.

Endpoints get parameters that only they can apply. For other models, parameters that shape sampling
are ignored, as unknown ones are for every model, and listed in a response header; those without
which an answer would be wrong are rejected.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError
from swarm.models.base import PROMPT_FORMS, Message, Model, Request
from swarm.models.trace import Trace, TracingModel
from swarm.serve.api_errors import HttpError

if TYPE_CHECKING:
    from swarm.registry.registry import Roster

MAX_SAMPLES, MAX_LOGPROBS = 16, 20
"""Maximum `n`, as each sample takes a thread, and OpenAI's maximum `top_logprobs`."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_k": (),
    "min_p": (),
    "repetition_penalty": (1,),
    "reasoning_effort": (),
    "verbosity": (),
}
"""Parameters that not every model supports, with values that have no effect."""

NUMBERS: dict[str, tuple[float, float]] = {
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "top_k": (-1, 2**31),
    "min_p": (0, 1),
    "repetition_penalty": (0, 10),
}
"""Numeric parameters of `NEUTRAL_VALUES` and their ranges."""

SHAPING = (*NUMBERS, "reasoning_effort", "verbosity")
"""Passed on to endpoints; ignored by other models, whose answers are still valid."""

DECISIVE = ("response_format", "logit_bias")
"""Passed on to endpoints; rejected by other models, whose answers would be wrong."""

OPTIONAL = ("functions",)
"""Ignored, as OpenAI replaced them by `tools`: a model that may call a function may also answer."""

FREE_CHOICES = (None, "none", "auto")
"""Values of `tool_choice` that allow an answer without a tool call."""

ROLE_MAP = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

KNOWN_MESSAGE_KEYS = ("role", "content", "name", "reasoning_content", "reasoning")
"""Message fields; reasoning, which clients send back with an answer, is not shown to models."""


@dataclass(frozen=True)
class ChatRequest:
    """One chat completion request.

    Attributes:
        model: Name used by the client.
        request: Request to the model; samples differ in `Request.sample` only.
        count: Number of samples.
        streamed: True if they are to be streamed.
        usage: True if a stream ends with its usage.
        passed: Additional fields for an endpoint.
        error: Error for models that are not endpoints; `None` if they can answer.
        ignored: Parameters that such models ignore.
        form: See `swarm.models.base.with_prompt_form`.
    """

    model: str
    request: Request
    count: int
    streamed: bool
    usage: bool
    passed: Mapping[str, Any] = field(default_factory=dict)
    error: HttpError | None = None
    ignored: tuple[str, ...] = ()
    form: str | None = None

    def of_endpoint(self) -> tuple[Request, tuple[str, ...]]:
        """Return the request to an endpoint's model, and the ignored parameters."""
        rest = tuple(name for name in self.ignored if name not in (*self.passed, "messages.name"))
        return replace(self.request, body=dict(self.passed) or None), rest

    def of_others(self) -> tuple[Request, tuple[str, ...]]:
        """Return the request to any other model, and the ignored parameters.

        Raises:
            HttpError: An answer would be wrong without an unsupported parameter.
        """
        if self.error:
            raise self.error
        return self.request, self.ignored


def parse_chat_request(body: Any, longest: int | None) -> ChatRequest:
    """Parse a chat completion request.

    Args:
        body: JSON body.
        longest: Default maximum number of new tokens; `None`: see `Request.max_new_tokens`.

    Raises:
        HttpError: A parameter is missing, invalid or unsupported.
    """
    if not isinstance(body, dict):
        raise HttpError("the body must be a JSON object")
    remaining = {key: value for key, value in body.items() if value is not None}
    model, messages = remaining.pop("model", None), remaining.pop("messages", None)
    if not isinstance(model, str) or not model:
        raise _parameter_error("model", "must be the name of a model; GET /v1/models lists them")
    streamed = _parse_flag(remaining, "stream")
    options = remaining.pop("stream_options", {})
    if not isinstance(options, dict) or (options and not streamed):
        raise _parameter_error("stream_options", "must be an object, and requires stream")
    logprobs, top = (
        _parse_flag(remaining, "logprobs"),
        _parse_int(remaining, "top_logprobs", 0, MAX_LOGPROBS),
    )
    if top is not None and not logprobs:
        raise _parameter_error("top_logprobs", "requires logprobs: true")
    turns, passed, refused = _parse_messages(messages)
    ignored = ["messages.name"] if passed and refused is None else []
    tools, unable = _parse_tools(remaining)
    passed, refused = passed | tools, refused or unable
    request = Request(
        turns,
        max_new_tokens=_parse_max_tokens(remaining) or longest,
        temperature=_parse_temperature(remaining),
        seed=_parse_int(remaining, "seed", -(2**63), 2**63 - 1),
        stop=_parse_stops(remaining.pop("stop", [])),
        top_logprobs=(top or -1) if logprobs else 0,
    )
    count = _parse_int(remaining, "n", 1, MAX_SAMPLES) or 1
    form = remaining.pop("prompt_form", None)
    if form not in (None, *PROMPT_FORMS):
        raise _parameter_error("prompt_form", f"must be {' or '.join(PROMPT_FORMS)}")
    if tools and tools.get("tool_choice") != "none":
        ignored.append("tools")
    ignored += [name for name in remaining if name not in NEUTRAL_VALUES]
    for name in _effective(remaining):
        if name in SHAPING or name in OPTIONAL:
            ignored.append(name)
        else:
            refused = refused or _parameter_error(
                name, f"is not supported by this model; {_leave(name)}"
            )
        if name not in OPTIONAL:
            passed[name] = remaining[name]
    usage = options.get("include_usage") is True
    return ChatRequest(
        model, request, count, streamed, usage, passed, refused, tuple(ignored), form
    )


def _parse_max_tokens(remaining: dict[str, Any]) -> int | None:
    new = _parse_int(remaining, "max_completion_tokens", 1, 2**31)
    old = _parse_int(remaining, "max_tokens", 1, 2**31)
    if new and old and new != old:
        raise _parameter_error(
            "max_tokens", f"contradicts max_completion_tokens={new}; give one of them"
        )
    return new or old


def _effective(remaining: Mapping[str, Any]) -> Iterator[str]:
    """Yield the remaining known parameters that have an effect.

    Raises:
        HttpError: One is invalid, or not supported by any model.
    """
    for name, value in remaining.items():
        if any(value == neutral for neutral in NEUTRAL_VALUES.get(name, (value,))):
            continue
        if name in NUMBERS:
            lowest, highest = NUMBERS[name]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not lowest <= value <= highest:
                raise _parameter_error(name, f"must be a number from {lowest} to {highest}")
        elif name in SHAPING and not isinstance(value, str):
            raise _parameter_error(name, "must be a string")
        elif name in (*DECISIVE, *OPTIONAL):
            kind = list if name in OPTIONAL else dict
            if not isinstance(value, kind):
                raise _parameter_error(name, f"must be {'a list' if kind is list else 'an object'}")
        elif name not in SHAPING:
            raise _parameter_error(name, f"is not supported; {_leave(name)}")
        yield name


def _parse_tools(left: dict[str, Any]) -> tuple[dict[str, Any], HttpError | None]:
    """Return the fields about tools for endpoints, and the error for other models.

    Other models never call a tool. If the choice is free, an answer without a call is valid.
    """
    tools, choice = left.pop("tools", []), left.pop("tool_choice", None)
    parallel = left.pop("parallel_tool_calls", None)
    if not isinstance(tools, list) or not all(
        isinstance(one, dict) and isinstance(one.get("type"), str) for one in tools
    ):
        raise _parameter_error("tools", "must be a list of objects, each with a type")
    if not (choice in (*FREE_CHOICES, "required") or isinstance(choice, dict)):
        raise _parameter_error(
            "tool_choice", "must be none, auto, required, or an object that names a tool"
        )
    if parallel is not None and not isinstance(parallel, bool):
        raise _parameter_error("parallel_tool_calls", "must be true or false")
    given = choice.get("allowed_tools") if isinstance(choice, dict) else None
    free = choice in FREE_CHOICES or (isinstance(given, dict) and given.get("mode") == "auto")
    if not tools:
        if not free:
            raise _parameter_error("tool_choice", "requires tools")
        return {}, None
    told = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    refused = _parameter_error(
        "tool_choice",
        'is not supported by this model, which calls no tools; leave it out, or give "none" or '
        '"auto"',
    )
    return {key: one for key, one in told.items() if one is not None}, None if free else refused


def _leave(name: str) -> str:
    neutral = " or ".join(map(json.dumps, NEUTRAL_VALUES[name]))
    return f"leave it out, or give {neutral}"


def _parse_messages(messages: Any) -> tuple[tuple[Message, ...], dict[str, Any], HttpError | None]:
    """Return the conversation, the messages for endpoints, and the error for other models."""
    if not isinstance(messages, list) or not messages:
        raise _parameter_error("messages", "must be a list of at least one message")
    found, sent, more = [], [], False
    refused: HttpError | None = None
    for n, turn in enumerate(messages):
        location = f"messages.[{n}]"
        if not isinstance(turn, dict) or turn.get("role") not in [*ROLE_MAP]:
            raise _parameter_error(f"{location}.role", f"must be one of {', '.join(ROLE_MAP)}")
        message_fields = _parse_tool_fields(location, turn)
        for key, value in turn.items():
            if key not in (*KNOWN_MESSAGE_KEYS, *message_fields) and value not in (None, [], ""):
                raise _parameter_error(f"{location}.{key}", "is not supported")
        content, role = turn.get("content"), ROLE_MAP[turn["role"]]
        if message_fields:
            where = f"{location}.{'tool_calls' if 'tool_calls' in message_fields else 'role'}"
            refused, more = refused or _tool_turn_error(where), True
        if turn.get("name"):
            message_fields["name"], more = _parse_text(f"{location}.name", turn["name"]), True
        try:
            # A turn that calls tools may have no text.
            empty = content is None and "tool_calls" in message_fields
            text = "" if empty else _parse_content(f"{location}.content", content)
        except Pictures as error:
            text, refused, more = "", refused or error, True
        else:
            content = None if empty else text
        found.append(Message(role, text))
        sent.append({"role": role, "content": content, **message_fields})
    return tuple(found), {"messages": sent} if more else {}, refused


def _parse_tool_fields(place: str, turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that make a turn one of tools: their calls, or the call it answers."""
    if turn["role"] == "tool":
        return {"tool_call_id": _parse_text(f"{place}.tool_call_id", turn.get("tool_call_id"))}
    calls = turn.get("tool_calls")
    if turn["role"] != "assistant" or not calls:
        return {}
    if not isinstance(calls, list) or not all(isinstance(one, dict) for one in calls):
        raise _parameter_error(f"{place}.tool_calls", "must be a list of objects")
    return {"tool_calls": calls}


def _tool_turn_error(place: str) -> HttpError:
    """Return the error for a model that is not behind an endpoint."""
    return _parameter_error(place, "this model reads no tool calls and no results of tools")


class Pictures(HttpError):
    """Message parts that only an endpoint may support."""


def _parse_content(location: str, content: Any) -> str:
    """Parse message content; parts are joined by newlines."""
    if isinstance(content, list) and content:
        texts = []
        for n, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise _parameter_error(f"{location}.[{n}]", "must be an object with a type")
            if part["type"] != "text":
                part_location = f"{location}.[{n}]"
                raise Pictures(
                    f"{part_location}: this model accepts parts of type text only",
                    400,
                    part_location,
                )
            texts.append(_parse_text(f"{location}.[{n}].text", part.get("text")))
        return "\n".join(texts)
    return _parse_text(location, content)


def _parse_text(location: str, text: Any) -> str:
    if not isinstance(text, str):
        raise _parameter_error(location, "must be a string or a list of parts of type text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _parameter_error(location, "contains a lone surrogate") from None
    return text


def _parse_stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise _parameter_error("stop", "must be a non-empty string or a list of them")
    return tuple(_parse_text("stop", one) for one in stops)


def _parse_temperature(remaining: dict[str, Any]) -> float | None:
    value = remaining.pop("temperature", None)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 2 or not math.isfinite(value):
        raise _parameter_error("temperature", "must be a number from 0 to 2")
    return float(value)


def _parse_flag(remaining: dict[str, Any], name: str) -> bool:
    value = remaining.pop(name, False)
    if not isinstance(value, bool):
        raise _parameter_error(name, "must be true or false")
    return value


def _parse_int(remaining: dict[str, Any], name: str, lowest: int, highest: int) -> int | None:
    value = remaining.pop(name, None)
    if value is not None and (type(value) is not int or not lowest <= value <= highest):
        raise _parameter_error(name, f"must be an integer from {lowest} to {highest}")
    return value


def _parameter_error(name: str, reason: str) -> HttpError:
    return HttpError(f"{name}: {reason}", 400, name)


MAX_NAMES_SHOWN = 10
"""Maximum number of names in an error message."""


def resolve_name(name: str, models: Mapping[str, Model]) -> str:
    """Return the served model for a client's name: the full name, or a unique suffix.

    Raises:
        HttpError: It does not exist, or is ambiguous.
    """
    if name in models:
        return name
    suffix_matches = [one for one in models if one.partition("/")[2] == name]
    if len(suffix_matches) == 1:
        return suffix_matches[0]
    full_names = {one.partition("/")[2]: one for one in models} | {one: one for one in models}
    matches = suffix_matches or [full_names[one] for one in get_close_matches(name, full_names, 1)]
    suggestion = f"did you mean {' or '.join(matches)}? " if matches else ""
    more = f" and {len(models) - MAX_NAMES_SHOWN} more" if len(models) > MAX_NAMES_SHOWN else ""
    available = f"{', '.join(list(models)[:MAX_NAMES_SHOWN])}{more}"
    message = f"model {name!r:.200}: is not served; {suggestion}available models: {available}"
    raise HttpError(message, 404, "model", "model_not_found")


def select_models(roster: "Roster", names: Sequence[str]) -> dict[str, Model]:
    """Return the models of these names after checking them; nothing is loaded yet.

    Raises:
        UserError: A model does not exist, or something it needs is missing.
    """
    models = {name: roster.model(name) for name in names}
    for model in models.values():
        _check_model(model)
    return models


def discover_models(roster: "Roster", local: Sequence[str]) -> tuple[dict[str, Model], list[str]]:
    """Find the base, the experts, the best models of runs, the mixtures and the consortia.

    Args:
        roster: Registry of models.
        local: Names of local models, without local/.

    Returns:
        Models that can be used, and the names of the others, for which e.g. a key or a file is
        missing; see `select_models` for the reason.
    """
    found: dict[str, Model] = {}
    left_out = []
    for name in [*(f"local/{name}" for name in local), *_list_collaborations()]:
        try:
            found.update(select_models(roster, [name]))
        except UserError:
            left_out.append(name)
    return found, left_out


def trace_models(models: Mapping[str, Model], trace: Trace) -> dict[str, Model]:
    """Trace the calls of models; for a collaboration those of its members."""
    traced = {}
    for name, model in models.items():
        if hasattr(model, "trace"):
            model.trace = trace
        traced[name] = model if hasattr(model, "trace") else TracingModel(model, name, trace)
    return traced


def _list_collaborations() -> list[str]:
    """Return the shipped mixtures, and the saved and shipped consortia.

    Raises:
        UserError: The database of saved consortia cannot be read.
    """
    from swarm.multi_agent.consortium.store import ConsortiumStore
    from swarm.multi_agent.presets import preset_names

    consortia = dict.fromkeys([*ConsortiumStore().list_names(), *preset_names("consortium")])
    moa = [f"moa/{name}" for name in preset_names("moa")]
    return [*moa, *(f"consortium/{name}" for name in consortia)]


def _check_model(model: Model) -> None:
    if check := getattr(model, "check", None):
        check()
