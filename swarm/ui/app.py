"""The ASGI application: pages, access control and server."""

import hmac
import logging
import secrets
import webbrowser
from importlib import import_module
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse

from swarm._util.threads import start_thread
from swarm.report.page import ICON
from swarm.serve.api_errors import LOCAL_HOST_PATTERN
from swarm.ui.state import AppState

SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
}
"""Headers that restrict pages to local resources, so that model output cannot load others."""

SHUTDOWN_GRACE_S = 2
"""Seconds that requests in progress have to finish at shutdown."""

MAX_CONNECTIONS = 256
"""Maximum number of connections; a browser opens up to seven."""

TOKEN = "token"
"""Query parameter that carries the token."""

NO_TOKEN = (
    "a token is needed: open the address that python -m swarm.ui printed when it started, or send "
    "Authorization: Bearer TOKEN\n"
)

log = logging.getLogger(__name__)


class HostGuard:
    """ASGI middleware that admits only requests with the token, a local Host and a matching Origin.

    The token keeps out other users of the machine. The Host check prevents DNS rebinding, and the
    Origin check prevents websockets from pages of other sites, to which the same-origin policy does
    not apply. The token is passed as a query parameter, after which a cookie stores it, or as
    `Authorization: Bearer`.

    Args:
        app: Protected application, websockets included.
        token: Required token; `None` for none.
    """

    def __init__(self, app: Any, token: str | None = None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Forward the request to the application, or refuse it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        request, plain_get = HTTPConnection(scope), scope.get("method") in ("GET", "HEAD")
        host, _, port = request.headers.get("host", "").rpartition(":")
        # With the port, as browsers share a host's cookies between ports.
        cookie = f"model_swarms_{port}" if host and port.isdigit() else "model_swarms"
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = {request.cookies.get(cookie, "")}
        given |= {bearer.strip()} if kind.lower() in ("bearer", "token") else set()
        if not is_allowed(request):
            answer: Any = PlainTextResponse("not from here\n", 403)
        elif self._token is None or any(map(self._is_token, given)):
            return await self._forward(scope, receive, send)
        elif not self._is_token(request.query_params.get(TOKEN, "")):
            answer = PlainTextResponse(NO_TOKEN, 403)
        elif not plain_get:
            return await self._forward(scope, receive, send)
        else:
            # Redirect to the URL without the token, to keep it out of histories. A single slash:
            # two would start a URL relative to the scheme, on another host.
            path = "/" + scope.get("raw_path", scope["path"].encode()).decode("latin-1").lstrip("/")
            query = [pair for pair in request.query_params.multi_items() if pair[0] != TOKEN]
            headers = SECURITY_HEADERS | {"cache-control": "no-store"}
            url = path + f"?{urlencode(query)}" * bool(query)
            answer = RedirectResponse(url, 303, headers)
            answer.set_cookie(cookie, self._token, httponly=True, samesite="strict")
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await answer(scope, receive, send)

    def _is_token(self, token: str) -> bool:
        # Constant time, so that response times do not reveal the token.
        return hmac.compare_digest(token.encode(), str(self._token).encode())

    async def _forward(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Forward the request; a client that leaves before the response is not an error."""
        left = False

        async def receive_and_watch() -> Any:
            nonlocal left
            message = await receive()
            left = left or message["type"] == "http.disconnect"
            return message

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive_and_watch, send_with_headers)
        except (KeyError, RuntimeError) as error:
            # socket.io fails if a poll ends while it is read, and then NiceGUI's middlewares, of
            # Starlette's class BaseHTTPMiddleware, raise "No response returned."
            if not left:
                raise
            log.info("%s: left before the response", scope["path"], exc_info=error)


def is_allowed(request: HTTPConnection) -> bool:
    """Return whether a request addresses this machine and does not originate from another site."""
    host = request.headers.get("host", "")
    origins = {origin.lower() for origin in request.headers.getlist("origin")}
    return bool(LOCAL_HOST_PATTERN.fullmatch(host)) and origins <= {f"http://{host}".lower()}


def build_application(home: AppState, token: str | None = None) -> HostGuard:
    """Build the application; once per process, as NiceGUI's pages are global."""
    from fastapi import FastAPI
    from nicegui import ui

    from swarm.ui import chat, layout
    from swarm.ui.pages import compare, models, new_search, run, runs

    for page in (runs, run, new_search, models, chat, compare):
        page.register_page(home)
    layout.register_not_found_page()
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    # A search may slow server and browser down; a late answer must not count as a lost connection.
    # With 10 seconds a browser that stalled for 25 lost its conversation; with 30 it keeps it.
    ui.run_with(
        app,
        title="model-swarms",
        favicon=ICON,
        dark=None,
        show_welcome_message=False,
        reconnect_timeout=30.0,
    )
    return HostGuard(app, token)


def serve_pages(home: AppState, host: str, port: int, browser: bool, guarded: bool = True) -> None:
    """Serve the pages until an interrupt.

    Args:
        home: State that the pages share.
        host, port: Address to bind; port 0 selects a free one.
        browser: Whether to open a browser.
        guarded: Whether to require a token, which is new for each start.

    Raises:
        UserError: The address cannot be bound.
        KeyboardInterrupt: The server was interrupted.
    """
    import uvicorn

    from swarm.serve.limits import server_config
    from swarm.serve.server import bind_socket

    with bind_socket(host, port) as bound:
        token = secrets.token_hex(24) if guarded else None
        name, free_port = bound.getsockname()[:2]
        url = f"http://{f'[{name}]' if ':' in name else name}:{free_port}/"
        url += f"?{TOKEN}={token}" if token else ""
        app = build_application(home, token)
        config = server_config(app, MAX_CONNECTIONS, timeout_graceful_shutdown=SHUTDOWN_GRACE_S)
        logging.getLogger("nicegui").setLevel(logging.ERROR)
        print(f"serving the page at {url} (Ctrl-C stops it)", flush=True)
        if token is None:
            print("--no-token: every user of this machine can start searches on it", flush=True)
        # The form's cost needs it. Not transformers: two threads may not import from it at once.
        start_thread(import_module, "torch", name="swarm-torch")
        if browser:
            start_thread(webbrowser.open, url, name="swarm-browser")
        uvicorn.Server(config).run([bound])
