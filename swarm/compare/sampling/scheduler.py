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
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from swarm.compare.sampling.backends import Backend, BatchBackend, EndpointBackend
from swarm.compare.sampling.progress_bar import SamplingProgressBar
from swarm.compare.sampling.resolve import (
    get_endpoint_index,
    get_resolved_backend,
    kept_source,
    resolve_backend,
)
from swarm.compare.sampling.types import ModelCall, SampleOutcome, SampleRequest, Script
from swarm.compare.settings import get_max_workers
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Completion, Request
from swarm.models.cache import Cache
from swarm.models.http_errors import BadRequest, ConnectionFailed, RequestError
from swarm.models.openai import GenerateSamples, open_sampler
from swarm.models.openai_protocol import lacks_logprobs
from swarm.models.threaded import run_in_thread, shared_event_loop

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


MAX_FAILURES_IN_ROW = 3
"""Consecutive failures after which a model receives no further requests."""


@dataclass(slots=True)
class WaitingScript:
    """A script that waits for samples.

    Attributes:
        script, number: The script and its index among all.
        heard: Outcomes received, in the order of its requests.
        missing: Number of outcomes not received yet.
        again: Whether it has requested samples before.
    """

    script: Script[Any]
    number: int
    heard: list[Any]
    missing: int = 0
    again: bool = False


QueuedSample = tuple[SampleRequest, WaitingScript, int]
"""A request, the script that waits for it, and its index among that script's requests."""


@dataclass(slots=True)
class PreparedCall:
    """A call of a resolved model; shared by all samples.

    Attributes:
        asked: The call.
        place: Queue of the model.
        error: Why the model cannot be called.
        key: Common part of the cache keys.
        one: Whether all samples are equal.
        request: Request of sample 0; `None` until it is needed.
    """

    asked: ModelCall
    place: "ModelQueue"
    error: UserError | None = None
    key: str = ""
    one: bool = False
    request: Request | None = None


@dataclass
class ModelQueue:
    """Queue and state of one model in a run.

    Attributes:
        name: Name of the model.
        source: Backend; `None` until it is resolved.
        parked: Requests from before it was resolved.
        queue: Requests to send: cache key, request and sample number.
        ask: Sampler of an endpoint; `None` until it is used.
        under_way: Number of running batches, or of requests that are sent one by one.
        last: Time of the last answer, as `time.monotonic` returns it.
        failures: Number of failures since then.
        error: Why no further requests are sent.
    """

    name: str
    source: Backend | None = None
    parked: list[QueuedSample] = field(default_factory=list)
    queue: deque[tuple[str, Request, int]] = field(default_factory=deque)
    ask: GenerateSamples | None = None
    under_way: int = 0
    last: float = 0.0
    failures: int = 0
    error: UserError | None = None

    def can_start(self) -> bool:
        """Return whether a batch may start; an endpoint gets one until it has answered."""
        if not self.queue:
            return False
        assert self.source
        return self.under_way < (self.source.batches if self.source.met else 1)

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
        nobody = isinstance(error, ConnectionFailed) and not self.last
        hopeless = self.failures >= MAX_FAILURES_IN_ROW or nobody
        if error.general or (error.passing and self.last < began and hopeless):
            self.error = error
            if self.source:
                self.source.met = False  # the next run begins with a single request
            # Another endpoint may have the model, or another key may have access: search again next
            # time.
            get_endpoint_index().mark_missing(self.name)


T = TypeVar("T")

LOOK = 0.2
"""Seconds between two checks for answers that other processes have requested."""

MIN_BULK_LOOKUP = 20
"""Minimum number of samples of one call that are looked up together."""


class Scheduler(Generic[T]):
    """A run of scripts on the event loop of `swarm.models.threaded.shared_event_loop`.

    State is changed on that loop only, so no locks are needed.

    Args:
        scripts: Scripts; closed at the end of the run.
        told: Called with the index and the result of each finished script.
        workers: Maximum number of concurrent requests; `None`: `Config.max_workers`.
        before: Called once, before the first request.
    """

    def __init__(
        self,
        scripts: Sequence[Script[T]],
        told: Callable[[int, T], None],
        workers: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.scripts, self.told, self.before = scripts, told, before
        self.workers = workers or get_max_workers()
        self.places: dict[str, ModelQueue] = {}
        self.prepared: dict[int, PreparedCall] = {}
        self.together: set[int] = set()  # ids of requests that may use the field `n`
        self.wanted: dict[str, list[QueuedSample]] = {}
        self.new: list[QueuedSample] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.claimed: dict[str, Cache] = {}  # by cache key
        self.released: list[str] = []
        self.elsewhere: dict[
            str, tuple[ModelQueue, Request, int]
        ] = {}  # requested by other processes
        self.under_way = self.came = self.failed = 0
        self.left, self.settling, self.looking = len(scripts), False, False

    def count_progress(self) -> tuple[int, int, int]:
        """Return the numbers of received answers, of requested answers, and of failures."""
        return self.came, self.came + len(self.wanted), self.failed

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
            self._release(list(self.claimed))

    def _spawn_task(self, work: Any) -> None:
        """Start a concurrent task; an exception in it ends the run."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)

    def _advance_script(self, waiting: WaitingScript, heard: list[SampleOutcome] | None) -> None:
        """Advance a script until it waits for a sample, or ends."""
        waiting.missing = 0
        while not waiting.missing:
            waiting.again = heard is not None
            try:
                wants = next(waiting.script) if heard is None else waiting.script.send(heard)
            except StopIteration as end:
                self.left -= 1
                self.told(waiting.number, end.value)
                return
            heard = waiting.heard = self._bulk_cached_samples(wants)
            for index, want in enumerate(wants):
                if heard[index] is None:
                    waiting.missing += 1
                    self.new.append((want, waiting, index))

    def _bulk_cached_samples(self, wants: Sequence[SampleRequest]) -> list[Any]:
        """Return cached answers if the samples of one call are consecutive; `None` for others."""
        nothing = [None] * len(wants)
        if len(wants) < MIN_BULK_LOOKUP:
            return nothing
        asked, first = wants[0]
        if any(one is not asked or n != k for k, (one, n) in enumerate(wants, first)):
            return nothing
        ready = self.prepared.get(id(asked)) or self._prepare_call(asked)
        if ready is None or ready.error or ready.one:
            return nothing
        assert ready.place.source
        kept = ready.place.source.get_cached_samples(ready.key, first, len(wants))
        kept = {
            sample: one for sample, one in kept.items() if not lacks_wanted_logprobs(asked, one)
        }
        self.came += len(kept)
        return [kept.get(sample) for sample in range(first, first + len(wants))]

    def _deliver_outcome(self, key: str, heard: SampleOutcome) -> None:
        """Deliver an outcome to all scripts that wait for it."""
        self.came += 1
        self.failed += isinstance(heard, UserError)
        if key in self.claimed:
            self.released.append(key)
        for _, waiting, index in self.wanted.pop(key):
            waiting.heard[index] = heard
            waiting.missing -= 1
            if not waiting.missing:
                self._advance_script(waiting, waiting.heard)

    def _schedule_settle(self) -> None:
        """Schedule `_settle_samples` once for all outcomes of this iteration of the loop."""
        if not self.settling:
            self.settling = True
            self._spawn_task(self._settle_later())

    async def _settle_later(self) -> None:
        self.settling = False
        self._settle_samples()

    def _settle_samples(self) -> None:
        """Deliver cached samples, queue the others until none is new, then send batches."""
        self._release(self.released)
        while self.new:
            new, self.new = self.new, []
            for place, sought in self._group_uncached(new).values():
                self._look_up_cached(place, sought)
        self._dispatch_batches()
        if not self.left and not self.over.done():
            self.over.set_result(None)

    def _group_uncached(
        self, new: list[QueuedSample]
    ) -> dict[str, tuple[ModelQueue, dict[str, QueuedSample]]]:
        """Register the requests in `wanted`; return those to look up, by model and cache key."""
        sought: dict[str, tuple[ModelQueue, dict[str, QueuedSample]]] = {}
        for one in new:
            asked, sample = one[0]
            ready = self.prepared.get(id(asked)) or self._prepare_call(asked)
            if ready is None:
                self.places[asked.model].parked.append(one)
                continue
            if ready.error is not None:
                self.wanted[""] = [one]
                self._deliver_outcome("", ready.error)
                continue
            place = ready.place
            assert place.source
            key = place.source.sample_key(ready.key, 0 if ready.one else sample)
            if key in self.wanted:
                self.wanted[key].append(one)
                continue
            self.wanted[key] = [one]
            if place.name not in sought:
                sought[place.name] = (place, {})
            sought[place.name][1][key] = one
        return sought

    def _prepare_call(self, asked: ModelCall) -> PreparedCall | None:
        """Prepare a call for all its samples; `None` if its model is not resolved yet."""
        place = self.places.get(asked.model)
        if place is None:
            place = self.places[asked.model] = ModelQueue(
                asked.model, get_resolved_backend(asked.model)
            )
            if place.source is None:
                self._spawn_task(self._resolve_model(place))
        if place.source is None and place.error is None:
            return None
        ready = PreparedCall(asked, place, error=place.error)
        if place.source is not None:
            try:
                key, same = place.source.call_key(asked)
                ready = PreparedCall(asked, place, None, key, same)
            except UserError as error:
                ready = PreparedCall(asked, place, error=error)
        return self.prepared.setdefault(id(asked), ready)

    def _look_up_cached(self, place: ModelQueue, sought: dict[str, QueuedSample]) -> None:
        assert place.source
        kept = place.source.get_cached(list(sought))
        if isinstance(place.source, EndpointBackend):
            bad = [
                key for key, one in kept.items() if lacks_wanted_logprobs(sought[key][0].asked, one)
            ]
            place.source.cache.delete(bad)
            for key in bad:
                del kept[key]
        for key, completion in kept.items():
            self._deliver_outcome(key, completion)
        missing = [key for key in sought if key not in kept]
        mine = self._claim(place, [] if place.error else missing)
        for key in missing:
            (asked, sample), waiting, _ = sought[key]
            if place.error:
                self._deliver_outcome(key, place.error)
                continue
            if key not in self.wanted:
                continue  # cached in the meantime
            # Requests that complete a started script precede those that begin another.
            add = place.queue.appendleft if waiting.again else place.queue.append
            ready = self.prepared[id(asked)]
            ready.request = ready.request or place.source.build_request(asked)
            if asked.together:
                self.together.add(id(ready.request))
            one = key, ready.request, 0 if ready.one else sample
            if key in mine:
                add(one)
            else:
                self._await(place, one)

    def _claim(self, place: ModelQueue, keys: list[str]) -> set[str]:
        """Deliver what has been cached meanwhile; return the keys that this run has to request.

        Claims prevent two processes from requesting the same sample. Models that are not endpoints
        claim their requests themselves.
        """
        if not isinstance(source := place.source, EndpointBackend) or not keys:
            return set(keys)
        kept, mine = source.cache.claim(keys)
        self.claimed |= dict.fromkeys(mine, source.cache)
        for key, completion in zip(kept, source.again(kept.values()), strict=True):
            self._deliver_outcome(key, completion)
        return set(mine)

    def _release(self, keys: list[str]) -> None:
        caches: dict[int, tuple[Cache, list[str]]] = {}
        for key in keys:
            cache = self.claimed.pop(key)
            caches.setdefault(id(cache), (cache, []))[1].append(key)
        for cache, some in caches.values():
            cache.release(some)
        self.released = []

    def _await(self, place: ModelQueue, one: tuple[str, Request, int]) -> None:
        """Wait for the answer of another process, which is polled."""
        if not self.looking:
            self.looking = True
            self._spawn_task(self._look())
        self.elsewhere[one[0]] = (place, one[1], one[2])

    async def _look(self) -> None:
        while self.elsewhere:
            await asyncio.sleep(LOOK)
            for place in {id(place): place for place, *_ in self.elsewhere.values()}.values():
                keys = [key for key, (its, *_) in self.elsewhere.items() if its is place]
                mine = set() if place.error else self._claim(place, keys)
                for key in keys:
                    if place.error and key in self.wanted:
                        self._deliver_outcome(key, place.error)
                    if key in mine or key not in self.wanted:
                        _, request, sample = self.elsewhere.pop(key)
                    if key in mine:
                        place.queue.append((key, request, sample))
            self._settle_samples()
        self.looking = False

    async def _resolve_model(self, place: ModelQueue) -> None:
        try:
            place.source = await run_in_thread(resolve_backend, place.name)
        except UserError as error:
            place.error = error
            place.source = await run_in_thread(kept_source, place.name)
        self.new += place.parked
        place.parked = []
        self._settle_samples()

    def _dispatch_batches(self) -> None:
        """Start as many batches as allowed, in turn over all models."""
        while self.under_way < self.workers:
            ready = [place for place in self.places.values() if place.can_start()]
            if not ready:
                return
            if self.before:
                self.before()
                self.before = None
            for place in ready[: self.workers - self.under_way]:
                assert place.source
                # Moved to the end, or the first model would get every free worker, and judges none.
                self.places[place.name] = self.places.pop(place.name)
                batch = self._next_batch(place)
                place.under_way, self.under_way = place.under_way + 1, self.under_way + 1
                self._spawn_task(self._run_batch(place, batch))

    def _next_batch(self, place: ModelQueue) -> list[tuple[str, Request, int]]:
        """Return the next batch of a model; for an endpoint, samples of one request."""
        source, queue = place.source, place.queue
        assert source
        if not isinstance(source, EndpointBackend):
            return [queue.popleft() for _ in range(min(source.at_once, len(queue)))]
        batch = [queue.popleft()]
        request = batch[0][1]
        if id(request) in self.together and "seed" not in (request.body or {}):
            while queue and queue[0][1] is request and len(batch) < source.samples_at_once:
                batch.append(queue.popleft())
        return batch

    async def _run_batch(self, place: ModelQueue, batch: list[tuple[str, Request, int]]) -> None:
        began = time.monotonic()
        heard = await self._send_batch(place, batch)
        place.under_way, self.under_way = place.under_way - 1, self.under_way - 1
        # Missing samples are requested one by one: the endpoint does not support `n`.
        place.queue.extendleft(reversed(batch[len(heard) :]))
        told: UserError | None = None
        for (key, _, _), one in zip(batch, heard, strict=False):
            if isinstance(one, UserError):
                if one is not told:  # one failed request for several samples counts once
                    place.record_failure(one, began)
                told = one
            else:
                place.record_success()
            self._deliver_outcome(key, one)
        while place.error and place.queue:
            self._deliver_outcome(place.queue.popleft()[0], place.error)
        self._schedule_settle()

    async def _send_batch(
        self, place: ModelQueue, batch: list[tuple[str, Request, int]]
    ) -> list[SampleOutcome]:
        source = place.source
        if isinstance(source, BatchBackend):
            requests = [replace(request, sample=sample) for _, request, sample in batch]
            return await run_in_thread(source.generate_each, requests)
        assert isinstance(source, EndpointBackend)
        try:
            if place.ask is None:
                # No race: only one request is running at the beginning, see `ModelQueue.can_start`.
                place.ask = await self.stack.enter_async_context(open_sampler(source.model))
            _, request, sample = batch[0]
            heard: list[SampleOutcome] = [
                *await place.ask([one[0] for one in batch], request, sample)
            ]
            if len(heard) < len(batch):
                source.samples_at_once = 1
            return heard
        except BadRequest as error:
            if len(batch) == 1:
                return [error]
            source.samples_at_once = 1
            return []
        except UserError as error:
            return [error] * len(batch)


def lacks_wanted_logprobs(asked: ModelCall, kept: Completion) -> bool:
    """Return whether an answer lacks log probabilities; earlier versions stored such answers."""
    return lacks_logprobs(asked.api_kwargs, {"text": kept.text, "tokens": kept.tokens})


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
        came, wanted, _ = course.count_progress()
        said = f"interrupted: {came} of {wanted} answers came, and are kept; the same again goes on"
        print(said, file=sys.stderr)
        raise
    return [found[number] for number in range(len(found))]


def check_not_nested(course: Scheduler[T]) -> Scheduler[T]:
    """Return the scheduler, unless this thread runs the event loop that it would wait for.

    Raises:
        InvalidArgument: A handler of `ModelAdapter` queries models, which would deadlock.
    """
    # asyncio.get_running_loop would raise an error outside a loop; this returns None.
    if asyncio._get_running_loop() is shared_event_loop()._loop:
        raise InvalidArgument(
            "what a ModelAdapter calls cannot ask models itself, nor wait for them"
        )
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
    told: list[Callable[[tuple[int, T]], None]] = []
    whole = Scheduler(list(scripts), lambda number, result: told[0]((number, result)), workers)
    course = check_not_nested(whole)

    def start_scheduler(emit: Callable[[tuple[int, T]], None]) -> Coroutine[Any, Any, None]:
        told.append(emit)
        return course.run_all()

    with SamplingProgressBar(title, course.count_progress, silent):
        yield from shared_event_loop().stream_items(start_scheduler)
