"""Backends of experiments: models whose answers are cached by request and sample."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from swarm.compare.sampling.types import ModelCall
from swarm.compare.settings import CompareSettings
from swarm.errors import UserError
from swarm.models.base import Completion, Message, Request, completion_fields
from swarm.models.cache import (
    Cache,
    make_cache_key,
)
from swarm.models.openai import OpenAI
from swarm.models.openai_protocol import chat_url, override_fields
from swarm.models.sampling import CachedModel


def open_answer_cache() -> Cache:
    """Open the cache file in the current `Config.cache_dir`."""
    return _open_cache_file(str(Path(CompareSettings.cache_dir).expanduser() / "answers.sqlite"))


@lru_cache(maxsize=16)
def _open_cache_file(file: str) -> Cache:
    return Cache(file)


DEFAULT_MAX_NEW_TOKENS = 1024
"""Maximum new tokens of a model on this machine if the parameters set no limit."""

BATCH_SIZE = 32
"""Requests in one batch of a `BatchBackend`."""

MAX_SAMPLES_PER_REQUEST = 128
"""Maximum of the field `n` of a request: the limit of OpenAI's API."""

COMMON_PARAMS = {
    "model",
    "timeout",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "seed",
    "stop",
    "logprobs",
    "top_logprobs",
}
"""Parameters supported by every model."""

SAMPLE_KEY_OFFSET = 10**10
"""Added to sample numbers in keys, so that the keys sort in numerical order."""

SAMPLE_KEY_DIGITS = len(str(SAMPLE_KEY_OFFSET))

UNSUPPORTED_SDK_PARAMS = ("extra_headers", "extra_query")
"""Parameters that the openai package sends outside the request body."""


class Backend(Protocol):
    """Source of a model's answers.

    Attributes:
        cache: Cache of the answers.
        label: Name of the model in the cache.
        at_once: Requests per batch; 1 sends them one by one.
        batches: Maximum number of concurrent batches.
        met: Whether the model has answered; until then there is one request at a time.
    """

    cache: Cache
    label: str
    at_once: int
    batches: int
    met: bool

    def build_request(self, call: ModelCall) -> Request:
        """Build the request of sample 0.

        Raises:
            UserError: The model does not support these parameters.
        """
        ...

    def call_key(self, call: ModelCall) -> tuple[str, bool]:
        """Return the common part of all samples' cache keys, and whether they are equal.

        Raises:
            UserError: As `build_request`.
        """
        ...

    def sample_key(self, key: str, sample: int) -> str:
        """Return the cache key of one sample."""
        ...

    def get_cached_samples(self, key: str, first: int, count: int) -> dict[int, Completion]:
        """Return the cached samples among `first`, ..., `first + count - 1`, by number."""
        ...

    def get_cached(self, keys: Sequence[str]) -> dict[str, Completion]:
        """Return the cached answers of these keys, which are distinct.

        Raises:
            UserError: The answer cache cannot be read.
        """
        ...


class EndpointBackend:
    """A model behind a chat endpoint; requests are sent one by one.

    Args:
        model: The model.
        kept_at: Base URL under which its answers are cached; `None`: the model's.
    """

    at_once = 1

    def __init__(self, model: OpenAI, kept_at: str | None = None) -> None:
        assert model.cache is not None
        self.url = chat_url(kept_at) if kept_at else model.client.url
        self.model, self.cache, self.label = model, model.cache, str(model.model)
        self.batches, self.met = model.client.limits.concurrency, False
        self.samples_at_once = MAX_SAMPLES_PER_REQUEST

    def build_request(self, call: ModelCall) -> Request:
        """Build a request with the unchanged parameters, whatever they contain."""
        body, timeout = self._request_body(call)
        # Config's timeout is that of one attempt and already part of the limits.
        return Request(
            (), body=body, timeout=None if timeout == CompareSettings.timeout else timeout
        )

    def _request_body(self, call: ModelCall) -> tuple[dict[str, Any], float | None]:
        field = self.model.tokens_field
        body = {**call.api_kwargs}
        timeout = body.pop("timeout", None)
        if body.get("model") == call.model:
            del body["model"]
        if "max_tokens" in body:
            body[field] = body.pop("max_tokens")
        else:
            body.setdefault(field, None)
        if other := next((key for key in UNSUPPORTED_SDK_PARAMS if body.pop(key, None)), None):
            raise UserError(f"{call.model}: {other} is not supported; leave it out")
        body |= body.pop("extra_body", None) or {}
        return body, timeout

    def call_key(self, call: ModelCall) -> tuple[str, bool]:
        """See `Backend.call_key`; a name at another endpoint is another model.

        Samples are never equal: endpoints are not deterministic even at temperature 0.
        """
        body = override_fields({"messages": [], **self.model.fixed}, self._request_body(call)[0])
        try:
            return make_cache_key("chat", self.url, body), False
        except TypeError as error:
            raise UserError(f"{self.label}: the request is not JSON: {error}") from None

    def sample_key(self, key: str, sample: int) -> str:
        """Return the key of a sample; keys of one request are adjacent, for range queries."""
        return f"{key}:{SAMPLE_KEY_OFFSET + sample}"

    def get_cached(self, keys: Sequence[str]) -> dict[str, Completion]:
        """See `Backend.get_cached`."""
        found = self.cache.get(keys, completion_fields)
        return dict(zip(found, self.again(found.values()), strict=True))

    def get_cached_samples(self, key: str, first: int, count: int) -> dict[int, Completion]:
        """See `Backend.get_cached_samples`; reads one range of the cache."""
        begin, end = (self.sample_key(key, sample) for sample in (first, first + count - 1))
        found = self.cache.get_range(begin, end, completion_fields)
        numbers = [int(one[-SAMPLE_KEY_DIGITS:]) - SAMPLE_KEY_OFFSET for one in found]
        return dict(zip(numbers, self.again(found.values()), strict=True))

    def again(self, answers: Collection[Any]) -> list[Completion]:
        """Convert cached answers, and count them in the model's totals."""
        self.model.totals.cached += len(answers)
        completion = self.model.build_completion
        return [completion(answer, cached=True) for answer in answers]


class BatchBackend:
    """Any other model, queried in batches in a thread."""

    at_once = BATCH_SIZE
    batches = 4
    met = True

    def __init__(self, model: CachedModel) -> None:
        assert model.cache is not None
        self.model, self.cache, self.label = model, model.cache, model.label

    def build_request(self, call: ModelCall) -> Request:
        """Build a request from the parameters that all models support."""
        params = call.api_kwargs
        if strange := sorted(
            key for key in params if key not in COMMON_PARAMS and params[key] is not None
        ):
            raise UserError(
                f"{call.model}: {strange[0]} is not supported; ModelAdapter.register can remove "
                "it for this model"
            )
        top = params.get("top_logprobs") or -1 if params.get("logprobs") else 0
        stop = params.get("stop") or ()
        longest = (
            params.get("max_tokens")
            or params.get("max_completion_tokens")
            or DEFAULT_MAX_NEW_TOKENS
        )
        return Request(
            tuple(_parse_message(call.model, turn) for turn in params["messages"]),
            max_new_tokens=longest,
            temperature=params.get("temperature"),
            seed=params.get("seed"),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            top_logprobs=top,
        )

    def call_key(self, call: ModelCall) -> tuple[str, bool]:
        """See `Backend.call_key`; greedy samples are equal."""
        prepared = self.model.prepare(self.build_request(call))
        return prepared.key, prepared.equal

    def sample_key(self, key: str, sample: int) -> str:
        """See `swarm.models.sampling.sample_key`."""
        return f"{key}:{sample}"

    def get_cached(self, keys: Sequence[str]) -> dict[str, Completion]:
        """See `Backend.get_cached`."""
        found = self.cache.get(keys, completion_fields)
        return {key: self.model.build_completion(one, True) for key, one in found.items()}

    def get_cached_samples(self, key: str, first: int, count: int) -> dict[int, Completion]:
        """See `Backend.get_cached_samples`."""
        keys = [f"{key}:{sample}" for sample in range(first, first + count)]
        found = self.get_cached(keys)
        return {first + n: found[one] for n, one in enumerate(keys) if one in found}

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """Return each outcome; an exception of a custom model does not end other requests."""
        try:
            return self.model.generate_each(requests)
        except (Exception, SystemExit) as error:
            return [UserError(f"{self.label}: {type(error).__name__}: {error}")] * len(requests)


def _parse_message(model: str, turn: Mapping[str, Any]) -> Message:
    content = turn.get("content")
    if not isinstance(content, str):
        raise UserError(f"{model}: accepts text only, but a message has other content")
    return Message(str(turn.get("role")), content)
