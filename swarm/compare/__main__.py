"""Ask models questions and compare their answers: python -m swarm.compare run questions.yaml."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click

from swarm._util.cli import run_program
from swarm._util.options import CONTEXT, run_click
from swarm._util.terminal import pluralize
from swarm.errors import InvalidArgument, UserError, missing_extra_error

if TYPE_CHECKING:
    from swarm.compare.question import Question

DATA_DIR = "llmcomp_models"


@click.group(context_settings=CONTEXT)
def compare() -> None:
    """Ask models questions, judge their answers, and compare the models.

    \b
    Examples:
      python -m swarm.compare run questions.yaml --models local/base,local/rooms
      python -m swarm.compare view compare/questions/songs/data.jsonl
      python -m swarm.compare finetune validate chats.jsonl
    """


@compare.command()
@click.argument("file")
@click.option("--models", "-m", help="a,b: each model is a group.")
@click.option(
    "--group", "-g", "groups", multiple=True, metavar="NAME=A,B", help="A group; repeatable."
)
@click.option("--questions", help="Names of the questions, a,b; default: all but those of judges.")
@click.option("--samples", type=click.IntRange(1), help="Samples per paraphrase.")
@click.option("--folder", help="Folder of data, plots and report, replaced; default compare/FILE.")
@click.option(
    "--workers", "max_workers", type=int, help="Maximum number of concurrent requests; default 100."
)
@click.option("--requests-per-minute", type=float, help="Maximum for each endpoint.")
@click.option("--timeout", type=float, help="Seconds per request; default 60.")
@click.option("--cache-dir", help="Folder of the answer cache.")
@click.option("--base", help="Base model of local/ names; default: that named by the experts.")
@click.option("--pool", help="Folder of local/ experts; default initial_experts.")
@click.option("--dry-run", is_flag=True, help="Show the planned requests without sending any.")
def run(
    file: str,
    models: str | None,
    groups: Sequence[str],
    questions: str | None,
    samples: int | None,
    folder: str | None,
    dry_run: bool,
    **settings: Any,
) -> int:
    """Ask the questions of a yaml file, or of all files of a folder.

    Writes the data, plots and a report. The exit code is 1 if an answer failed.

    \b
    Examples:
      python -m swarm.compare run questions.yaml --models local/base,local/rooms
      python -m swarm.compare run questions.yaml --samples 9 -g small=o4-mini -g large=o3,o1
      python -m swarm.compare run questions.yaml --models local/base --dry-run
    """
    from swarm._util.files import find_path
    from swarm.compare.config import Config
    from swarm.compare.question import Question, load_questions

    path = find_path(file)
    place = Path(folder or Path("compare") / path.resolve().stem).expanduser()
    chosen = parse_groups(models, groups)
    found = {question.name: question for question in load_questions(path)}
    names = [name.strip() for name in questions.split(",")] if questions is not None else [*found]
    if missing := [name for name in names if name not in found]:
        raise InvalidArgument(f"--questions {missing[0]}: {path} has {', '.join(found)}")
    asked = [found[name] for name in dict.fromkeys(names)]
    for question in asked:
        question.samples_per_paraphrase = samples or question.samples_per_paraphrase
    given = {key: value for key, value in settings.items() if value is not None}
    with Config.override(**given, yaml_dir=path if path.is_dir() else path.parent):
        if dry_run:
            print("\n".join(describe_plan(asked, chosen)))
            return 0
        _check_writable(place)
        frames = Question.many(asked, chosen, details=True)
    if all((frame["answer"].isna() & frame["error"].notna()).all() for frame in frames):
        raise UserError(f"there are no answers, so {place} is unchanged")
    from swarm.compare.report import write_report

    by_name = {one.name: frame for one, frame in zip(asked, frames, strict=True)}
    if conclusions := write_report(place, by_name, chosen):
        print(conclusions)
    failed = sum(int(frame["error"].notna().sum()) for frame in frames)
    rows = pluralize(sum(map(len, frames)), "row")
    print(f"{rows}, {failed} with an error: {place / 'report.html'}")
    first = shlex.quote(str(place / asked[0].name / "data.jsonl"))
    print(f"browse them with: python -m swarm.compare view {first}", file=sys.stderr)
    return int(failed > 0)


def parse_groups(models: str | None, groups: Sequence[str]) -> dict[str, list[str]]:
    """Parse "a,b", each a group, and "NAME=a,b" for each further group.

    Raises:
        InvalidArgument: There are none, or a name is empty.
    """
    found = {name.strip(): [name.strip()] for name in models.split(",")} if models else {}
    for one in groups:
        name, equals, members = one.partition("=")
        found[name.strip() if equals else ""] = [part.strip() for part in members.split(",")]
    if not found or not all(name and all(members) for name, members in found.items()):
        raise InvalidArgument(
            "name the models: --models a,b for a group each, or --group NAME=a,b; e.g. "
            "--models local/base,local/rooms"
        )
    return found


def describe_plan(questions: "list[Question]", groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe the requests of a run, line by line."""
    from swarm.compare.statistics import detectable

    models = sorted({model for group in groups.values() for model in group})
    lines = []
    for question in questions:
        wordings, each = len(question.as_messages()), question.samples_per_paraphrase
        answers = pluralize(len(models) * wordings * each, "answer")
        judges = ", ".join(question.layout.near) if question.type() == "free_form" else ""
        lines.append(
            f"{question.name} ({question.type()}): {pluralize(len(models), 'model')} x "
            f"{pluralize(wordings, 'paraphrase')} x {pluralize(each, 'sample')} = {answers}"
            + f", each judged by {judges}"
            * bool(judges)
        )
        if len(groups) > 1:
            lines.append(f"  {detectable(groups, wordings, each)}")
    return [*lines, f"models: {', '.join(models)}", "no request was sent (dry run)"]


def _check_writable(folder: Path) -> None:
    """Raise an error if results that will be paid for could not be written."""
    try:
        import pandas  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except ImportError as error:
        raise UserError(f"{missing_extra_error(error, 'compare')}; no request was sent") from None
    except OSError as error:
        raise UserError(
            f"folder={folder}: is not writable ({error.strerror}); no request was sent"
        ) from None


@compare.command()
@click.argument("file")
@click.option("--out", help="Page to write; default: beside FILE, with .html.")
@click.option("--no-browser", is_flag=True, help="Do not open the page.")
@click.option(
    "--sort-by", metavar="COLUMN", default="__random__", help="Initial order; default random."
)
@click.option("--descending", is_flag=True, help="Sort in descending order.")
def view(file: str, out: str | None, no_browser: bool, sort_by: str, descending: bool) -> None:
    """Write one HTML page with the answers of a .jsonl or .csv file, and open it.

    \b
    Examples:
      python -m swarm.compare view compare/questions/songs/data.jsonl
      python -m swarm.compare view answers.csv --sort-by quality --descending
    """
    from swarm.compare.view import view as write_page

    page = out or Path(file).with_suffix(".html")
    order: dict[str, Any] = {"sort_by": sort_by, "sort_ascending": not descending}
    write_page(file, **order, open_browser=not no_browser, filename=page)


def _open_manager(folder: str = DATA_DIR) -> Any:
    from swarm.compare.finetuning import FinetuningManager

    return FinetuningManager(folder)


@compare.group()
def finetune() -> None:
    """Create, follow and list fine-tunings at servers with OpenAI's API.

    \b
    Examples:
      python -m swarm.compare finetune validate chats.jsonl
      python -m swarm.compare finetune create chats.jsonl --base-model gpt-4o-mini-2024-07-18
      python -m swarm.compare finetune update
    """


data_dir = click.option(
    "--data-dir", default=DATA_DIR, show_default=True, help="Folder of the database."
)


@finetune.command()
@data_dir
def update(data_dir: str) -> None:
    """Update the jobs that are not finished."""
    _open_manager(data_dir).update_jobs()


@finetune.command()
@click.argument("file")
@click.option("--min-examples", type=int, help="Minimum number of examples; default 10.")
def validate(file: str, min_examples: int | None) -> int:
    """Check a JSONL training file."""
    result = _open_manager().openai_validate_file(file, min_examples=min_examples)
    print(f"{file}: {result}")
    return 0 if result.valid else 1


@finetune.command()
@click.argument("file")
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True)
@click.option("--price", type=click.FloatRange(0), help="Of a million trained tokens.")
def cost(file: str, epochs: int, price: float | None) -> None:
    """Estimate the tokens of a training file, and what they cost.

    \b
    Example:
      python -m swarm.compare finetune cost chats.jsonl --epochs 3 --price 3
    """
    from swarm.compare.training_files import count_training_tokens

    tokens = epochs * count_training_tokens(file)
    paid = "give --price for the cost" if price is None else f"{tokens * price / 1e6:,.2f}"
    print(f"{file}: about {tokens:,} tokens in {epochs} epochs (4 characters each): {paid}")


@finetune.command()
@click.argument("filters", nargs=-1, metavar="[COLUMN=VALUE]...")
@data_dir
def models(filters: Sequence[str], data_dir: str) -> None:
    """List the fine-tuned models.

    \b
    Example:
      python -m swarm.compare finetune models base_model=gpt-4o-mini
    """
    found = _open_manager(data_dir).get_models(**_parse_filters(filters))
    columns = ["model", "base_model", "suffix", "file_name", "epochs", "seed"]
    _print_table(found[columns], f"{data_dir}: no models")


@finetune.command()
@click.argument("filters", nargs=-1, metavar="[COLUMN=VALUE]...")
@data_dir
def jobs(filters: Sequence[str], data_dir: str) -> None:
    """List the fine-tuning jobs.

    \b
    Example:
      python -m swarm.compare finetune jobs state=running
    """
    found = _open_manager(data_dir).get_jobs(**_parse_filters(filters))
    _print_table(found.drop(columns="file_md5"), f"{data_dir}: no jobs")


@finetune.command()
@click.argument("file")
@click.option("--base-model", required=True, help="Name of the model at the server.")
@click.option("--suffix", help="Part of the new model's name; default: the file's name.")
@click.option("--epochs", help='An integer, or "auto".')
@click.option("--batch-size", help='An integer, or "auto".')
@click.option("--lr-multiplier", help='A number, or "auto".')
@click.option("--seed", type=int)
@click.option("--validation-file", "validation_file_name", help="JSONL of chats.")
@click.option("--base-url", help="URL of the API; default OpenAI's.")
@click.option(
    "--api-key-env",
    default="OPENAI_API_KEY",
    show_default=True,
    metavar="VARIABLE",
    help="Environment variable with the key.",
)
@data_dir
def create(file: str, base_model: str, api_key_env: str, data_dir: str, **options: Any) -> int:
    """Start a fine-tuning job.

    \b
    Example:
      python -m swarm.compare finetune create chats.jsonl --base-model gpt-4o-mini --suffix birds
    """
    from swarm.compare.finetuning import OpenaiTrainingParams

    key = os.environ.get(api_key_env, "")
    if not key.strip():
        raise UserError(
            f"the environment variable {api_key_env} is not set; set it to the key, or name "
            "another one with --api-key-env"
        )
    given = {name: value for name, value in options.items() if value is not None}
    for name, kind in (("epochs", int), ("batch_size", int), ("lr_multiplier", float)):
        with suppress(ValueError, KeyError):  # the parameters refuse others but "auto"
            given[name] = kind(given[name])
    params = OpenaiTrainingParams(api_key=key, file_name=file, base_model=base_model, **given)
    return 0 if _open_manager(data_dir).create_job(params) else 1


def _parse_filters(words: Sequence[str]) -> dict[str, str]:
    if wrong := [word for word in words if "=" not in word]:
        raise InvalidArgument(f"filters: {wrong[0]!r} is not NAME=VALUE", 2)
    return dict(word.split("=", 1) for word in words)


def _print_table(frame: Any, empty: str) -> None:
    from rich.console import Console
    from rich.table import Table

    if frame.empty:
        print(empty)
        return
    table = Table(*frame.columns, box=None, header_style="bold")
    for row in frame.itertuples(index=False):
        table.add_row(*("" if cell is None or cell != cell else str(cell) for cell in row))
    Console(soft_wrap=True, highlight=False, markup=False).print(table)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 on success, 1 after an error or a failed answer, 2 for an invalid command,
            130 after an interrupt.
    """
    return run_click(compare, words, "python -m swarm.compare")


if __name__ == "__main__":
    run_program(main)
