"""Files are written whole, and hold whatever a model says."""

import json
from pathlib import Path

from swarm._util.files import read_gzip_json, write_gzip_json, write_json


def test_half_a_surrogate_pair_survives(tmp_path: Path) -> None:
    said = {"text": 'an answer "cut" in 🐦 two: \ud83d\n'}
    write_gzip_json(tmp_path / "packed", said)
    write_json(tmp_path / "plain", said)
    assert read_gzip_json(tmp_path / "packed") == said
    assert json.loads((tmp_path / "plain").read_bytes()) == said
