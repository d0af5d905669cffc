"""Command line `python -m swarm.judge FORMAT ACTION`, and options shared by all formats."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from swarm._util.cli import CommandParser
from swarm.errors import UserError
from swarm.judge.batch_requests import BATCH_SIZE
from swarm.models.base import Model
from swarm.models.providers import Providers, parse_counted_names

if TYPE_CHECKING:
    from swarm.registry.registry import Roster


FORMATS = {
    "alpaca_eval": "in pairs against reference answers, with win rates (AlpacaEval 2)",
    "mt_bench": "questions of two turns, rated or compared (MT-Bench)",
    "flask": "by a rubric for each skill (FLASK)",
}
"""Subpackages for the formats; each has `add_subcommands(parser)`."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: a subcommand per format, and below it one per action."""
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
    """Normalize an option: `--max-tokens` is the same as `--max_tokens`."""
    name, equals, value = word.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if word[:2] == "--" else word


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an action and return its exit code; print a user's error in one line."""
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
        # The reader of the pipe has closed it; keep the interpreter from flushing to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def parse_positive_int(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def parse_temperature(text: str) -> float:
    """Parse a number of at least 0, for argparse."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def parse_index(text: str) -> int:
    """Parse an integer of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def parse_output_file(text: str) -> Path:
    """Parse the path of an output file, for argparse."""
    path = Path(text)
    if not path.name or path.is_dir():
        raise ValueError(text)
    return path


def parse_folder(text: str) -> Path:
    """Parse the path of a folder, which may not exist yet, for argparse."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ValueError(text)
    return path


# argparse shows these names in its error messages.
parse_positive_int.__name__ = "integer from 1"
parse_temperature.__name__ = "number from 0"
parse_index.__name__ = "integer from 0"
parse_output_file.__name__ = "file"
parse_folder.__name__ = "folder"


def add_generation_options(parser: argparse.ArgumentParser, max_tokens: int, usual: float) -> None:
    """Add options of answers: `temperature`, `max_tokens`, `system`, `seed`."""
    add = parser.add_argument
    add("--temperature", type=parse_temperature, default=usual, help="of sampling (%(default)s)")
    add(
        "--max_tokens",
        type=parse_positive_int,
        default=max_tokens,
        metavar="N",
        help="the most new tokens of an answer (%(default)s)",
    )
    add("--system", metavar="TEXT", help="a system turn before every question")
    add("--seed", type=int, help="of sampling, for models that take one")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add options of batches: `limit`, `batch`."""
    add = parser.add_argument
    add("--limit", type=parse_positive_int, metavar="N", help="only the first N questions")
    add(
        "--batch",
        type=parse_positive_int,
        default=BATCH_SIZE,
        metavar="N",
        help="questions put at once; answers are kept after each batch (%(default)s)",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add options of the registry: `providers`, `base`, `pool`, `device`, `no_cache`."""
    add = parser.add_argument
    add("--providers", metavar="FILE", help="endpoints of your own")
    add(
        "--base",
        metavar="MODEL",
        help="the base of local names: an option of conf/model or a folder",
    )
    add(
        "--pool",
        default="initial_experts",
        metavar="FOLDER",
        help="the experts of local names (%(default)s)",
    )
    add("--device", metavar="DEVICE", help="where local models run: cpu, cuda, cuda:1")
    add(
        "--no_cache",
        action="store_true",
        help="keep no endpoint's answers beyond this command's own files, and use none",
    )


def add_mixture_options(parser: argparse.ArgumentParser) -> None:
    """Add options of a mixture of agents: `reference_models`, `rounds`."""
    add = parser.add_argument
    add(
        "--reference_models",
        action="append",
        metavar="A,B:3",
        help="proposers of a mixture of agents whose aggregator is --model; NAME:3 is asked three "
        "times; may be repeated",
    )
    add("--rounds", type=parse_positive_int, metavar="N", help="layers of these proposers (1)")


def load_answering_model(given: argparse.Namespace) -> Model:
    """Return the answering model: --model, or a mixture of --reference_models aggregated by it.

    Raises:
        UserError: The model does not exist or is not usable, or an option has no effect.
    """
    proposers = parse_counted_names(given.reference_models or [])
    if not proposers and given.rounds is not None:
        raise UserError("--rounds has no effect without --reference_models; leave it out", 2)
    if not proposers:
        return load_model(given, given.model)
    from swarm.multi_agent.presets import build_mixture

    roster = _load_roster(given)
    preset = {
        "proposers": [{"model": name, "count": count} for name, count in proposers],
        "aggregator": given.model,
        "layers": (given.rounds or 1) + 1,
    }
    mixture = build_mixture(preset, roster.model)
    roster.check()
    return mixture


def load_model(given: argparse.Namespace, name: str) -> Model:
    """Return the model of a name after checking it; local models are loaded on first use.

    Raises:
        UserError: The model does not exist or is not usable.
    """
    roster = _load_roster(given)
    model = roster.model(name)
    roster.check()
    return model


def _load_roster(given: argparse.Namespace) -> "Roster":
    from swarm.registry.registry import Roster

    providers = Providers.load(given.providers) if given.providers else None
    cache: Literal["default"] | None = None if given.no_cache else "default"
    return Roster(providers, given.base, given.pool, given.device, cache)
