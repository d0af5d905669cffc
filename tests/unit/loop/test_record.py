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
from swarm.runs import folder as folder_module
from swarm.runs.folder import (
    RECORD_FILE,
    RunRecord,
    answers_path,
    read_record,
    read_state,
)
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

    save_note = save


def test_a_kill_between_a_best_and_its_answers_leaves_no_older_answers(tmp_path: Path) -> None:
    record, pool = RunRecord(tmp_path), Notes()
    record.open_or_resume({}, ["amber", "birch"])
    for number, utility in enumerate((0.25, 0.5)):
        position = np.array([[number, 1 - number]], dtype=float)
        rows = {0: [{"id": 7, "answer": f"of round {number}"}]}
        record.add_iteration(position, np.array([utility]), rows, {}, {})
        pool.dies = number == 1
        with pytest.raises(KeyboardInterrupt) if pool.dies else contextlib.nullcontext():
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
    """Bytes of the record after 20 and after 200 rounds; run.json is not written."""
    record, grown = searched(tmp_path, 20), []
    file, summary = tmp_path / RECORD_FILE, (tmp_path / "run.json").read_bytes()
    for rounds in (40, 220, 240):
        before, inode = file.stat().st_size, file.stat().st_ino
        add(record, rounds)
        assert file.stat().st_ino == inode, "lines are appended"
        grown.append(file.stat().st_size - before)
    assert grown[2] < 1.1 * grown[0] and (tmp_path / "run.json").read_bytes() == summary
    found = read_record(tmp_path)
    assert found.state == record.state and len(found.sums) == 240 and found.find_damaged() == []


def test_bests_and_sums_follow_the_rounds(tmp_path: Path) -> None:
    record = searched(tmp_path, 30)
    values = np.array([entry["utilities"] for entry in record.iterations])
    for particle in (0, 1):
        assert record.find_best(particle) == (int(values[:, particle].argmax()), particle)
    assert record.find_best() == tuple(np.unravel_index(values.argmax(), values.shape))
    assert record.best_expert() == (0, int(values[0].argmax()))
    assert record.count_prompts() == {"prompts_scored": 60, "prompts_saved": 30}
    add(record, 60)
    assert record.count_prompts()["prompts_scored"] == 120


def test_a_record_is_cut_at_the_first_bad_line(tmp_path: Path, caplog: Any) -> None:
    """Every way to lose or change a line is found, said, and costs no more than what follows."""
    caplog.set_level(logging.INFO)
    whole = searched(tmp_path / "whole", 9)
    data = (tmp_path / "whole" / RECORD_FILE).read_bytes()
    lines = data.splitlines(keepends=True)  # the first has the facts
    place = len(data) // 2
    damages: dict[str, tuple[bytes, int | None]] = {
        "a bit": (data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :], None),
        "a line is gone": (b"".join(lines[:4] + lines[5:]), 3),
        "two lines in turn": (b"".join([*lines[:3], lines[4], lines[3], *lines[5:]]), 2),
        "last lines are gone": (b"".join(lines[:6]), 5),
        "garbage": (lines[0] + b"\xff\x00\n" * 3, 0),
    }
    for name, (content, left) in damages.items():
        folder = tmp_path / name
        searched(folder, 9)
        (folder / RECORD_FILE).write_bytes(content)
        with pytest.raises(UserError, match=f"{RECORD_FILE} is damaged"):
            read_state(folder)
        caplog.clear()
        record = RunRecord(folder)
        assert record.open_or_resume({"task": "x"}, ["amber", "birch"]) == (left != 0)
        said = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert len(said) == 1 and RECORD_FILE in said[0].getMessage(), name
        assert 1 < len(record.iterations) < 9 if left is None else len(record.iterations) == left
        assert not (folder / answers_path(len(record.iterations))).exists()
        assert read_state(folder) == record.state, name
        add(record, 9)
        assert record.state == whole.state, name
        found = read_record(folder)
        assert found.find_damaged() == [] and len(found.sums) == 9


@pytest.mark.parametrize("content", [None, b"", b"\xff\x00\n", b"{}\n"])
def test_without_its_record_a_search_is_lost(content: bytes | None, tmp_path: Path) -> None:
    searched(tmp_path, 2)
    (tmp_path / RECORD_FILE).unlink()
    if content is not None:
        (tmp_path / RECORD_FILE).write_bytes(content)
    with pytest.raises(UserError, match=rf"{RECORD_FILE} is .*restore it from a backup"):
        RunRecord(tmp_path).open_or_resume({"task": "x"}, ["amber", "birch"])


def test_a_finished_search_is_never_cut(tmp_path: Path, caplog: Any) -> None:
    """Neither for a bad line, nor for a lost end, nor for lost answers."""
    record = searched(tmp_path, 3)
    whole = (tmp_path / "run.json").read_bytes()
    for content in (b"", whole.replace(b"amber", b"birch"), b"[]"):  # is derived again
        (tmp_path / "run.json").write_bytes(content)
        caplog.clear()
        RunRecord(tmp_path).open_or_resume({"task": "x"}, ["amber", "birch"])
        assert "run.json" in caplog.text and b"amber" in (tmp_path / "run.json").read_bytes()
    record.state["finished"] = "3 rounds done"
    record.save_state()
    data, answers = (tmp_path / RECORD_FILE).read_bytes(), tmp_path / answers_path(1)
    lines, kept = data.splitlines(keepends=True), answers.read_bytes()

    def is_refused(name: str) -> None:
        with pytest.raises(UserError, match=rf"{name} is damaged or missing.*has ended.*name="):
            RunRecord(tmp_path).open_or_resume({"task": "x"}, ["amber", "birch"])

    for content in (b"".join(lines[:-1]), b"".join([*lines[:2], b"x", *lines[2:]])):
        (tmp_path / RECORD_FILE).write_bytes(content)
        is_refused(RECORD_FILE)
    (tmp_path / RECORD_FILE).write_bytes(data)
    answers.unlink()
    is_refused("iteration_0001.json.gz")
    answers.write_bytes(kept)
    assert RunRecord(tmp_path).open_or_resume({"task": "x"}, ["amber", "birch"])


class Killed(BaseException):
    """A kill at a write."""


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int, part: float) -> None:
    """Kill before write number `moment` of a record, or within it if it appends a line."""
    left = [moment]

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(path: Path, *data: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                if path.name == RECORD_FILE and write is append:
                    with path.open("ab") as file:
                        file.write(data[0][: int(part * len(data[0]))])
                raise Killed
            write(path, *data)

        return wrapped

    for name in ("append", "write_atomic", "write_json", "remove"):
        monkeypatch.setattr(folder_module, name, dying(getattr(folder_module, name)))


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_kill_at_any_write_is_no_damage(
    part: float, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed without a warning to the identical state, also if the record has half of a line."""
    whole = searched(tmp_path / "whole", 4)
    sums = read_record(tmp_path / "whole").sums
    moments = set()
    for moment in range(40):
        folder = tmp_path / str(moment)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_at(patch, moment, part)
            searched(folder, 4)
            break
        known = read_record(folder)
        assert known.damage == ""
        moments.add(len(known.rounds))
        record = RunRecord(folder)
        record.open_or_resume({"task": "x"}, ["amber", "birch"])
        assert len(record.iterations) == len(known.rounds)
        add(record, 4)
        assert record.state == whole.state and read_record(folder).sums == sums
        assert read_state(folder) == whole.state
    assert moments >= {0, 1, 2, 3} and moment > 9 and not caplog.records


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
