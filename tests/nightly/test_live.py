"""The live view of a search in a real terminal."""

import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyte
import pytest
import searches

LINES = 24
Search = Callable[..., list[str]]


def written(command: list[str], columns: int, **environment: str) -> bytes:
    """Everything a search writes to a terminal of so many columns and 24 lines."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (LINES, columns))
    surroundings = searches.environment(**{"TERM": "xterm-256color", **environment})
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.search", *command],
        cwd=searches.ROOT,
        env=surroundings,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            seen += part
    os.close(ours)
    assert process.wait(timeout=60) == 0, seen.decode()
    return seen


def screens(seen: bytes, columns: int) -> list[list[str]]:
    """What stands on the screen whenever the live view is drawn anew, and at the end."""
    screen = pyte.HistoryScreen(columns, LINES, history=1000)
    stream = pyte.ByteStream(screen)
    found = []
    for part in re.split(rb"(?=\r\x1b\[2K)", seen):
        stream.feed(part)
        found.append([line.rstrip() for line in screen.display])
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path) -> Search:
    """The arguments of a search of a second, by name and further keys."""
    folder = tmp_path_factory.mktemp("live")

    def command(name: str, **more: Any) -> list[str]:
        keys = {
            "optimizer__max_iterations": 2,
            "test": "false",
            "noise_floor": "false",
            "ensemble": 0,
            **more,
        }
        return searches.arguments(folder, tiny_llama, tiny_pool, name, **keys)

    return command


@pytest.mark.parametrize(("columns", "particles"), [(80, 7), (200, 8)])
def test_a_terminal_shows_the_search_live(columns: int, particles: int, small: Search) -> None:
    # Long enough for a picture, drawn four times a second, between two iterations.
    more = {"optimizer__max_iterations": 8, "optimizer__patience": 8}
    command = small(f"wide_{columns}", optimizer__particles=particles, **more)
    seen = written(command, columns, **({"NO_COLOR": "1"} if columns == 200 else {}))
    shown = screens(seen, columns)
    assert (b"\x1b[1;32m" in seen) == (columns == 80), "colour, but for NO_COLOR"
    assert not re.search(rb"\x1b\[[0-9;]*(3|4|9)[0-7]m", seen) or columns == 80
    drawn = r"(?s)\d+/\d+ items.*prompts/s.*^best .*\*"
    live = [text for text in map("\n".join, shown) if re.search(drawn, text, re.M)]
    assert live, "no live view with particles"
    text = live[-1]
    assert re.search(r"items\s+\d+\.\d prompts/s", text)
    assert re.search(r"^best 0\.\d{3} +(found|improved by 0\.\d{3}) in round \d", text, re.M)
    cells = re.findall(r"(?:^|\s)(\d+) ([▁▂▃▄▅▆▇█·]+)  ?(0\.\d{3})\*?", text)
    assert [int(number) for number, _, _ in cells] == list(range(particles))
    assert len({len(line) for _, line, _ in cells}) == 1 and "*" in text
    end = "\n".join(shown[-1])
    assert "best expert" in end and "Traceback" not in end


def test_a_dumb_terminal_gets_lines_without_escape_codes(small: Search) -> None:
    seen = written(small("dumb"), 80, TERM="dumb").decode()
    assert "\x1b" not in seen and "round 2: best 0." in seen
    commands = ("search ", "python -m ", "report: ")  # are not broken, so that they can be copied
    lines = [line for line in seen.splitlines() if not line.startswith(commands)]
    assert all(len(line) <= 80 or " " not in line for line in lines)


def test_a_pipe_gets_a_line_an_iteration(small: Search) -> None:
    done = searches.run(small("piped"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("round")]
    assert [line.split()[1] for line in lines] == ["0:", "1:", "2:"], done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "prompts/s" in lines[0]
    phases = [line for line in done.stdout.splitlines() if line.startswith("answering")]
    assert [re.sub(r"\d+", "N", line) for line in phases] == [
        "answering N dev items by N mixtures"
    ], "short phases are announced once"
