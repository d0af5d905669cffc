"""Limits of both servers, by raw sockets: endless heads, half-open connections, large bodies."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import ui_pages
from model_server import Told, served

from swarm.models.base import Completion
from swarm.serve import limits

FEW_FILES = 256

SERVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_FILES}, {FEW_FILES}))
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
from model_server import Told, served
from swarm.models.base import Completion
with served({{"a/b": Told(Completion("x"))}}) as url:
    print(url, flush=True)
    sys.stdin.read()
"""
"""A server in a process that may open few files."""

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
JSON = f"{HEAD}Content-Type: application/json\r\n"
HALF = f"{JSON}Content-Length: 9\r\n\r\n{{"


@pytest.fixture(scope="module", params=["server", "page"])
def door(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server, and its process."""
    if request.param == "page":
        with ui_pages.served(tmp_path_factory.mktemp("page"), "--no-token") as url:
            yield url, psutil.Process().children()[-1]
        return
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
        process.stdin.close()
        assert process.wait(60) == 0


def connected(url: str, text: str = "") -> socket.socket:
    """A connection on which a text was sent."""
    where = urlsplit(url)
    found = socket.create_connection((str(where.hostname), where.port or 0), timeout=20)
    found.sendall(text.encode())
    return found


def reply(connection: socket.socket) -> str:
    """Everything that arrives until the server closes the connection."""
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts).decode()


def healthy(url: str) -> bool:
    """Whether a client that sends a whole request is answered."""
    whole = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with connected(url, whole) as one:
        return reply(one).startswith(("HTTP/1.1 200 ", "HTTP/1.1 404 "))


def test_endless_headers_are_cut_off(door: tuple[str, psutil.Process]) -> None:
    url, process = door
    while process.cpu_percent(1.0) > 5:  # the page still imports what Talk needs
        pass
    before = process.memory_info().rss
    header = b"X-Endless: " + b"x" * 2**16 + b"\r\n"
    with ExitStack() as stack:
        for _ in range(4):
            one = stack.enter_context(connected(url, HEAD))
            with pytest.raises(ConnectionError):
                for _ in range(1000):
                    one.sendall(header)
        assert process.memory_info().rss - before < 20 * 2**20
        with connected(url, f"{HEAD}X: {'x' * limits.MAX_HEAD_BYTES}") as one:
            assert reply(one).startswith("HTTP/1.1 400 ")


def test_half_open_connections_do_not_keep_others_out(door: tuple[str, psutil.Process]) -> None:
    """More of them than the server may open files; it is asked before any is too old."""
    url, _ = door
    began = time.monotonic()
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connected(url, HALF))
        assert all(healthy(url) for _ in range(5))
    assert time.monotonic() - began < limits.REQUEST_S


@pytest.mark.parametrize("half", ["", HEAD, HALF])
def test_a_request_that_does_not_end_is_closed(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 0.3)
    with served({"a/b": Told(Completion("x"))}) as url, connected(url, half) as one:
        assert reply(one) == ""


@pytest.mark.parametrize("kind", ["Content-Length: 20000000", "Transfer-Encoding: chunked"])
def test_a_client_sees_that_its_body_is_too_large(
    door: tuple[str, psutil.Process], kind: str
) -> None:
    """It reads only after it has sent everything."""
    million = b"x" * 1_000_000
    with connected(door[0], f"{JSON}Connection: close\r\n{kind}\r\n\r\n") as one:
        for _ in range(20):
            one.sendall(million if "Length" in kind else b"f4240\r\n" + million + b"\r\n")
        if "Length" not in kind:
            one.sendall(b"0\r\n\r\n")
        answer = reply(one)
    if answer.startswith("HTTP/1.1 404 "):  # the page has none that is read; all of it was sent
        assert "Length" not in kind
    else:
        assert answer.startswith("HTTP/1.1 413 ") and "more than 16777216 bytes" in answer
