"""Threads, the shared event loop, and a lock: every thread of the package is started here.

Threads are daemons unless stated otherwise: after Ctrl-C a process ends without waiting for a slow
answer, which the threads of `concurrent.futures.ThreadPoolExecutor` and `asyncio.to_thread` delay
until it has arrived.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
P = TypeVar("P")

STREAM_END: Any = object()
"""Sentinel after the last item of a stream."""

PARSING = threading.Lock()
"""Held by `ast.parse`, which counts the depth of all threads together in some versions of CPython,
and then raises SystemError (https://github.com/python/cpython/issues/106905)."""


class Cancelled(Exception):
    """The consumer of a stream has closed it."""


def start_thread(
    function: Callable[..., object], *args: Any, name: str, daemon: bool = True
) -> threading.Thread:
    """Start a thread that calls a function; its exceptions are printed, not raised.

    It has the caller's context variables.

    Raises:
        RuntimeError: The process has too many threads.
    """
    target = partial(copy_context().run, function, *args)
    thread = threading.Thread(target=target, name=name, daemon=daemon)
    thread.start()
    return thread


def submit(function: Callable[..., T], *args: Any, name: str) -> "Future[T]":
    """Call a function in a new thread; return the future of its result or exception.

    Raises:
        RuntimeError: The process has too many threads.
    """
    future: Future[T] = Future()
    start_thread(_set_outcome, future, function, *args, name=name)
    return future


def _set_outcome(future: "Future[T]", function: Callable[..., T], *args: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


async def run_in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a blocking function in a new thread; if cancelled, do not wait for it."""
    import asyncio  # takes 60 ms, which commands without requests save

    return await asyncio.wrap_future(submit(function, *args, name="swarm-call"))


def run_concurrently(
    calls: Sequence[Callable[[], T]], limit: int | None = None, name: str = "swarm-call"
) -> Iterator[tuple[int, T]]:
    """Run calls concurrently; yield index and result of each as they complete.

    A single call is run in the calling thread. An exception or an interrupt is raised at once, and
    no further call is started; those in progress finish in their threads.

    Args:
        calls: Functions without arguments.
        limit: Maximum number of threads; `None` uses one per call.
        name: Prefix of the names of the threads.
    """
    if len(calls) == 1:
        yield 0, calls[0]()
        return
    pending = deque(enumerate(calls))
    outcomes: SimpleQueue[tuple[int, Future[T]]] = SimpleQueue()

    def run_pending() -> None:
        while True:
            try:
                number, call = pending.popleft()
            except IndexError:
                return
            future: Future[T] = Future()
            _set_outcome(future, call)
            outcomes.put((number, future))

    try:
        for thread in range(min(limit or len(calls), len(calls))):
            start_thread(run_pending, name=f"{name}-{thread}")
        for _ in calls:
            number, future = outcomes.get()
            yield number, future.result()
    finally:
        pending.clear()


def stream_from_thread(run: Callable[[Callable[[P], None]], T], name: str) -> Generator[P, None, T]:
    """Run a function in a new thread; yield the items that it emits, and return its result.

    Closing the generator ends the function at the next item, by the exception `Cancelled`.

    Args:
        run: Called with the function that emits an item.
        name: Name of the thread.

    Raises:
        BaseException: Exception of the function.
    """
    items: SimpleQueue[P] = SimpleQueue()
    closed = threading.Event()

    def emit(item: P) -> None:
        if closed.is_set():
            raise Cancelled
        items.put(item)

    try:
        return (yield from _iterate_until_done(items, submit(run, emit, name=name)))
    finally:
        closed.set()


def forward_items(items: Generator[P, None, T], emit: Callable[[P], object]) -> T:
    """Call a function with each item of a generator; return the generator's result."""
    while True:
        try:
            item = next(items)
        except StopIteration as end:
            result: T = end.value
            return result
        emit(item)


def _iterate_until_done(items: "SimpleQueue[P]", future: "Future[T]") -> Generator[P, None, T]:
    """Yield the items of a queue until a future is done; return the future's result."""
    future.add_done_callback(lambda _: items.put(STREAM_END))
    yield from iter(items.get, STREAM_END)
    return future.result()


class PeriodicThread:
    """A thread that calls a function at intervals, until it is closed.

    Args:
        function: Function without arguments.
        interval: Seconds between two calls.
        name: Name of the thread.
        delay: Seconds until the first call; `None` uses `interval`.
    """

    def __init__(
        self, function: Callable[[], object], interval: float, name: str, delay: float | None = None
    ) -> None:
        self._closed = threading.Event()

        def call_periodically(wait: float) -> None:
            while not self._closed.wait(wait):
                function()
                wait = interval

        self._thread = start_thread(
            call_periodically, interval if delay is None else delay, name=name
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """Wait for a call in progress, and end the thread."""
        self._closed.set()
        self._thread.join()


class EventLoopThread:
    """An event loop in a daemon thread.

    Works in notebooks, in threads and after forks, where the caller may have a running loop.
    """

    def __init__(self) -> None:
        import asyncio

        self._loop = asyncio.new_event_loop()
        start_thread(self._loop.run_forever, name="swarm-http")

    def is_running_here(self) -> bool:
        """Return whether the caller is a coroutine or a callback of this loop."""
        import asyncio

        # `asyncio.get_running_loop` would raise an error outside of a loop; this returns None.
        return asyncio._get_running_loop() is self._loop

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine, which ends if the future is cancelled."""
        import asyncio

        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result; an interrupt cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stream_items(
        self, work: Callable[[Callable[[P], None]], Coroutine[Any, Any, T]]
    ) -> Generator[P, None, T]:
        """Yield the items that a coroutine emits, and return its result; closing cancels it."""
        items: SimpleQueue[P] = SimpleQueue()
        future = self.start(work(items.put))
        try:
            return (yield from _iterate_until_done(items, future))
        finally:
            future.cancel()


_shared_loop: EventLoopThread | None = None
_lock = threading.Lock()


def shared_event_loop() -> EventLoopThread:
    """Return the background loop of this process; start it on first use."""
    global _shared_loop
    with _lock:
        _shared_loop = _shared_loop or EventLoopThread()
        return _shared_loop


def _reset_after_fork() -> None:
    # The child lacks the loop's thread, and the lock may be held.
    global _shared_loop, _lock
    _shared_loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
