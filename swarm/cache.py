"""Show and prune the cached answers: python -m swarm.cache info."""

import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click

from swarm._util.cli import run_program
from swarm._util.options import CONTEXT, run_click
from swarm._util.terminal import format_amount, suggest
from swarm.errors import UserError
from swarm.models.cache import Cache

EPILOG = """\b
python -m swarm.cache info
python -m swarm.cache prune --older-than 30d --dry-run
python -m swarm.cache prune --model gpt-4o-mini
python -m swarm.cache prune --larger-than 1GB
"""

UNKNOWN_MODEL = "unknown"
"""Label of answers stored without a model name."""

ENTRY_BYTES = "LENGTH(key) + LENGTH(CAST(value AS BLOB))"
SELECT_BY_LABEL = (
    f"SELECT label, COUNT(*), SUM({ENTRY_BYTES}), MIN(time), MAX(time) FROM responses "
    "GROUP BY label ORDER BY 3 DESC"
)
COUNT_ENTRIES = f"SELECT COUNT(*), COALESCE(SUM({ENTRY_BYTES}), 0) FROM responses WHERE "
OLDEST_BEYOND_SIZE = (
    "key IN (SELECT key FROM (SELECT key, "
    f"SUM({ENTRY_BYTES}) OVER (ORDER BY time DESC, key) AS so_far FROM responses) "
    "WHERE so_far > ?)"
)


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
    from rich.console import Console  # not needed for help
    from rich.table import Table

    if (stored := _open(file)) is None:
        return
    rows = _select(stored, SELECT_BY_LABEL)
    total = _format_entries(sum(row[1] for row in rows), sum(row[2] for row in rows))
    size = format_amount(stored.path.stat().st_size, "B")
    click.echo(f"{stored.path}: {total}, {size} on disk")
    table = Table("model", "responses", "size", "stored", box=None, pad_edge=False)
    for label, answers, number_of_bytes, *times in rows:
        days = " to ".join(dict.fromkeys(map(_format_date, times)))
        name = label or UNKNOWN_MODEL
        table.add_row(name, f"{answers:,}", format_amount(number_of_bytes, "B"), days)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table).maximum)
    console.print(table)


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
    given = {name: value for name, value in which.items() if value not in (None, False)}
    if len(given) != 1:
        raise UserError("give one of --older-than, --model, --larger-than and --all", 2)
    if (stored := _open(file)) is None:
        return
    match given.popitem():
        case "older_than", seconds:
            condition, values = "time < ?", [time.time() - seconds]
        case "larger_than", size:
            condition, values = OLDEST_BEYOND_SIZE, [int(size)]
        case "model", name:
            condition, values = "label IS ?", [_find_label(stored, name)]
        case _:
            condition, values = "TRUE", []
    [every] = _select(stored, COUNT_ENTRIES + "TRUE")
    [found] = _select(stored, COUNT_ENTRIES + condition, values)
    if not dry_run:
        _select(stored, f"DELETE FROM responses WHERE {condition}", values)
        _select(stored, "VACUUM")
        _select(stored, "PRAGMA wal_checkpoint(TRUNCATE)")
    would = "would remove" if dry_run else "removed"
    rest = _format_entries(every[0] - found[0], every[1] - found[1])
    click.echo(f"{stored.path}: {would} {_format_entries(*found)}; {rest} stay")


def _open(file: str | None) -> Cache | None:
    """Return the cache; `None`, and a line that says so, if there is none yet."""
    found = Cache(file)
    if found.path.exists():
        return found
    click.echo(f"{found.path}: no responses are cached yet")
    return None


def _select(stored: Cache, statement: str, values: Sequence[Any] = ()) -> list[Any]:
    return stored.run(lambda connection: connection.execute(statement, values).fetchall())


def _find_label(stored: Cache, name: str) -> str | None:
    names = [row[0] or UNKNOWN_MODEL for row in _select(stored, SELECT_BY_LABEL)]
    if name in names:
        return None if name == UNKNOWN_MODEL else name
    meant = suggest(name, names).strip() or "list the models with info"
    raise UserError(f"--model {name}: no responses in {stored.path}; {meant}")


def _format_entries(answers: int, bytes_: int) -> str:
    return f"{answers:,} response{'s' * (answers != 1)} ({format_amount(bytes_, 'B')})"


def _format_date(moment: Any) -> str:
    try:
        return datetime.fromtimestamp(moment).strftime("%Y-%m-%d")
    except (OSError, OverflowError, TypeError, ValueError):
        return "of unknown age"  # damaged


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are reported in one line."""
    return run_click(cache, arguments, "python -m swarm.cache")


if __name__ == "__main__":
    run_program(main)
