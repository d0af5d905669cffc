"""Files are written whole, and hold whatever a model says; nested JSON is a mistake of a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm._util.files import read_gzip_json, write_gzip_json, write_json
from swarm._util.jsonl import JsonlJournal, read_json_rows
from swarm.errors import UserError


def test_half_a_surrogate_pair_survives(tmp_path: Path) -> None:
    said = {"text": 'an answer "cut" in 🐦 two: \ud83d\n'}
    write_gzip_json(tmp_path / "packed", said)
    write_json(tmp_path / "plain", said)
    assert read_gzip_json(tmp_path / "packed") == said
    assert json.loads((tmp_path / "plain").read_bytes()) == said


@pytest.mark.parametrize("read", [read_json_rows, JsonlJournal])
def test_json_that_is_nested_too_deeply_is_an_error_of_its_line(
    read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1: .*nested too deeply"):
        read(path)
