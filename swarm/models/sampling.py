"""Answers to requests: cached ones first, the others from one queue per model.

Everything that is sent to an endpoint, a function or a model of llm passes here. A
request to an endpoint:

    Sampler.sample         the cache; a sample that is already requested is awaited, not paid twice
      SampledModel.open_session     one batch of the model's queue
        http.HttpClient.call        retries: 429, 5xx, timeouts, malformed responses
          rate_limit.RateLimiter    when it may be sent: concurrency, rates, the learned rate

From any thread, one model: `model.generate(requests)`, `model.generate_each(requests)` and
`model.stream(request)`. Several models at once, from a coroutine on the shared event loop:

    async def ask() -> list[Completion | UserError]:
        async with Sampler(limit=32) as sampler:
            calls = [model.prepare(Request("Name a number.", temperature=1.0)) for model in models]
            return await sampler.sample([(call, n) for call in calls for n in range(100)])

    answers = shared_event_loop().run(ask())
"""

import asyncio
import os
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from swarm._util.threads import run_in_thread, shared_event_loop
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    CompletionFields,
    Delta,
    Model,
    Request,
    Stream,
    completion_fields,
    completion_to_json,
    request_to_json,
)
from swarm.models.cache import Cache, make_cache_key
from swarm.models.http_errors import ConnectionFailed, RequestError

Outcome = Completion | UserError
"""What a request comes to."""


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """A request to one model, for all of its samples.

    Attributes:
        model, request: The model, and the request of sample 0.
        key: Common part of the samples' cache keys.
        equal: Whether all samples are one answer, as of greedy requests.
        together: Whether one request may return several samples; see `samples_at_once`.
        body: Request body of sample 0, for models behind an endpoint.
    """

    model: "SampledModel"
    request: Request
    key: str
    equal: bool = False
    together: bool = False
    body: dict[str, Any] | None = None


Sample = tuple[PreparedRequest, int]
"""One sample of a request, by number."""

Send = Callable[[Sequence[Sample]], Awaitable[Sequence[CompletionFields | UserError]]]
"""Answers a batch of a model's samples in order. The last ones may be missing if the model returns
fewer samples at once than requested; they are queued again.
"""


def sample_key(call: PreparedRequest, sample: int) -> str:
    """Return the cache key of one sample."""
    return f"{call.key}:{0 if call.equal else sample}"


class SampledModel(Model):
    """Base of models whose answers are obtained by a `Sampler`.

    Subclasses define `open_session` and `stream_uncached`.

    Args:
        label: The model's name in messages.
        cache_label: The model's name in `python -m swarm.cache info`.
        cache: Cache of the answers; `None` stores none.
        identity: JSON value that distinguishes the model from all others sharing the cache.
        batch_size: Maximum number of different requests in a batch.
        batches: Maximum number of concurrent batches.

    Attributes:
        samples_at_once: Maximum number of samples of one request in a batch (field `n`).
        answered: Whether the model has answered; see the argument `probe` of `Sampler`.
    """

    samples_at_once = 1
    answered = False

    def __init__(
        self,
        label: str,
        cache_label: str | None,
        cache: Cache | None,
        identity: Sequence[Any] = (),
        batch_size: int = 1,
        batches: int = 1,
    ) -> None:
        self.label, self.cache_label, self.cache = label, cache_label, cache
        self.identity, self.batch_size, self.batches = list(identity), batch_size, batches

    def prepare(self, request: Request) -> PreparedRequest:
        """Return a request in the model's form.

        Raises:
            UserError: The model cannot answer it.
        """
        key = make_cache_key("model", self.identity, request_to_json(replace(request, sample=0)))
        # Without a cache each of equal requests is answered: a function may be random.
        equal = self.cache is not None and request.temperature == 0
        return PreparedRequest(self, request, key, equal)

    def open_session(self) -> Any:
        """Return an asynchronous context that provides a `Send`; its errors concern all requests.

        It is used on the event loop of `swarm._util.threads.shared_event_loop`.
        """
        raise NotImplementedError

    def stream_uncached(self, call: PreparedRequest) -> Generator[Delta, None, CompletionFields]:
        """Stream one sample, number `call.request.sample`."""
        raise NotImplementedError

    def is_complete(self, call: PreparedRequest, answer: CompletionFields) -> bool:
        """Return whether an answer may be stored."""
        return True

    def build_completion(self, answer: CompletionFields, cached: bool) -> Completion:
        """Build a completion from stored fields."""
        return Completion.from_fields({**answer, "cached": True} if cached else answer)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        # Answers received before a failure are stored.
        found: list[Any] = self._ask([self.prepare(request) for request in requests], stop=True)
        return found

    def generate_each(self, requests: Sequence[Request]) -> list[Outcome]:
        """See `Model.generate_each`.

        An error that concerns all requests, such as a wrong key, is the outcome of the remaining
        ones too.
        """
        prepared: list[PreparedRequest | UserError] = []
        for request in requests:
            try:
                prepared.append(self.prepare(request))
            except UserError as error:
                prepared.append(error)
        found = iter(self._ask([one for one in prepared if isinstance(one, PreparedRequest)]))
        return [one if isinstance(one, UserError) else next(found) for one in prepared]

    def _ask(self, calls: Sequence[PreparedRequest], stop: bool = False) -> list[Outcome]:
        """Obtain one answer for each request: the k-th of equal ones gets the k-th sample.

        The samples count from `Request.sample`, so that the next call has the same ones.
        """
        seen: Counter[tuple[str, int]] = Counter()
        samples = []
        for call in calls:
            number = call.request.sample
            if not call.equal:
                same = call.key, number
                number += seen[same]
                seen[same] += 1
            samples.append((call, number))
        return shared_event_loop().run(self._answer(samples, stop)) if samples else []

    async def _answer(self, samples: Sequence[Sample], stop: bool) -> list[Outcome]:
        async with Sampler(stop=stop) as sampler:
            return await sampler.sample(samples)

    def stream(self, request: Request) -> Stream:
        """See `Model.stream`; a cached answer is one piece, an incomplete one is not stored."""
        call = self.prepare(request)
        key = sample_key(call, request.sample)
        if self.cache:
            for answer in self.cache.get([key], completion_fields).values():
                completion = self.build_completion(answer, cached=True)
                calls = [{"index": n, **one} for n, one in enumerate(completion.tool_calls)]
                yield Delta(completion.text, completion.reasoning, tuple(calls))
                return completion
        answer = yield from self.stream_uncached(call)
        if self.cache and self.is_complete(call, answer):
            answer = self.cache.put(key, answer, self.cache_label, completion_fields)
        return self.build_completion(answer, cached=False)


class CachedModel(SampledModel):
    """Answers from a cache; requests missing answers from a model in batches, in a thread.

    `Request.stop_check` is not passed on, so that cached answers are complete. Requests with
    temperature 0 share one answer.

    Args:
        model: Model that answers on a cache miss.
        cache, identity, label, batches: See `SampledModel`.
        batch_size: Requests in a batch; an interrupt loses the answers of at most one.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        identity: Sequence[Any],
        label: str,
        batch_size: int = 64,
        batches: int = 1,
    ) -> None:
        super().__init__(label, label, cache, identity, batch_size, batches)
        self.model = model

    def check(self) -> None:
        self.model.check()

    def open(self, device: str) -> None:
        self.model.open(device)

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[Send]:
        yield self._send_batch

    async def _send_batch(self, batch: Sequence[Sample]) -> list[CompletionFields | UserError]:
        requests = [replace(call.request, stop_check=None, sample=n) for call, n in batch]
        try:
            outcomes = await run_in_thread(self.model.generate_each, requests)
        except (Exception, SystemExit) as error:  # of a user's model: the others go on
            raise UserError(f"{self.label}: {type(error).__name__}: {error}") from error
        return [one if isinstance(one, UserError) else completion_to_json(one) for one in outcomes]

    def stream_uncached(self, call: PreparedRequest) -> Generator[Delta, None, CompletionFields]:
        request = replace(call.request, stop_check=None)
        return completion_to_json((yield from self.model.stream(request)))


MAX_FAILURES_IN_ROW = 3
"""Number of failures without an answer between them after which an endpoint is given up."""

Key = tuple[Any, str]
"""The cache, or without one the call of `Sampler.sample`, and the key of a sample."""

_in_flight: dict[Key, "_Item"] = {}
"""Samples that a sampler of this process is about to request and store."""

_answering: ContextVar[tuple["_Item", ...]] = ContextVar("answering", default=())
"""Samples for whose answers the caller's own requests are made, also from threads of theirs."""

os.register_at_fork(after_in_child=_in_flight.clear)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call of `Sampler.sample` that waits for outcomes."""

    outcomes: list[Any]
    missing: int
    done: "asyncio.Future[list[Outcome]]"

    def deliver(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(self.outcomes)


@dataclass(slots=True, eq=False)
class _Item:
    """A sample in a model's queue.

    Attributes:
        first: Whether it precedes those that wait already.
        sampler: The sampler that requests it.
        waiting: Calls of this sampler's `sample` that want it, each with its index there.
        followers: Called with the outcome for other samplers, or with `None` if this one was
            closed before.
        sent: Whether it has left the queue.
    """

    key: Key
    call: PreparedRequest
    sample: int
    first: bool
    sampler: "Sampler"
    waiting: list[tuple[_Waiting, int]]
    followers: list[Callable[[Outcome | None], None]] = field(default_factory=list)
    sent: bool = False


@dataclass(slots=True, eq=False)
class ModelQueue:
    """Samples of one model that are to be requested, and the state of its requests.

    Attributes:
        unstored: Answers that are neither stored nor delivered yet.
        active: Number of batches under way.
        last: Time of the last answer, as `time.monotonic` returns it.
        failures: Number of failures since then.
        error: Why no further requests are sent.
    """

    model: SampledModel
    waiting: deque[_Item] = field(default_factory=deque)
    unstored: list[tuple[_Item, CompletionFields]] = field(default_factory=list)
    active: int = 0
    last: float = 0.0
    failures: int = 0
    error: UserError | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    send: Send | None = None

    def can_start(self, probe: bool) -> bool:
        """Return whether a batch may be sent; `probe` allows one before the first answer."""
        limit = self.model.batches if self.model.answered or not probe else 1
        return bool(self.waiting) and self.active < limit

    def next_batch(self) -> list[_Item]:
        """Take the next batch: different requests, or several samples of one."""
        batch = [self.waiting.popleft()]
        if self.model.batch_size > 1:
            size = min(self.model.batch_size - 1, len(self.waiting))
            return batch + [self.waiting.popleft() for _ in range(size)]
        call, limit = batch[0].call, self.model.samples_at_once
        while call.together and self.waiting and len(batch) < limit:
            other = self.waiting[0].call
            if other.key != call.key or other.request.timeout != call.request.timeout:
                break
            batch.append(self.waiting.popleft())
        return batch


class Sampler:
    """Answers samples of any models, as an asynchronous context on the shared event loop.

    Leaving the context cancels what is under way; answers received before are stored. All state is
    changed on the event loop only, so no locks are needed. Equal samples are requested once, also
    by several samplers of the process where answers are cached.

    Args:
        limit: Maximum number of concurrent batches of all models; `None` is no limit. The models
            have their own.
        probe: Send a model a single request until it has answered.
        stop: Raise the first error, and send nothing more.

    Attributes:
        received, failed: Number of outcomes, and of errors among them.
    """

    def __init__(self, limit: int | None = None, probe: bool = False, stop: bool = False) -> None:
        self.limit, self.probe, self.stop = limit or sys.maxsize, probe, stop
        self.active = self.received = self.failed = 0
        self._queues: dict[SampledModel, ModelQueue] = {}
        self._wanted: dict[Key, _Item] = {}
        self._new: list[tuple[Sample, _Waiting, int, bool]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._outer = _answering.get()
        self._outer_samplers = {item.sampler for item in self._outer}
        self._waits: set[_Waiting] = set()
        self._stack = AsyncExitStack()
        self._started = self._failed = self._closed = False

    # Hooks of subclasses.

    def on_start(self) -> None:
        """Do something before the first request is sent; not called if all answers are cached."""

    def on_give_up(self, model: SampledModel, error: RequestError) -> None:
        """Note that a model gets no further requests."""

    @property
    def pending(self) -> int:
        """Number of different samples without an outcome."""
        return len(self._wanted)

    async def __aenter__(self) -> "Sampler":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in self._queues.values():
            self._store(queue)
        for item in self._wanted.values():
            self._end_flight(item, None)
        await self._stack.aclose()

    async def sample(self, samples: Sequence[Sample], first: bool = False) -> list[Outcome]:
        """Return the outcome of each sample, in order.

        Args:
            samples: Requests, prepared by their models, with numbers of samples.
            first: Send them before those that wait already.

        Raises:
            UserError: A request failed, and this is a sampler with `stop`.
        """
        if not samples:
            return []
        done: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        waiting = _Waiting([None] * len(samples), len(samples), done)
        if not self._new:
            # Calls of one iteration of the loop are looked up together.
            self._call_soon(self._look_up)
        self._new += [(one, waiting, index, first) for index, one in enumerate(samples)]
        self._waits.add(waiting)
        try:
            return await done
        finally:
            self._waits.discard(waiting)

    def _call_soon(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the next iteration of the loop; its errors are those of `sample`."""

        def call() -> None:
            try:
                function(*args)
            except BaseException as error:
                self._fail(error)

        asyncio.get_running_loop().call_soon(call)

    def _look_up(self) -> None:
        """Deliver cached samples, and queue the others."""
        new, self._new = self._new, []
        wanted: dict[SampledModel, list[tuple[Sample, _Waiting, int, bool]]] = {}
        for one in new:
            wanted.setdefault(one[0][0].model, []).append(one)
        for model, ones in wanted.items():
            names = [sample_key(*sample) for sample, *_ in ones]
            found: dict[str, Outcome] = {}
            try:
                if model.cache:
                    cached = model.cache.get(list(dict.fromkeys(names)), completion_fields)
                    found = {k: model.build_completion(one, True) for k, one in cached.items()}
                    self.received += len(found)
            except UserError as error:
                found = dict.fromkeys(names, error)
                self._count_failures(error, len(found))
            missing = []
            for name, ((call, sample), waiting, index, first) in zip(names, ones, strict=True):
                if outcome := found.get(name):
                    waiting.deliver(index, outcome)
                    continue
                key = (model.cache or waiting, name)
                if item := self._wanted.get(key):
                    item.waiting.append((waiting, index))
                else:
                    number = 0 if call.equal else sample
                    item = _Item(key, call, number, first, self, [(waiting, index)])
                    self._wanted[key] = item
                    missing.append(item)
            if missing:
                self._enqueue(self._queues.setdefault(model, ModelQueue(model)), missing)
        self._dispatch()

    def _enqueue(self, queue: ModelQueue, items: Sequence[_Item]) -> None:
        """Queue samples, except those that another sampler is about to request."""
        mine = []
        for item in items:
            flight = _in_flight.get(item.key) if queue.model.cache else None
            if queue.error:
                self._deliver(item, queue.error)
            elif flight and self._may_await(flight):
                flight.followers.append(partial(self._on_flight_done, queue, item))
            else:
                mine.append(item)
                if queue.model.cache and not flight:
                    _in_flight[item.key] = item
        queue.waiting.extend(_group([item for item in mine if not item.first]))
        queue.waiting.extendleft(reversed(_group([item for item in mine if item.first])))

    def _may_await(self, flight: _Item) -> bool:
        """Return whether another sampler's request ends even if the caller waits for it.

        A model that sends requests in order to answer must not wait for its own answer, nor for a
        request that may be queued behind it.
        """
        if flight.sampler not in self._outer_samplers:
            return True
        return flight.sent and flight not in self._outer

    def _on_flight_done(self, queue: ModelQueue, item: _Item, outcome: Outcome | None) -> None:
        """Deliver another sampler's outcome; request the sample if that one was cancelled."""
        if item.key not in self._wanted or self._closed:
            return
        if outcome is not None:
            self._deliver(item, outcome)
            return
        self._enqueue(queue, [item])
        self._dispatch()

    def _end_flight(self, item: _Item, outcome: Outcome | None) -> None:
        """Pass an outcome on to other samplers; without one they request the sample themselves."""
        if _in_flight.get(item.key) is item:
            del _in_flight[item.key]
            for follow in item.followers:
                follow(outcome)

    def _count_failures(self, error: UserError, number: int) -> None:
        self.received, self.failed = self.received + number, self.failed + number
        if self.stop:
            self._fail(error)

    def _deliver(self, item: _Item, outcome: Outcome) -> None:
        if isinstance(outcome, UserError):
            self._count_failures(outcome, 1)
        else:
            self.received += 1
        del self._wanted[item.key]
        for waiting, index in item.waiting:
            waiting.deliver(index, outcome)
        self._end_flight(item, outcome)

    def _fail(self, error: BaseException) -> None:
        """Raise an error in all calls of `sample`, and send nothing more."""
        self._failed = True
        for waiting in self._waits:
            if not waiting.done.done():
                waiting.done.set_exception(error)

    def _list_ready(self) -> list[ModelQueue]:
        return [one for one in self._queues.values() if one.can_start(self.probe)]

    def _dispatch(self) -> None:
        """Start as many batches as allowed, in turn over all models."""
        while self.active < self.limit and not self._failed and (ready := self._list_ready()):
            if not self._started:
                self._started = True
                self.on_start()
            for queue in ready[: self.limit - self.active]:
                # Moved to the end, so that the first model does not get every free place.
                self._queues[queue.model] = self._queues.pop(queue.model)
                work = self._work(queue, self._take_batch(queue))
                task = asyncio.get_running_loop().create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    def _take_batch(self, queue: ModelQueue) -> list[_Item]:
        queue.active, self.active = queue.active + 1, self.active + 1
        batch = queue.next_batch()
        for item in batch:
            item.sent = True
        return batch

    async def _work(self, queue: ModelQueue, batch: list[_Item]) -> None:
        """Send a batch, and then those that may follow it at once."""
        while True:
            await self._run_batch(queue, batch)
            queue.active, self.active = queue.active - 1, self.active - 1
            if self._new or self._failed or self._list_ready() != [queue]:
                break
            batch = self._take_batch(queue)
            if queue.can_start(self.probe):  # samples that were queued again, for several batches
                self._dispatch()
        self._dispatch()

    async def _run_batch(self, queue: ModelQueue, batch: list[_Item]) -> None:
        began = time.monotonic()
        _answering.set((*self._outer, *batch))
        answers: Sequence[CompletionFields | UserError]
        try:
            send = queue.send or await self._open(queue)
            answers = await send([(item.call, item.sample) for item in batch])
        except UserError as error:
            answers = [error] * len(batch)
        if len(answers) < len(batch):
            queue.waiting.extendleft(reversed(batch[len(answers) :]))
        failed: UserError | None = None
        for item, answer in zip(batch, answers, strict=False):
            if not isinstance(answer, UserError):
                self._count_answer(queue)
                if not queue.unstored:
                    # The answers of one iteration of the loop are stored in one transaction.
                    self._call_soon(self._store, queue)
                queue.unstored.append((item, answer))
                continue
            if answer is not failed:  # a failed request for several samples counts once
                self._count_failure(queue, answer, began)
                failed = answer
            self._deliver(item, answer)

    def _store(self, queue: ModelQueue) -> None:
        """Store and deliver answers; the stored one is another process's if written before."""
        found, queue.unstored = queue.unstored, []
        model = queue.model
        stored: dict[str, CompletionFields] = {}
        complete = {
            item.key[1]: answer
            for item, answer in found
            if model.cache and model.is_complete(item.call, answer)
        }
        try:
            if model.cache and complete:
                stored = model.cache.put_many(complete, model.cache_label, completion_fields)
        except UserError as error:  # further answers would be lost as well
            for item, _ in found:
                self._deliver(item, error)
            self._close_queue(queue, error)
            return
        for item, answer in found:
            answer = stored.get(item.key[1], answer)
            self._deliver(item, model.build_completion(answer, cached=False))

    def _close_queue(self, queue: ModelQueue, error: UserError) -> None:
        """Send no more requests to a model."""
        queue.error = error
        while queue.waiting:
            self._deliver(queue.waiting.popleft(), error)

    async def _open(self, queue: ModelQueue) -> Send:
        """Open the model's session, once."""
        async with queue.opening:
            if queue.error:
                raise queue.error
            if queue.send is None:
                try:
                    session = queue.model.open_session()
                    queue.send = await self._stack.enter_async_context(session)
                except UserError as error:
                    self._close_queue(queue, error)
                    raise
            return queue.send  # type: ignore[return-value]

    def _count_answer(self, queue: ModelQueue) -> None:
        if not queue.model.answered and self.probe:
            self._call_soon(self._dispatch)  # more than one may be sent now
        queue.model.answered, queue.last, queue.failures = True, time.monotonic(), 0

    def _count_failure(self, queue: ModelQueue, error: UserError, began: float) -> None:
        """Count a failure of a batch sent at `began`; give up a model that fails always."""
        queue.failures += 1
        if not isinstance(error, RequestError):
            return
        unreachable = isinstance(error, ConnectionFailed) and not queue.last
        hopeless = queue.failures >= MAX_FAILURES_IN_ROW or unreachable
        if error.general or (error.passing and queue.last < began and hopeless):
            queue.model.answered = False
            self._close_queue(queue, error)
            self.on_give_up(queue.model, error)
        elif not error.passing:
            queue.model.answered = True  # it refuses this request, but is there


def _group(items: list[_Item]) -> list[_Item]:
    """Move samples of one request together where a batch may contain several."""
    if not any(item.call.together for item in items):
        return items
    groups: dict[str, list[_Item]] = {}
    for item in items:
        groups.setdefault(item.call.key, []).append(item)
    return list(chain.from_iterable(groups.values()))
