"""The command line of the mixture of agents, read and checked before anything is loaded."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from swarm._util.cli import add_model_options, normalize_option, number_type
from swarm.errors import UserError

TEMPERATURE, MAX_TOKENS = 0.7, 512


DESCRIPTION = """\
Query several models, and let one of them synthesize their answers (mixture of agents).

  python -m swarm.moa                                  an interactive chat
  python -m swarm.moa "Why is the sky blue?"           one answer
  echo "Why is the sky blue?" | python -m swarm.moa    the same; "-" also reads standard input
"""


EXAMPLES = """\
MODEL is PROVIDER/NAME, local/rooms (rooms is an expert in initial_experts), moa/lite (a preset) or
another name of docs/models.md; --list shows those available. A NAME alone goes to the server in
OPENAI_BASE_URL, or else to OpenAI or Together if their keys are set:
export OPENAI_BASE_URL=http://localhost:8000/v1

Option names may have hyphens instead of underscores. The answer goes to standard output, all
other text to standard error.

  python -m swarm.moa --reference_models qwen2:7b:3,gemma2 --aggregator qwen2:7b    # qwen2:7b x 3
  python -m swarm.moa --preset local --rounds 2 "Sort 5 2 9."
  python -m swarm.moa --json --quiet "Sort 5 2 9." | jq .answer
"""


class MoAArgumentParser(argparse.ArgumentParser):
    """Argument parser with one-line errors and suggestions."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message.

        Raises:
            UserError: Always.
        """
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise UserError(f"{message}; see --help", 2)
        first = unknown.split()[0]
        if not first.startswith("-"):
            raise UserError(f"{unknown}: quote the question, and separate models by commas", 2)
        matches = get_close_matches(first.split("=")[0], self._option_string_actions, 1)
        suggestion = f"did you mean {matches[0]}? " if matches else ""
        raise UserError(f"{first}: no such option; {suggestion}--help lists them", 2)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `multi_turn` is `None` if not given.

    Raises:
        UserError: It is invalid or contradictory.
    """
    options = build_parser().parse_args(_normalize_options(words))
    if options.layers is not None:
        if options.rounds is not None and options.layers != options.rounds + 1:
            raise UserError(
                f"--layers {options.layers} and --rounds {options.rounds} contradict each other: "
                "layers are rounds + 1; give only one",
                2,
            )
        options.rounds = options.layers - 1
    check_not_blank(options, ("preset", "aggregator", "fallback", "base", "pool", "device"))
    if options.list:
        _check_list_alone(options)
    if options.json and options.no_stream:
        raise UserError("--no_stream has no effect with --json; leave it out", 2)
    if options.replay and options.trace == options.replay:
        raise UserError("--trace would overwrite the file that --replay reads", 2)
    return options


def check_not_blank(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Check that options that are given have a value.

    Raises:
        UserError: A value is blank.
    """
    for name in names:
        if getattr(options, name) is not None and not getattr(options, name).strip():
            raise UserError(f"--{name}: the value is empty; give one or leave the option out", 2)


def _check_list_alone(options: argparse.Namespace) -> None:
    """Check that --list is used without conflicting options.

    Raises:
        UserError: Another option is given.
    """
    for name, value in vars(options).items():
        if value not in (None, False, "none") and name not in ("list", "providers", "pool"):
            raise UserError(
                f"--list can be combined with --providers and --pool only, not with --{name}", 2
            )


def _normalize_options(arguments: Sequence[str]) -> list[str]:
    """Normalize options: underscores in names, and truth values joined to their names."""
    normalized: list[str] = []
    arguments = list(arguments)
    while arguments:
        argument = arguments.pop(0)
        if argument == "--":
            return [*normalized, argument, *arguments]
        argument = normalize_option(argument)
        if argument == "--multi_turn":
            follows = bool(arguments) and arguments[0].lower() in TRUTH_VALUES
            argument += f"={arguments.pop(0) if follows else 'true'}"
        normalized.append(argument)
    return normalized


TRUTH_VALUES = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def parse_bool(word: str) -> bool:
    """Parse a truth value."""
    if word.lower() not in TRUTH_VALUES:
        raise argparse.ArgumentTypeError(f"{word!r} is not true or false")
    return TRUTH_VALUES[word.lower()]


def build_parser() -> MoAArgumentParser:
    """Build the parser, with options in groups."""
    parser = MoAArgumentParser(
        prog="python -m swarm.moa",
        usage="%(prog)s [OPTION ...] [QUESTION]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", nargs="?", metavar="QUESTION", help='"-" reads standard input')
    _add_model_options(parser.add_argument_group("models"))
    _add_request_options(parser.add_argument_group("requests"))
    _add_call_options(parser.add_argument_group("calls"))
    _add_output_options(parser.add_argument_group("output"))
    return parser


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--preset",
        metavar="NAME|FILE",
        help="a mixture of conf/moa, or a yaml file of one; by "
        "default together where TOGETHER_API_KEY is set, else local",
    )
    add(
        "--aggregator",
        "--model",
        metavar="MODEL",
        help="writes the final answer; overrides the preset's",
    )
    add(
        "--reference_models",
        action="append",
        metavar="A,B:3",
        help="proposers; replace all of the preset; NAME:3 requests three samples; repeatable",
    )
    add("--fallback", metavar="MODEL", help="writes the answer if the aggregator fails")
    add_model_options(add)


def _add_request_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--temperature",
        type=number_type(float, 0),
        metavar="T",
        help=f"sampling temperature; default {TEMPERATURE}, or the preset's",
    )
    add(
        "--max_tokens",
        type=number_type(int, 1),
        metavar="N",
        help=f"maximum new tokens of an answer; default {MAX_TOKENS}, or the preset's",
    )
    add(
        "--rounds",
        "--round",
        type=number_type(int, 0),
        metavar="N",
        help="layers of proposers; default 1, or the preset's",
    )
    add(
        "--layers",
        type=number_type(int, 1),
        metavar="N",
        help="rounds + 1, to count the aggregator's layer",
    )
    add(
        "--strategy",
        choices=("aggregate", "rank", "sequential"),
        help="aggregate: synthesize "
        "all answers; rank: choose one; sequential: synthesize a few at a time",
    )
    add("--prompt", choices=("safe", "paper"), help="format of the proposals in a prompt")
    add("--system", metavar="TEXT", help="system prompt of all models")
    add(
        "--context",
        type=number_type(int, 1),
        metavar="TOKENS",
        help="maximum prompt tokens; older turns are omitted first",
    )
    add(
        "--seed",
        type=number_type(int, 0),
        metavar="N",
        help="random seed of sampling and of the proposals' order",
    )


def _add_call_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--num_proc",
        type=number_type(int, 1),
        metavar="N",
        help="maximum number of concurrent requests",
    )
    add(
        "--timeout",
        type=number_type(float, 0, above=True),
        metavar="SECONDS",
        help="timeout of an answer",
    )
    add(
        "--quorum",
        type=number_type(int, 0),
        metavar="N",
        help="minimum number of answers per layer; default 1, or the preset's",
    )
    add("--no_cache", action="store_true", help="do not use the answer cache")
    add("--trace", metavar="FILE", type=Path, help="log every call to this file, as JSON lines")
    add(
        "--replay",
        metavar="FILE",
        type=Path,
        help="replay the answers of a trace, without a network",
    )


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--multi_turn",
        type=parse_bool,
        metavar="true|false",
        help="include previous turns in a chat's requests; default true",
    )
    add(
        "--no_multi_turn",
        dest="multi_turn",
        action="store_false",
        default=None,
        help="answer every question independently",
    )
    add("--json", action="store_true", help="print one JSON object per answer, with all stages")
    add("--no_stream", action="store_true", help="show the answer only when it is complete")
    add("--quiet", action="store_true", help="no progress; warnings and errors are still shown")
    add("--list", action="store_true", help="list the presets, providers and local models")
