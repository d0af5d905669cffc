"""The command `python -m swarm.judge FORMAT ACTION`: each format has a module with its actions."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from swarm.errors import UserError
from swarm.examples import CommandParser

FORMATS = {
    "alpaca_eval": "in pairs against reference answers, with win rates (AlpacaEval 2)",
    "mt_bench": "questions of two turns, rated or compared (MT-Bench)",
    "flask": "by a rubric for each skill (FLASK)",
}
"""The modules of this package that are formats; each has `subcommands(parser)`."""


def build_parser() -> argparse.ArgumentParser:
    """The command line: a sub-command a format, and below it one an action."""
    made = CommandParser(
        prog="python -m swarm.judge",
        description="Have models answer questions, and another model judge the answers.",
        epilog="Each format has three actions, generate, judge and show, with a --help of their "
        "own.",
    )
    formats = made.add_subparsers(metavar="FORMAT", required=True)
    for name, what in FORMATS.items():
        one = formats.add_parser(name, help=what, description=f"Judging {what}.")
        import_module(f"swarm.judge.{name}").add_subcommands(one)
    return made


def normalize_option(word: str) -> str:
    """An option by its one spelling: `--max-tokens` is as good as `--max_tokens`."""
    name, equals, value = word.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if word[:2] == "--" else word


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an action and give its exit code; a user's mistake is one line."""
    words = sys.argv[1:] if arguments is None else arguments
    given = build_parser().parse_args([normalize_option(word) for word in words])
    try:
        code: int = given.run(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the table has enough; the interpreter must not try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
