"""The application: its pages, who may ask, and the process that serves it."""

import importlib
import logging
import socket
import threading
import webbrowser
from typing import Any

from swarm.serve.guard import HERE
from swarm.ui.home import Home

PAGES = ("runs", "run", "together", "start", "models", "talk", "compare")
"""The modules of the pages; each has a `register`."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
}
"""The page loads what is here, and a text of a model loads nothing from elsewhere."""

GRACE = 2
"""Seconds for what is under way when the page ends."""


class Guard:
    """Lets in who calls the page by an address of this machine, from the page itself.

    A page of somebody else's in the same browser could otherwise have its own name point here, or
    open a websocket, which no browser holds back.

    Args:
        app: What is guarded, websockets included.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer, or refuse."""
        if scope["type"] == "lifespan" or allowed(scope):
            return await self._app(scope, receive, _marked(send))
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        kind = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": 403, "headers": kind})
        await send({"type": "http.response.body", "body": b"not from here\n"})


def allowed(scope: dict[str, Any]) -> bool:
    """Whether a request means this machine, and does not come from another page."""
    named = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    host, origin = named.get("host", ""), named.get("origin")
    if not HERE.fullmatch(host):
        return False
    return origin is None or origin.lower() == f"http://{host}".lower()


def _marked(send: Any) -> Any:
    """Send with the headers; those that an answer has itself stay."""

    async def sent(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message["headers"], *(m for m in more if m[0] not in own)]
        await send(message)

    return sent


def application(home: Home) -> Guard:
    """The pages, behind the guard; once a process, as NiceGUI has one set of pages."""
    from fastapi import FastAPI
    from nicegui import ui

    for name in PAGES:
        importlib.import_module(f"swarm.ui.{name}").register(home)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    # A search keeps this machine busy: a slow answer is no lost connection.
    ui.run_with(
        app, title="model-swarms", dark=None, show_welcome_message=False, reconnect_timeout=10.0
    )
    return Guard(app)


def serve(home: Home, host: str, port: int, browser: bool) -> None:
    """Serve the page until an interrupt.

    Raises:
        UserError: The address cannot be bound.
        KeyboardInterrupt: At its end.
    """
    import uvicorn

    from swarm.serve.server import bind

    with bind(host, port) as bound:
        url = address(bound)
        server = uvicorn.Server(uvicorn.Config(
            application(home), log_config=None, log_level="warning", access_log=False,
            server_header=False, timeout_graceful_shutdown=GRACE,
        ))  # fmt: skip
        logging.getLogger("nicegui").setLevel(logging.ERROR)
        print(f"the page is at {url} (Ctrl-C ends it)", flush=True)
        if browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        server.run([bound])


def address(bound: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
