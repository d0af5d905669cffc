"""Models behind any OpenAI-compatible chat endpoint: a vendor's, a router's or a user's server.

First the protocol: request bodies, and the parsing of full and streamed answers.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any, Literal

from swarm._util.secrets import HIDDEN, SECRET
from swarm._util.settings import Positive, Text, checked
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    CompletionFields,
    Delta,
    Message,
    Prices,
    Request,
    ThoughtSplitter,
    Token,
    Usage,
    compute_cost,
    split_thoughts,
)
from swarm.models.cache import Cache, make_cache_key
from swarm.models.http import Call, HttpClient, HttpSession
from swarm.models.http_errors import (
    CONTENT_ERROR_CODES,
    BadRequest,
    MalformedResponse,
    error_code,
    error_message,
    to_one_line,
)
from swarm.models.rate_limit import Limits
from swarm.models.sampling import Outcome, PreparedRequest, Sample, SampledModel, Send
from swarm.models.transport import validate_url

log = logging.getLogger(__name__)

is_secret = lru_cache(SECRET.search)

CHARS_PER_TOKEN = 4
"""Estimate for answers whose tokens no server has counted."""

MIN_LOGPROB = -9999.0
"""Log probability used for impossible tokens: minus infinity is not valid JSON."""

USAGE_FIELDS = {"prompt_tokens": "prompt_tokens", "new_tokens": "completion_tokens"}
"""Completion fields and their names in a server's usage record."""

FINISH_KEYS = ("finish_reason", "finishReason", "stop_reason", "done_reason")
LENGTH_REASONS = (
    "length",
    "max_tokens",
    "max_output_tokens",
    "max_completion_tokens",
    "model_length",
)
"""Names of the finish reason "length" at different providers."""


def chat_url(base_url: object) -> str:
    """Return the URL to post chats to.

    Raises:
        UserError: The base URL is invalid; the message omits a password.
    """
    return validate_url(f"{base_url}".rstrip("/") + "/chat/completions")


def build_body(request: Request, tokens_field: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Build the body of a request; its settings override the model's defaults in `fixed`."""
    prompt = request.prompt
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    body: dict[str, Any] = {
        "messages": [{"role": one.role, "content": one.content} for one in turns]
    }
    if request.max_new_tokens is not None:
        body[tokens_field] = request.max_new_tokens
    body |= fixed
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
        body = {k: value for k, value in {**body, **request.body}.items() if value is not None}
    return body


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
    choices = content.get("choices") if isinstance(content, dict) else None
    if not choices:
        raise MalformedResponse(to_one_line(error_message(content)) or "no choices")
    answers = [parse_choice(choice) for choice in choices[:limit]]
    usage, model = content.get("usage") or {}, content.get("model")
    for name, counted in USAGE_FIELDS.items():
        part, remainder = divmod(int(usage.get(counted) or 0), len(answers))
        for number, answer in enumerate(answers):
            answer[name] = part + (number < remainder)
    for answer in answers:
        answer["seconds"] = round(seconds, 6)
        if "finish" not in answer and (finish := parse_finish(content)):
            answer["finish"] = finish
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
    if (logprobs := choice.get("logprobs")) and (tokens := logprobs.get("content")):
        answer["tokens"] = tuple(
            Token(*_parse_token(one), tuple(map(_parse_token, one.get("top_logprobs") or ())))
            for one in tokens
        )
    return answer


def _parse_token(token: Mapping[str, Any]) -> tuple[str, float]:
    return str(token["token"]), max(MIN_LOGPROB, float(token["logprob"]))


def parse_finish(*records: Any) -> str:
    """Return the first finish reason of a response or its parts, "" if there is none.

    A reached token limit is "length", also where "incomplete_details" report it.
    """
    for record in records:
        if not isinstance(record, dict):
            continue
        details = record.get("incomplete_details")
        reasons = [details.get("reason")] if isinstance(details, dict) else []
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
    text = message.get("content") or ""
    fields = (message.get("reasoning_content"), message.get("reasoning"))
    thoughts = next((one for one in fields if one and isinstance(one, str)), "")
    if isinstance(text, list):
        thoughts += "".join(
            _join_text_parts(part["thinking"]) for part in text if part.get("thinking")
        )
        text = _join_text_parts(text)
    if not isinstance(text, str):
        raise MalformedResponse("the content is not a string")
    return text, thoughts


def _join_text_parts(parts: Any) -> str:
    """Join the text of a list of parts; a string is returned as it is."""
    if isinstance(parts, str):
        return parts
    return "".join(str(part["text"]) for part in parts if part.get("type") == "text")


class StreamedToolCalls:
    """Joins the streamed parts of tool calls.

    Servers differ: some send whole calls, number all of them 0 or not at all, count from 1, or
    repeat a call's name or give its later parts other ids.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._places: dict[Any, int] = {}

    def add_part(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a part and return it with its call's index in `calls`."""
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
        return {**part, "index": place}

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
    """Parses the events of a streamed chat completion."""

    def __init__(self) -> None:
        self._splitter = ThoughtSplitter()
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
        parts = tuple(map(self._tools.add_part, delta.get("tool_calls") or ()))
        self._texts.append((text, thoughts))
        self._tokens += (choices[0].get("logprobs") or {}).get("content") or []
        self._finish = choices[0].get("finish_reason") or self._finish
        piece = self._splitter.feed(text)
        return _nonempty(Delta(piece.text, thoughts + piece.reasoning, parts))

    def finish(self) -> tuple[list[Delta], Any]:
        """Return text held back because it might have been a tag, and the full completion."""
        pieces = _nonempty(self._splitter.flush_pending())
        if self._at_once or not self._texts:
            return pieces, self._at_once
        text, thoughts = map("".join, zip(*self._texts, strict=True))
        message = {"content": text, "reasoning_content": thoughts, "tool_calls": self._tools.calls}
        choice = {
            "message": message,
            "finish_reason": self._finish,
            "logprobs": {"content": self._tokens},
        }
        return pieces, {"choices": [choice], **self._common}


def _nonempty(delta: Delta) -> list[Delta]:
    return [delta] if any(delta) else []


def is_same_model(requested: str, other: str) -> bool:
    """Return whether a reported model name may denote the requested model.

    Servers add a date or a tag, omit the vendor, and resolve "latest".
    """
    requested_name, returned = (name.casefold().rsplit("/", 1)[-1] for name in (requested, other))
    requested_name = requested_name.removesuffix("-latest")
    return not returned or requested_name in returned or returned in requested_name


MAX_LOGPROB_RETRIES = 2
"""Retries of a request whose answer lacks the requested log probabilities, if the endpoint may
support them.
"""

BASE_URL, API_KEY_ENV = "https://api.openai.com/v1", "OPENAI_API_KEY"

TokensField = Literal["max_tokens", "max_completion_tokens"]


@checked()
class OpenAI(SampledModel):
    """Client of `base_url`/chat/completions; a plain text prompt is sent as one user turn.

    Reasoning, in a separate field or between <think> and </think>, is not part of the text.
    Answers, including refusals, are stored in `cache` and not paid for twice; failures are not
    stored, nor are answers without the requested log probabilities, which are requested again. With
    temperature 0 equal requests share one answer; otherwise the k-th of them in a call of
    `generate` gets the k-th sample, counted from `Request.sample`, and the same one in the next
    call. With a seed, the k-th sample is requested with the seed plus k.

    Args:
        model: The model's name at the endpoint; `None` must be set before the first request.
        base_url: The endpoint's URL without /chat/completions.
        api_key_env: Name of the environment variable with the key; `None` sends no key.
        temperature: Sampling temperature; `None` leaves it to the endpoint.
        seed: Sampling seed, for endpoints that support one; `None` sends none.
        body: Additional request fields, such as {"reasoning_effort": "low"}.
        tokens_field: Field of the token limit: "max_tokens", or "max_completion_tokens" as required
            by OpenAI's reasoning models.
        prices: Cost of a million tokens, {"prompt": ..., "new": ...}; `None` counts no cost.
        limits: Rate, concurrency and timeout limits.
        cache: Cache of the answers; `None` stores none.
        samples_at_once: Maximum number of samples of one prompt per request (field `n`); endpoints
            that support it count the prompt once. Ignored with a seed.
        client: Client shared with other models of the endpoint, including its limits; replaces
            `base_url`, `api_key_env` and `limits`. It must post to
            `swarm.models.openai.chat_url(base_url)`.
        greedy_once: Share one answer among equal requests with temperature 0; otherwise each is
            requested.

    Attributes:
        totals: Usage so far, in this process; `calls` are answers of the endpoint, `failed` the
            prompts that it refused, whose answers are empty.
        fixed: Default fields of every request body.
        cache_url: URL in the cache keys; `client.url` unless another one's answers are continued.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(
        self,
        model: Text | None,
        base_url: str = BASE_URL,
        api_key_env: str | None = API_KEY_ENV,
        temperature: float | None = 0.0,
        seed: int | None = None,
        body: Mapping[str, Any] | None = None,
        tokens_field: TokensField = "max_tokens",
        prices: Prices | None = None,
        limits: Limits | None = None,
        cache: Cache | None = None,
        samples_at_once: Positive = 1,
        client: HttpClient | None = None,
        greedy_once: bool = True,
    ) -> None:
        url, name = chat_url(base_url), model or "the model"
        if client and not (
            url in (chat_url(BASE_URL), client.url)
            and api_key_env in (API_KEY_ENV, client.api_key_env)
            and limits in (None, client.limits)
        ):
            raise UserError("client: its base_url, api_key_env or limits differ")
        self.client = (
            client.for_model(name) if client else HttpClient(name, url, api_key_env, limits)
        )
        super().__init__(self.client.label, model, cache, batches=self.client.limits.concurrency)
        self.model, self.tokens_field, self.samples_at_once = model, tokens_field, samples_at_once
        fixed = {"model": model, "temperature": temperature, "seed": seed, **(body or {})}
        self.fixed = {key: value for key, value in fixed.items() if value is not None}
        self.prices: Prices = prices or {}
        self.greedy_once, self.cache_url = greedy_once, self.client.url
        self.totals = Usage()
        self._stream_options = True
        self._returns_logprobs: bool | None = None  # supports log probabilities; None until known
        self._warned = False

    def check(self) -> None:
        """Check that a model name and a key are set.

        Raises:
            UserError: One of them is missing.
        """
        if self.model is None:
            raise UserError(
                f"no model is set for {self.client.url}: give task.scorer.model.model=NAME "
                "for a judge, candidate.model.model=NAME for a candidate"
            )
        self.client.check()

    def prepare(self, request: Request) -> PreparedRequest:
        if request.choices:
            raise UserError(
                f"{self.model}: a chat endpoint cannot score choices; parse the text instead "
                "(task.scoring=generate for a task, --reading text for a judge)"
            )
        body = build_body(request, self.tokens_field, self.fixed)
        # Hide secrets in the cache key: another API key in the body must not pay for all answers
        # again.
        secret = {
            name: HIDDEN for name, one in body.items() if isinstance(one, str) and is_secret(name)
        }
        return PreparedRequest(
            self,
            request,
            make_cache_key("chat", self.cache_url, {**body, **secret}),
            equal=self.greedy_once and body.get("temperature") == 0,
            together=self.samples_at_once > 1 and "seed" not in body,
            body=body,
        )

    async def _answer(self, samples: Sequence[Sample], stop: bool = False) -> list[Outcome]:
        cached, retries = self.totals.cached, self.client.repeated
        found = await super()._answer(samples, stop)
        log.info(
            "%s: %d answers, %d of them cached, %d retries; total so far: %s",
            self.client.label,
            len(samples),
            self.totals.cached - cached,
            self.client.repeated - retries,
            asdict(self.totals),
        )
        return found

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[Send]:
        self.check()
        async with self.client.open_session() as session:
            yield partial(self._send_batch, session)

    async def _send_batch(
        self, session: HttpSession, batch: Sequence[Sample]
    ) -> list[CompletionFields]:
        """Request one or several samples of a request; fewer may be returned."""
        prepared, number = batch[0]
        call = self._build_call(prepared, number, len(batch))
        try:
            answers = await session.call(call, self._response_reader(call, len(batch)))
        except BadRequest as error:
            refused = self._refused_answers(error, len(batch))
            if refused is None and len(batch) == 1:
                raise
            answers = refused or []  # the field n may be what it refuses
        if len(answers) < len(batch) and self.samples_at_once > 1:
            log.warning(
                "%s: returns fewer samples than requested (n), so each sample is requested "
                "separately; set samples_at_once: 1 in the providers file",
                self.client.label,
            )
            self.samples_at_once = 1
        return answers

    def _build_call(self, prepared: PreparedRequest, sample: int, count: int) -> Call:
        """Build the call for a number of samples; the k-th is requested with the seed plus k."""
        body = prepared.body
        assert body
        if "seed" in body:
            body = {**body, "seed": body["seed"] + sample}
        if count > 1:
            body = {**body, "n": count}
        return Call(body, prepared.request.timeout)

    def _response_reader(
        self, call: Call, count: int, again: bool = True
    ) -> Callable[[Any, float], list[CompletionFields]]:
        """Return the parser of a call's response.

        Args:
            again: Retry answers that lack log probabilities.
        """
        lacking = 0

        def read(content: Any, seconds: float) -> list[CompletionFields]:
            nonlocal lacking
            answers = parse_answers(content, count, seconds)
            for answer in answers:
                self._record_usage(answer)
            if not call.body.get("logprobs"):
                return answers
            if not any(lacks_logprobs(call.body, answer) for answer in answers):
                if any("tokens" in answer for answer in answers):
                    self._returns_logprobs = True
            elif again and self._returns_logprobs is not False:
                lacking += 1
                if lacking <= min(MAX_LOGPROB_RETRIES, self.client.limits.retries):
                    raise MalformedResponse("the requested log probabilities are missing")
                # An endpoint that has returned them before may do so the next time.
                self._returns_logprobs = self._returns_logprobs or False
            return answers

        return read

    def _refused_answers(self, error: BadRequest, count: int) -> list[CompletionFields] | None:
        """Return empty answers if the endpoint refuses the text, which is its answer to it."""
        if (reason := error_code(error.content)) not in CONTENT_ERROR_CODES:
            return None
        self.totals.failed += count
        log.warning("%s; counted as an empty answer", error)
        return [{"text": "", "prompt_tokens": 0, "new_tokens": 0, "finish": reason}] * count

    def is_complete(self, call: PreparedRequest, answer: CompletionFields) -> bool:
        return not lacks_logprobs(call.body or {}, answer)

    def stream_uncached(self, call: PreparedRequest) -> Generator[Delta, None, CompletionFields]:
        self.check()
        plain = self._build_call(call, call.request.sample, 1)
        read = self._response_reader(plain, 1, again=False)
        while True:
            options = {"stream_options": {"include_usage": True}} if self._stream_options else {}
            body = {**plain.body, "stream": True, **options}
            streamed = plain._replace(body=body)
            try:
                return (yield from self.client.stream(streamed, StreamedCompletion, read))[0]
            except BadRequest as error:
                if self._stream_options and "stream_options" in json.dumps(error.content):
                    self._stream_options = False
                elif answers := self._refused_answers(error, 1):
                    return answers[0]
                else:
                    raise

    def _record_usage(self, answer: CompletionFields) -> None:
        cost, priced = compute_cost(answer, self.prices), bool(self.prices)
        self.totals.add_answer(answer["prompt_tokens"], answer["new_tokens"], cost, priced)
        other = answer.get("model", "")
        if other != self.model and not self._warned and not is_same_model(str(self.model), other):
            self._warned = True
            log.warning("%s: the responses are from another model, %s", self.client.label, other)

    def build_completion(self, answer: CompletionFields, cached: bool) -> Completion:
        self.totals.cached += cached
        cost, priced = compute_cost(answer, self.prices), bool(self.prices)
        shown = {**answer, "cost": cost, "cached": cached, "priced": priced}
        return Completion.from_fields(shown)
