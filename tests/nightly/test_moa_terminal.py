"""python -m swarm.moa in a real terminal, and with a reader that leaves."""

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import searches
from endpoints import DONE, Asked, Endpoint, Reply, chat, endpoint, event, piece, streamed

STRANGE = "[/INST] a[i] [bold]"
AGAIN = "--aggregator big --reference_models one,two".split()


def answer(asked: Asked, model: str = "") -> Reply:
    """Each model says its name; in pieces if that is asked for, with a null among them."""
    model = model or asked.body["model"]
    if model == "slow":
        return Reply(pieces=[piece("begun"), *[0.02, piece(".")] * 1000, DONE])
    text = f"{model} says {STRANGE}"
    if not asked.body.get("stream"):
        return chat(text)
    usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}
    null = event({"choices": [{"index": 0, "delta": {"content": None}}]})
    said = [piece("", role="assistant"), piece(text[:7]), null, piece(text[7:])]
    return Reply(pieces=[*said, piece(finish="stop"), event(usage), DONE])


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint that is the default provider, and a cache of its own."""
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    with endpoint(answer) as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
        yield made


def environment(**more: str) -> dict[str, str]:
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "MODEL_SWARMS_CACHE")
    return searches.environment(**{name: os.environ[name] for name in names}, **more)


def test_a_reader_that_has_enough(loopback: Endpoint) -> None:
    loopback.answer = lambda asked: (
        streamed(*["x" * 4000] * 200) if asked.body.get("stream") else chat("a")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.moa", *AGAIN, "--quiet", "Why?"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stderr
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=120) == 1 and process.stderr.read() == ""


class Terminal:
    """A chat in a real terminal of 80 columns, without colour."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarm.moa", *words],
            env=environment(TERM="xterm", NO_COLOR="1", COLUMNS="80", LINES="30"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # So that a Ctrl-C that is typed interrupts it.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.seen = ""

    def until(self, text: str, seconds: float = 120.0) -> str:
        """Read to where `text` stands; gives what came until then."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready = select.select([self._ours], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"{text!r} did not come: {self.seen!r}"
            try:
                part = os.read(self._ours, 65536)
            except OSError:
                raise AssertionError(f"{text!r} did not come: {self.seen!r}") from None
            self.seen += part.decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())


def test_a_chat_in_a_terminal(loopback: Endpoint) -> None:
    terminal = Terminal(*AGAIN)
    shown = terminal.until(">>> ")
    assert "no preset: one, two propose, big answers" in shown
    terminal.type("Why?\n")
    shown = terminal.until(">>> ")
    assert f"big says {STRANGE}\r\n" in shown and "layer 1, proposer one: " in shown
    assert "waiting for" in shown, "no live line"
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", shown), "colour in spite of NO_COLOR"
    terminal.type("/stages\n")
    assert f"one says {STRANGE}" in terminal.until(">>> ")
    loopback.answer = lambda asked: answer(asked, "slow" if asked.body.get("stream") else "")
    terminal.type("And then?\n")
    terminal.until("begun")
    terminal.type("\x03")
    assert "stopped" in terminal.until(">>> ")
    assert loopback.left.wait(60), "the answer goes on"
    loopback.answer = answer
    terminal.type("Still there?\n")
    assert f"big says {STRANGE}" in terminal.until(">>> ")
    told = [turn["content"] for turn in loopback.asked[-2].body["messages"]]
    assert told == ["Why?", f"big says {STRANGE}", "Still there?"]
    terminal.type("half a line")
    terminal.until("half a line")
    time.sleep(0.5)
    terminal.type("\x03")
    try:
        shown = terminal.until(">>> ", 10)
    except AssertionError:  # it came just before readline waited: the next line shows it
        terminal.type("\n")
        shown = terminal.until(">>> ")
    assert "leaves the chat" in shown
    terminal.type("\x04")
    assert terminal.process.wait(timeout=120) == 0
