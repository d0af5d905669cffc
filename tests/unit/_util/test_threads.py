"""Threads: outcomes and exceptions reach the caller, and nothing waits for an abandoned call."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm._util.threads import (
    Cancelled,
    EventLoopThread,
    PeriodicThread,
    run_concurrently,
    run_in_thread,
    start_thread,
    stream_from_thread,
    submit,
)

SWARM = Path(__file__).parents[3] / "swarm"


def test_threads_are_created_in_one_module() -> None:
    users = [path for path in SWARM.rglob("*.py") if "threading.Thread(" in path.read_text()]
    assert users == [SWARM / "_util" / "threads.py"]


def test_a_future_has_the_result_or_the_exception_of_its_call() -> None:
    assert start_thread(print, name="one").daemon
    assert submit(divmod, 7, 2, name="call").result(5) == (3, 1)
    assert isinstance(submit(divmod, 7, 0, name="call").exception(5), ZeroDivisionError)
    # Those that end a process are exceptions of the call too, and not of its thread.
    assert isinstance(submit(exit, 3, name="call").exception(5), SystemExit)


def test_a_cancelled_coroutine_does_not_wait_for_its_thread() -> None:
    over = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(run_in_thread(over.wait, 20), 0.05))
    assert time.monotonic() - began < 10
    over.set()


def test_concurrent_calls_are_limited_and_yielded_as_they_complete() -> None:
    running, peak, lock = 0, 0, threading.Lock()

    def call(number: int) -> int:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.01 * (5 - number))
        with lock:
            running -= 1
        return number * number

    calls = [lambda n=n: call(n) for n in range(5)]  # type: ignore[misc]
    assert dict(run_concurrently(calls, 2)) == {n: n * n for n in range(5)}
    assert peak == 2
    assert list(run_concurrently(calls[3:], 5)) == [(1, 16), (0, 9)]
    assert list(run_concurrently([threading.current_thread])) == [(0, threading.current_thread())]
    assert list(run_concurrently([])) == []


def test_no_call_starts_after_a_failure() -> None:
    started = []

    def call(number: int) -> None:
        started.append(number)
        if number == 1:
            raise KeyError(number)
        time.sleep(0.05)

    calls = [lambda n=n: call(n) for n in range(40)]  # type: ignore[misc]
    with pytest.raises(KeyError):
        list(run_concurrently(calls, 2))
    time.sleep(0.2)
    assert len(started) <= 4


def test_a_stream_yields_items_and_returns_the_result_or_raises() -> None:
    def count(emit: Callable[[int], None]) -> str:
        for n in range(3):
            emit(n)
        return "done"

    found: list[int] = []
    stream = stream_from_thread(count, "stream")
    with pytest.raises(StopIteration, match="done"):
        while True:
            found.append(next(stream))
    assert found == [0, 1, 2]

    def fail(emit: Callable[[int], None]) -> None:
        emit(1)
        raise KeyError("end")

    stream_of_one = stream_from_thread(fail, "stream")
    assert next(stream_of_one) == 1
    with pytest.raises(KeyError, match="end"):
        next(stream_of_one)


def test_a_closed_stream_ends_its_function_at_the_next_item() -> None:
    outcomes: list[BaseException] = []
    ended, goes_on = threading.Event(), threading.Event()

    def run(emit: Callable[[int], None]) -> None:
        try:
            emit(1)
            goes_on.wait(5)
            emit(2)
        except Cancelled as error:
            outcomes.append(error)
        ended.set()

    stream = stream_from_thread(run, "stream")
    assert next(stream) == 1
    stream.close()
    goes_on.set()
    assert ended.wait(5) and len(outcomes) == 1


def test_a_periodic_thread_calls_until_it_is_closed() -> None:
    calls: list[float] = []
    began = time.monotonic()
    thread = PeriodicThread(lambda: calls.append(time.monotonic() - began), 0.01, "ticks", 0.1)
    while len(calls) < 3:
        time.sleep(0.01)
    assert calls[0] >= 0.1 and not thread.closed
    thread.close()
    count = len(calls)
    time.sleep(0.05)
    assert len(calls) == count and thread.closed


def test_a_loop_streams_the_items_of_a_coroutine_and_knows_its_own_callers() -> None:
    loop = EventLoopThread()

    def work(emit: Callable[[int], None]):  # type: ignore[no-untyped-def]
        async def run() -> bool:
            emit(1)
            await asyncio.sleep(0)
            emit(2)
            return loop.is_running_here()

        return run()

    found: list[int] = []
    stream = loop.stream_items(work)
    with pytest.raises(StopIteration, match="True"):
        while True:
            found.append(next(stream))
    assert found == [1, 2] and not loop.is_running_here()
