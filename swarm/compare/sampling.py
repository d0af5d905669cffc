"""Sampling: requests of questions, the models that answer them, and the run of all scripts.

A row of a question is a script, a generator that yields the samples it needs and is sent their
outcomes. One `swarm.models.sampling.Sampler` obtains the samples of all scripts of a run.
"""

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache, lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from swarm._util.terminal import show_sampling
from swarm._util.threads import run_in_thread, shared_event_loop
from swarm.compare.config import (
    FOLDER_PREFIXES,
    LOCAL_PREFIXES,
    Config,
    EndpointClient,
    KeyedClient,
    build_probe,
    find_client,
    forget_client,
    is_reasoning_model,
    open_answer_cache,
)
from swarm.errors import InvalidArgument, NoClientForModel, UserError
from swarm.models.base import Message, Model, Request, completion_fields
from swarm.models.cache import Cache
from swarm.models.http_errors import RequestError
from swarm.models.openai import OpenAI
from swarm.models.providers import Providers
from swarm.models.rate_limit import Limits
from swarm.models.sampling import (
    CachedModel,
    Outcome,
    PreparedRequest,
    SampledModel,
    Sampler,
    sample_key,
)
from swarm.registry.registry import Roster, store_answers

T = TypeVar("T")

DEFAULT_MAX_NEW_TOKENS = 1024
"""Maximum new tokens of a model on this machine if the parameters set no limit."""

BATCH_SIZE, BATCHES = 32, 4
"""Requests in one batch of a model that is not an endpoint, and concurrent batches."""

MAX_SAMPLES_PER_REQUEST = 128
"""Maximum of the field `n` of a request: the limit of OpenAI's API."""

COMMON_PARAMS = {
    *("model", "timeout", "messages", "max_tokens", "max_completion_tokens", "temperature"),
    *("seed", "stop", "logprobs", "top_logprobs"),
}
"""Parameters supported by every model."""

UNSUPPORTED_SDK_PARAMS = ("extra_headers", "extra_query")
"""Parameters that the openai package sends outside the request body."""


# Requests

Selector = Callable[[str], bool]
PrepareFunction = Callable[[dict[str, Any], str], dict[str, Any]]


class ModelAdapter:
    """Registry of functions that change the request parameters of some models.

    Handlers run both when a request is sent and when its cached answer is looked up: a handler that
    changes the parameters changes the cache key.
    """

    _handlers: ClassVar[list[tuple[Selector, PrepareFunction]]] = []

    @classmethod
    def register(cls, model_selector: Selector, prepare_function: PrepareFunction) -> None:
        """Add a handler; all matching handlers are called in the order of registration.

        Args:
            model_selector: Called with a model's name; returns whether the handler applies.
            prepare_function: Called with the parameters and the model's name; returns the
                parameters, and may modify them in place.
        """
        cls._handlers.append((model_selector, prepare_function))

    @classmethod
    def reset(cls) -> None:
        """Remove all registered handlers."""
        cls._handlers.clear()

    @classmethod
    def prepare(cls, params: dict[str, Any], model: str) -> dict[str, Any]:
        """Return the parameters with the model's name, after all matching handlers.

        OpenAI's reasoning models get `Config.reasoning_effort` and their own token limit.

        Raises:
            InvalidArgument: The result is not well-formed.
        """
        params = {"model": model, **params}
        if is_reasoning_model(model):
            params = {"reasoning_effort": Config.reasoning_effort, **params}
            limit = params.pop("max_tokens", None)
            # One that the user has set; max_tokens may be the question's default.
            if limit is not None and params.get("max_completion_tokens") is None:
                params["max_completion_tokens"] = limit
        params = validate_params(params, model)
        for selects, prepared in cls._handlers:
            if selects(model):
                params = validate_params(prepared(params, model), model)
        return params

    @classmethod
    def test_request_params(cls, model: str) -> dict[str, Any]:
        """Return the parameters of the request that probes whether an endpoint has a model."""
        return build_probe(model)


def validate_params(params: Any, model: str) -> dict[str, Any]:
    """Return the parameters if they are well-formed; the endpoint may still reject them.

    Raises:
        InvalidArgument: "messages" is not a list of turns, or a token limit is not an integer.
    """
    turns = params.get("messages") if isinstance(params, dict) else None
    valid = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str | list | None)
        for turn in turns
    )
    if not valid:
        raise InvalidArgument(
            f"{model}: {params!r:.60} is not a dict with "
            '"messages": [{"role": ..., "content": ...}]'
        )
    for key in ("max_tokens", "max_completion_tokens"):
        if not isinstance(params.get(key), int | None):
            raise InvalidArgument(f"{model}: {key}={params[key]!r:.60}: must be an integer")
    return dict(params)


class ModelCall:
    """Parameters of a call to one model; shared by all of its samples.

    Args:
        model: Name of the model.
        params: Parameters in the chat format ("messages", "temperature", "max_tokens", ...), before
            `ModelAdapter` is applied.
        together: Whether one request may return several samples (`n`), so that the prompt is paid
            once. For short answers, since such a request takes as long as its longest answer.
    """

    def __init__(self, model: str, params: Mapping[str, Any], together: bool = False) -> None:
        self.model, self.params, self.together = model, params, together
        self._api_kwargs: dict[str, Any] | None = None

    @property
    def api_kwargs(self) -> dict[str, Any]:
        """Parameters that are sent, with "model" and "timeout"; computed once."""
        if self._api_kwargs is None:
            # A handler may change its copy in place.
            prepared = ModelAdapter.prepare(copy_containers(self.params), self.model)
            self._api_kwargs = {"timeout": Config.timeout, **prepared}
        return self._api_kwargs


def copy_containers(value: Any) -> Any:
    """Copy nested dictionaries and lists; ten times as fast as `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: copy_containers(one) for key, one in value.items()}
    return [copy_containers(one) for one in value] if isinstance(value, list) else value


class SampleRequest(NamedTuple):
    """One sample of a call, by number."""

    call: ModelCall
    sample: int = 0


Script = Generator[Sequence[SampleRequest], list[Outcome], T]
"""Computes one or several rows: yields requests any number of times, is sent their outcomes in
order, and returns its result. Failures are sent, not raised. Thousands of scripts run at once; a
sample requested by several of them is requested once.
"""


def prepare_call(model: SampledModel, call: ModelCall) -> PreparedRequest:
    """Return a call in the form of its model.

    Raises:
        UserError: The model does not support these parameters.
    """
    if not isinstance(model, OpenAI):
        return model.prepare(_build_request(call))
    field = model.tokens_field
    body = {**call.api_kwargs}
    # Config's timeout is that of one attempt and already part of the limits.
    timeout = body.pop("timeout", None)
    if body.get("model") == call.model:
        del body["model"]
    body[field] = body.pop("max_tokens", body.get(field))
    if other := next((key for key in UNSUPPORTED_SDK_PARAMS if body.pop(key, None)), None):
        raise UserError(f"{call.model}: {other} is not supported; leave it out")
    body |= body.pop("extra_body", None) or {}
    request = Request((), body=body, timeout=None if timeout == Config.timeout else timeout)
    try:
        prepared = model.prepare(request)
    except TypeError as error:
        raise UserError(f"{call.model}: the request is not JSON: {error}") from None
    prepared.together = prepared.together and call.together
    return prepared


def _build_request(call: ModelCall) -> Request:
    """Build a request from the parameters that all models support."""
    params = {key: value for key, value in call.api_kwargs.items() if value is not None}
    if strange := sorted(params.keys() - COMMON_PARAMS):
        raise UserError(
            f"{call.model}: {strange[0]} is not supported; ModelAdapter.register can remove "
            "it for this model"
        )
    turns, stop = params["messages"], params.get("stop") or ()
    if not all(isinstance(turn.get("content"), str) for turn in turns):
        raise UserError(f"{call.model}: accepts text only, but a message has other content")
    limit = params.get("max_tokens") or params.get("max_completion_tokens")
    return Request(
        tuple(Message(str(turn.get("role")), turn["content"]) for turn in turns),
        max_new_tokens=limit or DEFAULT_MAX_NEW_TOKENS,
        temperature=params.get("temperature"),
        seed=params.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        top_logprobs=params.get("top_logprobs") or -1 if params.get("logprobs") else 0,
    )


# Models

_models_lock = threading.Lock()
_models: dict[Any, SampledModel] = {}


def resolve_model(name: str) -> SampledModel:
    """Return the model of a name; may probe endpoints, so it must not run in an event loop.

    Order of precedence: custom models (`Config.models`); this project's kinds (local/, search/,
    initial_experts/, llm/, function/, moa/, consortium/); the endpoints of `Config.url_key_pairs`;
    PROVIDER/MODEL.

    Raises:
        NoClientForModel: There is no such model; or another `UserError`.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgument(f"{name!r} is not a model name")
    if name in Config.models:
        model = Config.models[name]
        return _share_model((name, id(model)), lambda: _wrap_custom_model(name, model))
    first, slash, rest = name.partition("/")
    if slash and (first in LOCAL_PREFIXES or first in FOLDER_PREFIXES):
        known = f"{FOLDER_PREFIXES.get(first, first)}/{rest}"
        return _share_model((name,), lambda: _wrap_registry_model(known))
    try:
        client = find_client(name)
    except NoClientForModel:
        provider = _load_providers().get(first) if rest else None
        if provider is None:
            raise
        cache = open_answer_cache()
        return _share_model(
            (name,), lambda: provider.create_model(rest, cache=cache, greedy_once=False)
        )
    return _share_model(
        (name, client.base_url, client.api_key, client.variable),
        lambda: _create_endpoint_model(name, client),
    )


def _share_model(key: tuple[Any, ...], create: Callable[[], SampledModel]) -> SampledModel:
    """Return one model per name and settings, so that its limits apply to all callers."""
    limits = (Config.timeout, Config.max_workers, Config.requests_per_minute)
    local = (Config.base, Config.pool, id(Config.roster))
    state = (key, str(open_answer_cache().path), *local, *limits)
    with _models_lock:
        if state not in _models:
            _models[state] = create()
            if isinstance(_models[state], OpenAI):
                _models[state].samples_at_once = MAX_SAMPLES_PER_REQUEST
        return _models[state]


def _wrap_custom_model(name: str, model: Any) -> SampledModel:
    if not isinstance(model, Model):
        raise InvalidArgument(f"Config.models[{name!r}]: must be a swarm.models.base.Model")
    plain = str | int | float | None
    settings = {k: v for k, v in vars(model).items() if k[0] != "_" and isinstance(v, plain)}
    identity = ("own", name, type(model).__qualname__, model.fingerprint() or settings)
    return CachedModel(model, open_answer_cache(), identity, name, BATCH_SIZE, BATCHES)


def _wrap_registry_model(name: str) -> SampledModel:
    cache = open_answer_cache()
    roster = Config.roster or _load_roster(cache, Config.base, Config.pool)
    return store_answers(roster.model(name), name, cache, BATCH_SIZE, BATCHES)


def _create_endpoint_model(name: str, client: EndpointClient) -> SampledModel:
    providers = _load_providers().values()
    prices = (one.prices.get(name) for one in providers if one.base_url == client.base_url)
    limits = Limits(
        concurrency=Config.max_workers,
        requests_per_minute=Config.requests_per_minute,
        timeout=Config.timeout,
    )
    return OpenAI(
        name,
        client.base_url,
        temperature=None,
        prices=next(prices, None),
        cache=open_answer_cache(),
        client=_share_client(client.base_url, client.api_key, client.variable, limits),
        greedy_once=False,
    )


@cache
def _share_client(url: str, key: str, variable: str | None, limits: Limits) -> KeyedClient:
    """Return the client of one endpoint and key, whose limits apply to all of its models."""
    return KeyedClient("", EndpointClient(url, key, variable), limits)


@lru_cache(maxsize=4)
def _load_roster(cache: Cache, base: str | None, pool: str) -> Roster:
    return Roster(base=base, pool=pool, cache=cache)


_load_providers = lru_cache(maxsize=1)(Providers.load)


# Runs

Prepared = PreparedRequest | UserError


class ScriptRun(Sampler, Generic[T]):
    """A run of scripts on the event loop of `swarm._util.threads.shared_event_loop`.

    Args:
        scripts: Scripts; closed at the end of the run.
        on_result: Called with the index and the result of each finished script, in any thread.
        workers: Maximum number of concurrent requests; `None`: `Config.max_workers`.
        before: Called once, before the first request.
    """

    def __init__(
        self,
        scripts: Iterable[Script[T]],
        on_result: Callable[[int, T], None],
        workers: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(workers or Config.max_workers, probe=True)
        self.scripts, self.on_result, self.before = list(scripts), on_result, before
        self._resolving: dict[str, asyncio.Future[SampledModel]] = {}
        self._models: dict[str, SampledModel] = {}
        self._prepared: dict[ModelCall, Prepared] = {}

    async def run_all(self) -> None:
        """Run all scripts to their ends.

        Raises:
            BaseException: Any exception of a script.
        """
        try:
            async with self, asyncio.TaskGroup() as group:
                for number in range(len(self.scripts)):
                    group.create_task(self._drive(number))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for script in self.scripts:
                with suppress(ValueError):  # after an interrupt the thread may still execute it
                    script.close()

    async def _drive(self, number: int) -> None:
        outcomes: Any = None
        try:
            while True:
                wants = self.scripts[number].send(outcomes)
                # Requests that complete a started script precede those that begin another.
                outcomes = await self._fetch(wants, first=outcomes is not None)
        except StopIteration as end:
            self.on_result(number, end.value)

    async def _fetch(self, wants: Sequence[SampleRequest], first: bool) -> list[Outcome]:
        """Return the outcomes of samples; calls that cannot be prepared have errors."""
        found = [self._prepared.get(call) or await self._resolve(call) for call, _ in wants]
        samples = [
            (one, want.sample)
            for one, want in zip(found, wants, strict=True)
            if isinstance(one, PreparedRequest)
        ]
        self.received += len(wants) - len(samples)
        self.failed += len(wants) - len(samples)
        outcomes = iter(await self.sample(samples, first))
        return [next(outcomes) if isinstance(one, PreparedRequest) else one for one in found]

    async def _resolve(self, call: ModelCall) -> Prepared:
        """Prepare a call; its model is resolved once, which may take requests."""
        if call.model not in self._resolving:
            work = run_in_thread(resolve_model, call.model)
            self._resolving[call.model] = asyncio.ensure_future(work)
        try:
            model = await asyncio.shield(self._resolving[call.model])
            self._models[call.model] = model
            return self._prepared.setdefault(call, prepare_call(model, call))
        except UserError as error:
            return self._prepared.setdefault(call, error)

    def on_start(self) -> None:
        if self.before:
            self.before()

    def on_give_up(self, model: SampledModel, error: RequestError) -> None:
        """See `Sampler.on_give_up`: another endpoint may have the model, so search again later."""
        forget_client(next(name for name, one in self._models.items() if one is model))

    def count_progress(self) -> tuple[int, int, int]:
        """Return the numbers of received answers, of requested answers, and of failures."""
        return self.received, self.received + self.pending, self.failed


def run_scripts(
    scripts: Iterable[Script[T]], title: str = "", before: Callable[[], None] | None = None
) -> list[T]:
    """Run scripts in one pool and return their results in order; see `as_completed`."""
    found = dict(as_completed(scripts, title, before=before))
    return [found[number] for number in range(len(found))]


def as_completed(
    scripts: Iterable[Script[T]],
    title: str = "",
    workers: int | None = None,
    silent: bool = False,
    before: Callable[[], None] | None = None,
) -> Generator[tuple[int, T], None, None]:
    """Yield each script's index and result as soon as it has ended.

    Answers are cached as they arrive; closing the generator or an interrupt stops at once and loses
    none of them.

    Args:
        scripts: Scripts; a sample requested by several of them is requested once.
        title: Title of the progress bar.
        workers: Maximum number of concurrent requests; `None`: `Config.max_workers`.
        silent: Disable the progress bar.
        before: Called once before the first request; not if all answers are cached.
    """
    emitters: list[Callable[[tuple[int, T]], None]] = []

    def emit_result(number: int, result: T) -> None:
        emitters[0]((number, result))

    run = ScriptRun(scripts, emit_result, workers, before)
    if shared_event_loop().is_running_here():  # it would wait for itself
        raise InvalidArgument("a function of a ModelAdapter cannot query models or wait for them")

    def start(emit: Callable[[tuple[int, T]], None]) -> Coroutine[Any, Any, None]:
        emitters.append(emit)
        return run.run_all()

    try:
        with (
            show_sampling(title, run.count_progress, silent),
            closing(shared_event_loop().stream_items(start)) as items,
        ):
            yield from items
    except KeyboardInterrupt:
        completed, total, _ = run.count_progress()
        stored = f"{completed} of {total} answers arrived and are stored; the same call resumes"
        print(f"interrupted: {stored}", file=sys.stderr)
        raise


def replay_scripts(scripts: Iterable[Script[T]]) -> tuple[list[T | None], list[str]]:
    """Run scripts on cached answers only.

    Returns:
        The results, `None` for a script that needs an answer that is not cached, and the cache keys
            of all samples that were needed.

    Raises:
        UserError: A model does not exist, or the answer cache cannot be read.
    """

    prepare = cache(lambda call: prepare_call(resolve_model(call.model), call))
    running = list(scripts)
    results: list[T | None] = [None] * len(running)
    keys: list[str] = []
    heard: dict[int, Any] = dict.fromkeys(range(len(running)))
    while heard:
        wants: dict[int, list[tuple[PreparedRequest, str]]] = {}
        for number, outcomes in heard.items():
            try:
                asked = running[number].send(outcomes)
            except StopIteration as end:
                results[number] = end.value
                continue
            calls = [(prepare(call), sample) for call, sample in asked]
            wants[number] = [(call, sample_key(call, sample)) for call, sample in calls]
        sought = list(dict.fromkeys(key for each in wants.values() for _, key in each))
        keys += sought
        cached = open_answer_cache().get(sought, completion_fields)
        heard = {
            number: [call.model.build_completion(cached[key], cached=True) for call, key in each]
            for number, each in wants.items()
            if all(key in cached for _, key in each)
        }
    for script in running:
        script.close()
    return results, keys


@contextmanager
def reduce_gc_frequency() -> Iterator[None]:
    """Make garbage collection rare: a run creates many objects and hardly any garbage.

    Reading 10,000 cached answers then takes 60 % of the time, as each collection traverses all
    objects.
    """
    saved = gc.get_threshold()
    gc.set_threshold(250_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*saved)
