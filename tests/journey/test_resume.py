"""Killed at any moment and started again, a search ends as if it had never been killed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import searches

from swarm.runs.folder import RunRecord, read_state


@pytest.mark.parametrize(
    ("arguments", "few"), [(searches.arguments, False), (searches.mutating, True)]
)
def test_kills_before_writes_change_nothing(
    tmp_path: Path,
    tiny_llama: Path,
    tiny_pool: Path,
    arguments: Callable[..., list[str]],
    few: bool,
) -> None:
    """SIGKILL before each kind of write of a search, one after the other."""
    more = {"optimizer__max_iterations": 6, "optimizer__patience": 6, "job__items": 4}
    plain = arguments(tmp_path, tiny_llama, tiny_pool, "plain", **more)
    killed = arguments(tmp_path, tiny_llama, tiny_pool, "killed", **more)
    folder = tmp_path / "search"
    kills = searches.run_killed(killed, folder / "killed", few)
    assert kills == ([1, 1, 3] if few else [0, 0, 1, 1, 1, 3, 7, 7, 7])
    assert searches.run(plain).returncode == 0
    assert searches.differences(folder / "plain", folder / "killed") == []


def test_a_kill_between_the_answers_and_the_bests_is_mended(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """Bests, scratchpad and drafts are put right from the state."""
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, "run")
    assert searches.run(command).returncode == 0
    folder = tmp_path / "search" / "run"
    whole = searches.tree(folder)
    (folder / "utility_scratchpad.json").unlink()
    (folder / "global_best" / "answers_dev.jsonl").unlink()
    for path in (folder / "particle_2" / "personal_best").iterdir():
        path.unlink()
    (folder / ".run.json.99.tmp").write_text("{")
    assert searches.run(command).returncode == 0
    assert searches.tree(folder) == whole
    for _ in range(2):  # a draft of the first round goes too
        RunRecord(tmp_path / "new").open_or_resume({"task": "x"}, ["amber"])
        (tmp_path / "new" / ".run.json.99.tmp").write_text("{")
    RunRecord(tmp_path / "new").open_or_resume({"task": "x"}, ["amber"])
    left = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert left == ["rounds.jsonl", "run.json"]


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    long = {"optimizer__max_iterations": 500, "optimizer__patience": 500}
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, "run", **long)
    process = searches.start(command)
    folder = tmp_path / "search" / "run"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (folder / "global_best").is_dir():
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "name=" in err and "resumes" in err and "Traceback" not in err + out
    assert len((read_state(folder) or {})["rounds"]) >= 1


def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """A real file system of half a megabyte, mounted in a namespace of its own."""
    small = tmp_path / "small"
    small.mkdir()
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, "run")
    search = [sys.executable, "-m", "swarm.search", *command, f"folder={small}"]
    script = (
        f'mount -t tmpfs -o size=150k none {small} && "$@"; code=$?; ls -A {small}/run; exit $code'
    )
    result = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "bash", *search],
        cwd=searches.ROOT,
        env=searches.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"no mount namespaces here: {result.stderr.strip()[:80]}")
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "No space left" in result.stderr and str(small) in result.stderr
    assert ".tmp" not in result.stdout.splitlines()[-1]
