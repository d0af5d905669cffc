"""Command line of the server, parsed and checked before anything is loaded."""

import argparse
import os
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from swarm._util.cli import RaisingParser, add_model_options, normalize_option, number_type
from swarm.errors import UserError

DEFAULT_KEY_VARIABLE = "SWARM_API_KEY"
"""Default environment variable of the API key required from clients."""

DESCRIPTION = """\
Serve models over an OpenAI-compatible API: the base model, the experts, the models that searches
have found, mixtures of agents, consortia.

  python -m swarm.serve                            all available models
  python -m swarm.serve --model local/base --model moa/lite
"""

EPILOG = """\
Clients then use this URL instead of OpenAI's: export OPENAI_BASE_URL=http://127.0.0.1:8000/v1

Everyone who can reach the address may use the models. So the default is a loopback address, and
others need a key: export SWARM_API_KEY=... before the server starts. Ctrl-C stops it.
"""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UserError: It is invalid, or would allow access without a key.
    """
    options = build_parser().parse_args([normalize_option(word, "_", "-") for word in words])
    for name in ("base", "pool", "device", "host"):
        if getattr(options, name) is not None and not getattr(options, name).strip():
            raise UserError(f"--{name}: the value is empty; give one or leave the option out", 2)
    options.key = _read_api_key(options.api_key_env)
    if not (options.key or options.insecure or is_loopback(options.host)):
        raise UserError(
            f"--host {options.host}: reachable by others without a key: set "
            f"{options.api_key_env or DEFAULT_KEY_VARIABLE}, or pass --insecure to allow this",
            2,
        )
    return options


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_api_key(variable: str | None) -> str | None:
    """Return the API key, or `None` if none is set.

    Raises:
        UserError: The named variable is empty, or the key is not printable ASCII.
    """
    key = os.environ.get(variable or DEFAULT_KEY_VARIABLE, "").strip()
    if variable and not key:
        raise UserError(f"--api-key-env {variable}: this environment variable is not set", 2)
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"{variable or DEFAULT_KEY_VARIABLE}: a key may have printable ASCII characters only", 2
        )
    return key or None


def build_parser() -> RaisingParser:
    """Build the parser, with options in groups."""
    parser = RaisingParser(
        prog="python -m swarm.serve",
        usage="%(prog)s [OPTION ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_options(parser.add_argument_group("what is served"))
    _add_address_options(parser.add_argument_group("address and access"))
    _add_answering_options(parser.add_argument_group("requests"))
    return parser


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        action="append",
        metavar="NAME",
        help="model to serve; repeatable. Any "
        "name of docs/models.md; default: the base, the experts, the best models of finished "
        "searches, and the mixtures and consortia whose members are available",
    )
    add_model_options(add)
    add(
        "--preload",
        action="store_true",
        help="load local models at startup instead of at the first request",
    )


def _add_address_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to bind; default %(default)s")
    add("--port", type=parse_port, default=8000, help="default %(default)s; 0 selects a free one")
    add(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with the key required from "
        f"clients; default {DEFAULT_KEY_VARIABLE}, if set",
    )
    add(
        "--insecure",
        action="store_true",
        help="allow an address that is not loopback without a key",
    )


def _add_answering_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        type=number_type(int, 1),
        default=32,
        metavar="N",
        help="maximum number of concurrent requests; default %(default)s",
    )
    add(
        "--queue",
        type=number_type(int, 0),
        default=256,
        metavar="N",
        help="maximum number of waiting requests; more get a 429; default %(default)s",
    )
    add(
        "--max-tokens",
        type=number_type(int, 1),
        metavar="N",
        help="maximum new tokens if the request sets none; default none, and 1024 for local models",
    )
    add(
        "--no-cache",
        action="store_true",
        help="do not use the answer cache",
    )
    add("--trace", metavar="FILE", type=Path, help="log every call to this file, as JSON lines")


def parse_port(word: str) -> int:
    """Parse a port number."""
    if not (word.isascii() and word.isdigit() and int(word) <= 65535):
        raise argparse.ArgumentTypeError(f"{word!r} is not an integer from 0 to 65535")
    return int(word)
