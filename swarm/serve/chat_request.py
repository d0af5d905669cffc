"""Chat completion requests: what is applied, passed on, ignored or refused.

Endpoints get parameters that only they can apply. For other models, parameters that shape sampling
are ignored, as unknown ones are for every model, and listed in a response header; those without
which an answer would be wrong are refused.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm._util.settings import Positive, Share, Text, describe_type, field_types
from swarm.models.base import Message, Request
from swarm.serve.api_errors import HttpError

Penalty = Annotated[float, Field(ge=-2, le=2)]


class Turn(BaseModel):
    """One message; fields that are not listed are ignored."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
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

    @classmethod
    def parse(cls, body: Any) -> "ChatBody":
        """Parse and check a JSON body.

        Raises:
            HttpError: A parameter is missing, invalid or contradicts another one.
        """
        if not isinstance(body, dict):
            raise HttpError("the body must be a JSON object")
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise HttpError("the body contains a lone surrogate") from None
        try:
            chat = cls.model_validate({k: one for k, one in body.items() if one is not None})
        except ValidationError as complaint:
            raise _to_http_error(complaint) from None
        new, old = chat.max_completion_tokens, chat.max_tokens
        contradicts = f"contradicts max_completion_tokens={new}; give one of them"
        for name, wrong, reason in (
            ("stream_options", chat.stream_options and not chat.stream, "requires stream"),
            (
                "top_logprobs",
                chat.top_logprobs is not None and not chat.logprobs,
                "requires logprobs: true",
            ),
            ("max_tokens", new and old and new != old, contradicts),
            ("tool_choice", not (chat.tools or _is_free(chat.tool_choice)), "requires tools"),
        ):
            if wrong:
                raise _parameter_error(name, reason)
        return chat

    def to_request(self, endpoint: bool, longest: int | None) -> tuple[Request, list[str]]:
        """Return the request to a model, and the names of the ignored parameters.

        Args:
            endpoint: Whether the model is behind an endpoint, to which parameters are passed on.
            longest: Default maximum number of new tokens; `None`: see `Request.max_new_tokens`.

        Raises:
            HttpError: An answer would be wrong without an unsupported parameter.
        """
        turns, sent = zip(
            *(_read_turn(n, turn, endpoint) for n, turn in enumerate(self.messages)), strict=True
        )
        passed: dict[str, Any] = {}
        if any(turn._asdict() != one for turn, one in zip(turns, sent, strict=True)):
            passed["messages"] = list(sent)
        ignored = ["messages.name"] if any(turn.name for turn in self.messages) else []
        if self.tools:
            names = ("tools", "tool_choice", "parallel_tool_calls")
            passed |= {k: getattr(self, k) for k in names if getattr(self, k) is not None}
            ignored += ["tools"] if self.tool_choice != "none" else []
        if not (endpoint or _is_free(self.tool_choice)):
            reason = 'is not supported by this model; leave it out, or give "none" or "auto"'
            raise _parameter_error("tool_choice", reason)
        for name, neutral in NEUTRAL_VALUES.items():
            value = getattr(self, name)
            if value in (None, neutral):
                continue
            passed[name] = value
            ignored.append(name)
            if name in DECISIVE and not endpoint:
                raise _parameter_error(name, "is not supported by this model; leave it out")
        unknown = [f"messages.{key}" for turn in self.messages for key in turn.model_extra or ()]
        unknown = list(dict.fromkeys([*(self.model_extra or ()), *unknown]))
        request = Request(
            turns,
            max_new_tokens=self.max_completion_tokens or self.max_tokens or longest,
            temperature=self.temperature,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            top_logprobs=(self.top_logprobs or -1) if self.logprobs else 0,
            body=(passed or None) if endpoint else None,
        )
        return request, unknown if endpoint else [*ignored, *unknown]


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


def _is_free(choice: Any) -> bool:
    """Return whether a `tool_choice` allows an answer without a tool call."""
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    return choice in (None, "none", "auto") or (
        isinstance(allowed, dict) and allowed.get("mode") == "auto"
    )


def _read_turn(n: int, turn: Turn, endpoint: bool) -> tuple[Message, dict[str, Any]]:
    """Return a message for models, and one for endpoints."""
    place = f"messages.[{n}]"
    tools = turn.model_dump(include={"tool_calls", "tool_call_id"}, exclude_defaults=True)
    if turn.role == "tool" and turn.tool_call_id is None:
        raise _parameter_error(f"{place}.tool_call_id", "is missing")
    if tools and not endpoint:
        reason = "this model reads no tool calls and no results of tools"
        raise _parameter_error(f"{place}.{next(iter(tools))}", reason)
    role = "system" if turn.role == "developer" else turn.role
    text = _read_content(f"{place}.content", turn, endpoint)
    content = turn.content if text is None or turn.content is None else text
    named = {"name": turn.name} if turn.name else {}
    return Message(role, text or ""), {"role": role, "content": content, **tools, **named}


def _read_content(place: str, turn: Turn, endpoint: bool) -> str | None:
    """Return the text of a message, its parts joined by newlines; `None` for other parts."""
    if isinstance(turn.content, str):
        return turn.content
    if not turn.content:
        if turn.tool_calls:
            return ""
        raise _parameter_error(place, "must be a string or a list of parts of type text")
    texts = []
    for n, part in enumerate(turn.content):
        if part.get("type") != "text":
            if endpoint:
                return None
            reason = "this model accepts parts of type text only"
            raise _parameter_error(f"{place}.[{n}]", reason)
        if not isinstance(part.get("text"), str):
            raise _parameter_error(f"{place}.[{n}].text", "must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _parameter_error(name: str, reason: str) -> HttpError:
    return HttpError(f"{name}: {reason}", 400, name)


def _to_http_error(error: ValidationError) -> HttpError:
    """Return the first complaint of pydantic, with the place of the value as OpenAI names it."""
    first = error.errors(include_url=False)[0]
    types, turn_types = field_types(ChatBody), field_types(Turn)
    place = [
        f"[{one}]" if isinstance(one, int) else one
        for one in first["loc"]
        if isinstance(one, int) or one in types or one in turn_types  # not a union's member
    ]
    name = ".".join(place)
    annotation = types.get(name) or (turn_types.get(place[-1]) if len(place) == 3 else None)
    wanted = describe_type(annotation)
    reason = "is missing" if first["type"] == "missing" else f"must be {wanted}" if wanted else ""
    return _parameter_error(name, reason or first["msg"])
