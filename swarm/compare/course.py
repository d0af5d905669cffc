"""One run of scripts: what is kept is read in batches, the rest is asked in one pool."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Generic, TypeVar

from swarm.compare.asking import Asked, Heard, Script, Want
from swarm.compare.config import checked_workers
from swarm.compare.finding import source
from swarm.compare.sources import Batches, Endpoint, Source
from swarm.compare.standing import Place, Waiting, Wanted
from swarm.errors import UserError
from swarm.models import Request, attempt
from swarm.models.background import in_thread
from swarm.models.cache import sample_key
from swarm.models.one_by_one import asking

T = TypeVar("T")


class Course(Generic[T]):
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
        self.workers = workers or checked_workers()
        self.places: dict[str, Place] = {}
        self.prepared: dict[int, tuple[Asked, Request | UserError, str]] = {}
        self.wanted: dict[str, list[tuple[Waiting, int]]] = {}
        self.new: list[Wanted] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.under_way = self.came = self.failed = 0
        self.left, self.settling = len(scripts), False

    def count(self) -> tuple[int, int, int]:
        """Answers that came, that are known to be wanted, and failures."""
        return self.came, self.came + len(self.wanted), self.failed

    async def all(self) -> None:
        """Run them to their ends.

        Raises:
            BaseException: What a script raises.
        """
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with AsyncExitStack() as self.stack:
                for number, script in enumerate(self.scripts):
                    self._advance(Waiting(script, number), None)
                self._settle()
                await self.over
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            for script in self.scripts:
                script.close()

    def _start(self, work: Any) -> None:
        """Let something run beside; what it raises ends everything."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)

    def _advance(self, waiting: Waiting, heard: list[Heard] | None) -> None:
        """Let a script go on until it wants something, or ends."""
        wants: Sequence[Want] = ()
        while not wants:
            waiting.again = heard is not None
            try:
                wants = next(waiting.script) if heard is None else waiting.script.send(heard)
            except StopIteration as end:
                self.left -= 1
                self.told(waiting.number, end.value)
                return
            heard = []
        waiting.heard, waiting.missing = [None] * len(wants), len(wants)
        self.new += [(want, waiting, index) for index, want in enumerate(wants)]

    def _hand(self, waiting: Waiting, index: int, heard: Heard) -> None:
        waiting.heard[index] = heard
        waiting.missing -= 1
        if not waiting.missing:
            self._advance(waiting, waiting.heard)

    def _deliver(self, key: str, heard: Heard) -> None:
        """Hand an answer to all who wait for it."""
        self.came += 1
        self.failed += isinstance(heard, UserError)
        for waiting, index in self.wanted.pop(key):
            self._hand(waiting, index, heard)

    def _refuse(self, waiting: Waiting, index: int, error: UserError) -> None:
        self.came, self.failed = self.came + 1, self.failed + 1
        self._hand(waiting, index, error)

    def _soon(self) -> None:
        """Settle when all that comes in this turn of the loop is there."""
        if not self.settling:
            self.settling = True
            self._start(self._settled())

    async def _settled(self) -> None:
        self.settling = False
        self._settle()

    def _settle(self) -> None:
        """Answer what is kept, queue the rest, until nothing new is wanted; then ask."""
        while self.new:
            new, self.new = self.new, []
            looked_up: dict[str, dict[str, tuple[Request, int, bool]]] = defaultdict(dict)
            for one in new:
                self._sort(one, looked_up)
            for name, sought in looked_up.items():
                self._look_up(self.places[name], sought)
        self._ask()
        if not self.left and not self.over.done():
            self.over.set_result(None)

    def _sort(self, one: Wanted, looked_up: dict[str, dict[str, Any]]) -> None:
        """Find the key of a want; what has none yet is parked, what has an error is told it."""
        want, waiting, index = one
        name = want.asked.model
        place = self.places.get(name)
        if place is None:
            place = self.places[name] = Place(name)
            self._start(self._find(place))
        if place.source is None:
            return (
                self._refuse(waiting, index, place.error)
                if place.error
                else place.parked.append(one)
            )
        request, key = self._prepared(place.source, want.asked)
        if isinstance(request, UserError):
            return self._refuse(waiting, index, request)
        number = place.source.number(request, want.sample)
        key = sample_key(key, number)
        if key in self.wanted:
            return self.wanted[key].append((waiting, index))
        self.wanted[key] = [(waiting, index)]
        looked_up[name][key] = (request, number, waiting.again)

    def _prepared(self, source: Source, asked: Asked) -> tuple[Request | UserError, str]:
        """The request and the key without a sample's number; made once for all samples."""
        if id(asked) not in self.prepared:
            try:
                request = source.request(asked)
                self.prepared[id(asked)] = (asked, request, source.key(request))
            except UserError as error:
                self.prepared[id(asked)] = (asked, error, "")
        return self.prepared[id(asked)][1:]

    def _look_up(self, place: Place, sought: dict[str, tuple[Request, int, bool]]) -> None:
        assert place.source
        kept = place.source.cache.get(list(sought))
        for key, value in kept.items():
            self._deliver(key, place.source.again(value))
        for key, (request, number, urgent) in sought.items():
            if key in kept:
                continue
            if place.error:
                self._deliver(key, place.error)
            else:
                # What a script lacks to its end goes before what begins another.
                add = place.queue.appendleft if urgent else place.queue.append
                add((key, replace(request, sample=number)))

    async def _find(self, place: Place) -> None:
        try:
            place.source = await in_thread(source, place.name)
        except UserError as error:
            place.error = error
        self.new += place.parked
        place.parked = []
        self._settle()

    def _ask(self) -> None:
        """Begin as much as may be under way, in turn of all models."""
        while self.under_way < self.workers:
            ready = [place for place in self.places.values() if place.ready()]
            if not ready:
                return
            if self.before:
                self.before()
                self.before = None
            for place in ready[: self.workers - self.under_way]:
                assert place.source
                many = min(place.source.at_once, len(place.queue))
                place.under_way, self.under_way = place.under_way + 1, self.under_way + 1
                self._start(self._batch(place, [place.queue.popleft() for _ in range(many)]))

    async def _batch(self, place: Place, batch: list[tuple[str, Request]]) -> None:
        began = time.monotonic()
        heard = await self._heard(place, [request for _, request in batch])
        place.under_way, self.under_way = place.under_way - 1, self.under_way - 1
        for (key, _), one in zip(batch, heard, strict=True):
            if isinstance(one, UserError):
                place.failed(one, began)
            else:
                place.answered()
            self._deliver(key, one)
        while place.error and place.queue:
            self._deliver(place.queue.popleft()[0], place.error)
        self._soon()

    async def _heard(self, place: Place, requests: list[Request]) -> list[Heard]:
        source = place.source
        if isinstance(source, Batches):
            return await in_thread(attempt, source.model, requests)
        assert isinstance(source, Endpoint)
        try:
            if place.ask is None:
                # Only one request is under way at the beginning: see `Place.ready`.
                place.ask = await self.stack.enter_async_context(asking(source.model))
            return [await place.ask(requests[0])]
        except UserError as error:
            return [error]
