"""Report on run folders: python -m swarm.report search/first."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from swarm._util.cli import CommandParser, run_command, run_program
from swarm.errors import UserError

EPILOG = """python -m swarm.report search/NAME is short for python -m swarm.report page search/NAME.
It writes report.html (one file, opens offline), report.md and report/*.png."""


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser, with one sub-command per kind of report."""
    made = CommandParser(prog="python -m swarm.report", description=__doc__, epilog=EPILOG)
    commands = made.add_subparsers(dest="command", required=True)
    page = commands.add_parser("page", help="write a run's report into its folder")
    page.add_argument("folders", nargs="+", metavar="search/NAME", help="finished or running")
    page.set_defaults(run=_run_page)
    one = commands.add_parser("analyse", help="the paper's analyses of one or more runs")
    one.add_argument("folders", nargs="+", metavar="search/NAME", help="finished or running")
    one.add_argument("--json", action="store_true", help="print JSON")
    one.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="write charts (SVG) to this folder"
    )
    one.set_defaults(run=_run_analyse)
    return made


def _run_page(given: argparse.Namespace) -> int:
    from swarm.report import build

    code = 0
    for folder in given.folders:
        try:
            paths = build.write_report(folder)
        except UserError as error:  # continue with the other folders
            print(f"error: {error}", file=sys.stderr)
            code = error.code
            continue
        texts = [path for path in paths if path.suffix != ".png"]
        pictures = len(paths) - len(texts)
        more = f" and {pictures} pictures in {folder}/report/" if pictures else ""
        print(f"wrote {', '.join(map(str, texts))}{more}")
    return code


def _run_analyse(given: argparse.Namespace) -> int:
    from swarm.report import analyses

    found = analyses.analyse_runs(given.folders)
    print(analyses.as_json(found) if given.json else analyses.as_text(found))
    if given.plots:
        for path in analyses.draw_charts(found, given.plots):
            print(f"wrote {path}", file=sys.stderr)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; a `UserError` is printed as one line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in ("page", "analyse", "-h", "--help"):
        words.insert(0, "page")
    given = build_parser().parse_args(words)
    # Warnings about data files were already logged when the search began.
    logging.getLogger("swarm").addHandler(logging.NullHandler())
    return run_command(lambda: given.run(given))


if __name__ == "__main__":
    run_program(main)
