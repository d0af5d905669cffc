"""Commands of fine-tunings: update, validate, cost, models, jobs, create, cancel, delete."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swarm.compare.finetuning.manager import JOB_COLUMNS, MODEL_COLUMNS, FinetuningManager
from swarm.compare.finetuning.params import (
    OPENAI_BASE_URL,
    LocalTrainingParams,
    OpenaiTrainingParams,
)
from swarm.compare.finetuning.params import estimate_cost as cost_of
from swarm.errors import InvalidArgument, UserError

DATA_DIR = "llmcomp_models"

MODEL_COLUMNS_SHOWN = ("model", "base_model", "suffix", "file_name", "epochs", "seed")
"""Columns of models that fit on a screen."""

JOB_COLUMNS_SHOWN = (
    "id",
    "state",
    "suffix",
    "base_model",
    "file_name",
    "created",
    "model",
    "error",
)


def update_jobs(data_dir: str = DATA_DIR) -> None:
    """Update all unfinished jobs and print their status."""
    FinetuningManager(data_dir).update_jobs()


def validate_file(file: str, minimum: int | None = None) -> bool:
    """Print the errors of a training file; return whether it is valid."""
    result = FinetuningManager().openai_validate_file(file, min_examples=minimum)
    print(f"{file}: {result}")
    return result.valid


def print_cost(file: str, prices: Mapping[str, float] | None = None, epochs: int = 1) -> None:
    """Print the number of tokens of a file and their cost."""
    print(f"{file}: {cost_of(file, prices, epochs)}")


def print_models(data_dir: str = DATA_DIR, **filters: Any) -> None:
    """Print all models that match the filters."""
    _print_frame(
        FinetuningManager(data_dir).get_models(**filters)[list(MODEL_COLUMNS_SHOWN)],
        "models",
        data_dir,
    )


def print_jobs(data_dir: str = DATA_DIR, **filters: Any) -> None:
    """Print all jobs that match the filters."""
    _print_frame(
        FinetuningManager(data_dir).get_jobs(**filters)[list(JOB_COLUMNS_SHOWN)], "jobs", data_dir
    )


def _print_frame(frame: Any, kind: str, data_dir: str) -> None:
    if frame.empty:
        print(f"{data_dir}: no {kind}")
        return
    print(frame.to_string(index=False, na_rep="-", max_colwidth=80))


def create_job(given: argparse.Namespace) -> bool:
    """Create the job that the command line describes; return whether its files are valid.

    Raises:
        UserError: An option is invalid, or the job cannot be created.
    """
    names = ("suffix", "epochs", "batch_size", "seed")
    options = {name: value for name in names if (value := getattr(given, name)) is not None}
    params: OpenaiTrainingParams | LocalTrainingParams
    if given.local:
        kinds = ("learning_rate", "lora_rank", "expert_folder")
        options |= {name: value for name in kinds if (value := getattr(given, name)) is not None}
        params = LocalTrainingParams(
            file_name=given.file, base_model=given.base_model or "base", **options
        )
    else:
        if not given.base_model:
            raise InvalidArgument(
                "--base-model: name the model to fine-tune; --local trains on this machine"
            )
        key = os.environ.get(given.api_key_env, "")
        if not key.strip():
            raise UserError(
                f"the environment variable {given.api_key_env} is not set; set it to the "
                "key, or name another one with --api-key-env"
            )
        kinds = ("lr_multiplier", "validation_file_name", "base_url")
        options |= {name: value for name in kinds if (value := getattr(given, name)) is not None}
        params = OpenaiTrainingParams(
            api_key=key, file_name=given.file, base_model=given.base_model, **options
        )
    job = FinetuningManager(given.data_dir).create_job(params, blocking=given.blocking)
    return job is not None


def add_parsers(subparsers: Any) -> None:
    """Add the commands to a parser; each sets `handler`, which returns an exit code or `None`.

    Args:
        subparsers: Result of `ArgumentParser.add_subparsers`.
    """

    def add_command(
        name: str, description: str, handler: Callable[[argparse.Namespace], int | None]
    ) -> Any:
        subparser = subparsers.add_parser(name, help=description, description=description)
        subparser.set_defaults(handler=handler)
        if name not in ("validate", "cost"):
            subparser.add_argument("--data-dir", default=DATA_DIR, help="folder of the database")
        return subparser

    add_command(
        "update", "update the jobs that are not finished", lambda g: update_jobs(g.data_dir)
    )
    one = add_command(
        "validate",
        "check a JSONL training file",
        lambda g: 0 if validate_file(g.file, g.min_examples) else 1,
    )
    one.add_argument("file")
    one.add_argument(
        "--min-examples", type=int, help="print the first examples of a training file; default 10"
    )
    one = add_command(
        "cost",
        "estimate the tokens and cost of a file, offline",
        lambda g: print_cost(g.file, dict(g.price) if g.price else None, g.epochs),
    )
    one.add_argument("file")
    one.add_argument("--epochs", type=int, default=1)
    one.add_argument(
        "--price",
        type=_parse_price,
        action="append",
        metavar="MODEL=PRICE",
        help="price per million trained tokens; repeatable",
    )
    for name, columns, show in (
        ("models", MODEL_COLUMNS, print_models),
        ("jobs", JOB_COLUMNS, print_jobs),
    ):
        one = add_command(name, f"list the {name}", _list_handler(show))
        one.add_argument(
            "filters",
            nargs="*",
            type=_parse_filter,
            metavar="COLUMN=VALUE",
            help=f"columns: {', '.join(columns)}",
        )
    _add_create_options(
        add_command("create", "start a fine-tuning job", lambda g: 0 if create_job(g) else 1)
    )
    one = add_command("cancel", "end a job", lambda g: FinetuningManager(g.data_dir).cancel(g.id))
    one.add_argument("id", help="id of the job, local or of the server")
    one = add_command(
        "delete",
        "delete a model permanently, or all models of a job",
        lambda g: FinetuningManager(g.data_dir).delete(g.name),
    )
    one.add_argument("name", help="name of a model, or id of a job")


def add_script_parsers(subparsers: Any) -> None:
    """Add the commands with the names and arguments of llmcomp's scripts; see `add_parsers`."""
    text = "update the fine-tuning jobs that are not finished"
    one = subparsers.add_parser("update-jobs", help=text, description=text)
    one.add_argument("data_dir", nargs="?", default=DATA_DIR, help="default %(default)s")
    one.set_defaults(handler=_update_existing)
    text = "check a JSONL training file; show the tokens of a valid one"
    one = subparsers.add_parser("validate-file", help=text, description=text)
    one.add_argument("file")
    one.set_defaults(handler=_validate_with_cost)


def _update_existing(given: argparse.Namespace) -> None:
    if not Path(given.data_dir).expanduser().is_dir():
        raise InvalidArgument(f"{given.data_dir}: no such folder; name that of the jobs: DATA_DIR")
    update_jobs(given.data_dir)


def _validate_with_cost(given: argparse.Namespace) -> int:
    if not validate_file(given.file):
        return 1
    print_cost(given.file)
    return 0


def _add_create_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("file", help="JSONL of chats")
    one.add_argument(
        "--base-model", help="model name at the server; with --local a folder or hub id"
    )
    one.add_argument("--suffix", help="part of the new model's name; default: the file's name")
    for name in ("--epochs", "--batch-size"):
        one.add_argument(name, type=_parse_auto_or(int), help='an integer, or "auto" at a server')
    one.add_argument("--seed", type=int)
    one.add_argument("--blocking", action="store_true", help="wait until a server's job has ended")
    server = one.add_argument_group("at a server")
    server.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="VARIABLE",
        help="environment variable with the key; default OPENAI_API_KEY",
    )
    server.add_argument("--base-url", help=OPENAI_BASE_URL)
    server.add_argument("--lr-multiplier", type=_parse_auto_or(float))
    server.add_argument("--validation-file", dest="validation_file_name")
    local = one.add_argument_group("on this machine")
    local.add_argument("--local", action="store_true", help="train a LoRA on this machine")
    local.add_argument("--learning-rate", type=float)
    local.add_argument("--lora-rank", type=int)
    local.add_argument("--expert-folder", help="folder of the new expert; default initial_experts")


def _list_handler(show: Callable[..., None]) -> Callable[[argparse.Namespace], None]:
    return lambda given: show(given.data_dir, **dict(given.filters))


def _parse_auto_or(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of a number or the word "auto"."""

    def parse_value(text: str) -> Any:
        return text if text == "auto" else kind(text)

    return parse_value


def _parse_price(text: str) -> tuple[str, float]:
    model, equals, price = text.rpartition("=")
    try:
        return model, float(price if equals else "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL=PRICE") from None


def _parse_filter(text: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not COLUMN=VALUE")
    return column, value
