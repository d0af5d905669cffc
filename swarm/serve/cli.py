"""Command line of the server, parsed and checked before anything is loaded."""

import argparse
import os
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from swarm.errors import UserError
from swarm.moa.arguments import MoAArgumentParser, number_type

DEFAULT_KEY_VARIABLE = "SWARM_API_KEY"
"""Default environment variable of the API key required from clients."""

DESCRIPTION = """\
Serve models to every program that speaks OpenAI's language: the base, the experts, what searches
have found, mixtures of agents, consortia.

  python -m swarm.serve                            all that there is
  python -m swarm.serve --model local/base --model moa/lite
"""

EPILOG = """\
A program then takes the URL for OpenAI's: export OPENAI_BASE_URL=http://127.0.0.1:8000/v1

Whoever reaches the address may use the models, so it is one of this machine's own, and another one
wants a key: export SWARM_API_KEY=... before the server starts. Ctrl-C ends it.
"""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UserError: It is invalid, or would allow access without a key.
    """
    given = build_parser().parse_args([_normalize_option(word) for word in words])
    for name in ("base", "pool", "device", "host"):
        if getattr(given, name) is not None and not getattr(given, name).strip():
            raise UserError(f"--{name}: nothing follows it; name one or leave it out", 2)
    given.key = _read_api_key(given.api_key_env)
    if not (given.key or given.insecure or is_loopback(given.host)):
        raise UserError(
            f"--host {given.host}: others could use the models without a key: set "
            f"{given.api_key_env or DEFAULT_KEY_VARIABLE}, or say --insecure if you want that",
            2,
        )
    return given


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
            f"{variable or DEFAULT_KEY_VARIABLE}: a key has printable ASCII characters only", 2
        )
    return key or None


def _normalize_option(word: str) -> str:
    """Replace underscores in an option's name by hyphens."""
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def build_parser() -> MoAArgumentParser:
    """Build the parser, with options in groups."""
    made = MoAArgumentParser(
        prog="python -m swarm.serve",
        usage="%(prog)s [OPTION ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_options(made.add_argument_group("what is served"))
    _add_address_options(made.add_argument_group("where, and to whom"))
    _add_answering_options(made.add_argument_group("how it is answered"))
    return made


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        action="append",
        metavar="NAME",
        help="serve this one; may be repeated. Any "
        "name of docs/models.md; default: the base, the experts, the bests of finished searches, "
        "and the mixtures and consortia whose members can be asked",
    )
    add(
        "--base",
        metavar="MODEL",
        help="the base of local names: an option of conf/model or a folder",
    )
    add("--pool", metavar="FOLDER", help="the experts of local names")
    add("--device", metavar="DEVICE", help="where local models run: cpu, cuda, cuda:1")
    add("--providers", metavar="FILE", type=Path, help="endpoints of your own")
    add(
        "--preload", action="store_true", help="load local models now; else the first question does"
    )


def _add_address_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to bind; default %(default)s")
    add("--port", type=parse_port, default=8000, help="default %(default)s; 0 takes a free one")
    add(
        "--api-key-env",
        metavar="NAME",
        help="the environment variable with the key that clients "
        f"have to give; default {DEFAULT_KEY_VARIABLE}, where it is set",
    )
    add(
        "--insecure",
        action="store_true",
        help="allow another address than this machine's own without a key",
    )


def _add_answering_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        type=number_type(int, 1),
        default=32,
        metavar="N",
        help="requests that are answered at once; default %(default)s",
    )
    add(
        "--queue",
        type=number_type(int, 0),
        default=256,
        metavar="N",
        help="requests that may wait for that; more get a 429; default %(default)s",
    )
    add(
        "--max-tokens",
        type=number_type(int, 1),
        default=1024,
        metavar="N",
        help="of an answer where the request does not say; default %(default)s",
    )
    add(
        "--no-cache",
        action="store_true",
        help="keep no answers of endpoints and use none that were kept",
    )
    add("--trace", metavar="FILE", type=Path, help="write every call there, as JSON lines")


def parse_port(word: str) -> int:
    """Parse a port number."""
    if not (word.isascii() and word.isdigit() and int(word) <= 65535):
        raise argparse.ArgumentTypeError(f"{word!r} is not an integer from 0 to 65535")
    return int(word)
