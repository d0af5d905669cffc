"""Chat completion requests: what is applied, passed on, ignored or refused.

Endpoints get parameters that only they can apply. For other models, parameters that shape sampling
are ignored, as unknown ones are for every model, and listed in a response header; those without
which an answer would be wrong are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm._util.settings import Positive, Share, Text, describe_type, field_types
from swarm.models.base import Message, Request
from swarm.serve.api_errors import HttpError

Penalty = Annotated[float, Field(ge=-2, le=2)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Turn(BaseModel):
    """One message; fields that are not listed are ignored."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: Text | None = None
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: Text | None = None
    # Sent back by clients with an answer; not shown to models.
    reasoning: Any = None
    reasoning_content: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, turn: Any) -> Any:
        return {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else turn


class ChatBody(BaseModel):
    """Body of a chat completion request; fields that are not listed are ignored."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Text
    messages: Annotated[list[Turn], Field(min_length=1)]
    stream: bool = False
    stream_options: dict[str, Any] = {}
    n: Annotated[int, Field(ge=1, le=16)] = 1  # each sample takes a thread
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | list[Text] = []
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_form: Literal["chat", "plain"] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Passed on to endpoints. Other models ignore them: their answers are still valid.
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    # Passed on to endpoints. Other models refuse them: their answers would be wrong.
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, Any] | None = None


NEUTRAL_VALUES: dict[str, Any] = {
    "top_p": 1,
    "top_k": None,
    "min_p": None,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "reasoning_effort": None,
    "verbosity": None,
    "response_format": {"type": "text"},
    "logit_bias": {},
}
"""Parameters that not every model supports, with the value that has no effect."""

DECISIVE = ("response_format", "logit_bias")
"""Those of them without which an answer is wrong."""


@dataclass(frozen=True)
class ChatRequest:
    """One chat completion request.

    Attributes:
        model: Name used by the client.
        request: Request to the model; samples differ in `Request.sample` only.
        count: Number of samples.
        streamed: True if they are to be streamed.
        usage: True if a stream ends with its usage.
        form: See `swarm.models.base.with_prompt_form`.
        passed: Additional fields for an endpoint.
        error: Error for models that are not endpoints; `None` if they can answer.
        ignored: Parameters that no model applies.
        ignored_elsewhere: Parameters that only endpoints apply.
    """

    model: str
    request: Request
    count: int
    streamed: bool
    usage: bool
    form: str | None
    passed: Mapping[str, Any] = field(default_factory=dict)
    error: HttpError | None = None
    ignored: tuple[str, ...] = ()
    ignored_elsewhere: tuple[str, ...] = ()

    def of_endpoint(self) -> tuple[Request, tuple[str, ...]]:
        """Return the request to an endpoint's model, and the ignored parameters."""
        return replace(self.request, body=dict(self.passed) or None), self.ignored

    def of_others(self) -> tuple[Request, tuple[str, ...]]:
        """Return the request to any other model, and the ignored parameters.

        Raises:
            HttpError: An answer would be wrong without an unsupported parameter.
        """
        if self.error:
            raise self.error
        return self.request, (*self.ignored_elsewhere, *self.ignored)


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
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HttpError("the body contains a lone surrogate") from None
    try:
        chat = ChatBody.model_validate({k: one for k, one in body.items() if one is not None})
    except ValidationError as complaint:
        raise _to_http_error(complaint) from None
    _check_combinations(chat)
    turns, passed, error = _read_turns(chat.messages)
    elsewhere = ["messages.name"] if any(turn.name for turn in chat.messages) else []
    if chat.tools:
        names = ("tools", "tool_choice", "parallel_tool_calls")
        passed |= {k: getattr(chat, k) for k in names if getattr(chat, k) is not None}
        elsewhere += ["tools"] if chat.tool_choice != "none" else []
        if not _is_free(chat.tool_choice):
            reason = 'is not supported by this model; leave it out, or give "none" or "auto"'
            error = error or _parameter_error("tool_choice", reason)
    for name, neutral in NEUTRAL_VALUES.items():
        value = getattr(chat, name)
        if value is None or value == neutral:
            continue
        passed[name] = value
        if name in DECISIVE:
            reason = "is not supported by this model; leave it out"
            error = error or _parameter_error(name, reason)
        else:
            elsewhere.append(name)
    stop = [chat.stop] if isinstance(chat.stop, str) else chat.stop
    request = Request(
        turns,
        max_new_tokens=chat.max_completion_tokens or chat.max_tokens or longest,
        temperature=chat.temperature,
        seed=chat.seed,
        stop=tuple(stop),
        top_logprobs=(chat.top_logprobs or -1) if chat.logprobs else 0,
    )
    unknown = [f"messages.{key}" for turn in chat.messages for key in turn.model_extra or ()]
    return ChatRequest(
        chat.model,
        request,
        chat.n,
        chat.stream,
        chat.stream_options.get("include_usage") is True,
        chat.prompt_form,
        passed,
        error,
        tuple(dict.fromkeys([*(chat.model_extra or ()), *unknown])),
        tuple(elsewhere),
    )


def _check_combinations(chat: ChatBody) -> None:
    if chat.stream_options and not chat.stream:
        raise _parameter_error("stream_options", "requires stream")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise _parameter_error("top_logprobs", "requires logprobs: true")
    new, old = chat.max_completion_tokens, chat.max_tokens
    if new and old and new != old:
        reason = f"contradicts max_completion_tokens={new}; give one of them"
        raise _parameter_error("max_tokens", reason)
    if not chat.tools and not _is_free(chat.tool_choice):
        raise _parameter_error("tool_choice", "requires tools")


def _is_free(choice: Any) -> bool:
    """Return whether a `tool_choice` allows an answer without a tool call."""
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    return choice in (None, "none", "auto") or (
        isinstance(allowed, dict) and allowed.get("mode") == "auto"
    )


def _read_turns(
    messages: list[Turn],
) -> tuple[tuple[Message, ...], dict[str, Any], HttpError | None]:
    """Return the conversation, the messages for endpoints, and the error for other models."""
    found, sent, error = [], [], None
    for n, turn in enumerate(messages):
        place = f"messages.[{n}]"
        tools = turn.model_dump(include={"tool_calls", "tool_call_id"}, exclude_defaults=True)
        if turn.role == "tool" and turn.tool_call_id is None:
            raise _parameter_error(f"{place}.tool_call_id", "is missing")
        if tools:
            reason = "this model reads no tool calls and no results of tools"
            error = error or _parameter_error(f"{place}.{next(iter(tools))}", reason)
        role = "system" if turn.role == "developer" else turn.role
        text, other = _read_content(f"{place}.content", turn)
        error = error or other
        found.append(Message(role, text))
        content = turn.content if other or turn.content is None else text
        named = {"name": turn.name} if turn.name else {}
        sent.append({"role": role, "content": content, **tools, **named})
    plain = all(turn == one._asdict() for turn, one in zip(sent, found, strict=True))
    return tuple(found), {} if plain else {"messages": sent}, error


def _read_content(place: str, turn: Turn) -> tuple[str, HttpError | None]:
    """Return the text of a message, its parts joined by newlines; an error for other parts."""
    if isinstance(turn.content, str):
        return turn.content, None
    if not turn.content:
        if turn.tool_calls:
            return "", None
        raise _parameter_error(place, "must be a string or a list of parts of type text")
    texts = []
    for n, part in enumerate(turn.content):
        if part.get("type") != "text":
            reason = "this model accepts parts of type text only"
            return "", _parameter_error(f"{place}.[{n}]", reason)
        if not isinstance(part.get("text"), str):
            raise _parameter_error(f"{place}.[{n}].text", "must be a string")
        texts.append(part["text"])
    return "\n".join(texts), None


def _parameter_error(name: str, reason: str) -> HttpError:
    return HttpError(f"{name}: {reason}", 400, name)


def _to_http_error(error: ValidationError) -> HttpError:
    """Return the first complaint of pydantic, with the place of the value as OpenAI names it."""
    first = error.errors(include_url=False)[0]
    types, place = field_types(ChatBody), []
    for one in first["loc"]:
        if isinstance(one, int):
            place.append(f"[{one}]")
        elif one in types or one in Turn.model_fields:  # not the names of a union's members
            place.append(one)
    name = ".".join(place)
    annotation = types.get(name) or (field_types(Turn).get(place[-1]) if len(place) == 3 else None)
    wanted = describe_type(annotation)
    if first["type"] == "missing":
        return HttpError(f"{name}: is missing", 400, name)
    return HttpError(
        f"{name}: must be {wanted}" if wanted else f"{name}: {first['msg']}", 400, name
    )
