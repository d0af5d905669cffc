"""What a chat completion may be asked with: each parameter is applied, or refused by its name."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.models import Message, Request
from swarm.serve.refusals import Refused

MOST_SAMPLES, MOST_LOGPROBS = 16, 20
"""The highest `n`, each a thread while it is answered, and the highest `top_logprobs` of OpenAI."""

HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip
"""Parameters without effect on the answer; they are ignored."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "tools": ([],),
    "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
}  # fmt: skip
"""Parameters that cannot be applied, with the values at which they change nothing."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

LEFT_ALONE = ("reasoning_content", "reasoning")
"""Of a turn: thoughts that a client sends back with an answer; models are not shown them."""


@dataclass(frozen=True)
class Asked:
    """One request for chat completions.

    Attributes:
        model: As the client calls it.
        request: What the model is asked; a sample differs by `Request.sample` alone.
        count: How many samples are wanted.
        streamed: Whether they are wanted as they come.
        usage: Whether a stream ends with what it used.
    """

    model: str
    request: Request
    count: int
    streamed: bool
    usage: bool


def read(body: Any, longest: int) -> Asked:
    """What a body asks for.

    Args:
        body: As JSON.
        longest: The most new tokens of a request that does not say.

    Raises:
        Refused: A parameter is missing, is not as agreed, or cannot be applied.
    """
    if not isinstance(body, dict):
        raise Refused("the body has to be a JSON object")
    left = {key: value for key, value in body.items() if value is not None}
    model, messages = left.pop("model", None), left.pop("messages", None)
    if not isinstance(model, str) or not model:
        raise _wrong("model", "has to be the name of a model; GET /v1/models lists them")
    streamed = _flag(left, "stream")
    options = left.pop("stream_options", {})
    if not isinstance(options, dict) or (options and not streamed):
        raise _wrong("stream_options", "has to be an object, and goes with stream")
    logprobs, top = _flag(left, "logprobs"), _whole(left, "top_logprobs", 0, MOST_LOGPROBS)
    if top is not None and not logprobs:
        raise _wrong("top_logprobs", "goes with logprobs: true")
    request = Request(
        _turns(messages),
        max_new_tokens=_longest(left) or longest,
        temperature=_temperature(left),
        seed=_whole(left, "seed", -(2**63), 2**63 - 1),
        stop=_stops(left.pop("stop", [])),
        top_logprobs=(top or -1) if logprobs else 0,
    )
    count = _whole(left, "n", 1, MOST_SAMPLES) or 1
    _nothing_left(left)
    return Asked(model, request, count, streamed, options.get("include_usage") is True)


def _longest(left: dict[str, Any]) -> int | None:
    new = _whole(left, "max_completion_tokens", 1, 2**31)
    old = _whole(left, "max_tokens", 1, 2**31)
    if new and old and new != old:
        raise _wrong("max_tokens", f"contradicts max_completion_tokens={new}; give one of them")
    return new or old


def _nothing_left(left: Mapping[str, Any]) -> None:
    for name, value in left.items():
        if name in HARMLESS or any(value == fine for fine in NEUTRAL.get(name, ())):
            continue
        if name not in NEUTRAL:
            what = f"{name!r:.80}: is no parameter that is known here; leave it out"
            raise Refused(what, 400, name, "unknown_parameter")
        fine = " or ".join(map(json.dumps, NEUTRAL[name]))
        raise _wrong(name, f"cannot be applied here; leave it out, or give {fine}")


def _turns(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "has to be a list of turns, one at least")
    return tuple(_turn(f"messages.[{n}]", turn) for n, turn in enumerate(messages))


def _turn(place: str, turn: Any) -> Message:
    if not isinstance(turn, dict) or turn.get("role") not in [*ROLES]:
        raise _wrong(f"{place}.role", f"has to be one of {', '.join(ROLES)}")
    for key, value in turn.items():
        if key not in ("role", "content", *LEFT_ALONE) and value not in (None, [], ""):
            raise _wrong(f"{place}.{key}", "is not supported here")
    return Message(ROLES[turn["role"]], _content(f"{place}.content", turn.get("content")))


def _content(place: str, content: Any) -> str:
    """A text; parts are joined by line breaks."""
    if isinstance(content, list) and content:
        texts = []
        for n, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise _wrong(f"{place}.[{n}]", "only parts of type text are supported here")
            texts.append(_text(f"{place}.[{n}].text", part.get("text")))
        return "\n".join(texts)
    return _text(place, content)


def _text(place: str, text: Any) -> str:
    if not isinstance(text, str):
        raise _wrong(place, "has to be a text or a list of parts of type text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(place, "has half a character in it (a lone surrogate)") from None
    return text


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise _wrong("stop", "has to be a text or a list of texts, none of them empty")
    return tuple(_text("stop", one) for one in stops)


def _temperature(left: dict[str, Any]) -> float | None:
    value = left.pop("temperature", None)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 2 or not math.isfinite(value):
        raise _wrong("temperature", "has to be a number from 0 to 2")
    return float(value)


def _flag(left: dict[str, Any], name: str) -> bool:
    value = left.pop(name, False)
    if not isinstance(value, bool):
        raise _wrong(name, "has to be true or false")
    return value


def _whole(left: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = left.pop(name, None)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise _wrong(name, f"has to be a whole number from {least} to {most}")
    return value


def _wrong(name: str, what: str) -> Refused:
    return Refused(f"{name}: {what}", 400, name)
