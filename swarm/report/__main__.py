"""Report on run folders as one HTML page: python -m swarm.report search/first."""

import json
import logging
import sys
from pathlib import Path

import click

from swarm._util.cli import run_program
from swarm._util.options import CONTEXT, run_click
from swarm.errors import UserError


@click.command(
    context_settings=CONTEXT,
    no_args_is_help=True,
    epilog="The page report.html opens offline and prints; nothing else is written.",
)
@click.argument("folders", nargs=-1, required=True, metavar="search/NAME...")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, write no page.")
def report(folders: tuple[str, ...], as_json: bool) -> int:
    """Write the report of finished or running searches into their folders."""
    from swarm.report import analyses, page

    # Warnings about data files were already logged when the search began.
    logging.getLogger("swarm").addHandler(logging.NullHandler())
    code = 0
    for folder in folders:
        try:
            if as_json:
                print(json.dumps(analyses.analyse_run(folder), ensure_ascii=False, indent=1))
            else:
                print(f"wrote {page.write_report(Path(folder))}")
        except UserError as error:  # continue with the other folders
            print(f"error: {error}", file=sys.stderr)
            code = error.code
    return code


if __name__ == "__main__":
    run_program(lambda: run_click(report, None, "python -m swarm.report"))
