"""Show and prune the cached answers: python -m swarm.cache info."""

import re
from collections.abc import Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import Any

import click
from rich.table import Table

from swarm._util.cli import run_program
from swarm._util.options import CONTEXT, run_click
from swarm._util.terminal import format_amount
from swarm.errors import UserError
from swarm.models import cache as kept
from swarm.models.cache import Cache

EPILOG = """\b
python -m swarm.cache info
python -m swarm.cache prune --older-than 30d --dry-run
python -m swarm.cache prune --model gpt-4o-mini
python -m swarm.cache prune --larger-than 1GB
"""

UNKNOWN_MODEL = "unknown"
"""Label of answers stored without a model name."""


class Quantity(click.ParamType):
    """A number with a unit, such as 30d or 1GB."""

    def __init__(self, name: str, units: dict[str, int]) -> None:
        self.name, self.units = name, units

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return the number of seconds or bytes."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
        if not found or found[2] not in self.units:
            units = ", ".join(filter(None, self.units))
            self.fail(f"{value!r}: must be a number with one of the units {units}", param, ctx)
        return float(found[1]) * self.units[found[2]]


DURATION = Quantity("30d", {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400})
SIZE = Quantity("1GB", {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12})

file_option = click.option(
    "--file",
    metavar="FILE",
    help="Cache file; by default answers.sqlite in $MODEL_SWARMS_CACHE or ~/.cache/model-swarms.",
)


@click.group(epilog=EPILOG, context_settings=CONTEXT)
def cache() -> None:
    """Show or remove the cached answers of models, which are not paid for twice."""


@cache.command(epilog=EPILOG)
@file_option
def info(file: str | None) -> None:
    """Show the file and its contents by model."""
    if (stored := _open(file)) is None:
        return
    parts = kept.stats_by_label(stored)
    total = _format_entries(sum(p.answers for p in parts), sum(p.bytes for p in parts))
    size = format_amount(stored.path.stat().st_size, "B")
    click.echo(f"{stored.path}: {total}, {size} on disk")
    table = Table("model", "responses", "size", "stored", box=None, pad_edge=False)
    for part in parts:
        days = " to ".join(dict.fromkeys(map(_format_date, (part.oldest, part.newest))))
        name = part.label or UNKNOWN_MODEL
        table.add_row(name, f"{part.answers:,}", format_amount(part.bytes, "B"), days)
    print_table(table)


@cache.command(epilog=EPILOG)
@click.option("--older-than", type=DURATION, help="Responses older than this: units m, h, d, w.")
@click.option(
    "--model",
    metavar="NAME",
    help=f"Responses of one model, as info lists it; {UNKNOWN_MODEL}: those without a name.",
)
@click.option(
    "--larger-than", type=SIZE, help="The oldest responses, until the rest is at most this large."
)
@click.option("--all", "everything", is_flag=True, help="All responses.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@file_option
def prune(dry_run: bool, file: str | None, **which: Any) -> None:
    """Remove cached responses; they are requested and paid for again."""
    given = [name for name, value in which.items() if value not in (None, False)]
    if len(given) != 1:
        raise UserError("give one of --older-than, --model, --larger-than and --all", 2)
    if (stored := _open(file)) is None:
        return
    entries = _select_entries(stored, given[0], which[given[0]])
    all_of_them = kept.count_entries(stored, kept.ALL_ENTRIES)
    found = (kept.count_entries if dry_run else kept.remove_entries)(stored, entries)
    remaining = (every - gone for every, gone in zip(all_of_them, found, strict=True))
    would = "would remove" if dry_run else "removed"
    click.echo(
        f"{stored.path}: {would} {_format_entries(*found)}; {_format_entries(*remaining)} stay"
    )


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal; where there is none, as wide as its content."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table).maximum)
    console.print(table)


def _open(file: str | None) -> Cache | None:
    """Return the cache; `None`, and a line that says so, if there is none yet."""
    found = Cache(file)
    if found.path.exists():
        return found
    click.echo(f"{found.path}: no responses are cached yet")
    return None


def _select_entries(stored: Cache, option: str, value: Any) -> kept.CacheFilter:
    match option:
        case "older_than":
            return kept.filter_older_than(value)
        case "larger_than":
            return kept.filter_beyond_size(int(value))
        case "everything":
            return kept.ALL_ENTRIES
    names = [part.label or UNKNOWN_MODEL for part in kept.stats_by_label(stored)]
    if value in names:
        return kept.filter_by_label(None if value == UNKNOWN_MODEL else value)
    matches = get_close_matches(value, names, 1)
    meant = f"did you mean {matches[0]}?" if matches else "list the models with info"
    raise UserError(f"--model {value}: no responses in {stored.path}; {meant}")


def _format_entries(answers: int, bytes_: int) -> str:
    return f"{answers:,} response{'s' * (answers != 1)} ({format_amount(bytes_, 'B')})"


def _format_date(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment).strftime("%Y-%m-%d")
    except (OSError, OverflowError, TypeError, ValueError):
        return "of unknown age"  # damaged


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are reported in one line."""
    return run_click(cache, arguments, "python -m swarm.cache")


if __name__ == "__main__":
    run_program(main)
