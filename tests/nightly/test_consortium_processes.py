"""Processes of the consortium's command: interrupts, and what the plugin costs llm."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import consortium_members
import pytest
import searches
from consortium_members import BLUE, GREEN, JUDGE
from endpoints import Reply, chat, endpoint

from swarm._util.settings import parse_settings
from swarm.multi_agent.consortium.settings import ConsortiumSettings
from swarm.multi_agent.consortium.store import ConsortiumStore, RunLog

COUNCIL = parse_settings(
    ConsortiumSettings, {"members": [BLUE, GREEN], "arbiter": JUDGE, "max_iterations": 1}
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh folder of llm's, and nobody's keys."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    for key in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TOGETHER_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.chdir(tmp_path)
    consortium_members.heard.clear()
    yield tmp_path


def started(words: str, *python: str, cwd: Path, **more: str) -> "subprocess.Popen[str]":
    """A question to a consortium in a process of its own, which Ctrl-C interrupts."""
    command = [sys.executable, *python, "-m", "swarm.consortium", *words.split(), "--no-stdin"]
    names = ("LLM_USER_PATH", "MODEL_SWARMS_CACHE")
    paths = os.pathsep.join([str(searches.ROOT), str(searches.HELPERS)])
    more |= {name: os.environ[name] for name in names} | {"PYTHONPATH": paths}
    return subprocess.Popen(
        command,
        env=searches.environment(**more),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def interrupted(process: "subprocess.Popen[str]", at: str) -> str:
    """What a process says until it ends by Ctrl-C, after a line with this text."""
    assert process.stderr
    seen = ""
    while at not in (line := process.stderr.readline()):
        assert line, f"it ended before {at!r}: {seen}"
        seen += line
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130 and rest.splitlines()[-1] == "stopped"
    return seen


def test_an_interrupt_and_no_torch(place: Path) -> None:
    words = f"Why? -m function/consortium_members:slow --arbiter {JUDGE}"
    seen = interrupted(started(words, "-X", "importtime", cwd=place), "asked\n")
    loaded = {line.rpartition("|")[2].strip() for line in seen.splitlines()}
    assert "swarm.consortium.commands" in loaded
    assert not loaded & {"torch", "transformers", "llm"}


def test_ctrl_c_keeps_what_members_have_answered(place: Path) -> None:
    """In the record of runs and in the file of --output; what was under way is named as stopped."""

    def answer(asked: Any) -> Reply:
        slow = asked.body["model"] == "slow"
        return Reply(chat(f"the {asked.body['model']} answer").body, wait=60.0 if slow else 0.0)

    words = "Why? -m openai/quick -m openai/slow --arbiter openai/quick --output out.json"
    with endpoint(answer) as server:
        process = started(words, cwd=place, OPENAI_BASE_URL=server.url)
        interrupted(process, "member openai/quick")
    found = json.loads((place / "out.json").read_text())
    said = {one["model"]: one for one in found["model_responses"]}
    assert said["openai/quick"]["response"] == "the quick answer"
    assert said["openai/slow"]["error"] == "stopped" and found["synthesis"] is None
    [run] = RunLog().list()
    assert (run["status"], run["error"]) == ("failed", "stopped")
    kept = RunLog().get(run["id"])["result"]["model_responses"]
    assert [one.get("response") for one in kept] == ["the quick answer", None]


WORDS = """
import sys
from llm.cli import cli
cli(["--version"], standalone_mode=False)
print("=== asked", file=sys.stderr)
cli(["-m", "council", "Why?"])
"""


def test_the_plugin_costs_llm_next_to_nothing_and_needs_no_folder(place: Path) -> None:
    ConsortiumStore().save("council", COUNCIL)
    paths = f"{searches.ROOT}:{searches.HELPERS}"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", WORDS],
        capture_output=True,
        text=True,
        input="",
        env=searches.environment(PYTHONPATH=paths, LLM_USER_PATH=os.environ["LLM_USER_PATH"]),
    )
    version, answer = done.stdout.splitlines()
    assert done.returncode == 0 and "version" in version and answer == "answer 1"
    before, after = done.stderr.split("=== asked\n")
    times = re.findall(r"import time: +(\d+) \| +(\d+) \| ( *)(\S+)", before)
    own = {name: int(alone) for alone, _, _, name in times if name.startswith("swarm")}
    assert "swarm.consortium.cli" in own and sum(own.values()) < 3_000_000
    few = ("_version", "errors", "_util", "_util.terminal", "_util.threads", "consortium")
    few += ("consortium.cli", "consortium.plugin")
    assert set(own) <= {"swarm", *(f"swarm.{name}" for name in few)}
    loaded = {name.split(".")[0] for *_, name in times}
    assert not loaded & {"hydra", "omegaconf", "rich"}
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)
    assert re.search(rf"member {re.escape(GREEN)}: \d+\.\d s", after)
    with sqlite3.connect(place / "llm" / "logs.db") as log:
        assert log.execute("SELECT model FROM turns").fetchall() == [("council",)]
