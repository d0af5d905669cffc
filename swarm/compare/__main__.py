"""Ask models questions and compare their answers: python -m swarm.compare run questions.yaml."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from swarm._util.cli import run_program
from swarm._util.options import CONTEXT, run_click
from swarm.errors import InvalidArgument, UserError

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
@click.option("--workers", type=int, help="Maximum number of concurrent requests; default 100.")
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
    from swarm.compare.run_file import parse_groups, run_file

    path = find_path(file)
    place = Path(folder or Path("compare") / path.resolve().stem).expanduser()
    names = None if questions is None else [name.strip() for name in questions.split(",")]
    given = {key: value for key, value in settings.items() if value is not None}
    if "workers" in given:
        given["max_workers"] = given.pop("workers")
    return run_file(path, parse_groups(models, groups), place, names, samples, given, dry_run)


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
    from swarm.compare.finetuning import FinetuningManager

    FinetuningManager(data_dir).update_jobs()


@finetune.command()
@click.argument("file")
@click.option("--min-examples", type=int, help="Minimum number of examples; default 10.")
def validate(file: str, min_examples: int | None) -> int:
    """Check a JSONL training file."""
    from swarm.compare.finetuning import FinetuningManager

    result = FinetuningManager().openai_validate_file(file, min_examples=min_examples)
    print(f"{file}: {result}")
    return 0 if result.valid else 1


@compare.command("update-jobs")
@click.argument("data_dir", default=DATA_DIR)
def update_jobs(data_dir: str) -> None:
    """Update the fine-tuning jobs, as llmcomp-update-jobs does."""
    from swarm.compare.finetuning import FinetuningManager

    FinetuningManager(data_dir).update_jobs()


compare.add_command(validate, "validate-file")


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
    from swarm.compare.finetuning import count_training_tokens

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
    from swarm.compare.finetuning import FinetuningManager

    found = FinetuningManager(data_dir).get_models(**_parse_pairs(filters, "filters"))
    columns = ("model", "base_model", "suffix", "file_name", "epochs", "seed")
    _print_table(found[list(columns)], f"{data_dir}: no models")


@finetune.command()
@click.argument("filters", nargs=-1, metavar="[COLUMN=VALUE]...")
@data_dir
def jobs(filters: Sequence[str], data_dir: str) -> None:
    """List the fine-tuning jobs.

    \b
    Example:
      python -m swarm.compare finetune jobs state=running
    """
    from swarm.compare.finetuning import FinetuningManager

    found = FinetuningManager(data_dir).get_jobs(**_parse_pairs(filters, "filters"))
    _print_table(found.drop(columns=["file_md5", "job"]), f"{data_dir}: no jobs")


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
    from swarm.compare.finetuning import FinetuningManager, OpenaiTrainingParams

    key = os.environ.get(api_key_env, "")
    if not key.strip():
        raise UserError(
            f"the environment variable {api_key_env} is not set; set it to the key, or name "
            "another one with --api-key-env"
        )
    given = {name: value for name, value in options.items() if value is not None}
    for name, kind in (("epochs", int), ("batch_size", int), ("lr_multiplier", float)):
        if given.get(name, "auto") != "auto":
            with suppress(ValueError):  # refused by the parameters, which say what is allowed
                given[name] = kind(given[name])
    params = OpenaiTrainingParams(api_key=key, file_name=file, base_model=base_model, **given)
    return 0 if FinetuningManager(data_dir).create_job(params) else 1


def _parse_pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE words."""
    if wrong := [word for word in words if "=" not in word]:
        raise InvalidArgument(f"{option}: {wrong[0]!r} is not NAME=VALUE", 2)
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
