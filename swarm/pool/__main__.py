"""Check a folder of adapters before a search: python -m swarm.pool check initial_experts."""

import logging
from collections.abc import Sequence

import click

from swarm._util.cli import run_program
from swarm._util.options import CONTEXT, run_click


@click.group(context_settings=CONTEXT)
def pool() -> None:
    """Check a folder of adapters before a search."""


@pool.command()
@click.argument("folder")
@click.option("--base", metavar="NAME", help="Base model; default: the one most adapters name.")
@click.option("--matrix", is_flag=True, help="Add the matrix of cosines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(folder: str, base: str | None, matrix: bool, as_json: bool) -> int:
    """List what FOLDER contains, and what a search would refuse.

    No base model is loaded. Exit code 0: a search takes the folder as it is; 1: it would refuse it.
    Norms and cosines are of the updates s B A (Frobenius), over all modules.

    \b
    python -m swarm.pool check initial_experts
    python -m swarm.pool check my_adapters --matrix
    """
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
    from swarm.pool import inspection

    found = inspection.inspect_folder(folder, base)
    click.echo(found.to_json() if as_json else inspection.format_inspection(found, matrix))
    return 1 if found.fault else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_click(pool, arguments, "python -m swarm.pool")


if __name__ == "__main__":
    run_program(main)
