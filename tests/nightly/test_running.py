"""A run folder is held by one process, says how far its search is, and how it was started."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import searches

from swarm.errors import UserError
from swarm.runs.folder import COMMAND_FILE, load_command, read_state
from swarm.runs.lock import STATUS_FILE, RunLock, running_info


def until(what: Any, seconds: float = 300) -> Any:
    """What a question comes to, once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return found


def test_a_held_folder_says_who_holds_it_and_what_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert running_info(folder) is None
    now: dict[str, Any] = {"activity": "begins"}
    hold = RunLock(folder, lambda: now)
    first = running_info(folder)
    assert first and first["pid"] == os.getpid() and first["activity"] == "begins" and first["host"]
    now |= {"activity": "iteration 3", "iteration": 3}
    found = until(lambda: (running_info(folder) or {}).get("iteration"))
    assert found == 3 and (running_info(folder) or {})["started"] == first["started"]
    hold.close()
    hold.close()
    assert running_info(folder) is None and list(folder.iterdir()) == []


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    hold = RunLock(tmp_path)
    before = (tmp_path / STATUS_FILE).read_text()
    with pytest.raises(UserError, match=rf"process {os.getpid()}\).*kill {os.getpid()}.*name="):
        RunLock(tmp_path)
    assert (tmp_path / STATUS_FILE).read_text() == before
    hold.close()
    RunLock(tmp_path).close()


def test_a_killed_process_holds_nothing_and_its_note_is_none(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from swarm.runs.lock import RunLock\n"
        "RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    words, env = [sys.executable, "-c", code, str(tmp_path)], searches.environment()
    process = subprocess.Popen(words, cwd=searches.ROOT, env=env, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"held\n"
    assert (running_info(tmp_path) or {})["pid"] == process.pid
    process.kill()
    process.communicate()
    assert (tmp_path / STATUS_FILE).is_file() and running_info(tmp_path) is None
    RunLock(tmp_path).close()
    assert not (tmp_path / STATUS_FILE).exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/run"):
        RunLock(tmp_path / "file" / "run")


def test_who_only_looks_keeps_no_search_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks are shared among themselves, and a search waits for them."""
    code = (
        "import sys; from pathlib import Path; from swarm.runs.lock import running_info\n"
        "print('looks', flush=True)\nwhile True: running_info(Path(sys.argv[1]))"
    )
    words, env = [sys.executable, "-c", code, str(tmp_path)], searches.environment()
    looker = subprocess.Popen(words, cwd=searches.ROOT, env=env, stdout=subprocess.PIPE)
    assert looker.stdout and looker.stdout.readline() == b"looks\n"
    monkeypatch.setattr("swarm.runs.lock.LOCK_TIMEOUT_S", 60)
    stop = time.monotonic() + 1.0
    try:
        while time.monotonic() < stop:
            RunLock(tmp_path).close()
    finally:
        looker.kill()
        looker.communicate()


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path) -> list[str]:
    """The arguments of a search that goes on for minutes."""
    folder = tmp_path_factory.mktemp("long")
    keys = {"optimizer__max_iterations": 2000, "optimizer__patience": 2000}
    (folder / "conf").mkdir()
    words = searches.arguments(folder, tiny_llama, tiny_pool, "long", **keys)
    return [*words, f"--config-dir={folder / 'conf'}"]


def test_a_search_is_seen_from_outside_kept_alone_ended_and_started_again(long: list[str]) -> None:
    folder = Path(long[1].removeprefix("folder=")) / "long"
    process = searches.start(long)
    try:
        note = until(lambda: (n := running_info(folder) or {}).get("iteration", 0) > 1 and n)
        second = searches.run(long)
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in err + out, err
    assert "stopped; the same command with name=long resumes" in err
    assert second.returncode == 1 and second.stderr.count("\n") == 1
    assert f"process {note['pid']}" in second.stderr and "name=" in second.stderr
    assert note["max_iterations"] == 2000 and note["activity"].startswith("round")
    keys = "pid host started updated activity iteration max_iterations done total best"
    keys += " prompts_per_second seconds_left share budget_share answers"
    assert set(note) == set(keys.split())
    assert running_info(folder) is None and not (folder / STATUS_FILE).exists()
    rounds = (read_state(folder) or {})["rounds"]
    assert len(rounds) > note["iteration"]

    again = load_command(folder)
    assert again == json.loads((folder / COMMAND_FILE).read_text())
    assert again["directory"] == str(searches.ROOT)
    done = searches.run([*again["arguments"], f"optimizer.max_iterations={len(rounds)}"])
    assert "another search" in done.stderr, "another limit is another search"
    assert [w for w in again["arguments"] if w.startswith("name=")] == ["name=long"]
    assert sorted(again["arguments"]) == sorted(long)


SWALLOWING = """
import os, signal
from swarm._util.cli import handle_termination_signals, one_line_errors
handle_termination_signals()
with one_line_errors("lost"):
    try:
        os.kill(os.getpid(), signal.{0})
    except KeyboardInterrupt:
        raise ValueError("of its own") from None
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupt_that_compiled_code_makes_its_own_error_of(name: str, code: int) -> None:
    words = [sys.executable, "-c", SWALLOWING.format(name)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == "stopped; the same command with name=lost resumes\n"
