"""A server of given models on the loopback, and models that show how they are asked."""

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from swarm.models.base import Completion, Delta, Model, Request
from swarm.serve.server import bind_socket, build_server, server_url


@contextmanager
def served(models: Mapping[str, Model], **settings: Any) -> Iterator[str]:
    """The URL of a server of these models, as OpenAI's client wants it."""
    bound = bind_socket("127.0.0.1", 0)
    made = build_server(models, **settings)
    thread = threading.Thread(target=made.run, args=([bound],), daemon=True)
    thread.start()
    try:
        yield server_url(bound)
    finally:
        made.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        bound.close()


class Slow(Model):
    """Gives a piece at a time, each when it is allowed to; endless unless `pieces` are given.

    Attributes:
        go: Is released once a piece.
        given: Pieces so far.
        ended: Is set when its answer has ended, or was closed.
        heard: What it was asked.
        peak: The most answers that were under way at once.
    """

    def __init__(self, pieces: Sequence[str] | None = None) -> None:
        self.pieces = pieces
        self.go, self.ended = threading.Semaphore(0), threading.Event()
        self.given = self.live = self.peak = 0
        self.heard: list[Request] = []
        self._lock = threading.Lock()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `swarm.models.base.Model`."""
        raise AssertionError("it is streamed")

    def stream(self, request: Request) -> Generator[Delta, None, Completion]:
        """See `swarm.models.base.stream`."""
        with self._lock:
            self.heard.append(request)
            self.live += 1
            self.peak = max(self.peak, self.live)
        try:
            while self.pieces is None or self.given < len(self.pieces):
                assert self.go.acquire(timeout=60)
                self.given += 1
                yield Delta(self.pieces[self.given - 1] if self.pieces else "more ")
            return Completion("".join(self.pieces), prompt_tokens=2, new_tokens=len(self.pieces))
        finally:
            with self._lock:
                self.live -= 1
            self.ended.set()


class Told(Model):
    """Answers with a completion, or raises; keeps what it was asked."""

    def __init__(self, *said: Completion | BaseException) -> None:
        self.said = said
        self.heard: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `swarm.models.base.Model`."""
        self.heard += requests
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Completion:
        said = self.said[request.sample % len(self.said)]
        if isinstance(said, BaseException):
            raise said
        return said
