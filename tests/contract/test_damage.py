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
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.export.source import read_source
from swarm.loop.run import Run
from swarm.registry.model_groups import model_group
from swarm.report.page import build_report
from swarm.runs.folder import RECORD_FILE, Record, answers_path, read_record, read_state
from swarm.search import build_run

NOT_CHECKED = ("log.txt",)
"""Lines are added to it; nothing reads it."""

CANNOT_BE_HEALED = (RECORD_FILE, "answers/iteration_")

Damage = Callable[[Path, int], None]


def deleted(path: Path, seed: int) -> None:
    path.unlink()


def halved(path: Path, seed: int) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path, seed: int) -> None:
    path.write_bytes(random.Random(seed).randbytes(path.stat().st_size))


def flipped(path: Path, seed: int) -> None:
    draw, data = random.Random(seed), bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def piped(path: Path, seed: int) -> None:
    path.unlink()
    os.mkfifo(path)  # which would be read for ever


def foldered(path: Path, seed: int) -> None:
    path.unlink()
    path.mkdir()


def looped(path: Path, seed: int) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGES: list[Damage] = [deleted, halved, garbage, flipped, piped, foldered, looped]


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
        run, config = build_run(self.composed)
        try:
            run.search(config, self.command, show=False)
        except UserError as error:
            return str(error)
        return None

    def restore(self, files: dict[str, bytes] | None = None) -> None:
        """Write these files, by default the whole ones, and no other."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for path, data in (files or self.whole).items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(data)


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
    files = [path for path in folder.rglob("*") if path.is_file()]
    left = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    lab = Lab(command, folder)
    capsys.readouterr()
    lines = left[RECORD_FILE].splitlines(keepends=True)
    rounds = [line for line in lines if b'"round"' in line]
    newest, middle = (answers_path(number) for number in (len(rounds) - 1, 2))

    def bad_line(path: Path, seed: int) -> None:
        bad = rounds[2][:30] + b"x" + rounds[2][31:]
        path.write_bytes(path.read_bytes().replace(rounds[2], bad))

    cases: list[tuple[str, Damage, int]] = [(RECORD_FILE, bad_line, 2), (middle, deleted, 2)]
    cases += [(newest, how, len(rounds) - 1) for how in DAMAGES[:4]]
    for name, how, first in cases:
        lab.restore(left)
        how(folder / name, 0)
        if name == RECORD_FILE:
            with pytest.raises(UserError, match=f"{RECORD_FILE} is damaged"):
                build_report(folder)
        assert lab.again() is None
        said = capsys.readouterr().err
        assert said.count("WARNING") == 1 and f"{name} is damaged" in said
        assert f"iterations from {first} on are evaluated again" in said
        assert lab.tree() == lab.sound


@pytest.mark.parametrize("shift", range(3))
def test_no_damage_of_a_sample_is_silent(
    shift: int, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every kind of file one: an error that names it, or it is healed and named."""
    kinds = {re.sub(r"\d+|_[0-9a-f]{16}", "", name): name for name in lab.whole}
    for number, name in enumerate(kinds.values()):
        lab.restore()
        DAMAGES[(number + 2 * shift) % len(DAMAGES)](lab.folder / name, number)
        capsys.readouterr()
        error, said = lab.again(), capsys.readouterr().err
        if name.startswith(CANNOT_BE_HEALED):
            assert error and name in error and "\n" not in error, f"{name}: {error}"
        else:
            assert error is None, f"{name}: {error}"
            assert name in said and said.count("WARNING") == 1, f"{name}: {said!r}"
            assert lab.tree() == lab.sound, name


READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "report": (build_report, (RECORD_FILE, "config.json", "answers/")),
    "export": (lambda run: read_source(str(run)), (RECORD_FILE, "config.json", "global_best/")),
    "evaluate": (
        lambda run: model_group(run / "global_best", BaseModel("no/model")),
        ("global_best/",),
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_refuse_what_is_damaged(reader: str, lab: Lab) -> None:
    read, reads = READERS[reader]
    for seed, name in enumerate(lab.whole):
        lab.restore()
        DAMAGES[seed % 4](lab.folder / name, 100 + seed)
        try:
            read(lab.folder)
        except UserError as error:
            assert "\n" not in str(error)
            assert Path(name).name in str(error) or "state of a search" in str(error), name
        else:
            skipped = name.startswith("answers/") and reader == "report"
            assert skipped or not name.startswith(reads), f"{reader} read {name}"
    lab.restore()
    (again,) = (name for name in lab.whole if name.startswith("answers/again_"))
    deleted(lab.folder / again, 0)
    with pytest.raises(UserError, match=Path(again).name):
        build_report(lab.folder)


def test_a_line_has_a_checksum(tmp_path: Path) -> None:
    """Each changed bit of a line is found."""
    record, facts = Record(tmp_path), {"numbers": [0.1, 1e-300], "é": "\ud800"}
    record.write({"set": facts})
    whole = record.path.read_bytes()
    assert Record(tmp_path).read().facts == record.facts == facts
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


def test_a_folder_with_something_in_it_is_not_removed(lab: Lab) -> None:
    lab.restore()
    foldered(lab.folder / "config.json", 0)
    (lab.folder / "config.json" / "thesis.tex").write_text("years of work")
    error = lab.again()
    assert error and "config.json" in error and "move it away" in error
    assert (lab.folder / "config.json" / "thesis.tex").read_text() == "years of work"


def test_a_disk_that_is_full_at_a_start_costs_no_answers(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.restore()
    record = Record(lab.folder).read()
    path = next(one for one in record.sums if one.startswith("answers/test_"))
    record.forget([path])  # as after a kill between the file and its checksum

    def refuse(*_: object) -> None:
        raise UserError("cannot write: no space left")

    with monkeypatch.context() as full:
        full.setattr("swarm.runs.folder.append", refuse)
        assert "no space left" in str(lab.again())
    assert (lab.folder / path).read_bytes() == lab.whole[path]
    assert lab.again() is None and path in read_record(lab.folder).sums


def test_answers_that_are_removed_while_the_search_runs_are_named(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = Run._run_iteration

    def gone(run: Run, number: int) -> None:
        if number == 1:
            shutil.rmtree(run.record.folder)
        iterate(run, number)

    monkeypatch.setattr(Run, "_run_iteration", gone)
    shutil.rmtree(lab.folder)
    error = lab.again()
    assert error and "iteration_0000.json.gz was removed during the search" in error


@pytest.mark.parametrize("how", [piped, foldered])
def test_a_record_that_is_no_file_is_damage(how: Damage, lab: Lab) -> None:
    lab.restore()
    how(lab.folder / RECORD_FILE, 0)
    with pytest.raises(UserError, match="not a file"):
        read_record(lab.folder)
