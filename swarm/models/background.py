"""One event loop in a thread of its own, for notebooks, threads and forks alike."""

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
P = TypeVar("P")

END: Any = object()
"""Comes after the last piece."""


class Line:
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

    def pieces(
        self, work: Callable[[Callable[[P], None]], Coroutine[Any, Any, T]]
    ) -> Generator[P, None, T]:
        """Give what the work hands over as it comes, and return its result; to close it ends it."""
        waiting: queue.SimpleQueue[P] = queue.SimpleQueue()

        async def whole() -> T:
            try:
                return await work(waiting.put)
            finally:
                waiting.put(END)

        future = asyncio.run_coroutine_threadsafe(whole(), self._loop)
        try:
            while (piece := waiting.get()) is not END:
                yield piece
            return future.result()
        finally:
            future.cancel()


async def in_thread(function: Callable[..., T], *given: Any) -> T:
    """What a function gives that takes its time; the thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*given)
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await done


_line: Line | None = None
_lock = threading.Lock()


def line() -> Line:
    """The one background loop of this process, which begins here if it has to."""
    global _line
    with _lock:
        _line = _line or Line()
        return _line


def _forget() -> None:
    """A forked child has the loop's objects and not its thread, and perhaps a lock held."""
    global _line, _lock
    _line, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
