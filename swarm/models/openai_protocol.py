"""Chat completions protocol: request bodies, parsing of full and streamed answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from swarm.models.base import Delta, Message, Request, ThoughtSplitter, Token, split_thoughts
from swarm.models.http_errors import MalformedResponse, error_message, to_one_line
from swarm.models.transport import validate_url

MIN_LOGPROB = -9999.0
"""Log probability used for impossible tokens."""

CompletionFields = dict[str, Any]
"""JSON form of an answer in the cache: the non-default fields of a `Completion`."""

USAGE_FIELDS = {"prompt_tokens": "prompt_tokens", "new_tokens": "completion_tokens"}
"""Completion fields and their names in a server's usage record."""


def parse_answers(content: Any, limit: int, seconds: float) -> list[CompletionFields]:
    """Parse the answers of a chat completion, at most `limit` of them.

    The server counts the tokens of all answers together; they are divided equally.

    Args:
        content: The server's response.
        limit: Number of answers requested.
        seconds: Duration of the request.

    Raises:
        ValueError: It is not a completion, for example a router's error with status 200; or a
            similar exception.
    """
    choices = content.get("choices") if isinstance(content, Mapping) else None
    if not choices:
        raise MalformedResponse(to_one_line(error_message(content)) or "no choices")
    answers = [parse_choice(choice) for choice in list(choices)[:limit]]
    if finish := parse_finish(content):
        answers = [{"finish": finish, **answer} for answer in answers]
    usage, model = content.get("usage") or {}, content.get("model")
    for name, counted in USAGE_FIELDS.items():
        part, remainder = divmod(int(usage.get(counted) or 0), len(answers))
        for number, answer in enumerate(answers):
            answer[name] = part + (number < remainder)
    for answer in answers:
        answer["seconds"] = round(seconds, 6)
        if model and isinstance(model, str):
            answer["model"] = model
    return answers


def parse_choice(choice: Mapping[str, Any]) -> CompletionFields:
    """Parse one answer, without fields shared by all; empty fields are left out."""
    message = choice["message"]
    text, thoughts = split_message_text(message)
    split = split_thoughts(text)
    answer: CompletionFields = {"text": split.text}
    if thoughts := (thoughts + split.reasoning).strip():
        answer["reasoning"] = thoughts
    if calls := message.get("tool_calls"):
        answer["tool_calls"] = tuple(dict(call) for call in calls)
    refused = message.get("refusal") and not answer["text"]
    if finish := "refusal" if refused else parse_finish(choice):
        answer["finish"] = finish
    if tokens := parse_tokens(choice):
        answer["tokens"] = tokens
    return answer


FINISH_KEYS = ("finish_reason", "finishReason", "stop_reason", "done_reason")
LENGTH_REASONS = (
    "length",
    "max_tokens",
    "max_output_tokens",
    "max_completion_tokens",
    "model_length",
)
"""Names of the finish reason "length" at different providers."""


def parse_finish(*records: Any) -> str:
    """Return the first finish reason of a response or its parts, "" if there is none.

    A reached token limit is "length", also where "incomplete_details" report it.
    """
    for record in records:
        if not isinstance(record, Mapping):
            continue
        details = record.get("incomplete_details")
        reasons = [details.get("reason")] if isinstance(details, Mapping) else []
        for reason in (*reasons, *map(record.get, FINISH_KEYS)):
            if isinstance(reason, str) and reason:
                return "length" if reason.casefold() in LENGTH_REASONS else reason
    return ""


def lacks_logprobs(body: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Return whether a non-empty answer lacks the log probabilities requested in the body.

    Endpoints omit them occasionally. Such an answer is useless to the caller and not stored.
    """
    if not body.get("logprobs") or not answer.get("text"):
        return False
    tokens = answer.get("tokens")
    return not tokens or (bool(body.get("top_logprobs")) and not tokens[0][2])


def split_message_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Split a message, or a piece of one, into text and reasoning as reported by the server.

    Raises:
        ValueError: The content is not text.
    """
    text, thoughts = message.get("content") or "", ""
    for field in ("reasoning_content", "reasoning"):
        if not thoughts and isinstance(message.get(field), str):
            thoughts = message[field]
    if isinstance(text, list):
        thoughts += "".join(
            join_text_parts(part["thinking"]) for part in text if part.get("thinking")
        )
        text = join_text_parts(text)
    if not isinstance(text, str):
        raise MalformedResponse("the content is not a string")
    return text, thoughts


def join_text_parts(parts: Any) -> str:
    """Join the text of a list of parts; a string is returned as it is."""
    if isinstance(parts, str):
        return parts
    return "".join(str(part["text"]) for part in parts if part.get("type") == "text")


def parse_tokens(choice: Mapping[str, Any]) -> tuple[Token, ...]:
    """Parse the tokens of an answer or of a piece, if log probabilities were requested."""
    entries = (choice.get("logprobs") or {}).get("content") or []
    return tuple(
        Token(
            str(token["token"]),
            parse_logprob(token["logprob"]),
            tuple(
                (str(t["token"]), parse_logprob(t["logprob"]))
                for t in token.get("top_logprobs") or []
            ),
        )
        for token in entries
    )


def parse_logprob(value: Any) -> float:
    """Parse a log probability; minus infinity, written by some servers, is not valid JSON."""
    return max(MIN_LOGPROB, float(value))


class StreamedToolCalls:
    """Joins the streamed parts of tool calls.

    Servers differ: some send whole calls, number all of them 0 or not at all, count from 1, or
    repeat a call's name or give its later parts other ids.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._places: dict[Any, int] = {}

    def add_parts(self, parts: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Add the parts of one event and return them, each with its call's index in `calls`."""
        return tuple({**part, "index": self._add_part(part)} for part in parts)

    def _add_part(self, part: Mapping[str, Any]) -> int:
        place = self._find_place(part)
        call = self.calls[place]
        for key, value in part.items():
            if isinstance(value, Mapping):
                held = call.setdefault(key, {})
                for name, text in value.items():
                    # Arguments arrive in pieces, the name at once.
                    joined = isinstance(text, str) and name != "name"
                    held[name] = held.get(name, "") + text if joined else held.get(name) or text
            elif key != "index" and not call.get(key):
                call[key] = value
        return place

    def _find_place(self, part: Mapping[str, Any]) -> int:
        """Return the place of a part's call, which is new if the part names a tool anew."""
        index, identity = part.get("index"), part.get("id")
        named = any(isinstance(one, Mapping) and one.get("name") for one in part.values())
        if index in self._places:
            place = self._places[index]
            known = [self.calls[place].get("id"), *([None, ""] if index is not None else [])]
            if not named or identity in known:
                return place
        self.calls.append({})
        self._places[index] = len(self.calls) - 1
        return self._places[index]


class StreamedCompletion:
    """Parses a streamed chat completion; see `swarm.models.http.StreamParser`."""

    def __init__(self) -> None:
        self._thoughts = ThoughtSplitter()
        self._texts: list[tuple[str, str]] = []
        self._tokens: list[Any] = []
        self._tools = StreamedToolCalls()
        self._finish = ""
        self._common: dict[str, Any] = {}
        self._at_once: Any = None

    @property
    def is_complete(self) -> bool:
        """True once the server has sent a finish reason."""
        return bool(self._finish or self._at_once)

    def parse_event(self, content: Any) -> list[Delta]:
        """Return the pieces added by one event.

        Raises:
            ValueError: It reports an error, or is not a chat completion event.
        """
        if content.get("error"):
            raise MalformedResponse(to_one_line(error_message(content)))
        self._common |= {key: content[key] for key in ("model", "usage") if content.get(key)}
        if not (choices := content.get("choices")):
            return []
        if "message" in choices[0]:
            self._at_once = content
            answer = parse_choice(choices[0])
            calls = tuple({"index": n, **one} for n, one in enumerate(answer.get("tool_calls", ())))
            return [Delta(answer["text"], answer.get("reasoning", ""), calls)]
        delta = choices[0].get("delta") or {}
        text, thoughts = split_message_text(delta)
        parts = self._tools.add_parts(delta.get("tool_calls") or ())
        self._texts.append((text, thoughts))
        self._tokens += (choices[0].get("logprobs") or {}).get("content") or []
        self._finish = choices[0].get("finish_reason") or self._finish
        piece = self._thoughts.feed(text)
        return nonempty_deltas(Delta(piece.text, thoughts + piece.reasoning, parts))

    def flush_pending(self) -> list[Delta]:
        """Return text held back because it might have been a tag."""
        return nonempty_deltas(self._thoughts.flush_pending())

    def assemble_response(self) -> Any:
        """Return the equivalent non-streamed completion."""
        if self._at_once or not self._texts:
            return self._at_once
        text, thoughts = ("".join(parts) for parts in zip(*self._texts, strict=True))
        choice = {
            "message": {
                "content": text,
                "reasoning_content": thoughts,
                "tool_calls": self._tools.calls,
            },
            "finish_reason": self._finish,
            "logprobs": {"content": self._tokens},
        }
        return {"choices": [choice], **self._common}


def nonempty_deltas(delta: Delta) -> list[Delta]:
    """Return the piece unless it is empty."""
    return [delta] if any(delta) else []


def is_same_model(requested: str, other: str) -> bool:
    """Return whether a reported model name may denote the requested model.

    Servers add a date or a tag, omit the vendor, and resolve "latest".
    """
    requested_name, returned = (name.casefold().rsplit("/", 1)[-1] for name in (requested, other))
    requested_name = requested_name.removesuffix("-latest")
    return not returned or requested_name in returned or returned in requested_name


CHARS_PER_TOKEN = 4
"""Estimate for `Limits.tokens_per_minute`; corrected by the server's count."""


def chat_url(base_url: object) -> str:
    """Return the URL to post chats to.

    Raises:
        UserError: The base URL is invalid; the message omits a password.
    """
    return validate_url(f"{base_url}".rstrip("/") + "/chat/completions")


def build_body(request: Request, tokens_field: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Build the body of a request; its settings override the model's defaults in `fixed`."""
    plain = isinstance(request.prompt, str)
    turns = (Message("user", str(request.prompt)),) if plain else request.prompt
    body = {
        "messages": [turn._asdict() for turn in turns],  # type: ignore[union-attr]
        **({} if request.max_new_tokens is None else {tokens_field: request.max_new_tokens}),
        **fixed,
    }
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.seed is not None:
        body["seed"] = request.seed
    if request.stop:
        body["stop"] = list(request.stop)
    if request.top_logprobs:
        body["logprobs"] = True
    if request.top_logprobs > 0:
        body["top_logprobs"] = request.top_logprobs
    if request.body:
        body = override_fields(body, request.body)
    return body


def override_fields(body: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Override fields of a body; those set to `None` are removed."""
    fields = {**body, **overrides}
    return {key: value for key, value in fields.items() if value is not None}
