"""One run of scripts: what is kept is read in batches, the rest is asked in one pool."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Generic, TypeVar

from swarm.compare.asking import ModelCall, SampleOutcome, Script, SampleRequest
from swarm.compare.asking.finding import get_resolved_backend, kept_source, resolve_backend
from swarm.compare.asking.sources import BatchBackend, EndpointBackend
from swarm.compare.asking.standing import ModelQueue, PreparedCall, WaitingScript, QueuedSample
from swarm.compare.settings import get_max_workers
from swarm.errors import UserError
from swarm.models import Completion, Request
from swarm.models.answers import lacks_logprobs
from swarm.models.background import run_in_thread
from swarm.models.cache import Cache
from swarm.models.failures import BadRequest
from swarm.models.one_by_one import open_sampler

T = TypeVar("T")

LOOK = 0.2
"""Seconds between two looks for answers that other processes ask for."""

MIN_BULK_LOOKUP = 20
"""Samples of one request that are looked up together."""


class Scheduler(Generic[T]):
    """A run of scripts on the event loop of `swarm.models.background.line`.

    Args:
        scripts: They belong to it from now on.
        told: Is handed the number of each script that has ended and what it came to.
        workers: The most requests under way; `None`: `Config.max_workers`.
        before: Called once, before anything is asked.
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
        self.together: set[int] = set()  # ids of requests whose samples may be asked for at once
        self.wanted: dict[str, list[QueuedSample]] = {}
        self.new: list[QueuedSample] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.claimed: dict[str, Cache] = {}  # by the answers' keys
        self.released: list[str] = []
        self.elsewhere: dict[str, tuple[ModelQueue, Request, int]] = {}  # other processes ask for these
        self.under_way = self.came = self.failed = 0
        self.left, self.settling, self.looking = len(scripts), False, False

    def count_progress(self) -> tuple[int, int, int]:
        """Answers that came, that are known to be wanted, and failures."""
        return self.came, self.came + len(self.wanted), self.failed

    async def run_all(self) -> None:
        """Run them to their ends.

        Raises:
            BaseException: What a script raises.
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
        """Let something run beside; what it raises ends everything."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)

    def _advance_script(self, waiting: WaitingScript, heard: list[SampleOutcome] | None) -> None:
        """Let a script go on until it wants something, or ends."""
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
        """What is kept of many samples of one request in a row; of other wants nothing yet."""
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
        kept = {sample: one for sample, one in kept.items() if not lacks_wanted_logprobs(asked, one)}
        self.came += len(kept)
        return [kept.get(sample) for sample in range(first, first + len(wants))]

    def _deliver_outcome(self, key: str, heard: SampleOutcome) -> None:
        """Hand an answer to all who wait for it."""
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
        """Settle when all that comes in this turn of the loop is there."""
        if not self.settling:
            self.settling = True
            self._spawn_task(self._settle_later())

    async def _settle_later(self) -> None:
        self.settling = False
        self._settle_samples()

    def _settle_samples(self) -> None:
        """Answer what is kept, queue the rest, until nothing new is wanted; then ask."""
        self._release(self.released)
        while self.new:
            new, self.new = self.new, []
            for place, sought in self._group_uncached(new).values():
                self._look_up_cached(place, sought)
        self._dispatch_batches()
        if not self.left and not self.over.done():
            self.over.set_result(None)

    def _group_uncached(self, new: list[QueuedSample]) -> dict[str, tuple[ModelQueue, dict[str, QueuedSample]]]:
        """What is to be looked up of each model, by the answers' keys."""
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
        """What is asked, for all its samples; `None` if its model is yet to be found."""
        place = self.places.get(asked.model)
        if place is None:
            place = self.places[asked.model] = ModelQueue(asked.model, get_resolved_backend(asked.model))
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
            bad = [key for key, one in kept.items() if lacks_wanted_logprobs(sought[key][0].asked, one)]
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
                continue  # it was kept meanwhile
            # What a script lacks to its end goes before what begins another.
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
        """Deliver what is kept of some keys by now; gives those that this course is to ask for.

        Models that are no endpoints claim what they are asked themselves.
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
        """Let another process ask, and look for its answer now and then."""
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
        """Begin as much as may be under way, in turn of all models."""
        while self.under_way < self.workers:
            ready = [place for place in self.places.values() if place.can_start()]
            if not ready:
                return
            if self.before:
                self.before()
                self.before = None
            for place in ready[: self.workers - self.under_way]:
                assert place.source
                # To the end, or the first would have every worker that is free, and judges none.
                self.places[place.name] = self.places.pop(place.name)
                batch = self._next_batch(place)
                place.under_way, self.under_way = place.under_way + 1, self.under_way + 1
                self._spawn_task(self._run_batch(place, batch))

    def _next_batch(self, place: ModelQueue) -> list[tuple[str, Request, int]]:
        """What is asked of a model next; of an endpoint samples of one request."""
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
        # What lacks is asked for one by one: the endpoint does not know `n`.
        place.queue.extendleft(reversed(batch[len(heard) :]))
        told: UserError | None = None
        for (key, _, _), one in zip(batch, heard, strict=False):
            if isinstance(one, UserError):
                if one is not told:  # that of one request for several samples counts once
                    place.record_failure(one, began)
                told = one
            else:
                place.record_success()
            self._deliver_outcome(key, one)
        while place.error and place.queue:
            self._deliver_outcome(place.queue.popleft()[0], place.error)
        self._schedule_settle()

    async def _send_batch(self, place: ModelQueue, batch: list[tuple[str, Request, int]]) -> list[SampleOutcome]:
        source = place.source
        if isinstance(source, BatchBackend):
            requests = [replace(request, sample=sample) for _, request, sample in batch]
            return await run_in_thread(source.generate_each, requests)
        assert isinstance(source, EndpointBackend)
        try:
            if place.ask is None:
                # Only one request is under way at the beginning: see `Place.ready`.
                place.ask = await self.stack.enter_async_context(open_sampler(source.model))
            _, request, sample = batch[0]
            heard: list[SampleOutcome] = [*await place.ask([one[0] for one in batch], request, sample)]
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
    """Whether an answer lacks log probabilities; earlier versions kept such answers."""
    return lacks_logprobs(asked.api_kwargs, {"text": kept.text, "tokens": kept.tokens})
