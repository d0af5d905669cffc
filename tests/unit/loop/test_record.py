"""What a run folder keeps of its rounds and bests, whenever it is killed."""

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm._util.files import append, write_json
from swarm.errors import UserError
from swarm.loop.final_evaluation import FinalEvaluation
from swarm.pool import adapter
from swarm.runs import manifest as manifest_module
from swarm.runs import run_folder
from swarm.runs.manifest import (
    JOURNAL,
    MANIFEST_FILE,
    Manifest,
    answers_path,
    encode_state,
    read_state,
    replay,
)
from swarm.runs.run_folder import RunRecord
from swarm.tasks.base import Score
from swarm.tasks.exact_match import ExactMatch


class Notes:
    """A pool whose bests are notes: a folder that is there stays, and one file of it is new."""

    dies = False

    def save(self, position: Sequence[float], folder: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "swarm.json", {"coefficients": list(position), **facts})
        if self.dies:
            raise KeyboardInterrupt


def test_a_kill_between_a_best_and_its_answers_leaves_no_older_answers(tmp_path: Path) -> None:
    record, pool = RunRecord(tmp_path), Notes()
    record.open_or_resume({}, ["amber", "birch"])
    for number, utility in enumerate((0.25, 0.5)):
        position = np.array([[number, 1 - number]], dtype=float)
        rows = {0: [{"id": 7, "answer": f"of round {number}"}]}
        record.add_iteration(position, np.array([utility]), rows, {}, {})
        pool.dies = number == 1
        if pool.dies:
            with pytest.raises(KeyboardInterrupt):
                record.write_outputs(pool)
        else:
            record.write_outputs(pool)
    pool.dies = False
    record.write_outputs(pool)
    for folder in ("global_best", "particle_0/personal_best"):
        assert "of round 1" in (tmp_path / folder / "answers_dev.jsonl").read_text()


def searched(folder: Path, rounds: int) -> RunRecord:
    """A record of so many rounds of two particles, whose optimizer keeps a history."""
    record = RunRecord(folder)
    record.open_or_resume({"task": "x"}, ["amber", "birch"])
    add(record, rounds)
    return record


def add(record: RunRecord, rounds: int) -> None:
    for number in range(len(record.iterations), rounds):
        draw = np.random.default_rng(number)
        rows = {i: [{"id": 7, "answer": f"{number} {i}"}] for i in range(2)}
        history = [[float(n), -0.0] for n in range(number + 1)]
        optimizer = {"history": history, "step": 0.5**number, "inner": {"same": [1, 2]}}
        facts = {"prompts_scored": 2, "prompts_saved": number % 3}
        record.add_iteration(draw.random((2, 2)), draw.random(2), rows, optimizer, facts)


def test_a_round_costs_the_same_however_many_there_were(tmp_path: Path) -> None:
    """Bytes of the state, of the journal and of the checksums, after 20 and after 200 rounds."""
    record, grown = searched(tmp_path, 20), []
    files = [tmp_path / name for name in (JOURNAL, MANIFEST_FILE, "state.json")]
    kept = files[-1].stat()
    for rounds in (40, 220, 240):
        before = [file.stat().st_size for file in files]
        inode = files[1].stat().st_ino
        add(record, rounds)
        assert files[1].stat().st_ino == inode, "checksums are appended"
        grown.append([file.stat().st_size - old for file, old in zip(files, before, strict=True)])
    assert grown[2][0] < 1.1 * grown[0][0] and grown[2][1] < 1.1 * grown[0][1]
    now = files[-1].stat()
    assert (now.st_ino, now.st_mtime_ns, now.st_size) == (
        kept.st_ino,
        kept.st_mtime_ns,
        kept.st_size,
    )
    assert read_state(tmp_path) == record.state
    found = Manifest(tmp_path).read()
    assert not found.lost and len(found.sums) == 240 and found.find_damaged() == []
    record.save_state()
    assert not (tmp_path / JOURNAL).exists() and read_state(tmp_path) == record.state


def test_bests_and_sums_follow_the_rounds(tmp_path: Path) -> None:
    record = searched(tmp_path, 30)
    values = np.array([entry["utilities"] for entry in record.iterations])
    for particle in (0, 1):
        assert record.best_index(particle) == (int(values[:, particle].argmax()), particle)
    assert record.best_index() == tuple(np.unravel_index(values.argmax(), values.shape))
    assert record.best_index(rows=1) == (0, 0)
    assert record.count_prompts() == {"prompts_scored": 60, "prompts_saved": 30}
    add(record, 60)
    assert record.count_prompts()["prompts_scored"] == 120


def test_a_journal_is_cut_at_the_first_bad_line(tmp_path: Path, caplog: Any) -> None:
    """Every way to lose or change a line is found, said, and costs no more than what follows."""
    caplog.set_level(logging.INFO)
    whole = searched(tmp_path / "whole", 9)
    data = (tmp_path / "whole" / JOURNAL).read_bytes()
    lines = data.splitlines(keepends=True)
    flipped = (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
    )
    damages: dict[str, tuple[bytes | None, int | None]] = {
        "gone": (None, 0),
        "empty": (b"", 0),
        "a bit": (flipped, None),
        "a line is gone": (b"".join(lines[:3] + lines[4:]), 3),
        "two lines in turn": (b"".join([*lines[:2], lines[3], lines[2], *lines[4:]]), 2),
        "last lines are gone": (b"".join(lines[:5]), 5),
        "no text": (b"\xff\x00\n" * 3, 0),
    }
    for name, (content, left) in damages.items():
        folder = tmp_path / name
        searched(folder, 9)
        if content is None:
            (folder / JOURNAL).unlink()
        else:
            (folder / JOURNAL).write_bytes(content)
        with pytest.raises(UserError, match=f"{JOURNAL} is damaged or missing"):
            read_state(folder)
        caplog.clear()
        record = RunRecord(folder)
        assert record.open_or_resume({"task": "x"}, ["amber", "birch"]) == (left != 0)
        said = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert len(said) == 1 and JOURNAL in said[0].getMessage(), name
        assert 1 < len(record.iterations) < 9 if left is None else len(record.iterations) == left
        assert not (folder / answers_path(len(record.iterations))).exists()
        assert read_state(folder) == record.state, name
        add(record, 9)
        record.save_state()
        assert record.state == whole.state, name
        found = Manifest(folder).read()
        assert found.find_damaged() == [] and len(found.sums) == 9


class Killed(BaseException):
    """A kill at a write."""


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int, part: float) -> None:
    """Kill before write number `moment` of a record, or within it if it appends to the journal."""
    left = [moment]

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(path: Path, *data: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                if path.name == JOURNAL and write is append:
                    with path.open("ab") as file:
                        file.write(data[0][: int(part * len(data[0]))])
                raise Killed
            write(path, *data)

        return wrapped

    for module in (run_folder, manifest_module):
        for name in ("append", "write_atomic", "write_gzip_json", "remove"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, dying(getattr(module, name)))


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_kill_at_any_write_is_no_damage(
    part: float, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed without a warning to the identical state, also if the journal has half of a line."""
    whole = searched(tmp_path / "whole", 4)
    sums = Manifest(tmp_path / "whole").read().sums
    moments = set()
    for moment in range(40):
        folder = tmp_path / str(moment)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_at(patch, moment, part)
            searched(folder, 4)
            break
        if not (folder / "state.json").exists():
            continue
        state, damage = replay(folder)
        assert damage == "" and state
        moments.add(len(state["rounds"]))
        record = RunRecord(folder)
        record.open_or_resume({"task": "x"}, ["amber", "birch"])
        assert len(record.iterations) == len(state["rounds"])
        add(record, 4)
        assert record.state == whole.state and Manifest(folder).read().sums == sums
        assert read_state(folder) == whole.state
    assert moments == {0, 1, 2, 3, 4} and moment > 10 and not caplog.records


def test_a_lost_end_of_the_journal_is_damage(tmp_path: Path, caplog: Any) -> None:
    """Cut between two lines or within the last one, which a kill does not leave."""
    whole = searched(tmp_path / "whole", 9)
    data = (tmp_path / "whole" / JOURNAL).read_bytes()
    last = len(data.splitlines(keepends=True)[-1])
    for length in (1, last // 2, last - 1, last):
        folder = tmp_path / str(length)
        searched(folder, 9)
        (folder / JOURNAL).write_bytes(data[:-length])
        with pytest.raises(UserError, match=f"{JOURNAL} is damaged or missing"):
            read_state(folder)
        caplog.clear()
        record = RunRecord(folder)
        record.open_or_resume({"task": "x"}, ["amber", "birch"])
        assert len(record.iterations) == 8
        assert JOURNAL in caplog.text and "from 8 on are evaluated again" in caplog.text
        assert read_state(folder) == record.state
        add(record, 9)
        record.save_state()
        assert record.state == whole.state


def test_a_state_older_than_its_answers_is_noticed(tmp_path: Path, caplog: Any) -> None:
    """A copy of state.json from before the first iteration; another search is refused there."""
    record = RunRecord(tmp_path)
    record.open_or_resume({"task": "x"}, ["amber", "birch"])
    copy = (tmp_path / "state.json").read_bytes()
    add(record, 1)
    record.save_state()
    (tmp_path / "state.json").write_bytes(copy)
    with pytest.raises(UserError, match="another search"):
        RunRecord(tmp_path).open_or_resume({"task": "y"}, ["amber", "birch"])
    assert not RunRecord(tmp_path).open_or_resume({"task": "x"}, ["amber", "birch"])
    assert "from 0 on are evaluated again" in caplog.text


def test_answers_lost_from_a_snapshot_end_the_start(tmp_path: Path) -> None:
    """state.json, which is not cut, has later iterations."""
    searched(tmp_path, 3).save_state()
    (tmp_path / answers_path(1)).unlink()
    with pytest.raises(UserError, match=r"iteration_0001.*another name="):
        RunRecord(tmp_path).open_or_resume({"task": "x"}, ["amber", "birch"])


def test_names_are_on_the_disk_before_a_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a file is renamed, made by an append or by a new folder, its folder is synced."""
    synced: list[Path] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_json(tmp_path / "new" / "file.json", {})
    assert synced[0] == tmp_path and synced[-1] == tmp_path / "new"
    append(tmp_path / "lines", b"1\n")
    append(tmp_path / "lines", b"2\n")
    assert synced[3:] == [tmp_path / "lines", tmp_path, tmp_path / "lines"]
    adapter.write_folder_atomic(tmp_path / "best", lambda folder: None, {}, "best")
    assert synced[-3:] == [tmp_path / ".best.new", tmp_path / ".best.new" / "swarm.json", tmp_path]


def test_lines_that_the_state_has_already_are_no_more(tmp_path: Path) -> None:
    """A kill between the writing of the state and the removal of the journal."""
    record = searched(tmp_path, 5)
    data = (tmp_path / JOURNAL).read_bytes()
    record.save_state()
    (tmp_path / JOURNAL).write_bytes(data)
    assert read_state(tmp_path) == record.state


def test_a_position_of_the_search_has_one_number(tmp_path: Path) -> None:
    """A baseline at it takes the search's answers, which another batch may change by rounding."""
    rows = [{"id": n, "question": f"{n}?", "answer": "yes"} for n in range(4)]
    splits = {"dev": rows[:2], "test": rows[2:]}
    write_json(tmp_path / "items.json", splits)
    task = ExactMatch("tiny", str(tmp_path / "items.json"))
    record = RunRecord(tmp_path / "run")
    record.open_or_resume({}, ["amber", "birch"])
    answers = {0: [{"id": n, "answer": "yes", "text": "", "value": 1.0} for n in range(2)]}
    record.add_iteration(np.array([[0.5, 0.5], [1, 0]]), np.array([1.0, np.nan]), answers, {}, {})
    asked: list[tuple[str, int]] = []

    def ask(positions: Any, split: str, items: Any) -> list[list[Score]]:
        asked.append((split, len(items)))
        return [[Score(0.0, "no") for _ in items] for _ in positions]

    ending = FinalEvaluation(record, task, ask, ask, lambda *about: None, [0, 1], [])
    assert [one.value for one in ending.score_position_on_dev([0.5, 0.5])] == [1.0, 1.0]
    assert asked == []
    ending.score_position_on_dev([1.0, 0.0])  # in the search, but not measured
    assert asked == [("judged", 2)]
    assert len(ending.score_position_on_test([0.5, 0.5])) == 2
    assert len(ending.score_position_on_test([0.5, 0.5], [1])) == 1
    assert asked[1:] == [("test", 2)]
    ending.score_position_on_test([1.0, 0.0], [1])
    assert asked[2:] == [("test", 1)]


def test_a_run_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.open_or_resume({}, ["amber", "birch"])
    record.add_iteration(np.eye(1, 2), np.array([0.5]), {0: [{"id": 7}]}, {}, {})
    assert RunRecord(tmp_path).load_state({})
    state = read_state(tmp_path)
    assert state
    (tmp_path / "rounds.jsonl").unlink(missing_ok=True)
    (tmp_path / "state.json").write_bytes(encode_state({**state, "format": 1}))
    with pytest.raises(UserError, match="written by another version"):
        RunRecord(tmp_path).load_state({})
