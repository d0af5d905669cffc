"""Models behind any OpenAI-compatible chat endpoint: a vendor's, a router's or a user's server."""

import json
import logging
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from swarm._util.secrets import HIDDEN, SECRET
from swarm._util.settings import Positive, Text, checked
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Delta,
    Prices,
    Request,
    Stream,
    Usage,
    compute_cost,
)
from swarm.models.cache import Cache, make_cache_key
from swarm.models.http import Call, HttpClient, HttpSession, ParseResponse
from swarm.models.http_errors import (
    CONTENT_ERROR_CODES,
    BadRequest,
    MalformedResponse,
    error_code,
)
from swarm.models.openai_protocol import (
    CHARS_PER_TOKEN,
    StreamedCompletion,
    build_body,
    chat_url,
    is_same_model,
    lacks_logprobs,
    parse_answers,
)
from swarm.models.rate_limit import Limits
from swarm.models.sampling import (
    CompletionFields,
    Outcome,
    PreparedRequest,
    Sample,
    SampledModel,
    Send,
)
from swarm.models.transport import encode_body

log = logging.getLogger(__name__)

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
            `swarm.models.openai_protocol.chat_url(base_url)`.
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
        url = chat_url(base_url)
        if client and not (
            url in (chat_url(BASE_URL), client.url)
            and api_key_env in (API_KEY_ENV, client.api_key_env)
            and limits in (None, client.limits)
        ):
            raise UserError("client: its base_url, api_key_env or limits differ")
        self.model, self.tokens_field, self.samples_at_once = model, tokens_field, samples_at_once
        fixed = {"model": model, "temperature": temperature, "seed": seed, **(body or {})}
        self.fixed = {key: value for key, value in fixed.items() if value is not None}
        self.prices: Prices = prices or {}
        name = model or "the model"
        self.client = (
            client.for_model(name) if client else HttpClient(name, url, api_key_env, limits)
        )
        self.cache, self.greedy_once, self.cache_url = cache, greedy_once, self.client.url
        self.label, self.cache_label = self.client.label, model
        self.batches = self.client.limits.concurrency
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
        """See `SampledModel.prepare`; a chat endpoint cannot score choices."""
        if request.choices:
            raise UserError(
                f"{self.model}: a chat endpoint cannot score choices; parse the text instead "
                "(task.scoring=generate for a task, --reading text for a judge)"
            )
        body = build_body(request, self.tokens_field, self.fixed)
        # Hide secrets in the cache key: another API key in the body must not pay for all answers
        # again.
        fields = {
            name: HIDDEN if isinstance(one, str) and SECRET.search(name) else one
            for name, one in body.items()
        }
        return PreparedRequest(
            self,
            request,
            make_cache_key("chat", self.cache_url, fields),
            equal=self.greedy_once and body.get("temperature") == 0,
            together=self.samples_at_once > 1 and "seed" not in body,
            body=body,
        )

    def generate_each(self, requests: Sequence[Request]) -> list[Outcome]:
        """See `SampledModel.generate_each`."""
        try:
            self.check()
        except UserError as error:
            return [error] * len(requests)
        return super().generate_each(requests)

    async def _answer(self, samples: Sequence[Sample], stop: bool = False) -> list[Outcome]:
        self.check()
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
        """See `SampledModel.open_session`."""
        async with self.client.open_session() as session:
            yield partial(self._send_batch, session)

    async def _send_batch(
        self, session: HttpSession, batch: Sequence[Sample]
    ) -> list[CompletionFields]:
        """Request one or several samples of a request; fewer may be returned."""
        prepared, number = batch[0]
        call = self._build_call(prepared, number, len(batch))
        try:
            answers = await session(call, self._response_reader(call, len(batch)))
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
        seeded = "seed" in body
        if seeded:
            body = {**body, "seed": body["seed"] + sample}
        elif count == prepared.encoded[0]:
            return prepared.encoded[1]
        # A turn's content may be a list of parts, or missing in a tool call.
        read = sum(len(turn.get("content") or "") for turn in body["messages"]) / CHARS_PER_TOKEN
        tokens = float(read + count * body.get(self.tokens_field, 0))
        body = body | ({"n": count} if count > 1 else {})
        call = Call(body, tokens, prepared.request.timeout, encode_body(body))
        if not seeded:
            prepared.encoded = count, call
        return call

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
            spent = sum(answer["prompt_tokens"] + answer["new_tokens"] for answer in answers)
            for answer in answers:
                self._record_usage(answer)
            if spent:
                self.client.turns.tokens.adjust_reservation(spent - call.tokens)
            lacks = any(lacks_logprobs(call.body, answer) for answer in answers)
            if not lacks and any("tokens" in answer for answer in answers):
                self._returns_logprobs = True
            if lacks and again and self._returns_logprobs is not False:
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
        """See `SampledModel.is_complete`: not without the requested log probabilities."""
        return not lacks_logprobs(call.body or {}, answer)

    def stream(self, request: Request) -> Stream:
        """See `SampledModel.stream`."""
        self.check()
        return (yield from super().stream(request))

    def stream_uncached(self, call: PreparedRequest) -> Generator[Delta, None, CompletionFields]:
        """See `SampledModel.stream_uncached`."""
        plain = self._build_call(call, call.request.sample, 1)
        read = self._response_reader(plain, 1, again=False)
        try:
            try:
                return (yield from self._stream_call(plain, read))[0]
            except BadRequest as error:
                if not self._stream_options or "stream_options" not in json.dumps(error.content):
                    raise
                self._stream_options = False
                return (yield from self._stream_call(plain, read))[0]
        except BadRequest as error:
            if (answers := self._refused_answers(error, 1)) is None:
                raise
            return answers[0]

    def _stream_call(
        self, call: Call, read: ParseResponse[list[CompletionFields]]
    ) -> Generator[Delta, None, list[CompletionFields]]:
        options = {"stream_options": {"include_usage": True}} if self._stream_options else {}
        call = call._replace(body={**call.body, "stream": True, **options}, data=None)
        return (yield from self.client.stream(call, StreamedCompletion, read))

    def _record_usage(self, answer: CompletionFields) -> None:
        cost, priced = compute_cost(answer, self.prices), bool(self.prices)
        self.totals.add_answer(answer["prompt_tokens"], answer["new_tokens"], cost, priced)
        other = answer.get("model", "")
        if other != self.model and not self._warned and not is_same_model(str(self.model), other):
            self._warned = True
            log.warning("%s: the responses are from another model, %s", self.client.label, other)

    def build_completion(self, answer: CompletionFields, cached: bool) -> Completion:
        """See `SampledModel.build_completion`; the cost follows from the present prices."""
        self.totals.cached += cached
        cost, priced = compute_cost(answer, self.prices), bool(self.prices)
        return Completion(**{**answer, "cost": cost, "cached": cached, "priced": priced})
