"""Models behind any OpenAI-compatible chat endpoint: a vendor's, a router's or a user's server."""

import asyncio
import itertools
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Delta,
    Request,
    Stream,
    Usage,
    completion_fields,
    completion_from_fields,
    compute_cost,
    validate_prices,
)
from swarm.models.cache import Cache, CacheWriter
from swarm.models.http import Call, HttpClient
from swarm.models.http_errors import (
    CONTENT_ERROR_CODES,
    BadRequest,
    MalformedResponse,
    error_code,
)
from swarm.models.openai_protocol import (
    CompletionFields,
    PendingSample,
    StreamedCompletion,
    build_body,
    build_call,
    chat_url,
    group_samples,
    is_same_model,
    lacks_logprobs,
    list_pending_samples,
    number_tool_calls,
    parse_answers,
)
from swarm.models.rate_limit import Limits
from swarm.models.transport import encode_body

log = logging.getLogger(__name__)

MAX_LOGPROB_RETRIES = 2
"""Retries of a request whose answer lacks the requested log probabilities, if the endpoint may
support them.
"""

BASE_URL, API_KEY_ENV = "https://api.openai.com/v1", "OPENAI_API_KEY"


class OpenAI:
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

    Raises:
        UserError: A value is invalid.
    """

    def __init__(
        self,
        model: str | None,
        base_url: str = BASE_URL,
        api_key_env: str | None = API_KEY_ENV,
        temperature: float | None = 0.0,
        seed: int | None = None,
        body: Mapping[str, Any] | None = None,
        tokens_field: str = "max_tokens",
        prices: Mapping[str, float] | None = None,
        limits: Limits | None = None,
        cache: Cache | None = None,
        samples_at_once: int = 1,
        client: HttpClient | None = None,
        greedy_once: bool = True,
    ) -> None:
        # Validate the URL first: later messages repeat it, and it must contain no password.
        url = chat_url(base_url)
        if model is not None and (not isinstance(model, str) or not model.strip()):
            raise UserError(f"model={model!r}: must be the name of a model at {base_url}")
        if tokens_field not in (fields := ("max_tokens", "max_completion_tokens")):
            raise UserError(f"tokens_field={tokens_field!r} is not one of {', '.join(fields)}")
        if type(samples_at_once) is not int or samples_at_once < 1:
            raise UserError(f"samples_at_once={samples_at_once!r}: must be an integer, 1 or more")
        if client and not (
            url in (chat_url(BASE_URL), client.url)
            and api_key_env in (API_KEY_ENV, client.api_key_env)
            and limits in (None, client.limits)
        ):
            raise UserError("client: its base_url, api_key_env or limits differ")
        self.model, self.tokens_field, self.samples_at_once = model, tokens_field, samples_at_once
        fixed = {"model": model, "temperature": temperature, "seed": seed, **(body or {})}
        self.fixed = {key: value for key, value in fixed.items() if value is not None}
        self.prices = validate_prices(prices)
        name = model or "the model"
        self.client = (
            client.for_model(name) if client else HttpClient(name, url, api_key_env, limits)
        )
        self.cache, self.greedy_once = cache, greedy_once
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

    def open(self, device: str) -> None:
        """Do nothing; connections are opened on request."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests concurrently; see `Model.generate`.

        Raises:
            UserError: Choices were to be scored, which a chat endpoint cannot do.
            RequestError: The endpoint failed for good. Answers received before are stored.
        """
        self.check()
        return self._generate_with_cache(requests, self.client.run_calls)

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """Answer as many requests as possible; see `swarm.models.base.generate_each`.

        An error that affects all requests, such as a wrong key or an unknown model, stops the
        remaining ones.
        """
        supported = [request for request in requests if not request.choices]
        try:
            self.check()
            found = iter(self._generate_with_cache(supported, self.client.run_each_call))
        except UserError as error:
            found = iter([error] * len(supported))
        return [self._choices_error() if request.choices else next(found) for request in requests]

    def stream(self, request: Request) -> Stream:
        """Stream the answer to one request; see `swarm.models.base.stream`.

        A cached answer is yielded in one piece. An incomplete answer is not stored.

        Raises:
            UserError: See `generate`; also if the endpoint cuts the answer off.
        """
        self.check()
        pending = self.list_pending_samples([request])
        for answer in self._load_cached(pending).values():
            self.totals.cached += 1
            completion = self.build_completion(answer, cached=True)
            yield Delta(
                completion.text, completion.reasoning, number_tool_calls(completion.tool_calls)
            )
            return completion
        retries_before = self.client.repeated
        try:
            answer = yield from self._stream_uncached(pending)
        except BadRequest as error:
            if not self._stream_options or "stream_options" not in json.dumps(error.content):
                raise
            self._stream_options = False
            answer = yield from self._stream_uncached(pending)
        self._log_requests(1, 1, self.client.repeated - retries_before)
        return self.build_completion(answer, cached=False)

    def _stream_uncached(
        self, pending: list[PendingSample]
    ) -> Generator[Delta, None, CompletionFields]:
        keeping = CacheWriter(self.cache, self.model)
        [call], read, refused = self._build_calls([pending], keeping, retry_logprobs=False)
        options = {"stream_options": {"include_usage": True}} if self._stream_options else {}
        call = call._replace(body={**call.body, "stream": True, **options})
        [answer] = yield from self.client.stream(call, StreamedCompletion, read, refused)
        return keeping.get_stored(pending[0].key, answer)

    def _generate_with_cache(
        self, requests: Sequence[Request], ask: Callable[..., list[Any]]
    ) -> list[Any]:
        pending = self.list_pending_samples(requests)
        stored = self._load_cached(pending)
        new = {answer.key: answer for answer in pending if answer.key not in stored}
        retries_before = self.client.repeated
        new_answers = self._request_uncached(list(new.values()), ask)
        self.totals.cached += len(pending) - len(new_answers)
        found = {**stored, **new_answers}
        self._log_requests(len(pending), len(new_answers), self.client.repeated - retries_before)
        answers = [(found[one.key], one.key in stored) for one in pending]
        return [
            a if isinstance(a, UserError) else self.build_completion(a, old) for a, old in answers
        ]

    def _request_uncached(
        self, new: list[PendingSample], ask: Callable[..., list[Any]]
    ) -> dict[str, Any]:
        """Return answers or errors by key."""
        found: dict[str, Any] = {}
        keeping = CacheWriter(self.cache, self.model)
        while remaining := [answer for answer in new if answer.key not in found]:
            if found:
                log.warning(
                    "%s: returns fewer samples than requested (n), so each sample is requested "
                    "separately; set samples_at_once: 1 in the providers file",
                    self.client.label,
                )
                self.samples_at_once = 1
            groups = group_samples(remaining, self.samples_at_once)
            for group, result in zip(groups, ask(*self._build_calls(groups, keeping)), strict=True):
                each = [result] * len(group) if isinstance(result, UserError) else result
                found.update(zip((answer.key for answer in group), each, strict=False))
        return {key: keeping.get_stored(key, answer) for key, answer in found.items()}

    def list_pending_samples(self, requests: Sequence[Request]) -> list[PendingSample]:
        """Return the samples to request, with their cache keys."""
        if any(request.choices for request in requests):
            raise self._choices_error()
        url, field = self.client.url, self.tokens_field
        return list(list_pending_samples(url, requests, field, self.fixed, self.greedy_once))

    def _choices_error(self) -> UserError:
        return UserError(
            f"{self.model}: a chat endpoint cannot score choices; parse the text instead "
            "(task.scoring=generate for a task, --reading text for a judge)"
        )

    def _load_cached(self, pending: Sequence[PendingSample]) -> dict[str, CompletionFields]:
        if not self.cache:
            return {}
        return self.cache.get([answer.key for answer in pending], completion_fields)

    def _build_calls(
        self,
        groups: Sequence[Sequence[PendingSample]],
        keeping: CacheWriter,
        retry_logprobs: bool = True,
    ) -> tuple[list[Call], Any, Any]:
        """Return the calls, and the handlers of answers and refusals."""
        calls = [build_call(group, self.tokens_field) for group in groups]
        return calls, *self.response_handlers(groups, calls, keeping, retry_logprobs)

    def response_handlers(
        self, groups: Any, calls: Any, keeping: CacheWriter, again: bool = True
    ) -> tuple[Any, Any]:
        """Return the handlers of answers and refusals, which are called with a call number.

        Args:
            again: Retry answers that lack log probabilities.
        """
        lacking: Counter[int] = Counter()

        def store_answers(number: int, answers: list[CompletionFields]) -> list[CompletionFields]:
            for one, answer in zip(groups[number], answers, strict=False):
                if not lacks_logprobs(one.body, answer):
                    keeping.add(one.key, answer)
            return answers

        def handle_response(number: int, content: Any, seconds: float) -> list[CompletionFields]:
            answers = parse_answers(content, len(groups[number]), seconds)
            call, spent, lacks, has_logprobs = calls[number], 0, False, False
            for answer in answers:
                spent += answer["prompt_tokens"] + answer["new_tokens"]
                self._record_usage(answer)
                lacks = lacks or lacks_logprobs(call.body, answer)
                has_logprobs = has_logprobs or "tokens" in answer
            if spent:
                self.client.turns.tokens.adjust_reservation(spent - call.tokens)
            if has_logprobs and not lacks:
                self._returns_logprobs = True
            if lacks and again and self._returns_logprobs is not False:
                lacking[number] += 1
                if lacking[number] <= min(MAX_LOGPROB_RETRIES, self.client.limits.retries):
                    raise MalformedResponse("the requested log probabilities are missing")
                # An endpoint that has returned them before may do so the next time.
                self._returns_logprobs = self._returns_logprobs or False
            return store_answers(number, answers)

        def handle_bad_request(number: int, error: BadRequest) -> list[CompletionFields]:
            if (reason := error_code(error.content)) not in CONTENT_ERROR_CODES:
                raise error
            self.totals.failed += len(groups[number])
            log.warning("%s; counted as an empty answer", error)
            empty = {"text": "", "prompt_tokens": 0, "new_tokens": 0, "finish": reason}
            return store_answers(number, [empty] * len(groups[number]))

        return handle_response, handle_bad_request

    def _record_usage(self, answer: CompletionFields) -> None:
        cost, priced = compute_cost(answer, self.prices), bool(self.prices)
        self.totals.add_answer(answer["prompt_tokens"], answer["new_tokens"], cost, priced)
        other = answer.get("model", "")
        if other != self.model and not self._warned and not is_same_model(str(self.model), other):
            self._warned = True
            log.warning("%s: the responses are from another model, %s", self.client.label, other)

    def build_completion(self, answer: CompletionFields, cached: bool) -> Completion:
        """Build a completion from stored fields."""
        cost, priced = compute_cost(answer, self.prices), bool(self.prices)
        fields = {**answer, "cost": cost, "cached": cached, "priced": priced}
        return completion_from_fields(fields)

    def _log_requests(self, total: int, new: int, repeated: int) -> None:
        log.info(
            "%s: %d answers, %d of them new, %d retries; total so far: %s",
            self.client.label,
            total,
            new,
            repeated,
            asdict(self.totals),
        )


GenerateSamples = Callable[[Sequence[str], Request, int], Awaitable[list[Completion]]]
"""Requests one sample per key, the first with the given sample index, and stores them by key."""


@asynccontextmanager
async def open_sampler(model: OpenAI) -> AsyncIterator[GenerateSamples]:
    """Provide a function that requests samples one call at a time and stores them as they arrive.

    It must be used on the event loop of `swarm._util.threads.shared_event_loop`. It requests the
    answer even if it is already cached, and raises its error on failure. For a request with a seed,
    the k-th sample is requested with the seed plus k, and alone. For several samples (`n`) an
    endpoint may return fewer answers than keys.

    Raises:
        UserError: There is no key.
    """
    keeping = CacheWriter(model.cache, model.model)
    in_flight: dict[int, list[PendingSample]] = {}
    calls: dict[int, Call] = {}
    numbers = itertools.count()
    read, refused = model.response_handlers(in_flight, calls, keeping)
    last: tuple[Request, int, Call] | None = None

    def prepare_call(request: Request, sample: int, count: int) -> Call:
        nonlocal last
        if last and last[0] is request and last[1] == count:
            return last[2]
        body = build_body(request, model.tokens_field, model.fixed)
        if "seed" in body:
            body["seed"] += sample
        call = build_call(
            [PendingSample("", "", body, request.timeout)] * count, model.tokens_field
        )
        call = call._replace(data=encode_body(call.body))
        # Without a seed all samples of a request are the same call.
        last = None if "seed" in body else (request, count, call)
        return call

    async with model.client.open_caller(read, refused) as send:

        async def generate_samples(
            keys: Sequence[str], request: Request, sample: int
        ) -> list[Completion]:
            number, call = next(numbers), prepare_call(request, sample, len(keys))
            calls[number] = call
            in_flight[number] = [
                PendingSample(key, key, call.body, request.timeout) for key in keys
            ]
            try:
                answers = await send(number, call)
            finally:
                del in_flight[number], calls[number]
            # Let the event loop run `CacheWriter`, which writes this iteration's answers.
            await asyncio.sleep(0)
            answered = zip(keys, answers, strict=False)
            return [
                model.build_completion(keeping.get_stored(key, one), cached=False)
                for key, one in answered
            ]

        yield generate_samples
