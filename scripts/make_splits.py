"""Make the file of a task, dev and test, from a Hugging Face data set or from files of one.

    python scripts/make_splits.py mmlu
    python scripts/make_splits.py mmlu_pro --seed 1 --dev 140 --test 2000
    python scripts/make_splits.py gsm8k --source FOLDER_OR_FILE   # parquet, json or jsonl

Both splits are drawn from one labelled split of the set, at a pinned revision. Which items they
hold follows from the items and the seed, not from their order. No question comes twice with the
same choices, neither within a split nor in both. Sizes are the original's unless told.
"""

import argparse
import hashlib
import json
import logging
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hub_sets import SETS, Item, Row, Source

from swarm._util.files import write_json
from swarm.engine.base_model import first_line
from swarm.errors import UserError, missing_extra_error
from swarm.tasks.dataset import item_identity
from swarm.tasks.exact_match import match_item_error
from swarm.tasks.multiple_choice import choice_item_error

ROOT = Path(__file__).resolve().parent.parent
READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def load(source: Source, where: Path | None) -> list[Row]:
    """All rows of the set's split, from the hub or from files.

    Raises:
        UserError: The package is missing, nothing can be loaded, or a column is missing.
    """
    try:
        from datasets import disable_progress_bars, load_dataset
    except ImportError as error:
        raise missing_extra_error(error, "data") from None
    disable_progress_bars()
    # What goes wrong comes as an exception; the packages would print it as well.
    for package in ("datasets", "huggingface_hub"):
        logging.getLogger(package).setLevel(logging.CRITICAL)
    at = where or source.hub
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if where:
                kind, files = local_files(where, source.split)
                table = load_dataset(kind, data_files=files, split="train", cache_dir=scratch)
            else:
                named = {"split": source.split, "revision": source.revision}
                table = load_dataset(source.hub, source.config, **named)
        except UserError:
            raise
        # Two dozen kinds of error of four packages, about networks, files and formats.
        except Exception as error:
            remedy = (
                "check that these are its files"
                if where
                else "check the connection, or set local files by --source"
            )
            raise UserError(f"{at}: cannot be loaded ({first_line(error)}); {remedy}") from error
        missing = [name for name in source.columns.split() if name not in table.column_names]
        if missing:
            has = ", ".join(table.column_names)
            raise UserError(f'{at}: no column "{missing[0]}"; there are: {has}')
        rows: list[Row] = table.to_list()
    return rows


def local_files(where: Path, split: str) -> tuple[str, list[str]]:
    """The reader and the files: in a folder those named after the split, or all if none is.

    Raises:
        UserError: There is no such place, or no file, or files of different kinds.
    """
    if not where.exists():
        raise UserError(f"--source {where}: no such file or folder")
    found = sorted(where.iterdir()) if where.is_dir() else [where]
    files = [path for path in found if path.suffix in READERS]
    named = [path for path in files if re.search(rf"(?<![a-z]){split}(?![a-z])", path.stem)]
    files = named or files
    kinds = {READERS[path.suffix] for path in files}
    if len(kinds) != 1:
        wrong = "files of different kinds" if kinds else "no file"
        raise UserError(f"--source {where}: {wrong}; allowed: {', '.join(READERS)}")
    return kinds.pop(), [str(path) for path in files]


def make_items(source: Source, rows: Sequence[Row], seed: int) -> tuple[list[Item], Counter[str]]:
    """The sound, different items of the rows, and for what the others were left out."""
    items: dict[Any, Item] = {}
    left: Counter[str] = Counter()
    for number, row in enumerate(rows):
        try:
            draw = random.Random(f"{seed} {row.get('question')}")
            item = {"id": number, **source.item(row, draw)}
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            left[f"not readable ({first_line(error)})"] += 1
            continue
        wrong = choice_item_error(item) if "choices" in item else match_item_error(item)
        if wrong is not None:
            left[wrong] += 1
        elif content(item) in items:
            left["a duplicate"] += 1
        else:
            items[content(item)] = item
    return list(items.values()), left


def content(item: Item) -> Any:
    """The question and its choices: two items that differ only in the answer are one too many."""
    return item_identity(item)[:2]


def divide(
    items: Sequence[Item], dev: int, test: int, seed: int, even: bool
) -> dict[str, list[Item]]:
    """Disjoint splits of these sizes, drawn by a hash of each item's content.

    Raises:
        UserError: There are not so many items.
    """
    if dev + test > len(items):
        raise UserError(
            f"{dev} dev and {test} test items requested, but only {len(items)} are distinct; "
            "lower --dev or --test"
        )
    order = sorted(items, key=lambda item: place(item, seed))
    first = evenly(order) if even else order
    taken = {content(item) for item in first[:dev]}
    rest = [item for item in order if content(item) not in taken]
    return {"dev": first[:dev], "test": rest[:test]}


def place(item: Item, seed: int) -> str:
    """Where an item stands in the order from which the splits are taken."""
    return hashlib.sha256(json.dumps([seed, content(item)]).encode()).hexdigest()


def evenly(items: Sequence[Item]) -> list[Item]:
    """The items so ordered that every beginning has as many of each domain as can be."""
    seen: Counter[str] = Counter()
    ranks = []
    for position, item in enumerate(items):
        ranks.append((seen[item["domain"]], position))
        seen[item["domain"]] += 1
    return [items[position] for _, position in sorted(ranks)]


def make(options: argparse.Namespace) -> None:
    """Write the file that the command line asks for, and say what is in it.

    Raises:
        UserError: Something is in the way; nothing has been written then.
    """
    name, source = options.set, SETS[options.set]
    path = options.to or ROOT / "data" / "eval" / f"{name}_seed{options.seed}.json"
    if path.exists() and not options.force:
        raise UserError(f"{path} exists; replace it with --force, or set another by --to")
    rows = load(source, options.source)
    items, left = make_items(source, rows, options.seed)
    shown = left.most_common(5)
    for why, times in shown:
        print(f"skipped: {times} of {len(rows)} rows: {why}")
    if others := left.total() - sum(times for _, times in shown):
        print(f"skipped: {others} for other reasons")
    sizes = (options.dev or source.dev, options.test or source.test)
    splits = divide(items, *sizes, options.seed, source.even)
    hub = {"hub": source.hub, "config": source.config, "revision": source.revision}
    origin = {"files": str(options.source)} if options.source else hub
    made = {**origin, "split": source.split, "seed": options.seed}
    write_json(path, {"dataset": name, "made_from": made, **splits})
    print(f"{path}: {sizes[0]} dev and {sizes[1]} test of {len(items)} distinct items")
    print(f"python -m swarm.search task={name} task.file={path}")


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the file was written, 1 if not, 2 for a command line that means nothing."""
    parser = argparse.ArgumentParser(
        description="Make a task's dev and test items from a Hugging Face data set."
    )
    parser.add_argument("set", choices=SETS, help="the data set, also the name of the task")
    parser.add_argument(
        "--source", type=Path, help="local files of the data set, instead of the hub's"
    )
    parser.add_argument("--seed", type=int, default=42, help="random seed (default: 42)")
    parser.add_argument("--dev", type=count, help="dev items (default: as the original)")
    parser.add_argument("--test", type=count, help="test items (default: as the original)")
    parser.add_argument("--to", type=Path, help="default: data/eval/SET_seedSEED.json")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    try:
        make(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
