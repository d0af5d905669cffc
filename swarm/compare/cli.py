"""Command line: run the questions of a file, view answers, fine-tune."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from swarm._util.cli import RaisingParser
from swarm._util.files import find_path
from swarm.errors import UserError

DESCRIPTION = "Ask models questions, judge their answers, and compare the models."

RUN_KEYS = {
    "models": "a,b for a group each, or {group: [a, b], ...}; required",
    "questions": "names of the questions to ask, a,b; default: all but those of judges",
    "samples": "samples per paraphrase; overrides the file",
    "folder": "output folder of data, plots and report, replaced by a second run; default "
    "compare/FILE",
    "workers": "maximum number of concurrent requests; default 100",
    "requests_per_minute": "maximum requests per minute to each endpoint; default: as many as "
    "it accepts",
    "timeout": "seconds per request; default 60",
    "cache_dir": "folder of the answer cache",
    "base": "base model of local/ names; default: the base named by the experts",
    "pool": "folder of local/ experts; default initial_experts",
    "dry_run": "true: show the planned requests without sending any",
}
"""Settings of `run`, with their help texts."""

STRING_KEYS = ("folder", "cache_dir", "base", "pool")
"""Keys whose values are not parsed as YAML: a folder may be called 7."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; it sets `handler` to the function that runs the command."""
    from swarm.compare.finetuning import cli
    from swarm.compare.view import __main__ as viewer

    parser = RaisingParser(
        prog="python -m swarm.compare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=RaisingParser)
    keys = "\n".join(f"  {key + '=':<20} {description}" for key, description in RUN_KEYS.items())
    run = verbs.add_parser(
        "run",
        help="ask the questions of a yaml file",
        description=f"Ask the questions of a yaml file.\n\n{keys}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("file", help="a list of questions, or a folder of such files")
    run.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    run.set_defaults(handler=_run_command)
    viewer.add_options(
        verbs.add_parser(
            "view",
            help="browse a file of answers",
            description=viewer.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    tuning = verbs.add_parser("finetune", help="create, follow and list fine-tunings")
    cli.add_parsers(
        tuning.add_subparsers(dest="command", required=True, parser_class=RaisingParser)
    )
    cli.add_script_parsers(verbs)
    return parser


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE arguments into a mapping; values are YAML.

    Raises:
        UserError: An argument is not of this form, or its key is unknown.
    """
    import yaml

    found: dict[str, Any] = {}
    for argument in words:
        key, equals, value = argument.partition("=")
        if not equals or key not in RUN_KEYS:
            matches = get_close_matches(key, RUN_KEYS, 1)
            suggestion = f"did you mean {matches[0]}=? Keys" if matches else "keys"
            raise UserError(
                f"{argument}: unknown KEY=VALUE; {suggestion}: {', '.join(RUN_KEYS)}", 2
            )
        if not value.strip():
            raise UserError(f"{key}=: has no value", 2)
        try:
            found[key] = value if key in STRING_KEYS else yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(
                f"{key}={value}: the value is not valid yaml; quote it in the shell", 2
            ) from None
    return found


def _run_command(options: argparse.Namespace) -> int:
    from swarm.compare.run_file import run_file

    return run_file(find_path(options.file), read_settings(options.settings))
