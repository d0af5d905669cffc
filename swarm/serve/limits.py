"""Limits of both HTTP servers on what a client holds before it is known: time, memory, sockets."""

import asyncio
import resource
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.serve.api_errors import HttpError
from swarm.serve.streaming import encode_json

MAX_HEAD_BYTES = 32 * 2**10
"""Maximum size of a request's first line and headers."""

MAX_BODY_BYTES = 16 * 2**20
"""Maximum size of a request's body; a million tokens are about four million bytes."""

REQUEST_S = 30.0
"""Seconds in which a request must arrive, body included."""

KEEP_ALIVE_S = 5
"""Seconds that a connection may be idle between two requests."""

DRAIN_S = 5.0
"""Seconds to read on from a client that was answered before its body ended."""

BACKLOG = 100
"""Connections that are accepted at once, before any is closed."""


def server_config(app: Any, connections: int, **settings: Any) -> uvicorn.Config:
    """Return the configuration of a server with these limits.

    Args:
        app: ASGI application.
        connections: Number of connections from which on those that wait for their client are
            closed. Twice as many are refused with 503. At most a quarter and half of the
            process's open files.
        settings: Further arguments of `uvicorn.Config`.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        connections = min(connections, files // 4)
    return uvicorn.Config(
        BodyLimit(app),
        http=LimitedProtocol,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        limit_concurrency=2 * connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        **settings,
    )


class LimitedProtocol(H11Protocol):
    """Closes connections whose request is late, and the longest waiting one where there are too
    many, so that half-open connections do not keep others out."""

    _timer: asyncio.TimerHandle
    _since: float

    @property
    def _waits_for_client(self) -> bool:
        """True unless a complete request is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        if 2 * len(self.connections) > (self.limit_concurrency or 0):
            # The set also contains websockets.
            waiting = [
                one
                for one in self.connections
                if isinstance(one, LimitedProtocol) and one is not self and one._waits_for_client
            ]
            if waiting:
                min(waiting, key=lambda one: one._since)._drop()

    def on_response_complete(self) -> None:
        self._timer.cancel()
        self._start_timer()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._timer.cancel()
        super().handle_websocket_upgrade(event)

    def _start_timer(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(REQUEST_S, self._on_timeout)

    def _on_timeout(self) -> None:
        if self._waits_for_client:
            self._drop()

    def _drop(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


class BodyLimit:
    """ASGI middleware that answers 413 to a body above `MAX_BODY_BYTES`.

    An answer that is sent before the body has ended is followed by reading the rest: closing a
    socket with unread data resets it, and the client would not see the answer.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Forward the request, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        length, size = int(headers.get(b"content-length", 0)), 0
        ended = not length and b"transfer-encoding" not in headers
        too_large, started = length > MAX_BODY_BYTES, False

        async def receive_part() -> Any:
            """Return the next message; a body above the limit ends as if the client had left."""
            nonlocal size, ended, too_large
            message = await receive()
            size += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            too_large = too_large or size > MAX_BODY_BYTES
            return {"type": "http.disconnect"} if too_large else message

        async def send_part(message: Any) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and not ended:
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        while not ended:
                            await receive_part()
                message = {"type": "http.response.body"}
            await send(message)

        async def send_allowed(message: Any) -> None:
            """Send a message of the application, unless the body has become too large before."""
            nonlocal started
            if started or not too_large:
                started = True
                await send_part(message)

        if not too_large:
            try:
                await self._app(scope, receive_part, send_allowed)
            except Exception:
                if started or not too_large:
                    raise
        if too_large and not started:
            error = HttpError(f"the body has more than {MAX_BODY_BYTES} bytes", 413)
            body = encode_json(error.body)
            response = {"Content-Type": "application/json", "Content-Length": f"{len(body)}"}
            response |= {"Connection": "close", **error.headers}
            encoded = [(name.lower().encode(), value.encode()) for name, value in response.items()]
            await send_part({"type": "http.response.start", "status": 413, "headers": encoded})
            await send_part({"type": "http.response.body", "body": body})
