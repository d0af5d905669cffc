"""What is read of a chat completion, which came at once or in pieces, and what is kept of it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from swarm._util.secrets import HIDDEN, SECRET
from swarm.models.base import Delta, Message, Request, Token
from swarm.models.cache import make_cache_key, make_sample_key
from swarm.models.http import Call
from swarm.models.http_errors import MalformedResponse, error_message, to_one_line
from swarm.models.postprocess import ThoughtSplitter, split_thoughts
from swarm.models.transport import validate_url

MIN_LOGPROB = -9999.0
"""The log probability of what cannot be."""

CompletionFields = dict[str, Any]
"""What is kept: the fields of a `Completion` that say anything, as JSON."""

USAGE_FIELDS = {"prompt_tokens": "prompt_tokens", "new_tokens": "completion_tokens"}
"""Fields of a completion, and what a server calls them."""


def parse_answers(content: Any, most: int, seconds: float) -> list[CompletionFields]:
    """What is kept of each of a completion's answers, at most so many.

    The server counts the tokens of all its answers together; each has an equal part.

    Args:
        content: What the server said.
        most: How many were asked for.
        seconds: How long it took.

    Raises:
        ValueError: It is no completion, as where a router answers 200 and an error; or another
            error that says so.
    """
    choices = content.get("choices") if isinstance(content, Mapping) else None
    if not choices:
        raise MalformedResponse(to_one_line(error_message(content)) or "no choices")
    answers = [parse_choice(choice) for choice in list(choices)[:most]]
    usage, model = content.get("usage") or {}, content.get("model")
    for name, counted in USAGE_FIELDS.items():
        part, over = divmod(int(usage.get(counted) or 0), len(answers))
        for number, answer in enumerate(answers):
            answer[name] = part + (number < over)
    for answer in answers:
        answer["seconds"] = round(seconds, 6)
        if model and isinstance(model, str):
            answer["model"] = model
    return answers


def parse_choice(choice: Mapping[str, Any]) -> CompletionFields:
    """One answer, without what belongs to all of them; beside the text, only what says anything."""
    text, thoughts = split_message_text(choice["message"])
    told = split_thoughts(text)
    answer: CompletionFields = {"text": told.text}
    if thoughts := (thoughts + told.reasoning).strip():
        answer["reasoning"] = thoughts
    refused = choice["message"].get("refusal") and not answer["text"]
    if finish := "refusal" if refused else choice.get("finish_reason"):
        answer["finish"] = str(finish)
    if tokens := parse_tokens(choice):
        answer["tokens"] = tokens
    return answer


def lacks_logprobs(body: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Whether an answer has a text, and none of the log probabilities that the body asks for.

    Endpoints leave them out now and then. Such an answer is of no use to who asked, and not kept.
    """
    if not body.get("logprobs") or not answer.get("text"):
        return False
    tokens = answer.get("tokens")
    return not tokens or (bool(body.get("top_logprobs")) and not tokens[0][2])


def split_message_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Text and thoughts of a message or of a piece of one, as the server tells them apart.

    Raises:
        ValueError: The content is no text.
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
        raise MalformedResponse("the content is not a text")
    return text, thoughts


def join_text_parts(parts: Any) -> str:
    """The text of a list of parts, or of a text."""
    if isinstance(parts, str):
        return parts
    return "".join(str(part["text"]) for part in parts if part.get("type") == "text")


def parse_tokens(choice: Mapping[str, Any]) -> list[Token]:
    """The tokens of an answer or of a piece of one, where log probabilities were asked for."""
    told = (choice.get("logprobs") or {}).get("content") or []
    return [
        Token(
            str(token["token"]),
            parse_logprob(token["logprob"]),
            tuple(
                (str(t["token"]), parse_logprob(t["logprob"]))
                for t in token.get("top_logprobs") or []
            ),
        )
        for token in told
    ]


def parse_logprob(said: Any) -> float:
    """A log probability; what some servers write for none at all, minus infinity, is no JSON."""
    return max(MIN_LOGPROB, float(said))


class StreamedCompletion:
    """Reads a chat completion from the events of a stream; see `swarm.models.http.StreamParser`."""

    def __init__(self) -> None:
        self._thoughts = ThoughtSplitter()
        self._texts: list[tuple[str, str]] = []
        self._tokens: list[Any] = []
        self._finish = ""
        self._common: dict[str, Any] = {}
        self._at_once: Any = None

    @property
    def is_complete(self) -> bool:
        """Whether the server said why the text ends."""
        return bool(self._finish or self._at_once)

    def parse_event(self, content: Any) -> list[Delta]:
        """What one event adds, if anything.

        Raises:
            ValueError: It tells of an error, or is none of a chat completion.
        """
        if content.get("error"):
            raise MalformedResponse(to_one_line(error_message(content)))
        self._common |= {key: content[key] for key in ("model", "usage") if content.get(key)}
        if not (choices := content.get("choices")):
            return []
        if "message" in choices[0]:
            self._at_once = content
            answer = parse_choice(choices[0])
            return [Delta(answer["text"], answer.get("reasoning", ""))]
        text, thoughts = split_message_text(choices[0].get("delta") or {})
        self._texts.append((text, thoughts))
        self._tokens += (choices[0].get("logprobs") or {}).get("content") or []
        self._finish = choices[0].get("finish_reason") or self._finish
        piece = self._thoughts.feed(text)
        return nonempty_deltas(Delta(piece.text, thoughts + piece.reasoning))

    def flush_pending(self) -> list[Delta]:
        """What was held back because it might have been a tag."""
        return nonempty_deltas(self._thoughts.flush_pending())

    def assemble_response(self) -> Any:
        """The completion as if it had come at once."""
        if self._at_once or not self._texts:
            return self._at_once
        text, thoughts = ("".join(parts) for parts in zip(*self._texts, strict=True))
        choice = {
            "message": {"content": text, "reasoning_content": thoughts},
            "finish_reason": self._finish,
            "logprobs": {"content": self._tokens},
        }
        return {"choices": [choice], **self._common}


def nonempty_deltas(delta: Delta) -> list[Delta]:
    """The piece, if there is anything in it."""
    return [delta] if any(delta) else []


def is_same_model(asked: str, other: str) -> bool:
    """Whether a server may call the model that was asked so.

    Servers add a date or a tag, and leave out who made it; they resolve "latest".
    """
    mine, theirs = (name.casefold().rsplit("/", 1)[-1] for name in (asked, other))
    mine = mine.removesuffix("-latest")
    return not theirs or mine in theirs or theirs in mine


# What is sent to a chat endpoint for a request, and under which key the answer is kept.

CHARS_PER_TOKEN = 4
"""For the estimate of `Limits.tokens_per_minute`; the server's own count corrects it."""


class PendingSample(NamedTuple):
    """One answer that is to be had.

    Attributes:
        key: Under which it is kept.
        alike: The same key for all that a single request may ask for together.
        body: What is sent for it alone.
        timeout: See `Request.timeout`.
    """

    key: str
    alike: str
    body: dict[str, Any]
    timeout: float | None


def chat_url(base_url: object) -> str:
    """Where chats are posted to.

    Raises:
        UserError: It is no base URL; the message leaves a password out.
    """
    return validate_url(f"{base_url}".rstrip("/") + "/chat/completions")


def build_body(request: Request, tokens_field: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON for a request; its own settings go before the model's, `fixed`."""
    plain = isinstance(request.prompt, str)
    turns = (Message("user", str(request.prompt)),) if plain else request.prompt
    body = {
        "messages": [turn._asdict() for turn in turns],  # type: ignore[union-attr]
        tokens_field: request.max_new_tokens,
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


def override_fields(body: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """A body with what a request says over it; one of `None` is left out."""
    whole = {**body, **told}
    return {key: value for key, value in whole.items() if value is not None}


def list_pending_samples(
    url: str,
    requests: Sequence[Request],
    tokens_field: str,
    fixed: Mapping[str, Any],
    greedy_once: bool = True,
) -> Iterator[PendingSample]:
    """What is to be had for the requests: another answer each.

    Args:
        greedy_once: Equal ones with a temperature of 0 have one answer.
    """
    seen: Counter[tuple[str, int]] = Counter()
    for request in requests:
        body = build_body(request, tokens_field, fixed)
        # A key in the body is no part of the question: another one would pay for all again.
        told = {
            name: HIDDEN if isinstance(one, str) and SECRET.search(name) else one
            for name, one in body.items()
        }
        key = alike = make_cache_key("chat", url, told)
        if body.get("temperature") != 0 or not greedy_once:
            sample = request.sample + seen[key, request.sample]
            seen[key, request.sample] += 1
            key = make_sample_key(key, sample)
            if "seed" in body:
                alike, body["seed"] = key, body["seed"] + sample
        yield PendingSample(key, alike, body, request.timeout)


def group_samples(answers: Sequence[PendingSample], most: int) -> list[list[PendingSample]]:
    """The answers that go into one request each, at most so many."""
    alike: dict[Any, list[PendingSample]] = defaultdict(list)
    for answer in answers:
        alike[answer.alike, answer.timeout].append(answer)
    return [each[i : i + most] for each in alike.values() for i in range(0, len(each), most)]


def build_call(group: Sequence[PendingSample], tokens_field: str) -> Call:
    """The request for a group."""
    body, count = group[0].body, len(group)
    # A turn's content may be parts, or nothing where it is a call of tools.
    read = sum(len(turn.get("content") or "") for turn in body["messages"]) / CHARS_PER_TOKEN
    tokens = float(read + count * body.get(tokens_field, 0))
    return Call(body | ({"n": count} if count > 1 else {}), tokens, group[0].timeout)
