"""Following what goes on: the events of a collaboration, in the thread that asks for them."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from queue import SimpleQueue
from typing import Any, TypeVar

from swarm.collab import OnEvent

E = TypeVar("E")
N = TypeVar("N")
T = TypeVar("T")


class Cancelled(Exception):
    """Nobody follows any more."""


def stream_events(run: Callable[[OnEvent], T]) -> Generator[tuple[int, Any], None, T]:
    """Runs in a thread, yields each event with its request's number, and returns what came of it.

    Closing it ends the run at its next event: what was asked is answered, nothing more is asked.

    Args:
        run: Tells its events to the watch that it is given.
    """
    events: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
    left = threading.Event()

    def forward_event(number: int, event: Any) -> None:
        if left.is_set():
            raise Cancelled
        events.put((True, (number, event)))

    def run_in_thread() -> None:
        came: T | BaseException
        try:
            came = run(forward_event)
        except BaseException as error:
            came = error
        events.put((False, came))

    threading.Thread(target=run_in_thread, name="swarm-followed", daemon=True).start()
    try:
        while True:
            more, event = events.get()
            if not more:
                break
            yield event
    finally:
        left.set()
    if isinstance(event, BaseException):
        raise event
    came: T = event
    return came


def map_events(
    events: Generator[E, None, T], change: Callable[[E], N | None]
) -> Generator[N, None, T]:
    """Yields what `change` makes of each event, unless that is `None`, and returns as `events`.

    Closing it closes them.
    """
    with closing(events):
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                came: T = end.value
                return came
            if (made := change(event)) is not None:
                yield made
