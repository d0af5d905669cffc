"""What a run folder keeps of its bests, whenever it is killed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.files import write_json
from swarm.record import Record


class Notes:
    """A pool whose bests are notes: a folder that is there stays, and one file of it is new."""

    dies = False

    def save(self, position: Sequence[float], folder: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "swarm.json", {"coefficients": list(position), **facts})
        if self.dies:
            raise KeyboardInterrupt


def test_a_kill_between_a_best_and_its_answers_leaves_no_older_answers(tmp_path: Path) -> None:
    record, pool = Record(tmp_path), Notes()
    record.open({}, ["amber", "birch"])
    for number, utility in enumerate((0.25, 0.5)):
        position = np.array([[number, 1 - number]], dtype=float)
        rows = {0: [{"id": 7, "answer": f"of round {number}"}]}
        record.add_round(position, np.array([utility]), rows, {}, {})
        pool.dies = number == 1
        if pool.dies:
            with pytest.raises(KeyboardInterrupt):
                record.derive(pool)
        else:
            record.derive(pool)
    pool.dies = False
    record.derive(pool)
    for folder in ("global_best", "particle_0/personal_best"):
        assert "of round 1" in (tmp_path / folder / "answers_dev.jsonl").read_text()
