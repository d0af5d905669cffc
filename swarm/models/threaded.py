"""Models implemented in plain Python, one thread per request; the shared event loop."""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Request, Stream, stream_until_stop
from swarm.models.http_errors import RequestTimeout

T = TypeVar("T")
P = TypeVar("P")

STREAM_END: Any = object()
"""Sentinel after the last piece."""


class EventLoopThread:
    """An event loop in a daemon thread.

    Works in notebooks, in threads and after forks, where the caller may have a running loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="swarm-http", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stream_items(
        self, work: Callable[[Callable[[P], None]], Coroutine[Any, Any, T]]
    ) -> Generator[P, None, T]:
        """Yield the items that a coroutine emits, and return its result; closing cancels it."""
        pieces: queue.SimpleQueue[P] = queue.SimpleQueue()

        async def run_to_end() -> T:
            try:
                return await work(pieces.put)
            finally:
                pieces.put(STREAM_END)

        future = asyncio.run_coroutine_threadsafe(run_to_end(), self._loop)
        try:
            while (piece := pieces.get()) is not STREAM_END:
                yield piece
            return future.result()
        finally:
            future.cancel()


async def run_in_thread(function: Callable[..., T], *given: Any) -> T:
    """Run a blocking function in a daemon thread, which does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run_function() -> None:
        result, error = None, None
        try:
            result = function(*given)
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(set_outcome, result, error)

    threading.Thread(target=run_function, daemon=True).start()
    return await future


_shared_loop: EventLoopThread | None = None
_lock = threading.Lock()


def shared_event_loop() -> EventLoopThread:
    """Return the background loop of this process; start it on first use."""
    global _shared_loop
    with _lock:
        _shared_loop = _shared_loop or EventLoopThread()
        return _shared_loop


def _reset_after_fork() -> None:
    """Reset state after a fork: the child lacks the loop's thread, and a lock may be held."""
    global _shared_loop, _lock
    _shared_loop, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class ThreadedModel:
    """Base of models that implement `_generate_one` for a single request.

    At most `concurrency` requests run at once, over all callers. A request that exceeds its timeout
    is abandoned: its thread ends at the next piece, or with the process if there is none.

    Args:
        who: The model's name in messages.
        concurrency: At least 1; `None` uses `_concurrency_limit` at the first request.

    Raises:
        UserError: The concurrency is invalid.
    """

    def __init__(self, who: str, concurrency: int | None) -> None:
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise UserError(f"{who}: concurrency={concurrency!r}: must be an integer, 1 or more")
        self.who, self.concurrency = who, concurrency
        self._init_locks()

    def _init_locks(self) -> None:
        self._gate: threading.Semaphore | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_gate", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_locks()

    def _concurrency_limit(self) -> int:
        return self.concurrency or 1

    def _generate_one(self, request: Request, streamed: bool) -> Stream:
        """Answer one request, called in its thread; raise `UserError` on failure."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Model.generate`."""
        return self._run_requests(requests, through=False)

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.base.generate_each`."""
        return self._run_requests(requests, through=True)

    def stream(self, request: Request) -> Stream:
        """See `swarm.models.base.stream`."""
        return self._stream_in_thread(request, streamed=True)

    def _run_requests(self, requests: Sequence[Request], through: bool) -> list[Any]:
        """Return one result per request; unless `through`, the first failure stops the rest."""
        found: list[Any] = [None] * len(requests)
        numbers = queue.SimpleQueue[int]()
        for number in range(len(requests)):
            numbers.put(number)
        failed: list[BaseException] = []

        def run_worker() -> None:
            while not failed and not numbers.empty():
                with suppress(queue.Empty):
                    number = numbers.get_nowait()
                    try:
                        found[number] = _exhaust_stream(
                            self._stream_in_thread(requests[number], streamed=False)
                        )
                    except BaseException as error:
                        found[number] = error
                        if not (through and isinstance(error, UserError)):
                            failed.append(error)

        count = min(self._concurrency_limit(), len(requests))
        threads = [threading.Thread(target=run_worker, daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:
            failed.append(error)
            raise
        if failed:
            raise failed[0]
        return found

    def _acquire_slot(self) -> "_ConcurrencySlot":
        with self._lock:
            self._gate = self._gate or threading.Semaphore(self._concurrency_limit())
        return _ConcurrencySlot(self._gate)

    def _stream_in_thread(self, request: Request, streamed: bool) -> Stream:
        """Run `_generate_one` in a new thread; abandon it at the request's timeout."""
        slot = self._acquire_slot()
        start = time.monotonic()
        end = None if request.timeout is None else start + request.timeout
        pieces: queue.SimpleQueue[Delta | Completion | BaseException] = queue.SimpleQueue()

        def run_generation() -> None:
            stream = stream_until_stop(self._generate_one(request, streamed), request.stop)
            try:
                while not slot.is_released():
                    pieces.put(next(stream))
            except StopIteration as whole:
                pieces.put(whole.value)
            except BaseException as error:
                pieces.put(error)
            finally:
                stream.close()
                slot.release()

        threading.Thread(target=run_generation, daemon=True).start()
        try:
            while True:
                remaining = None if end is None else max(0.0, end - time.monotonic())
                one = pieces.get(timeout=remaining)
                if isinstance(one, BaseException):
                    raise one
                if isinstance(one, Completion):
                    return replace(one, seconds=time.monotonic() - start)
                yield one
        except queue.Empty:
            message = f"{self.who}: no response within {request.timeout:g} s (timeout)"
            raise RequestTimeout(message) from None
        finally:
            slot.release()


class _ConcurrencySlot:
    """One unit of a semaphore, acquired on construction and released at most once."""

    def __init__(self, gate: threading.Semaphore) -> None:
        gate.acquire()
        self._gate, self._once = gate, threading.Lock()

    def is_released(self) -> bool:
        """Return whether it was released."""
        return self._once.locked()

    def release(self) -> None:
        """Release it unless already released."""
        if self._once.acquire(blocking=False):
            self._gate.release()


def _exhaust_stream(stream: Stream) -> Completion:
    while True:
        try:
            next(stream)
        except StopIteration as end:
            completion: Completion = end.value
            return completion
