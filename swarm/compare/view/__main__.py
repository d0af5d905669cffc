"""Browse the answers of a file: python -m swarm.compare.view FILE."""

import argparse
from collections.abc import Sequence

from swarm._util.cli import RaisingParser, run_command, run_program
from swarm.compare.view import view
from swarm.serve.cli import parse_port

DESCRIPTION = """\
Browse, search, filter, sort and compare the answers of a file in the browser.

FILE is .jsonl, .csv or .parquet with a column "answer"; "question", "api_kwargs", "model", "group",
"paraphrase_ix", "error" and the columns of judges are used if present.
"""


def build_parser() -> RaisingParser:
    """Return the parser of the options."""
    parser = RaisingParser(
        prog="python -m swarm.compare.view",
        usage="%(prog)s FILE [OPTION ...]",
        description=DESCRIPTION,
        epilog="The page is reachable from this machine only. Ctrl-C stops it.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    return parser


def add_options(made: argparse.ArgumentParser) -> None:
    """Add the options to a parser; it sets `handler` to `show_file`."""
    made.set_defaults(handler=show_file)
    add = made.add_argument
    add("file", metavar="FILE")
    add(
        "--port",
        type=parse_port,
        default=8501,
        help="default %(default)s; the next free one if it is in use; 0 selects any free one",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address to bind; default %(default)s. Everyone who can reach it can read the answers",
    )
    add("--no-browser", action="store_true", help="open no browser")
    add(
        "--sort-by",
        metavar="COLUMN",
        default="__random__",
        help="initial order; default random",
    )
    add("--descending", action="store_true", help="sort in descending order")


def show_file(given: argparse.Namespace) -> None:
    """Show the file until Ctrl-C."""
    view(
        given.file,
        sort_by=given.sort_by,
        sort_ascending=not given.descending,
        port=given.port,
        host=given.host,
        open_browser=not given.no_browser,
        block=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Show a file until Ctrl-C; print a `UserError` in one line and return its exit code."""
    return run_command(lambda: show_file(build_parser().parse_args(arguments)))


if __name__ == "__main__":
    run_program(main)
