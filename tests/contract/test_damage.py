"""Damage to a run folder: found at every start, healed where it can be, and never silent."""

import contextlib
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import searches
from hydra import compose, initialize_config_dir

from swarm._util.files import conf_folder, encode_json
from swarm.errors import UserError
from swarm.runs.folder import (
    RECORD_FILE,
    Record,
    answers_path,
    read_record,
    read_state,
)

NOT_CHECKED = ("log.txt",)
"""Lines are added to it; nothing reads it."""

CANNOT_BE_HEALED = (RECORD_FILE, "answers/iteration_")


def deleted(data: bytes, seed: int) -> None:
    return None


def emptied(data: bytes, seed: int) -> bytes:
    return b""


def halved(data: bytes, seed: int) -> bytes:
    return data[: len(data) // 2]


def garbage(data: bytes, seed: int) -> bytes:
    return random.Random(seed).randbytes(len(data))


def flipped(data: bytes, seed: int) -> bytes:
    draw = random.Random(seed)
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


Damage = Callable[[bytes, int], bytes | None]
DAMAGES: list[Damage] = [deleted, emptied, halved, garbage, flipped]


class Lab:
    """A finished tiny search, and the same command in this process."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.command, self.folder = command, folder
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            self.composed = compose("search", overrides=command)
        assert self.again() is None
        self.whole, self.sound = self.files(), self.tree()

    def tree(self) -> dict[str, bytes]:
        """Every file but the log; of the record, to which a repair adds lines, the state."""
        record = read_record(self.folder)
        state = encode_json([record.state, dict(sorted(record.sums.items()))])
        return {**self.files(), RECORD_FILE: state, "run.json": b""}

    def files(self) -> dict[str, bytes]:
        """Every file but the log."""
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.name not in NOT_CHECKED
        }

    def again(self) -> str | None:
        """Run the command again; gives its error, `None` where it ended well."""
        from swarm.search import build_run

        run, config = build_run(self.composed)
        try:
            run.search(config, self.command, show=False)
        except UserError as error:
            return str(error)
        return None

    def damage(self, name: str, how: Damage, seed: int) -> None:
        """Make the folder whole again but for one file."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for path, data in self.whole.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            found = how(data, seed) if path == name else data
            if found is not None:
                (self.folder / path).write_bytes(found)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path) -> Lab:
    folder = tmp_path_factory.mktemp("damage")
    more = {"optimizer__max_iterations": 1, "optimizer__particles": 4, "ensemble": 2}
    command = searches.arguments(folder, tiny_llama, tiny_pool, "run", **more)
    return Lab(command, folder / "search" / "run")


def test_a_start_changes_no_byte(lab: Lab) -> None:
    assert lab.again() is None
    assert lab.files() == lab.whole
    assert set(read_record(lab.folder).sums) == set(lab.whole) - {RECORD_FILE, "run.json"}


def test_a_damaged_record_or_lost_answers_cost_the_iterations_after_them(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed search that has lost a line or answers ends as if it had never been killed."""
    more = {"optimizer__max_iterations": 30, "optimizer__patience": 30, "ensemble": 2}
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, "run", **more)
    folder = tmp_path / "search" / "run"
    search = searches.start(command)
    try:
        deadline = time.monotonic() + 90
        while len((read_state(folder) or {"rounds": []})["rounds"]) < 6:
            assert search.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        search.kill()
        search.communicate()
    left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    lab = Lab(command, folder)
    capsys.readouterr()
    lines = left[folder / RECORD_FILE].splitlines(keepends=True)
    rounds = [n for n, line in enumerate(lines) if b'"round"' in line]
    bad = lines[rounds[2]]
    bad_line = b"".join(lines).replace(bad, bad[:30] + b"x" + bad[31:])
    newest, middle = (answers_path(number) for number in (len(rounds) - 1, 2))
    cases = [(RECORD_FILE, bad_line, 2), (middle, None, 2)]
    cases += [(newest, how(left[folder / newest], 0), len(rounds) - 1) for how in DAMAGES]
    for name, damaged, first in cases:
        shutil.rmtree(folder)
        for path, data in {**left, folder / name: damaged}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if data is not None:
                path.write_bytes(data)
        if name == RECORD_FILE:
            with pytest.raises(UserError, match=f"{RECORD_FILE} is damaged"):
                report(folder)
        assert lab.again() is None
        said = capsys.readouterr().err
        assert said.count("WARNING") == 1 and f"{name} is damaged" in said
        assert f"iterations from {first} on are evaluated again" in said
        assert lab.tree() == lab.sound


def heal(lab: Lab, name: str, how: Damage, seed: int, capsys: Any) -> None:
    """A damage ends the start with an error that names the file, or is healed and named."""
    lab.damage(name, how, seed)
    capsys.readouterr()
    error, said = lab.again(), capsys.readouterr().err
    if name.startswith(CANNOT_BE_HEALED):
        assert error and name in error and "\n" not in error, f"{name}: {error}"
        return
    assert error is None, f"{name}: {error}"
    assert name in said and said.count("WARNING") == 1, f"{name}: {said!r}"
    assert lab.tree() == lab.sound, name


def test_no_damage_of_a_sample_is_silent(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every kind of file one, with one damage each."""
    kinds = {re.sub(r"\d+|_[0-9a-f]{16}", "", name): name for name in lab.whole}
    for number, name in enumerate(kinds.values()):
        heal(lab, name, DAMAGES[number % len(DAMAGES)], number, capsys)


READS: dict[str, Callable[[Path], Any]] = {}


def reads(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    READS[function.__name__] = function
    return function


@reads
def report(folder: Path) -> None:
    from swarm.report.page import build_report as made

    made(folder)


@reads
def export(folder: Path) -> None:
    from swarm.export.source import read_source

    read_source(str(folder))


@reads
def evaluate(folder: Path) -> None:
    from swarm.engine.base_model import BaseModel
    from swarm.registry.model_groups import model_group

    model_group(folder / "global_best", BaseModel("no/model"))


READ_BY = {
    "report": (RECORD_FILE, "config.json", "answers/test_"),
    "export": (RECORD_FILE, "config.json", "global_best/"),
    "evaluate": ("global_best/",),
}


@pytest.mark.parametrize("reader", READS)
def test_readers_refuse_what_is_damaged(reader: str, lab: Lab) -> None:
    for seed, name in enumerate(lab.whole):
        lab.damage(name, DAMAGES[seed % len(DAMAGES)], 100 + seed)
        try:
            READS[reader](lab.folder)
        except UserError as error:
            assert "\n" not in str(error)
            assert Path(name).name in str(error) or "state of a search" in str(error), name
        else:
            assert not name.startswith(READ_BY[reader]), f"{reader} read {name}"


def test_a_line_has_a_checksum(tmp_path: Path) -> None:
    """Each changed bit of a line is found."""
    record = Record(tmp_path)
    record.write({"set": {"numbers": [0.1, 1e-300], "é": "\ud800"}})
    whole = record.path.read_bytes()
    assert (
        Record(tmp_path).read().facts == record.facts == {"numbers": [0.1, 1e-300], "é": "\ud800"}
    )
    for place in range(len(whole) - 1):
        for bit in (0, 5):
            changed = whole[place] ^ (1 << bit)
            record.path.write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
            found = Record(tmp_path).read()
            assert found.damage and not found.facts, (place, bit)


def test_a_kill_while_a_file_is_replaced_is_no_damage(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b"
    file.parent.mkdir()
    file.write_text("old")
    record = Record(tmp_path)
    with record.replacing("a"):
        pass
    assert set(Record(tmp_path).read().sums) == {"a/b"}
    with contextlib.suppress(KeyboardInterrupt), record.replacing("a"):
        file.write_text("new")
        raise KeyboardInterrupt
    found = Record(tmp_path).read()
    assert not found.damage and found.sums == {} and found.find_damaged() == []


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def foldered(path: Path) -> None:
    path.unlink()
    path.mkdir()


def looped(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("how", [piped, foldered, looped])
def test_what_is_no_file_is_damage_too(
    how: Callable[[Path], None], lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every second kind of file one; a pipe would be read for ever."""
    kinds = {re.sub(r"\d+|_[0-9a-f]{16}", "", name): name for name in lab.whole}
    for name in [*kinds.values()][::2]:
        lab.damage(name, lambda data, seed: data, 0)
        how(lab.folder / name)
        capsys.readouterr()
        error, said = lab.again(), capsys.readouterr().err
        if name.startswith(CANNOT_BE_HEALED):
            assert error and name in error, name
        else:
            assert error is None and name in said and lab.tree() == lab.sound, (name, error)


def test_a_folder_with_something_in_it_is_not_removed(lab: Lab) -> None:
    lab.damage("config.json", deleted, 0)
    (lab.folder / "config.json").mkdir()
    (lab.folder / "config.json" / "thesis.tex").write_text("years of work")
    error = lab.again()
    assert error and "config.json" in error and "move it away" in error
    assert (lab.folder / "config.json" / "thesis.tex").read_text() == "years of work"


def test_answers_that_are_removed_while_the_search_runs_are_named(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarm.loop.run import Run

    iterate = Run._run_iteration

    def gone(run: Run, number: int) -> None:
        if number == 1:
            shutil.rmtree(run.record.folder)
        iterate(run, number)

    monkeypatch.setattr(Run, "_run_iteration", gone)
    lab.damage("", deleted, 0)
    shutil.rmtree(lab.folder)
    error = lab.again()
    assert error and "iteration_0000.json.gz was removed during the search" in error


def test_a_report_misses_what_the_end_had_asked(lab: Lab) -> None:
    from swarm.report.page import build_report as made

    (name,) = (name for name in lab.whole if name.startswith("answers/again_"))
    lab.damage(name, deleted, 0)
    with pytest.raises(UserError, match=Path(name).name):
        made(lab.folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_record_that_is_no_file_is_damage(make: Callable[[Path], None], lab: Lab) -> None:
    lab.damage("", deleted, 0)
    (lab.folder / RECORD_FILE).unlink()
    make(lab.folder / RECORD_FILE)
    with pytest.raises(UserError, match="not a file"):
        read_record(lab.folder)
