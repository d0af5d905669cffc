"""Answers under way: each in a thread of its own, all of a client's ended when it leaves."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from swarm.models import Completion, Delta, Model, Request, stream
from swarm.models.stops import stream_until_stop
from swarm.serve.refusals import HttpError

Mailbox = asyncio.Queue[Any]
"""What comes for one client: `TURN` once, numbered pieces and completions, or an exception."""

TURN_SIGNAL = object()

RETRY_AFTER_S = 1.0
"""Seconds that a client is asked to wait where too many wait already."""


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


class RequestQueue:
    """So many clients are answered at once; so many more wait in their order.

    All of it belongs to one event loop.
    """

    def __init__(self, concurrency: int, queue: int) -> None:
        self.free, self.queue = concurrency, queue
        self.waiting: deque[Mailbox] = deque()
        self.here: set[Mailbox] = set()
        self.stopped = False

    def enter_queue(self, mail: Mailbox) -> None:
        """Come in; `TURN` comes when it is one's turn.

        Raises:
            Refused: Too many wait, or the server is being stopped.
        """
        if self.stopped:
            raise shutdown_error()
        if self.free:
            self.free -= 1
            mail.put_nowait(TURN_SIGNAL)
        elif len(self.waiting) < self.queue:
            self.waiting.append(mail)
        else:
            raise HttpError(f"{self.queue} requests wait already (--queue); ask again later", 429,
                          again=True, after=RETRY_AFTER_S)  # fmt: skip
        self.here.add(mail)

    def leave_queue(self, mail: Mailbox) -> bool:
        """Go; gives whether it was one's turn, which `over` then has to hand on."""
        self.here.discard(mail)
        if mail not in self.waiting:
            return True
        self.waiting.remove(mail)
        return False

    def release_turn(self) -> None:
        """Hand a turn on, when the last thread of it has ended."""
        if self.waiting:
            self.waiting.popleft().put_nowait(TURN_SIGNAL)
        else:
            self.free += 1

    def stop_all(self) -> None:
        """Tell all who are here that there will be no answer."""
        self.stopped = True
        for mail in self.here:
            mail.put_nowait(shutdown_error())


def shutdown_error() -> HttpError:
    """The server ends."""
    return HttpError("the server is being stopped; ask again when it is back", 503, again=True)


async def stream_samples(
    line: RequestQueue, model: Model, request: Request, count: int, left: Callable[[], Awaitable[None]]
) -> AsyncGenerator[tuple[int, Delta | Completion], None]:
    """Numbered pieces of so many samples as they come, of each at last the whole.

    Closing it ends what is under way, at the next piece of each sample; a model of this machine
    that is asked by way of a mixture ends at its next token.

    Args:
        line: Where one waits for one's turn.
        left: Returns when the client has left.

    Raises:
        Refused: Too many wait, or the server is being stopped.
        ClientLeft: It has.
        Exception: What went wrong with one of the samples.
    """
    mail: Mailbox = asyncio.Queue()
    line.enter_queue(mail)
    watch = asyncio.ensure_future(left())
    watch.add_done_callback(lambda _: mail.put_nowait(ClientDisconnected()))
    gone = threading.Event()
    begun = False
    missing = count
    try:
        while missing:
            came = await mail.get()
            if isinstance(came, BaseException):
                raise came
            if came is TURN_SIGNAL:
                begun = True
                asked = replace(request, decided=lambda _: gone.is_set())
                start_sample_threads(line, model, [replace(asked, sample=n) for n in range(count)], mail, gone)
                continue
            missing -= isinstance(came[1], Completion)
            yield came
    finally:
        gone.set()
        watch.cancel()
        if line.leave_queue(mail) and not begun:
            line.release_turn()


def start_sample_threads(
    line: RequestQueue, model: Model, requests: Sequence[Request], mail: Mailbox, gone: threading.Event
) -> None:
    """Answer each request in a thread, and hand the turn on when all threads have ended."""
    loop = asyncio.get_running_loop()
    running = len(requests)

    def on_thread_end() -> None:
        nonlocal running
        running -= 1
        if not running:
            line.release_turn()

    def call_on_loop(what: Callable[..., object], *how: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(what, *how)

    def run_sample(number: int, request: Request) -> None:
        try:
            with (
                closing(stream(model, request)) as pieces,
                closing(stream_until_stop(pieces, request.stop)) as shown,
            ):
                while not gone.is_set():
                    call_on_loop(mail.put_nowait, (number, next(shown)))
        except StopIteration as end:
            call_on_loop(mail.put_nowait, (number, end.value))
        except BaseException as error:
            call_on_loop(mail.put_nowait, error)
        finally:
            call_on_loop(on_thread_end)

    for asked in enumerate(requests):
        try:
            threading.Thread(target=run_sample, args=asked, name="swarm-serve", daemon=True).start()
        except RuntimeError as error:  # there are too many
            mail.put_nowait(error)
            on_thread_end()
