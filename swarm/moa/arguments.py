"""The command line of the mixture of agents, read and checked before anything is loaded."""

import argparse
import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from swarm.errors import UserError

TEMPERATURE, MAX_TOKENS = 0.7, 512


DESCRIPTION = """\
Ask several models, and let one of them make a single answer of what they said (mixture of agents).

  python -m swarm.moa                                  a chat, where a person types
  python -m swarm.moa "Why is the sky blue?"           one answer
  echo "Why is the sky blue?" | python -m swarm.moa    the same; "-" reads standard input, too
"""


EXAMPLES = """\
MODEL is PROVIDER/NAME, local/rooms (rooms is an expert in initial_experts), moa/lite (a preset) or
another name of docs/models.md; --list shows what there is. A NAME alone goes to the server in
OPENAI_BASE_URL, or else to OpenAI or Together by their keys:
export OPENAI_BASE_URL=http://localhost:8000/v1

A hyphen in an option's name is as good as an underscore. The answer goes to standard output, all
else to standard error.

  python -m swarm.moa --reference_models qwen2:7b:3,gemma2 --aggregator qwen2:7b    qwen2:7b thrice
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
            raise UserError(f"{message}; --help tells more", 2)
        first = unknown.split()[0]
        if not first.startswith("-"):
            raise UserError(
                f"{unknown}: put the question in quotes, and models in one list with commas", 2
            )
        near = get_close_matches(first.split("=")[0], self._option_string_actions, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{first}: there is no such option; {meant}--help lists them", 2)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `multi_turn` is `None` if not given.

    Raises:
        UserError: It is invalid or contradictory.
    """
    given = build_parser().parse_args(_normalize_options(words))
    if given.layers is not None:
        if given.rounds is not None and given.layers != given.rounds + 1:
            raise UserError(
                f"--layers {given.layers} and --rounds {given.rounds} contradict each other: "
                "layers are the rounds and one more; give one of them",
                2,
            )
        given.rounds = given.layers - 1
    for name in ("preset", "aggregator", "fallback", "base", "pool", "device"):
        if getattr(given, name) is not None and not getattr(given, name).strip():
            raise UserError(f"--{name}: nothing follows it; name one or leave it out", 2)
    if given.list:
        _check_list_alone(given)
    if given.json and given.no_stream:
        raise UserError("--no_stream has no effect: with --json every answer comes whole", 2)
    if given.replay and given.trace == given.replay:
        raise UserError("--trace would write over the file that --replay reads", 2)
    return given


def _check_list_alone(given: argparse.Namespace) -> None:
    """Check that --list is used without conflicting options.

    Raises:
        UserError: Another option is given.
    """
    for name, value in vars(given).items():
        if value not in (None, False, "none") and name not in ("list", "providers", "pool"):
            raise UserError(f"--list goes with --providers and --pool alone, not with {name}", 2)


def _normalize_options(words: Sequence[str]) -> list[str]:
    """Normalize options: underscores in names, and truth values joined to their names."""
    found: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*found, word, *words]
        if word.startswith("--"):
            name, *value = word[2:].split("=", 1)
            word = "=".join(["--" + name.replace("-", "_"), *value])
        if word == "--multi_turn":
            follows = bool(words) and words[0].lower() in TRUTH_VALUES
            word += f"={words.pop(0) if follows else 'true'}"
        found.append(word)
    return found


TRUTH_VALUES = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def parse_bool(word: str) -> bool:
    """Parse a truth value."""
    if word.lower() not in TRUTH_VALUES:
        raise argparse.ArgumentTypeError(f"{word!r} is not true or false")
    return TRUTH_VALUES[word.lower()]


def number_type(kind: type, lowest: float, above: bool = False) -> Callable[[str], float]:
    """Return a parser of numbers not below, or strictly above, `lowest`."""

    def parse_number(word: str) -> float:
        try:
            value = kind(word)
        except ValueError:
            value = math.nan
        if not (lowest < value if above else lowest <= value) or math.isinf(value):
            least = f"above {lowest}" if above else f"of {lowest} or more"
            type_name = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{word!r} is not {type_name} {least}")
        return value

    return parse_number


def build_parser() -> MoAArgumentParser:
    """Build the parser, with options in groups."""
    made = MoAArgumentParser(
        prog="python -m swarm.moa",
        usage="%(prog)s [OPTION ...] [QUESTION]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("question", nargs="?", metavar="QUESTION", help='"-" reads standard input')
    _add_model_options(made.add_argument_group("who speaks"))
    _add_request_options(made.add_argument_group("how they are asked"))
    _add_call_options(made.add_argument_group("calls"))
    _add_output_options(made.add_argument_group("what is shown"))
    return made


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--preset",
        metavar="NAME|FILE",
        help="a mixture of conf/moa, or a yaml file of one; by "
        "default together where TOGETHER_API_KEY is set, else local",
    )
    add("--aggregator", "--model", metavar="MODEL", help="makes the answer, in the preset's place")
    add(
        "--reference_models",
        action="append",
        metavar="A,B:3",
        help="who proposes, in the place "
        "of all the preset's; NAME:3 is asked three times; may be repeated",
    )
    add("--fallback", metavar="MODEL", help="makes the answer where the aggregator fails")
    add("--providers", metavar="FILE", type=Path, help="endpoints of your own")
    add(
        "--base",
        metavar="MODEL",
        help="the base of local names: an option of conf/model or a folder",
    )
    add("--pool", metavar="FOLDER", help="the experts of local names")
    add("--device", metavar="DEVICE", help="where local models run: cpu, cuda, cuda:1")


def _add_request_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--temperature",
        type=number_type(float, 0),
        metavar="T",
        help=f"default {TEMPERATURE}, or the preset's",
    )
    add(
        "--max_tokens",
        type=number_type(int, 1),
        metavar="N",
        help=f"of one answer; default {MAX_TOKENS}, or the preset's",
    )
    add(
        "--rounds",
        "--round",
        type=number_type(int, 0),
        metavar="N",
        help="layers of proposers; default 1, or the preset's",
    )
    add("--layers", type=number_type(int, 1), metavar="N", help="rounds + 1: the aggregator's, too")
    add(
        "--strategy",
        choices=("aggregate", "rank", "sequential"),
        help="the aggregator writes, "
        "or picks one, or writes again and again with a few more at a time",
    )
    add("--prompt", choices=("safe", "paper"), help="how proposals are put to a model")
    add("--system", metavar="TEXT", help="put before the conversation for all of them")
    add(
        "--context",
        type=number_type(int, 1),
        metavar="TOKENS",
        help="the most that is sent at once; older turns are left out first",
    )
    add(
        "--seed",
        type=number_type(int, 0),
        metavar="N",
        help="of sampling and of the proposals' order",
    )


def _add_call_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--num_proc",
        type=number_type(int, 1),
        metavar="N",
        help="the most requests under way at once",
    )
    add(
        "--timeout", type=number_type(float, 0, above=True), metavar="SECONDS", help="of one answer"
    )
    add(
        "--quorum",
        type=number_type(int, 0),
        metavar="N",
        help="so many answers a layer are enough; default 1, or the preset's",
    )
    add("--no_cache", action="store_true", help="keep no answers and use none that were kept")
    add("--trace", metavar="FILE", type=Path, help="write every call there, as JSON lines")
    add(
        "--tracker",
        metavar="NAME",
        default="none",
        help="show it in wandb, wandb-offline, "
        "tensorboard, both or both-offline too (docs/wandb.md); default none",
    )
    add("--replay", metavar="FILE", type=Path, help="answer from a trace, without a network")


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--multi_turn",
        type=parse_bool,
        metavar="true|false",
        help="whether a chat's question comes with the turns before it; default true",
    )
    add(
        "--no_multi_turn",
        dest="multi_turn",
        action="store_false",
        default=None,
        help="every question by itself",
    )
    add("--json", action="store_true", help="one JSON object an answer, with all its stages")
    add("--no_stream", action="store_true", help="show the answer when it is whole")
    add("--quiet", action="store_true", help="no progress; warnings and errors are still told")
    add("--list", action="store_true", help="name the presets, providers and local models")
