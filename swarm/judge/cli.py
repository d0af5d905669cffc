"""Command line `python -m swarm.judge FORMAT ACTION`: options, models, and the three actions."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from swarm._util.cli import (
    CommandParser,
    add_model_options,
    normalize_option,
    number_type,
    run_command,
)
from swarm.errors import UserError
from swarm.judge.pipeline import BATCH_SIZE, OutputJob, run_job
from swarm.models.base import Model
from swarm.models.providers import Providers, parse_counted_names

if TYPE_CHECKING:
    from swarm.registry.registry import Roster


FORMATS = {
    "alpaca_eval": "in pairs against reference answers, with win rates (AlpacaEval 2)",
    "mt_bench": "questions of two turns, rated or compared (MT-Bench)",
    "flask": "by a rubric for each skill (FLASK)",
}
"""Modules of the formats, each a `JudgeFormat`, and their descriptions."""


class JudgeFormat(Protocol):
    """The module of a format.

    Attributes:
        ACTIONS: Help texts by action: generate, judge, show.
    """

    ACTIONS: Mapping[str, str]

    def add_options(self, action: str, parser: argparse.ArgumentParser) -> None:
        """Add the options of an action that `build_parser` does not add to all formats."""
        ...

    def build_answer_job(self, given: argparse.Namespace) -> OutputJob:
        """Return the job of generating a model's answers."""
        ...

    def build_judge_job(self, given: argparse.Namespace) -> OutputJob:
        """Return the job of judging answers."""
        ...

    def compute_tables(self, given: argparse.Namespace) -> tuple[Any, list[str]]:
        """Return the results of judgements, as JSON and as lines of text."""
        ...


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: a subcommand per format, and below it one per action."""
    parser = CommandParser(
        prog="python -m swarm.judge",
        description="Have models answer questions, and another model judge the answers.",
        epilog="Each format has three actions, generate, judge and show, with a --help of their "
        "own.",
    )
    formats = parser.add_subparsers(metavar="FORMAT", required=True)
    for name, what in FORMATS.items():
        one = formats.add_parser(name, help=what, description=f"Judging {what}.")
        _add_actions(one, cast(JudgeFormat, import_module(f"swarm.judge.{name}")))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an action and return its exit code; print a user's error in one line."""
    words = sys.argv[1:] if arguments is None else arguments
    given = build_parser().parse_args([normalize_option(word) for word in words])
    return run_command(lambda: given.run(given), "stopped; the same command resumes")


def _add_actions(parser: argparse.ArgumentParser, form: JudgeFormat) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    common: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
        "generate": _add_generate_options,
        "judge": _add_judge_options,
        "show": _add_show_options,
    }
    runs = {"generate": _generate, "judge": _judge, "show": _show}
    for action, what in form.ACTIONS.items():
        one = actions.add_parser(action, help=what)
        form.add_options(action, one)
        common[action](one)
        one.set_defaults(run=partial(runs[action], form))


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="answering model: moa/lite, local/base, ...")
    add("--output", required=True, type=parse_output_file, metavar="FILE", help="file of answers")
    add(
        "--reference_models",
        action="append",
        metavar="A,B:3",
        help="proposers of a mixture of agents whose aggregator is --model; NAME:3 requests three "
        "samples; repeatable",
    )
    add("--rounds", type=number_type(int, 1), metavar="N", help="layers of these proposers (1)")
    _add_registry_options(parser)


def _add_judge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--judge", required=True, metavar="NAME", help="judging model; any model")
    add("--out", required=True, type=parse_folder, metavar="FOLDER", help="folder of judgements")
    _add_registry_options(parser)


def _add_show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _add_registry_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser.add_argument, pool="initial_experts")
    parser.add_argument(
        "--no_cache",
        action="store_true",
        help="do not use the answer cache of endpoints; the command's own files are still used",
    )


def add_token_option(parser: argparse.ArgumentParser, default: int, of: str) -> None:
    """Add `--max_tokens` to a format's options."""
    parser.add_argument(
        "--max_tokens",
        type=number_type(int, 1),
        default=default,
        metavar="N",
        help=f"maximum new tokens of {of} (%(default)s)",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of answers of one turn: `temperature`, `max_tokens`, `system`, `seed`."""
    add = parser.add_argument
    add("--temperature", type=number_type(float, 0), default=0.7, help="of sampling (%(default)s)")
    add_token_option(parser, 2048, "an answer")
    add("--system", metavar="TEXT", help="system turn before every question")
    add("--seed", type=int, help="of sampling, for models that accept one")


def add_batch_options(
    parser: argparse.ArgumentParser, limit: Sequence[str] = (), batch: Sequence[str] = ()
) -> None:
    """Add `limit` and `batch`.

    Args:
        limit: The original's names of `--limit`.
        batch: Those of `--batch`.
    """
    number = number_type(int, 1)
    limit, batch = (*limit, "--limit"), (*batch, "--batch")
    add = parser.add_argument
    add(*limit, dest="limit", type=number, metavar="N", help="only the first N questions")
    add(
        *batch,
        dest="batch",
        type=number,
        default=BATCH_SIZE,
        metavar="N",
        help="concurrent requests; answers are stored after each batch (%(default)s)",
    )


def add_answers_option(parser: argparse.ArgumentParser) -> None:
    """Add `--answers` of a judge; see `swarm.judge.pipeline.list_files`."""
    parser.add_argument(
        "--answers",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files of generate, separated by spaces or commas",
    )


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
parse_output_file.__name__ = "file"
parse_folder.__name__ = "folder"


def _generate(form: JudgeFormat, given: argparse.Namespace) -> int:
    """Write a model's answers."""
    job = form.build_answer_job(given)
    model = job.wrap(_load_answering_model(given))
    return run_job(job, model, given.model, given.batch)


def _judge(form: JudgeFormat, given: argparse.Namespace) -> int:
    """Write a judge's verdicts."""
    job = form.build_judge_job(given)
    for note in job.notes:
        print(note)
    roster = _load_roster(given)
    model = roster.model(given.judge)
    roster.check()
    return run_job(job, model, given.judge, given.batch)


def _show(form: JudgeFormat, given: argparse.Namespace) -> int:
    """Print the results."""
    values, lines = form.compute_tables(given)
    print(json.dumps(values, indent=1) if given.json else "\n".join(lines))
    return 0


def _load_answering_model(given: argparse.Namespace) -> Model:
    """Return the answering model: --model, or a mixture of --reference_models aggregated by it.

    Raises:
        UserError: The model does not exist or is not usable, or an option has no effect.
    """
    proposers = parse_counted_names(given.reference_models or [])
    if not proposers and given.rounds is not None:
        raise UserError("--rounds has no effect without --reference_models; leave it out", 2)
    roster = _load_roster(given)
    if proposers:
        from swarm.multi_agent.moa import build_mixture

        preset = {
            "proposers": [{"model": name, "count": count} for name, count in proposers],
            "aggregator": given.model,
            "layers": (given.rounds or 1) + 1,
        }
        model: Model = build_mixture(preset, roster.model)
    else:
        model = roster.model(given.model)
    roster.check()
    return model


def _load_roster(given: argparse.Namespace) -> "Roster":
    from swarm.registry.registry import Roster

    providers = Providers.load(given.providers) if given.providers else None
    cache: Literal["default"] | None = None if given.no_cache else "default"
    return Roster(providers, given.base, given.pool, given.device, cache)
