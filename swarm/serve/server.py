"""Server process: finds the models, binds the address and serves until interrupted."""

import errno
import os
import socket
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError
from swarm.models.base import Model
from swarm.models.trace import Trace
from swarm.serve.cli import DEFAULT_KEY_VARIABLE, is_loopback
from swarm.serve.request_params import discover_models, select_models, trace_models

if TYPE_CHECKING:
    from uvicorn import Server

SHUTDOWN_GRACE_S = 5
"""Seconds for open connections to receive the shutdown error."""

SPARE_CONNECTIONS = 128
"""Connections beside those of answered and waiting requests."""


def run(given: Namespace) -> None:
    """Serve until an interrupt.

    Raises:
        UserError: A model or the address is not available.
        KeyboardInterrupt: At shutdown.
    """
    # Spinning OpenMP threads would slow down other computations; must be set before torch is
    # loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    models = _load_models(given)
    bound = bind_socket(given.host, given.port)
    with bound:
        if given.trace:
            models = trace_models(models, Trace(given.trace, {"serve": list(models)}))
        if given.preload:
            _preload_models(models, given.device)
        for line in format_greeting(server_url(bound), list(models), given):
            print(escape_control_chars(line), flush=True)
        build_server(
            models,
            given.key,
            is_loopback(given.host),
            given.concurrency,
            given.queue,
            given.max_tokens,
        ).run([bound])


def build_server(
    models: Mapping[str, Model],
    key: str | None = None,
    local: bool = True,
    concurrency: int = 32,
    queue: int = 256,
    longest: int | None = None,
) -> "Server":
    """Build a server of models by name, to run on a socket; see `swarm.serve.app.ChatService`."""
    import uvicorn

    from swarm.serve.api_errors import ApiKeyGuard
    from swarm.serve.app import ChatService
    from swarm.serve.limits import server_config
    from swarm.serve.streaming import RequestQueue

    line = RequestQueue(concurrency, queue)
    service = ChatService(models, ApiKeyGuard(key, local), line, longest)

    class NotifyingServer(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Send an error to waiting clients before closing their connections."""
            line.stop_all()
            await super().shutdown(sockets)

    return NotifyingServer(
        server_config(
            service.app,
            concurrency + queue + SPARE_CONNECTIONS,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            ws="none",
        )
    )


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address.

    Raises:
        UserError: It cannot be bound.
    """
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=kind, backlog=2048)
    except (OSError, UnicodeError) as error:
        more = (
            "; --port 0 selects a free one"
            if getattr(error, "errno", 0) == errno.EADDRINUSE
            else ""
        )
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{host}:{port} cannot be bound: {reason}{more}") from None


def server_url(bound: socket.socket) -> str:
    """Return the URL of a bound server."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def format_greeting(url: str, names: list[str], options: Namespace) -> list[str]:
    """Return the messages at startup: address, models, and an example request."""
    variable = options.api_key_env or DEFAULT_KEY_VARIABLE
    header = f' -H "Authorization: Bearer ${variable}"' if options.key else ""
    body = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    lines = [f"serving {len(names)} models at {url}" + (f", key in {variable}" if header else "")]
    lines += [f"  {name}" for name in names]
    if not options.preload and any(name.startswith("local/") for name in names):
        lines.append(
            "local models are loaded at the first request; --preload loads them at startup"
        )
    return [
        *lines,
        f"curl {url}/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'",
        "Ctrl-C stops it",
    ]


def _load_models(options: Namespace) -> dict[str, Model]:
    """Return the models to serve.

    Raises:
        UserError: A given name does not exist, or there are no models.
    """
    from swarm.models.providers import Providers
    from swarm.registry.local_models import LocalModels
    from swarm.registry.registry import Roster

    locations: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("base", "pool", "device")
        if getattr(options, name)
    }
    cache: Literal["default"] | None = None if options.no_cache else "default"
    roster = Roster(Providers.load(options.providers), cache=cache, **locations)
    if options.model:
        return select_models(roster, list(dict.fromkeys(options.model)))
    found, left_out = discover_models(roster, LocalModels(**locations).list_names())
    if left_out:
        print(
            escape_control_chars(
                f"not served, as a key, a file or a model name is missing: "
                f"{', '.join(left_out)} (--model NAME shows which)"
            )
        )
    if not found:
        raise UserError("no model to serve; give one with --model NAME, see docs/models.md")
    return found


def _preload_models(models: Mapping[str, Model], device: str | None) -> None:
    from swarm.engine.base_model import choose_device

    chosen_device = choose_device(device)
    print(f"loading the local models on {chosen_device}", flush=True)
    for model in models.values():
        if opened := getattr(model, "open", None):
            opened(chosen_device)
