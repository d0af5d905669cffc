"""The process of a viewer: a port that is free, a thread that answers, and its end."""

import errno
import socket
import threading
import webbrowser
from typing import TYPE_CHECKING

from swarm.compare.view.table import AnswerTable
from swarm.errors import UserError
from swarm.serve.arguments import is_loopback

if TYPE_CHECKING:
    from uvicorn import Server

MAX_PORTS_TRIED = 50
"""Ports that are tried, from the wanted one on."""

SHUTDOWN_GRACE_S = 2
"""Seconds for an export that is under way when the viewer ends."""


class ViewerHandle:
    """A viewer that is there until it is closed; as a context it is closed at the end.

    Attributes:
        url: Where the page is.
    """

    def __init__(self, table: AnswerTable, start: dict[str, str], host: str, port: int) -> None:
        self._bound = bind_socket(host, port)
        place, self.port = self._bound.getsockname()[:2]
        self.url = f"http://{f'[{place}]' if ':' in place else place}:{self.port}/"
        self._server = build_server(table, start, is_loopback(host))
        # A notebook's kernel, or a script that is done, ends in spite of it.
        self._thread = threading.Thread(
            target=self._server.run, args=([self._bound],), name="viewer", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"viewer at {self.url}" if self._thread.is_alive() else "viewer, closed"

    def __enter__(self) -> "ViewerHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Wait for Ctrl-C, and close."""
        try:
            while self._thread.is_alive():
                self._thread.join(1)
        except KeyboardInterrupt:
            # The terminal has written ^C there.
            print(flush=True)
        finally:
            self.close()

    def close(self) -> None:
        """End it; a second time does nothing."""
        self._server.should_exit = True
        self._thread.join()
        self._bound.close()

    def open_browser(self) -> None:
        """Show the page in the person's browser, if there is one."""
        threading.Thread(target=webbrowser.open, args=(self.url,), daemon=True).start()


def build_server(table: AnswerTable, start: dict[str, str], local: bool) -> "Server":
    """A server of the page; `local` says that it is bound to the loopback."""
    import uvicorn

    from swarm.compare.view.application import ViewerApp
    from swarm.serve.guard import ApiKeyGuard

    app = ViewerApp(table, start, ApiKeyGuard(None, local)).app
    return uvicorn.Server(uvicorn.Config(
        app, log_config=None, log_level="critical", access_log=False, lifespan="off",
        server_header=False, timeout_graceful_shutdown=SHUTDOWN_GRACE_S, ws="none",
    ))  # fmt: skip


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at the port, or where that is taken, at the next one that is free.

    Raises:
        UserError: It cannot.
    """
    last = min(port + MAX_PORTS_TRIED, 65536) if port else 1
    why: object = None
    for one in range(port, last):
        try:
            kind, *_, address = socket.getaddrinfo(host, one, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=kind)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                break
    raise UserError(f"{host}:{port} cannot be bound: {why}; port 0 takes a free one")
