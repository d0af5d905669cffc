"""Serve models by name, as OpenAI does, or as tools of MCP: python -m swarm.serve."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from swarm._util.cli import run_program
from swarm._util.options import CONTEXT, SettingType, run_click
from swarm._util.settings import Positive, Text
from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError, require_packages

HTTP_OPTIONS = ("host", "port", "concurrency", "trace")
"""Options without a meaning for MCP."""

KEY_VARIABLE = "SWARM_API_KEY"
"""Environment variable of the API key required from clients."""

EPILOG = """\b
python -m swarm.serve                            all available models
python -m swarm.serve --model local/base --model moa/lite
python -m swarm.serve mcp                        tools of a program that starts this command
export OPENAI_BASE_URL=http://127.0.0.1:8000/v1  for the clients

Everyone who can reach the address may use the models. So the default is a loopback address, and
others need a key: export SWARM_API_KEY=... before the server starts. Ctrl-C stops it.
"""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("protocol", type=click.Choice(["http", "mcp"]), default="http")
@click.option(
    "--model",
    "names",
    multiple=True,
    metavar="NAME",
    help="Model to serve; repeatable. Any name of docs/models.md; default: the base, the experts, "
    "the best models of finished searches, and the mixtures and consortia whose members are "
    "available.",
)
@click.option("--base", type=SettingType(Text), help="Base of local/ names.")
@click.option("--pool", type=SettingType(Text), help="Folder of the experts of local/ names.")
@click.option("--device", type=SettingType(Text), help="Device of local models: cpu, cuda, cuda:1.")
@click.option("--providers", type=click.Path(path_type=Path), help="Yaml file of own endpoints.")
@click.option("--preload", is_flag=True, help="Load local models now, not at the first request.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0 selects a free one.",
)
@click.option(
    "--concurrency",
    type=SettingType(Positive),
    default=32,
    show_default=True,
    help="Maximum number of concurrent requests.",
)
@click.option(
    "--max-tokens",
    type=SettingType(Positive),
    help="Maximum new tokens of requests without a limit; default none, 1024 for local models.",
)
@click.option("--no-cache", is_flag=True, help="Do not use the answer cache.")
@click.option("--trace", type=click.Path(path_type=Path), help="Log every call there, as JSON.")
@click.pass_context
def serve(context: click.Context, **options: Any) -> None:
    """Serve models over an OpenAI-compatible API, or over standard input and output as tools of the
    Model Context Protocol (mcp): the base model, the experts, the models that searches have found,
    mixtures of agents, consortia, endpoints."""
    if options["protocol"] == "mcp":
        for name in HTTP_OPTIONS:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise UserError(f"--{name}: mcp has no address and no clients; omit it", 2)
        return _serve_mcp(options)
    host, key = options["host"], os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY_VARIABLE}: a key has printable ASCII characters only", 2)
    require_packages("serve", "fastapi", "uvicorn")
    # Spinning OpenMP threads slow down other computations; must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from swarm.models.trace import Trace
    from swarm.serve.server import bind_socket, build_server, is_loopback, server_url

    local = is_loopback(host)
    if not (key or local):
        raise UserError(f"--host {host}: others could use it; set a key in {KEY_VARIABLE}", 2)
    models = _load_models(options)
    with bind_socket(host, options["port"]) as bound:
        path = options["trace"]
        trace = Trace(path, {"serve": list(models)}) if path else None
        if options["preload"]:
            from swarm.engine.base_model import choose_device

            device = choose_device(options["device"])
            print(f"loading the local models on {device}", flush=True)
            for model in models.values():
                model.open(device)
        url, names = server_url(bound), list(models)
        header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if key else ""
        body = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        lazy = not options["preload"] and any(name.startswith("local/") for name in names)
        for line in (
            f"serving {len(names)} models at {url}" + (f", key in {KEY_VARIABLE}" if key else ""),
            *(f"  {name}" for name in names),
            *(["local models are loaded at the first request; --preload loads them now"] * lazy),
            f"curl {url}/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'",
            "Ctrl-C stops it",
        ):
            print(escape_control_chars(line), flush=True)
        limits = options["concurrency"], options["max_tokens"]
        build_server(models, key or None, local, *limits, trace).run([bound])


def _serve_mcp(options: dict[str, Any]) -> None:
    """Serve tools until the end of standard input; standard output is the protocol's."""
    require_packages("mcp", "mcp")
    from swarm.engine.base_model import choose_device
    from swarm.serve.mcp_server import build_mcp_server

    with redirect_stdout(sys.stderr):
        models = _load_models(options)
        for model in models.values() if options["preload"] else ():
            model.open(choose_device(options["device"]))
    build_mcp_server(models, options["max_tokens"]).run()


def _load_models(options: dict[str, Any]) -> dict[str, Any]:
    """Return the models to serve.

    Raises:
        UserError: A given name does not exist, or there are no models.
    """
    from swarm.models.providers import Providers
    from swarm.registry.registry import Roster
    from swarm.serve.server import discover_models

    places = {k: options[k] for k in ("base", "pool", "device") if options[k]}
    cache: Literal["default"] | None = None if options["no_cache"] else "default"
    roster = Roster(Providers.load(options["providers"]), cache=cache, **places)
    if options["names"]:
        found = {name: roster.model(name) for name in options["names"]}
        roster.check()
        return found
    found, left_out = discover_models(roster, roster.local.list_names())
    if left_out:
        names = escape_control_chars(", ".join(left_out))
        print(f"not served, as something is missing: {names} (--model NAME says what)")
    if not found:
        raise UserError("no model to serve; give one with --model NAME, see docs/models.md")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; print a user's error in one line and return its exit code."""
    return run_click(serve, arguments, "python -m swarm.serve")


if __name__ == "__main__":
    run_program(main)
