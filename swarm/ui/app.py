"""The ASGI application: pages, access control and server."""

import hmac
import importlib
import logging
import secrets
import webbrowser
from typing import Any
from urllib.parse import parse_qsl, urlencode

from swarm._util.threads import start_thread
from swarm.serve.api_errors import LOCAL_HOST_PATTERN
from swarm.ui.state import AppState

PAGES = (
    "swarm.ui.pages.runs.register_page",
    "swarm.ui.pages.run.register_page",
    "swarm.ui.pages.new_search.register_page",
    "swarm.ui.pages.models.register_page",
    "swarm.ui.pages.models.register_pool_page",
    "swarm.ui.chat.register_page",
    "swarm.ui.pages.compare.register_page",
    "swarm.ui.layout.register_not_found_page",
)
"""Functions that register the pages."""

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
    b"a token is needed: open the address that python -m swarm.ui printed when it started, or send "
    b"Authorization: Bearer TOKEN\n"
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
        if not is_allowed(scope):
            return await _refuse(scope, send, b"not from here\n")
        if self._token is None or self._has_cookie(scope) or self._is_bearer(scope):
            return await self._forward(scope, receive, send)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not self._is_token(dict(query).get(TOKEN, "")):
            return await _refuse(scope, send, NO_TOKEN)
        if scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD"):
            return await self._forward(scope, receive, send)
        # Set the cookie, and redirect to the URL without the token to keep it out of histories.
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        rest = urlencode([pair for pair in query if pair[0] != TOKEN])
        # A single slash: two would start a URL relative to the scheme, on another host.
        location = "/" + path.lstrip("/") + (f"?{rest}" if rest else "")
        cookie = f"{_cookie_name(scope)}={self._token}; HttpOnly; SameSite=Strict; Path=/"
        headers = {"location": location, "set-cookie": cookie, "cache-control": "no-store"}
        await _respond(send, 303, SECURITY_HEADERS | headers)

    async def _forward(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Forward the request; a client that leaves before the response is not an error."""
        left = False

        async def receive_and_watch() -> Any:
            nonlocal left
            message = await receive()
            left = left or message["type"] == "http.disconnect"
            return message

        async def send_with_headers(message: dict[str, Any]) -> None:
            """Add the security headers that a response does not set itself."""
            if message["type"] == "http.response.start":
                own = {name.lower().decode(): value for name, value in message["headers"]}
                more = {name: value for name, value in SECURITY_HEADERS.items() if name not in own}
                message["headers"] = [*message["headers"], *_encode(more)]
            await send(message)

        try:
            await self._app(scope, receive_and_watch, send_with_headers)
        except (KeyError, RuntimeError) as error:
            # socket.io fails if a poll ends while it is read, and then NiceGUI's middlewares, of
            # Starlette's class BaseHTTPMiddleware, raise "No response returned."
            if not left:
                raise
            log.info("%s: left before the response", scope["path"], exc_info=error)

    def _is_token(self, token: str) -> bool:
        # Constant time, so that response times do not reveal the token.
        return hmac.compare_digest(token.encode(), str(self._token).encode())

    def _is_bearer(self, scope: dict[str, Any]) -> bool:
        kind, _, token = _header(scope, b"authorization").partition(" ")
        return kind.lower() in ("bearer", "token") and self._is_token(token.strip())

    def _has_cookie(self, scope: dict[str, Any]) -> bool:
        name = _cookie_name(scope)
        pairs = (one.strip().partition("=") for one in _header(scope, b"cookie").split(";"))
        return any(key == name and self._is_token(value) for key, _, value in pairs)


def is_allowed(scope: dict[str, Any]) -> bool:
    """Return whether a request addresses this machine and does not originate from another site."""
    host = _header(scope, b"host")
    origins = [value.decode("latin-1") for key, value in scope["headers"] if key == b"origin"]
    own_origin = f"http://{host}".lower()
    return bool(LOCAL_HOST_PATTERN.fullmatch(host)) and all(
        origin.lower() == own_origin for origin in origins
    )


def _header(scope: dict[str, Any], name: bytes) -> str:
    """Return the values of a header, joined in the format of cookies."""
    return "; ".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)


def _cookie_name(scope: dict[str, Any]) -> str:
    """Return the cookie's name with the port, as browsers share a host's cookies between ports."""
    _, _, port = _header(scope, b"host").rpartition(":")
    return f"model_swarms_{port}" if port.isdigit() else "model_swarms"


async def _refuse(scope: dict[str, Any], send: Any, reason: bytes) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    await _respond(send, 403, {"content-type": "text/plain; charset=utf-8"}, reason)


async def _respond(send: Any, status: int, headers: dict[str, str], body: bytes = b"") -> None:
    start = {"type": "http.response.start", "status": status, "headers": _encode(headers)}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _encode(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def build_application(home: AppState, token: str | None = None) -> HostGuard:
    """Build the application; once per process, as NiceGUI's pages are global."""
    from fastapi import FastAPI
    from nicegui import ui

    for page in PAGES:
        module, _, name = page.rpartition(".")
        getattr(importlib.import_module(module), name)(home)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    # A search may slow server and browser down; a late answer must not count as a lost connection.
    # With 10 seconds a browser that stalled for 25 lost its conversation; with 30 it keeps it.
    ui.run_with(
        app, title="model-swarms", dark=None, show_welcome_message=False, reconnect_timeout=30.0
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
        if browser:
            start_thread(webbrowser.open, url, name="swarm-browser")
        uvicorn.Server(config).run([bound])
