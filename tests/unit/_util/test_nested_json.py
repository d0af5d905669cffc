"""JSON that is nested more deeply than the reader can follow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm._util.jsonl import JsonlJournal, read_json_rows, read_jsonl
from swarm.errors import UserError
from swarm.pool.adapter import NOTE_FILE, ROUTER_FILE, read_note, read_routed_adapter

NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        (ROUTER_FILE, NESTED, lambda path: read_routed_adapter(path.parent)),
        ("rows.jsonl", NESTED, read_jsonl),
        ("rows.json", NESTED, read_json_rows),
        ("rows.jsonl", f'{{"a": {NESTED}}}\n', read_json_rows),
        ("rows.jsonl", f'{{"a": {NESTED}}}\n', JsonlJournal),
    ],
)
def test_100_000_brackets_are_an_error_of_the_file(
    name: str, text: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}.*(nested too deeply|not a router)"):
        read(tmp_path / name)


def test_a_note_of_100_000_brackets_is_no_note(tmp_path: Path) -> None:
    (tmp_path / NOTE_FILE).write_text(NESTED)
    assert read_note(tmp_path) == {}
