"""Scheduler of scripts: cached samples are read in batches, missing ones requested in one pool.

Contains the progress bar, the queue of each model, and the functions that run scripts:
`run_scripts` and `as_completed`.
"""

import asyncio
import gc
import sys
import threading
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from swarm._util.terminal import SamplingProgressBar
from swarm._util.threads import run_in_thread, shared_event_loop
from swarm.compare.sampling.backends import Backend, BatchBackend, EndpointBackend
from swarm.compare.sampling.resolve import (
    get_endpoint_index,
    get_resolved_backend,
    kept_source,
    resolve_backend,
)
from swarm.compare.sampling.types import ModelCall, SampleOutcome, SampleRequest, Script
from swarm.compare.settings import get_max_workers
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Completion, Request, completion_fields
from swarm.models.http_errors import BadRequest, ConnectionFailed, RequestError
from swarm.models.openai import OpenAI
from swarm.models.sampling import PreparedRequest

GC_THRESHOLDS = (250_000, 20, 100)
"""Thresholds of `gc.set_threshold`; a run creates many objects and hardly any garbage."""

_gc_lock = threading.Lock()
_gc_users = 0
_saved_thresholds = (700, 10, 10)


@contextmanager
def reduce_gc_frequency() -> Iterator[None]:
    """Make garbage collection rare until the last thread has left.

    Reading 10,000 cached answers then takes 60 % of the time, as each collection traverses all
    objects.
    """
    global _gc_users, _saved_thresholds
    with _gc_lock:
        if _gc_users == 0:
            _saved_thresholds = gc.get_threshold()
            gc.set_threshold(*GC_THRESHOLDS)
        _gc_users += 1
    try:
        yield
    finally:
        with _gc_lock:
            _gc_users -= 1
            if _gc_users == 0:
                gc.set_threshold(*_saved_thresholds)


GenerateSamples = Callable[[Sequence[str], Request, int], Awaitable[list[Completion]]]
"""Requests one sample per key, the first with the given sample index, and stores them by key."""


@asynccontextmanager
async def open_sampler(model: OpenAI) -> AsyncIterator[GenerateSamples]:
    """Provide a function that requests samples one call at a time and stores them."""
    prepared: dict[int, PreparedRequest] = {}

    async with model.open_session() as send:

        async def generate_samples(
            keys: Sequence[str], request: Request, sample: int
        ) -> list[Completion]:
            call = prepared.get(id(request))
            if call is None or call.request is not request:
                call = prepared[id(request)] = model.prepare(request)
            answers: Any = await send([(call, sample + n) for n in range(len(keys))])
            found = dict(zip(keys, answers, strict=False))
            complete = {key: one for key, one in found.items() if model.is_complete(call, one)}
            if complete and model.cache:
                found |= model.cache.put_many(complete, model.cache_label, completion_fields)
            return [model.build_completion(one, cached=False) for one in found.values()]

        yield generate_samples


MAX_FAILURES_IN_ROW = 3
"""Consecutive failures after which a model receives no further requests."""


@dataclass(slots=True)
class WaitingScript:
    """A script that waits for samples.

    Attributes:
        script, number: The script and its index among all.
        outcomes: Outcomes received, in the order of its requests.
        missing: Number of outcomes not received yet.
        again: Whether it has requested samples before.
    """

    script: Script[Any]
    number: int
    outcomes: list[Any]
    missing: int = 0
    again: bool = False


QueuedSample = tuple[SampleRequest, WaitingScript, int]
"""A request, the script that waits for it, and its index among that script's requests."""


@dataclass(slots=True)
class PreparedCall:
    """A call of a resolved model; shared by all samples.

    Attributes:
        call: The call.
        place: Queue of the model.
        error: Why the model cannot be called.
        key: Common part of the cache keys.
        samples_equal: Whether all samples are equal.
        request: Request of sample 0; `None` until it is needed.
    """

    call: ModelCall
    place: "ModelQueue"
    error: UserError | None = None
    key: str = ""
    samples_equal: bool = False
    request: Request | None = None


@dataclass
class ModelQueue:
    """Queue and state of one model in a run.

    Attributes:
        name: Name of the model.
        source: Backend; `None` until it is resolved.
        unresolved: Requests from before it was resolved.
        queue: Requests to send: cache key, request and sample number.
        ask: Sampler of an endpoint; `None` until it is used.
        active: Number of running batches, or of requests that are sent one by one.
        last: Time of the last answer, as `time.monotonic` returns it.
        failures: Number of failures since then.
        error: Why no further requests are sent.
    """

    name: str
    source: Backend | None = None
    unresolved: list[QueuedSample] = field(default_factory=list)
    queue: deque[tuple[str, Request, int]] = field(default_factory=deque)
    ask: GenerateSamples | None = None
    active: int = 0
    last: float = 0.0
    failures: int = 0
    error: UserError | None = None

    def can_start(self) -> bool:
        """Return whether a batch may start; an endpoint gets one until it has answered."""
        if not self.queue:
            return False
        assert self.source
        return self.active < (self.source.batches if self.source.met else 1)

    def record_success(self) -> None:
        """Record an answer."""
        assert self.source
        if not self.source.met:
            get_endpoint_index().mark_confirmed(self.name)
        self.source.met, self.last, self.failures = self.error is None, time.monotonic(), 0

    def record_failure(self, error: UserError, began: float) -> None:
        """Record a failure of a request started at `began`; stop the model if hopeless."""
        self.failures += 1
        if not isinstance(error, RequestError):
            return
        if self.source and not error.passing:
            # The endpoint is reachable. If it is overloaded from the beginning, concurrency is not
            # raised.
            self.source.met = True
        unreachable = isinstance(error, ConnectionFailed) and not self.last
        hopeless = self.failures >= MAX_FAILURES_IN_ROW or unreachable
        if error.general or (error.passing and self.last < began and hopeless):
            self.error = error
            if self.source:
                self.source.met = False  # the next run begins with a single request
            # Another endpoint may have the model, or another key may have access: search again next
            # time.
            get_endpoint_index().mark_missing(self.name)


T = TypeVar("T")

MIN_BULK_LOOKUP = 20
"""Minimum number of samples of one call that are looked up together."""


class Scheduler(Generic[T]):
    """A run of scripts on the event loop of `swarm._util.threads.shared_event_loop`.

    State is changed on that loop only, so no locks are needed.

    Args:
        scripts: Scripts; closed at the end of the run.
        on_result: Called with the index and the result of each finished script.
        workers: Maximum number of concurrent requests; `None`: `Config.max_workers`.
        before: Called once, before the first request.
    """

    def __init__(
        self,
        scripts: Sequence[Script[T]],
        on_result: Callable[[int, T], None],
        workers: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.scripts, self.on_result, self.before = scripts, on_result, before
        self.workers = workers or get_max_workers()
        self.places: dict[str, ModelQueue] = {}
        self.prepared: dict[int, PreparedCall] = {}
        self.together: set[int] = set()  # ids of requests that may use the field `n`
        self.wanted: dict[str, list[QueuedSample]] = {}
        self.new: list[QueuedSample] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.active = self.received = self.failed = 0
        self.unfinished, self.settle_scheduled = len(scripts), False

    def count_progress(self) -> tuple[int, int, int]:
        """Return the numbers of received answers, of requested answers, and of failures."""
        return self.received, self.received + len(self.wanted), self.failed

    async def run_all(self) -> None:
        """Run all scripts to their ends.

        Raises:
            BaseException: Any exception of a script.
        """
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with AsyncExitStack() as self.stack:
                for number, script in enumerate(self.scripts):
                    self._advance_script(WaitingScript(script, number, []), None)
                self._settle_samples()
                await self.over
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            for script in self.scripts:
                script.close()

    def _spawn_task(self, work: Any) -> None:
        """Start a concurrent task; an exception in it ends the run."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)

    def _advance_script(self, waiting: WaitingScript, outcomes: list[SampleOutcome] | None) -> None:
        """Advance a script until it waits for a sample, or ends."""
        waiting.missing = 0
        while not waiting.missing:
            waiting.again = outcomes is not None
            try:
                wants = next(waiting.script) if outcomes is None else waiting.script.send(outcomes)
            except StopIteration as end:
                self.unfinished -= 1
                self.on_result(waiting.number, end.value)
                return
            outcomes = waiting.outcomes = self._bulk_cached_samples(wants)
            for index, want in enumerate(wants):
                if outcomes[index] is None:
                    waiting.missing += 1
                    self.new.append((want, waiting, index))

    def _bulk_cached_samples(self, wants: Sequence[SampleRequest]) -> list[Any]:
        """Return cached answers if the samples of one call are consecutive; `None` for others."""
        nothing = [None] * len(wants)
        if len(wants) < MIN_BULK_LOOKUP:
            return nothing
        call, first = wants[0]
        if any(one is not call or n != k for k, (one, n) in enumerate(wants, first)):
            return nothing
        ready = self.prepared.get(id(call)) or self._prepare_call(call)
        if ready is None or ready.error or ready.samples_equal:
            return nothing
        assert ready.place.source
        cached = ready.place.source.get_cached_samples(ready.key, first, len(wants))
        self.received += len(cached)
        return [cached.get(sample) for sample in range(first, first + len(wants))]

    def _deliver_outcome(self, key: str, outcome: SampleOutcome) -> None:
        """Deliver an outcome to all scripts that wait for it."""
        self.received += 1
        self.failed += isinstance(outcome, UserError)
        for _, waiting, index in self.wanted.pop(key):
            waiting.outcomes[index] = outcome
            waiting.missing -= 1
            if not waiting.missing:
                self._advance_script(waiting, waiting.outcomes)

    def _schedule_settle(self) -> None:
        """Schedule `_settle_samples` once for all outcomes of this iteration of the loop."""
        if not self.settle_scheduled:
            self.settle_scheduled = True
            self._spawn_task(self._settle_later())

    async def _settle_later(self) -> None:
        self.settle_scheduled = False
        self._settle_samples()

    def _settle_samples(self) -> None:
        """Deliver cached samples, queue the others until none is new, then send batches."""
        while self.new:
            new, self.new = self.new, []
            for model_queue, sought in self._group_uncached(new).values():
                self._look_up_cached(model_queue, sought)
        self._dispatch_batches()
        if not self.unfinished and not self.over.done():
            self.over.set_result(None)

    def _group_uncached(
        self, new: list[QueuedSample]
    ) -> dict[str, tuple[ModelQueue, dict[str, QueuedSample]]]:
        """Register the requests in `wanted`; return those to look up, by model and cache key."""
        sought: dict[str, tuple[ModelQueue, dict[str, QueuedSample]]] = {}
        for one in new:
            call, sample = one[0]
            ready = self.prepared.get(id(call)) or self._prepare_call(call)
            if ready is None:
                self.places[call.model].unresolved.append(one)
                continue
            if ready.error is not None:
                self.wanted[""] = [one]
                self._deliver_outcome("", ready.error)
                continue
            model_queue = ready.place
            assert model_queue.source
            key = model_queue.source.sample_key(ready.key, 0 if ready.samples_equal else sample)
            if key in self.wanted:
                self.wanted[key].append(one)
                continue
            self.wanted[key] = [one]
            if model_queue.name not in sought:
                sought[model_queue.name] = (model_queue, {})
            sought[model_queue.name][1][key] = one
        return sought

    def _prepare_call(self, call: ModelCall) -> PreparedCall | None:
        """Prepare a call for all its samples; `None` if its model is not resolved yet."""
        model_queue = self.places.get(call.model)
        if model_queue is None:
            model_queue = self.places[call.model] = ModelQueue(
                call.model, get_resolved_backend(call.model)
            )
            if model_queue.source is None:
                self._spawn_task(self._resolve_model(model_queue))
        if model_queue.source is None and model_queue.error is None:
            return None
        ready = PreparedCall(call, model_queue, error=model_queue.error)
        if model_queue.source is not None:
            try:
                key, same = model_queue.source.call_key(call)
                ready = PreparedCall(call, model_queue, None, key, same)
            except UserError as error:
                ready = PreparedCall(call, model_queue, error=error)
        return self.prepared.setdefault(id(call), ready)

    def _look_up_cached(self, model_queue: ModelQueue, sought: dict[str, QueuedSample]) -> None:
        assert model_queue.source
        cached = model_queue.source.get_cached(list(sought))
        for key, completion in cached.items():
            self._deliver_outcome(key, completion)
        for key, ((call, sample), waiting, _) in sought.items():
            if key in cached:
                continue
            if model_queue.error:
                self._deliver_outcome(key, model_queue.error)
                continue
            # Requests that complete a started script precede those that begin another.
            add = model_queue.queue.appendleft if waiting.again else model_queue.queue.append
            ready = self.prepared[id(call)]
            ready.request = ready.request or model_queue.source.build_request(call)
            if call.together:
                self.together.add(id(ready.request))
            add((key, ready.request, 0 if ready.samples_equal else sample))

    async def _resolve_model(self, model_queue: ModelQueue) -> None:
        try:
            model_queue.source = await run_in_thread(resolve_backend, model_queue.name)
        except UserError as error:
            model_queue.error = error
            model_queue.source = await run_in_thread(kept_source, model_queue.name)
        self.new += model_queue.unresolved
        model_queue.unresolved = []
        self._settle_samples()

    def _dispatch_batches(self) -> None:
        """Start as many batches as allowed, in turn over all models."""
        while self.active < self.workers:
            ready = [model_queue for model_queue in self.places.values() if model_queue.can_start()]
            if not ready:
                return
            if self.before:
                self.before()
                self.before = None
            for model_queue in ready[: self.workers - self.active]:
                assert model_queue.source
                # Moved to the end, or the first model would get every free worker, and judges none.
                self.places[model_queue.name] = self.places.pop(model_queue.name)
                batch = self._next_batch(model_queue)
                model_queue.active, self.active = (
                    model_queue.active + 1,
                    self.active + 1,
                )
                self._spawn_task(self._run_batches(model_queue, batch))

    def _next_batch(self, model_queue: ModelQueue) -> list[tuple[str, Request, int]]:
        """Return the next batch of a model; for an endpoint, samples of one request."""
        source, queue = model_queue.source, model_queue.queue
        assert source
        if not isinstance(source, EndpointBackend):
            return [queue.popleft() for _ in range(min(source.at_once, len(queue)))]
        batch = [queue.popleft()]
        request = batch[0][1]
        if id(request) in self.together and "seed" not in (request.body or {}):
            while queue and queue[0][1] is request and len(batch) < source.samples_at_once:
                batch.append(queue.popleft())
        return batch

    async def _run_batches(
        self, model_queue: ModelQueue, batch: list[tuple[str, Request, int]]
    ) -> None:
        """Run a batch, and then those that may follow it at once."""
        await self._run_batch(model_queue, batch)
        while self._may_continue(model_queue):
            model_queue.active, self.active = model_queue.active + 1, self.active + 1
            await self._run_batch(model_queue, self._next_batch(model_queue))

    def _may_continue(self, model_queue: ModelQueue) -> bool:
        """Return whether a model may start another batch before `_dispatch_batches` runs.

        New samples are queued first, and other models have their turn.
        """
        if self.new or self.active >= self.workers or not model_queue.can_start():
            return False
        return len(self.places) == 1 or not any(
            other.can_start() for other in self.places.values() if other is not model_queue
        )

    async def _run_batch(
        self, model_queue: ModelQueue, batch: list[tuple[str, Request, int]]
    ) -> None:
        start = time.monotonic()
        outcomes = await self._send_batch(model_queue, batch)
        model_queue.active, self.active = model_queue.active - 1, self.active - 1
        # Missing samples are requested one by one: the endpoint does not support `n`.
        model_queue.queue.extendleft(reversed(batch[len(outcomes) :]))
        counted_error: UserError | None = None
        for (key, _, _), one in zip(batch, outcomes, strict=False):
            if isinstance(one, UserError):
                if one is not counted_error:  # one failed request for several samples counts once
                    model_queue.record_failure(one, start)
                counted_error = one
            else:
                model_queue.record_success()
            self._deliver_outcome(key, one)
        while model_queue.error and model_queue.queue:
            self._deliver_outcome(model_queue.queue.popleft()[0], model_queue.error)
        self._schedule_settle()

    async def _send_batch(
        self, model_queue: ModelQueue, batch: list[tuple[str, Request, int]]
    ) -> list[SampleOutcome]:
        source = model_queue.source
        if isinstance(source, BatchBackend):
            requests = [replace(request, sample=sample) for _, request, sample in batch]
            return await run_in_thread(source.generate_each, requests)
        assert isinstance(source, EndpointBackend)
        try:
            if model_queue.ask is None:
                # No race: only one request is running at the beginning, see `ModelQueue.can_start`.
                model_queue.ask = await self.stack.enter_async_context(open_sampler(source.model))
            _, request, sample = batch[0]
            outcomes: list[SampleOutcome] = [
                *await model_queue.ask([one[0] for one in batch], request, sample)
            ]
            if len(outcomes) < len(batch):
                source.samples_at_once = 1
            return outcomes
        except BadRequest as error:
            if len(batch) == 1:
                return [error]
            source.samples_at_once = 1
            return []
        except UserError as error:
            return [error] * len(batch)


def run_scripts(
    scripts: Iterable[Script[T]], title: str = "", before: Callable[[], None] | None = None
) -> list[T]:
    """Run scripts in one pool and return their results in order.

    Answers are cached as they arrive; an interrupt stops at once and loses none of them.

    Args:
        scripts: Scripts; a sample requested by several of them is requested once.
        title: Title of the progress bar.
        before: Called once before the first request; not if all answers are cached.

    Raises:
        UserError: A setting is invalid. Failures of a model are sent to its scripts instead.
    """
    found: dict[int, T] = {}
    course = check_not_nested(Scheduler(list(scripts), found.__setitem__, before=before))
    try:
        with SamplingProgressBar(title, course.count_progress):
            shared_event_loop().run(course.run_all())
    except KeyboardInterrupt:
        completed, total, _ = course.count_progress()
        message = (
            f"interrupted: {completed} of {total} answers arrived and are stored; the "
            f"same call resumes"
        )
        print(message, file=sys.stderr)
        raise
    return [found[number] for number in range(len(found))]


def check_not_nested(course: Scheduler[T]) -> Scheduler[T]:
    """Return the scheduler, unless this thread runs the event loop that it would wait for.

    Raises:
        InvalidArgument: A handler of `ModelAdapter` queries models, which would deadlock.
    """
    if shared_event_loop().is_running_here():
        raise InvalidArgument("a function of a ModelAdapter cannot query models or wait for them")
    return course


def as_completed(
    scripts: Iterable[Script[T]], title: str = "", workers: int | None = None, silent: bool = False
) -> Generator[tuple[int, T], None, None]:
    """Yield each script's index and result as soon as it has ended.

    Closing the generator ends the run.

    Args:
        scripts, title: See `run_scripts`.
        workers: Maximum number of concurrent requests; `None`: `Config.max_workers`.
        silent: Disable the progress bar.

    Raises:
        UserError: As `run_scripts`.
    """
    emitters: list[Callable[[tuple[int, T]], None]] = []
    scheduler = Scheduler(
        list(scripts), lambda number, result: emitters[0]((number, result)), workers
    )
    course = check_not_nested(scheduler)

    def start_scheduler(emit: Callable[[tuple[int, T]], None]) -> Coroutine[Any, Any, None]:
        emitters.append(emit)
        return course.run_all()

    with SamplingProgressBar(title, course.count_progress, silent):
        yield from shared_event_loop().stream_items(start_scheduler)
