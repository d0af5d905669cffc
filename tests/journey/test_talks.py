"""Mixtures of agents and consortia as processes, with functions as their models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import searches

MEMBERS = """
def blue(prompt):
    return "It is blue.\\x1b[2J"

def green(prompt):
    return "It is green."

def judge(prompt):
    return "<synthesis>both</synthesis><confidence>0.9</confidence>"
"""
BLUE, GREEN, JUDGE = (f"function/members:{name}" for name in ("blue", "green", "judge"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the functions."""
    (tmp_path / "members.py").write_text(MEMBERS)
    return tmp_path


def run(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command there."""
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        env=searches.environment(LLM_USER_PATH=str(folder / "llm")),
        cwd=folder,
        input="",
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_mixture_answers(folder: Path) -> None:
    words = ["--aggregator", BLUE, "--reference_models", f"{GREEN}:2"]
    done = run(folder, "swarm.moa", *words, "Why?")
    assert (done.returncode, done.stdout) == (0, "It is blue.␛[2J\n"), done.stderr
    assert f"layer 1, proposer {GREEN} #2: 0.0 s" in done.stderr


def test_a_consortium_is_saved_asked_and_recorded(folder: Path) -> None:
    members = ["-m", BLUE, "-m", GREEN, "--arbiter", JUDGE, "--max-iterations", "1"]
    saved = run(folder, "swarm.consortium", "save", "council", *members)
    assert saved.returncode == 0, saved.stderr
    done = run(folder, "swarm.consortium", "Why?", "--consortium", "council")
    assert (done.returncode, done.stdout) == (0, "both\n"), done.stderr
    assert re.search(rf"iteration 1, member {re.escape(GREEN)}: \d+\.\d s", done.stderr)
    assert "Why?" in run(folder, "swarm.consortium", "runs").stdout
