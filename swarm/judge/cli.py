"""Command `python -m swarm.judge FORMAT ACTION`: options, models, and the three actions.

The module of a format has `ACTIONS`: of generate, judge and show the help, an example, and the
options that are not those of all formats; `build_answer_job(given)` and `build_judge_job(given)`;
and `compute_tables(given)`, the results of judgements as JSON and as lines of text.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Options
from typing import Any

import click

from swarm._util.options import CONTEXT, SettingType, run_click
from swarm._util.settings import Count, Number, Positive, Text
from swarm.errors import UserError
from swarm.judge.pipeline import BATCH_SIZE, run_job
from swarm.models.base import Model
from swarm.models.providers import Providers, parse_counted_names

FORMATS = {
    "alpaca_eval": "in pairs against reference answers, with win rates (AlpacaEval 2)",
    "mt_bench": "questions of two turns, rated or compared (MT-Bench)",
    "flask": "by a rubric for each skill (FLASK)",
}
"""Modules of the formats, and their descriptions."""

EPILOG = """\b
python -m swarm.judge mt_bench generate --model moa/lite --output outputs/moa.jsonl
python -m swarm.judge mt_bench judge --answers outputs/moa.jsonl --judge gpt-4o --out outputs
python -m swarm.judge mt_bench show --out outputs

Each format has three actions, generate, judge and show, with a --help of their own. The same
command resumes an interrupted one.
"""


def build_command() -> click.Group:
    """Build the command: a group per format, and in it a command per action."""
    text = "Have models answer questions, and another model judge the answers."
    whole = click.Group("judge", help=text, epilog=EPILOG, context_settings=CONTEXT)
    for name, what in FORMATS.items():
        form = import_module(f"swarm.judge.{name}")
        examples = []
        group = click.Group(name, help=f"Judge {what}.")
        for action, (help_text, words, options) in form.ACTIONS.items():
            examples.append(f"python -m swarm.judge {name} {action} {words}")
            command = click.Command(
                action,
                callback=partial(_run, form, action),
                params=[*options, *_common_options(action)],
                help=f"{help_text[:1].upper()}{help_text[1:]}.",
                epilog=f"\b\n{examples[-1]}",
            )
            group.add_command(command)
        group.epilog = "\b\n" + "\n".join(examples)
        whole.add_command(group)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an action and return its exit code; print a user's error in one line."""
    return run_click(build_command(), arguments, "python -m swarm.judge")


def option(*names: str, type: Any = None, **more: Any) -> click.Option:
    """Return an option; its type is an annotation, such as `Positive`, or click's."""
    if type is not None and not isinstance(type, click.ParamType):
        type = SettingType(type)
    shown = "default" in more and more["default"] is not None
    return click.Option(list(names), type=type, show_default=shown, **more)


FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


def _common_options(action: str) -> list[click.Option]:
    if action == "show":
        return [option("--json", is_flag=True, help="Print the results as JSON.")]
    proposers = (
        "Proposers of a mixture of agents whose aggregator is --model; NAME:3 requests three "
        "samples; repeatable."
    )
    cached = "Neither use nor store cached answers; an interrupted command then begins again."
    answering = "Answering model: moa/lite, local/base, ... (any)."
    first = [
        option("--judge", required=True, help="Judging model; any model."),
        option("--out", required=True, type=FOLDER, help="Folder of judgements."),
    ]
    if action == "generate":
        first = [
            option("--model", required=True, help=answering),
            option("--output", required=True, type=FILE, help="File of answers."),
            option("--reference-models", multiple=True, metavar="A,B:3", help=proposers),
            option("--rounds", type=Positive, help="Layers of these proposers; default 1."),
        ]
    return [
        *first,
        option("--base", type=Text, help="Base model of local/ names."),
        option("--pool", type=Text, default="initial_experts", help="Folder of local experts."),
        option("--device", type=Text, help="Device of local models: cpu, cuda, cuda:1."),
        option("--providers", type=FILE, help="Yaml file of own endpoints."),
        option("--no-cache", is_flag=True, help=cached),
    ]


def token_option(default: int, of: str) -> click.Option:
    """Return `--max-tokens` of a format."""
    text = f"Maximum new tokens of {of}."
    return option("--max-tokens", type=Positive, default=default, help=text)


def sampling_options() -> list[click.Option]:
    """Return the options of answers of one turn: `temperature`, `max_tokens`, `system`, `seed`."""
    return [
        option("--temperature", type=Number, default=0.7, help="Of sampling."),
        token_option(2048, "an answer"),
        option("--system", metavar="TEXT", help="System turn before every question."),
        option("--seed", type=int, help="Of sampling, for models that accept one."),
    ]


def batch_options(limit: Sequence[str] = (), batch: Sequence[str] = ()) -> list[click.Option]:
    """Return `--limit` and `--batch`, also under the names of the original."""
    text = "Concurrent requests; answers are stored after each batch."
    return [
        option("limit", "--limit", *limit, type=Positive, help="Only the first N questions."),
        option("batch", "--batch", *batch, type=Positive, default=BATCH_SIZE, help=text),
    ]


def questions_option(default: str) -> click.Option:
    """Return `--questions`, of which a set is included."""
    return option("--questions", default=default, metavar="FILE", help="Included.")


def answers_option() -> click.Option:
    """Return `--answers` of a judge; see `list_files`."""
    text = "Files of generate, separated by commas; repeatable."
    return option("--answers", multiple=True, required=True, metavar="A,B", help=text)


def list_files(words: Sequence[str]) -> list[Path]:
    """Return the files of an option whose values may contain several, separated by commas."""
    return [Path(name) for names in words for name in names.split(",") if name]


def index_options() -> list[click.Option]:
    """Return the range of questions."""
    return [
        option("--question-begin", type=Count, help="Index of the first question, from 0."),
        option("--question-end", type=Count, help="Index after the last question."),
    ]


def _run(form: ModuleType, action: str, **options: Any) -> int:
    """Run an action of a format."""
    given = Options(**options)
    if action == "show":
        values, lines = form.compute_tables(given)
        print(json.dumps(values, indent=1) if given.json else "\n".join(lines))
        return 0
    generates = action == "generate"
    job = form.build_answer_job(given) if generates else form.build_judge_job(given)
    for note in job.notes:
        print(note)
    name = given.model if generates else given.judge
    return run_job(job, _load_model(job.wrap, name, given), name, given.batch)


def _load_model(wrap: Callable[[Model], Model], name: str, given: Options) -> Model:
    """Return what `wrap` makes of a model, or of a mixture of --reference-models and this one.

    Its answers are stored, whatever it is.
    """
    from swarm.registry.registry import Roster, store_answers

    proposers = parse_counted_names(vars(given).get("reference_models", ()))
    rounds = vars(given).get("rounds")
    if rounds is not None and not proposers:
        raise UserError("--rounds has no effect without --reference-models; leave it out", 2)
    cache: Any = None if given.no_cache else "default"
    roster = Roster(Providers.load(given.providers), given.base, given.pool, given.device, cache)
    model = roster.model(name)
    if proposers:
        from swarm.multi_agent.moa import build_mixture

        preset = {
            "proposers": [{"model": one, "count": count} for one, count in proposers],
            "aggregator": name,
            "layers": (rounds or 1) + 1,
        }
        model = build_mixture(preset, roster.model)
    roster.check()
    model = wrap(model)
    return store_answers(model, name, roster.cache, given.batch) if roster.cache else model
