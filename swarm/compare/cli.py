"""Command line: run the questions of a file, view answers, import llmcomp's cache, fine-tune."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from swarm._util.cli import RaisingParser
from swarm._util.files import find_path
from swarm.errors import UserError

DESCRIPTION = "Ask models questions, judge what they say, and compare them."

RUN_KEYS = {
    "models": "a,b asks each as a group of its own; {group: [a, b], ...} names the groups; a must",
    "questions": "names of those to ask, a,b; all that are no judges' otherwise",
    "samples": "of each paraphrase, in place of the file's numbers",
    "folder": "of data, plots and the report, which a second run replaces; compare/FILE otherwise",
    "workers": "requests under way at once; 100",
    "requests_per_minute": "to each endpoint, sent evenly; as many as it accepts otherwise",
    "timeout": "seconds for a request; 60",
    "cache_dir": "folder of the kept answers; what is there is not asked again",
    "base": "the base model of local/ names; what the experts name otherwise",
    "pool": "the folder of local/ experts; initial_experts",
    "tracker": "wandb, wandb-offline, tensorboard, both, both-offline: show it there, too; none",
    "dry_run": "true: say what would be asked, and ask nothing",
}
"""Settings of `run`, with their help texts."""

STRING_KEYS = ("folder", "cache_dir", "base", "pool")
"""Keys whose values are not parsed as YAML: a folder may be called 7."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; it sets `handler` to the function that runs the command."""
    from swarm.compare.finetuning import cli
    from swarm.compare.view import __main__ as viewer

    made = RaisingParser(
        prog="python -m swarm.compare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = made.add_subparsers(dest="verb", required=True, parser_class=RaisingParser)
    keys = "\n".join(f"  {key + '=':<20} {words}" for key, words in RUN_KEYS.items())
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
    older = verbs.add_parser("import", help="take over the answers that llmcomp has kept")
    older.add_argument("folder", help="its cache, llmcomp_cache by default")
    older.add_argument("--base-url", help="where its models were asked, if discovery cannot tell")
    older.set_defaults(handler=_import_command)
    tuning = verbs.add_parser("finetune", help="create, follow and list fine-tunings")
    cli.add_parsers(
        tuning.add_subparsers(dest="command", required=True, parser_class=RaisingParser)
    )
    return made


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE arguments into a mapping; values are YAML.

    Raises:
        UserError: An argument is not of this form, or its key is unknown.
    """
    import yaml

    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in RUN_KEYS:
            near = get_close_matches(key, RUN_KEYS, 1)
            meant = f"did you mean {near[0]}=? Keys" if near else "keys"
            raise UserError(
                f"{word}: is no KEY=VALUE that is known; {meant}: {', '.join(RUN_KEYS)}", 2
            )
        if not value.strip():
            raise UserError(f"{key}=: has no value", 2)
        try:
            found[key] = value if key in STRING_KEYS else yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(
                f"{key}={value}: the value is no yaml; quote it in the shell", 2
            ) from None
    return found


def _run_command(given: argparse.Namespace) -> int:
    from swarm.compare.run_file import run_file

    return run_file(find_path(given.file), read_settings(given.settings))


def _import_command(given: argparse.Namespace) -> int:
    from swarm.compare.import_llmcomp import import_cache

    print(import_cache(given.folder, base_url=given.base_url))
    return 0
