"""One event loop in a thread of its own, for notebooks, threads and forks alike."""

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
P = TypeVar("P")

STREAM_END: Any = object()
"""Comes after the last piece."""


class EventLoopThread:
    """An event loop in a thread of its own; the thread ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="swarm-http", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work; an interrupt ends it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stream_items(
        self, work: Callable[[Callable[[P], None]], Coroutine[Any, Any, T]]
    ) -> Generator[P, None, T]:
        """Give what the work hands over as it comes, and return its result; to close it ends it."""
        waiting: queue.SimpleQueue[P] = queue.SimpleQueue()

        async def run_to_end() -> T:
            try:
                return await work(waiting.put)
            finally:
                waiting.put(STREAM_END)

        future = asyncio.run_coroutine_threadsafe(run_to_end(), self._loop)
        try:
            while (piece := waiting.get()) is not STREAM_END:
                yield piece
            return future.result()
        finally:
            future.cancel()


async def run_in_thread(function: Callable[..., T], *given: Any) -> T:
    """What a function gives that takes its time; the thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def run_function() -> None:
        result, error = None, None
        try:
            result = function(*given)
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(set_outcome, result, error)

    threading.Thread(target=run_function, daemon=True).start()
    return await done


_shared_loop: EventLoopThread | None = None
_lock = threading.Lock()


def shared_event_loop() -> EventLoopThread:
    """The one background loop of this process, which begins here if it has to."""
    global _shared_loop
    with _lock:
        _shared_loop = _shared_loop or EventLoopThread()
        return _shared_loop


def _reset_after_fork() -> None:
    """A forked child has the loop's objects and not its thread, and perhaps a lock held."""
    global _shared_loop, _lock
    _shared_loop, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
