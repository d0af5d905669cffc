"""Show and prune the cached answers: python -m swarm.cache info."""

import argparse
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from difflib import get_close_matches

from swarm._util.cli import RaisingParser, run_command, run_program
from swarm._util.terminal import align_columns, format_bytes
from swarm.errors import UserError
from swarm.models import cache as kept
from swarm.models.cache import Cache

EXAMPLES = """\
examples:
  python -m swarm.cache info
  python -m swarm.cache prune --older-than 30d --dry-run
  python -m swarm.cache prune --model gpt-4o-mini
  python -m swarm.cache prune --larger-than 1GB
"""
UNKNOWN_MODEL = "unknown"
"""Label of answers stored without a model name."""

SECONDS_PER_UNIT = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
BYTES_PER_UNIT = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    described = (
        "Responses of models are cached in one SQLite file, so that no request is paid for twice."
    )
    made = RaisingParser(
        prog="python -m swarm.cache",
        description=described,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="info | prune")
    info = verbs.add_parser("info", help="show the file and its contents by model")
    prune = verbs.add_parser(
        "prune",
        help="remove cached responses; they are requested and paid for again",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--older-than",
        type=parse_duration,
        metavar="30d",
        help="responses older than this, in minutes (m), hours (h), days (d) or weeks (w)",
    )
    which.add_argument(
        "--model",
        metavar="NAME",
        help=f"responses of one model, as listed by info; {UNKNOWN_MODEL}: those "
        "without a model name",
    )
    which.add_argument(
        "--larger-than",
        type=parse_size,
        metavar="1GB",
        help="the oldest responses, until the rest is at most this large",
    )
    which.add_argument("--all", action="store_true", help="all responses")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    for one in (info, prune):
        one.add_argument(
            "--file",
            metavar="FILE",
            help="cache file; answers.sqlite in $MODEL_SWARMS_CACHE or "
            "~/.cache/model-swarms by default",
        )
    return made


def parse_duration(text: str) -> float:
    """Return the seconds in "30d", "12h", "45m" or "2w"."""
    return _parse_quantity(text, SECONDS_PER_UNIT, "a duration such as 30d, 12h, 45m or 2w")


def parse_size(text: str) -> int:
    """Return the bytes in "1GB", "500MB" or "0"."""
    return int(_parse_quantity(text, BYTES_PER_UNIT, "a size such as 1GB, 500MB or 200kB"))


def _parse_quantity(text: str, units: dict[str, int], wanted: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return float(found[1]) * units[found[2]]


def print_info(cache: Cache) -> None:
    """Print the path of the cache file, and its contents by model."""
    parts = kept.stats_by_label(cache)
    print(
        f"{cache.path}: "
        f"{_format_entries(sum(p.answers for p in parts), sum(p.bytes for p in parts))}, "
        f"{format_bytes(cache.path.stat().st_size)} on disk"
    )
    rows = []
    for part in parts:
        days = " to ".join(dict.fromkeys(map(_format_date, (part.oldest, part.newest))))
        entries = f"{_format_entries(part.answers, part.bytes)}, {days}"
        rows.append((f"  {part.label or UNKNOWN_MODEL}", entries))
    print(*align_columns(rows), sep="\n")


def prune_cache(cache: Cache, arguments: argparse.Namespace) -> None:
    """Remove the entries selected by the arguments, and print a summary.

    Raises:
        UserError: There is no answer of the named model.
    """
    which = _select_entries(cache, arguments)
    all_of_them = kept.count_entries(cache, kept.ALL_ENTRIES)
    found = (kept.count_entries if arguments.dry_run else kept.remove_entries)(cache, which)
    remaining = (everything - gone for everything, gone in zip(all_of_them, found, strict=True))
    would = "would remove" if arguments.dry_run else "removed"
    print(f"{cache.path}: {would} {_format_entries(*found)}; {_format_entries(*remaining)} stay")


def _select_entries(cache: Cache, arguments: argparse.Namespace) -> kept.CacheFilter:
    if arguments.older_than is not None:
        return kept.filter_older_than(arguments.older_than)
    if arguments.larger_than is not None:
        return kept.filter_beyond_size(arguments.larger_than)
    if arguments.all:
        return kept.ALL_ENTRIES
    names = [part.label or UNKNOWN_MODEL for part in kept.stats_by_label(cache)]
    if arguments.model in names:
        return kept.filter_by_label(None if arguments.model == UNKNOWN_MODEL else arguments.model)
    matches = get_close_matches(arguments.model, names, 1)
    meant = f"did you mean {matches[0]}?" if matches else "list the models with info"
    raise UserError(f"--model {arguments.model}: no responses in {cache.path}; {meant}")


def _format_entries(answers: int, bytes_: int) -> str:
    return f"{answers:,} response{'s' * (answers != 1)} ({format_bytes(bytes_)})"


def _format_date(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment).strftime("%Y-%m-%d")
    except (OSError, OverflowError, TypeError, ValueError):
        return "of unknown age"  # damaged


def normalize_option(word: str) -> str:
    """Return an option with hyphens: `--dry_run` is accepted as `--dry-run`."""
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") + equals + value) if word.startswith("--") else word


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are reported in one line."""
    words = sys.argv[1:] if arguments is None else arguments

    def command() -> None:
        given = build_parser().parse_args([normalize_option(word) for word in words])
        cache = Cache(given.file)
        if not cache.path.exists():
            print(f"{cache.path}: no responses are cached yet")
        elif given.verb == "info":
            print_info(cache)
        else:
            prune_cache(cache, given)

    return run_command(command)


if __name__ == "__main__":
    run_program(main)
