"""Server of models by name: which models, the socket, and the uvicorn server."""

import errno
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING

from swarm.errors import UserError
from swarm.models.base import Model

if TYPE_CHECKING:
    from uvicorn import Server

    from swarm.models.trace import Trace
    from swarm.registry.registry import Roster

SHUTDOWN_GRACE_S = 5
"""Seconds for open connections to receive the shutdown error."""

QUEUE = 256
"""Maximum number of waiting requests."""

SPARE_CONNECTIONS = 128
"""Connections beside those of answered and waiting requests."""


def build_server(
    models: Mapping[str, Model],
    key: str | None = None,
    local: bool = True,
    concurrency: int = 32,
    longest: int | None = None,
    trace: "Trace | None" = None,
    queue: int = QUEUE,
) -> "Server":
    """Build a server of models by name, to run on a socket; see `swarm.serve.app.ChatService`."""
    import uvicorn

    from swarm.serve.api_errors import ApiKeyGuard
    from swarm.serve.app import ChatService
    from swarm.serve.limits import server_config
    from swarm.serve.streaming import RequestQueue

    line = RequestQueue(concurrency, queue)
    service = ChatService(models, ApiKeyGuard(key, local), line, longest, trace)

    class NotifyingServer(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            line.stop_all()  # before their connections are closed
            await super().shutdown(sockets)

    config = server_config(
        service.app,
        concurrency + queue + SPARE_CONNECTIONS,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        ws="none",
    )
    return NotifyingServer(config)


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address.

    Raises:
        UserError: It cannot be bound.
    """
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=kind, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        more = "; --port 0 selects a free one" if taken else ""
        raise UserError(f"{host}:{port} cannot be bound: {reason}{more}") from None


def server_url(bound: socket.socket) -> str:
    """Return the URL of a bound server."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def discover_models(roster: "Roster", local: Sequence[str]) -> tuple[dict[str, Model], list[str]]:
    """Find the base, the experts, the best models of runs, the mixtures and the consortia.

    Args:
        roster: Registry of models.
        local: Names of local models, without local/.

    Returns:
        Models that can be used, and the names of the others, for which e.g. a key or a file is
        missing; `Model.check` says which.

    Raises:
        UserError: The database of saved consortia cannot be read.
    """
    from swarm.multi_agent.consortium.store import ConsortiumStore
    from swarm.multi_agent.presets import preset_names

    consortia = dict.fromkeys([*ConsortiumStore().list_names(), *preset_names("consortium")])
    kinds = {"local": local, "moa": preset_names("moa"), "consortium": consortia}
    found: dict[str, Model] = {}
    left_out = []
    for name in [f"{kind}/{name}" for kind, names in kinds.items() for name in names]:
        try:
            model = roster.model(name)
            model.check()
            found[name] = model
        except UserError:
            left_out.append(name)
    return found, left_out
