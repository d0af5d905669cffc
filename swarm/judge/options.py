"""Options that the formats' actions share: which models there are, and how they are asked."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from swarm.errors import UserError
from swarm.judge.asking import BATCH_SIZE
from swarm.models import Model
from swarm.models.counts import parse_counted_names
from swarm.models.providers import Providers

if TYPE_CHECKING:
    from swarm.roster import Roster


def parse_positive_int(text: str) -> int:
    """A number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def parse_temperature(text: str) -> float:
    """A number from 0, for argparse."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def parse_index(text: str) -> int:
    """A whole number from 0, for argparse."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def parse_output_file(text: str) -> Path:
    """The path of a file to be written, for argparse."""
    path = Path(text)
    if not path.name or path.is_dir():
        raise ValueError(text)
    return path


def parse_folder(text: str) -> Path:
    """The path of a folder, there or not, for argparse."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ValueError(text)
    return path


# What argparse calls the value that is wanted.
parse_positive_int.__name__ = "whole number from 1"
parse_temperature.__name__ = "number from 0"
parse_index.__name__ = "whole number from 0"
parse_output_file.__name__ = "file"
parse_folder.__name__ = "folder"


def add_generation_options(parser: argparse.ArgumentParser, max_tokens: int, usual: float) -> None:
    """How a model answers: `temperature`, `max_tokens`, `system`, `seed`."""
    add = parser.add_argument
    add("--temperature", type=parse_temperature, default=usual, help="of sampling (%(default)s)")
    add("--max_tokens", type=parse_positive_int, default=max_tokens, metavar="N",
        help="the most new tokens of an answer (%(default)s)")  # fmt: skip
    add("--system", metavar="TEXT", help="a system turn before every question")
    add("--seed", type=int, help="of sampling, for models that take one")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """How many questions there are, and how many are put at once: `limit`, `batch`."""
    add = parser.add_argument
    add("--limit", type=parse_positive_int, metavar="N", help="only the first N questions")
    add("--batch", type=parse_positive_int, default=BATCH_SIZE, metavar="N",
        help="questions put at once; answers are kept after each batch (%(default)s)")  # fmt: skip


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Where models come from: `providers`, `base`, `pool`, `device`, `no_cache`."""
    add = parser.add_argument
    add("--providers", metavar="FILE", help="endpoints of your own")
    add("--base", metavar="MODEL", help="the base of local names: an option of conf/model or a "
        "folder")  # fmt: skip
    add("--pool", default="initial_experts", metavar="FOLDER", help="the experts of local names "
        "(%(default)s)")  # fmt: skip
    add("--device", metavar="DEVICE", help="where local models run: cpu, cuda, cuda:1")
    add("--no_cache", action="store_true", help="keep no endpoint's answers beyond this command's "
        "own files, and use none")  # fmt: skip


def add_mixture_options(parser: argparse.ArgumentParser) -> None:
    """Proposers before the model that answers: `reference_models`, `rounds`."""
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
    """The model that answers: --model, or the mixture of --reference_models that it aggregates.

    Raises:
        UserError: There is no such model, it cannot be asked, or an option has no effect.
    """
    proposers = parse_counted_names(given.reference_models or [])
    if not proposers and given.rounds is not None:
        raise UserError("--rounds has no effect without --reference_models; leave it out", 2)
    if not proposers:
        return load_model(given, given.model)
    from swarm.collab.presets import build_mixture

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
    """The model of a name, checked; a local one is loaded when it is first asked.

    Raises:
        UserError: There is no such model, or it cannot be asked.
    """
    roster = _load_roster(given)
    model = roster.model(name)
    roster.check()
    return model


def _load_roster(given: argparse.Namespace) -> "Roster":
    from swarm.roster import Roster

    providers = Providers.load(given.providers) if given.providers else None
    cache: Literal["default"] | None = None if given.no_cache else "default"
    return Roster(providers, given.base, given.pool, given.device, cache)
