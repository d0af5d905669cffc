"""Check a folder of adapters before a search: python -m swarm.pool check initial_experts."""

import argparse
import logging
from collections.abc import Sequence

from swarm._util.cli import CommandParser, run_command, run_program

EPILOG = """No base model is loaded. Exit code 0: a search takes the folder as it is; 1: it would
refuse it. Norms and cosines are of the updates s B A (Frobenius), over all modules."""


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    made = CommandParser(prog="python -m swarm.pool", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="list what a folder contains and what a search would refuse",
        epilog=EPILOG,
    )
    check.add_argument("folder", metavar="FOLDER", help="as pool.folder of a search")
    check.add_argument("--base", metavar="NAME", help="base model; default: the one most name")
    check.add_argument("--matrix", action="store_true", help="add the matrix of cosines")
    check.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = build_parser().parse_args(arguments)
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)

    def check_folder() -> int:
        from swarm.pool import inspection

        found = inspection.inspect_folder(given.folder, given.base)
        print(found.to_json() if given.json else inspection.format_inspection(found, given.matrix))
        return 1 if found.fault else 0

    return run_command(check_folder)


if __name__ == "__main__":
    run_program(main)
