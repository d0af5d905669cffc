"""Fetching the evaluation files, against a real server on the loopback."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from swarm import fetch_data

ROOT = Path(__file__).resolve().parents[2]
CONTENT = b'{"dataset": "small", "dev": [], "test": []}' * 50
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Mirror(BaseHTTPRequestHandler):
    """Serves good.json, and files that break off, stall or hold something else."""

    asked: list[str]
    leave: threading.Event

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        self.asked.append(name)
        if name == "absent.json":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if name == "stalled.json":
            self.leave.wait(20)
        elif name == "truncated.json":
            self.wfile.write(CONTENT[:100])
        else:
            self.wfile.write(CONTENT if name == "good.json" else CONTENT[::-1])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[tuple[str, type[Mirror]]]:
    """The address of a running mirror and its handler class, which lists what was asked for."""
    handler = type("Own", (Mirror,), {"asked": [], "leave": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/data/eval/", handler
    handler.leave.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The target folder, with all names of the mirror pinned to one content."""
    sums = tmp_path / "SHA256SUMS"
    names = ("good", "absent", "wrong", "truncated", "stalled")
    sums.write_text("".join(f"{SHA256}  {name}.json\n" for name in names))
    pinned = fetch_data.pinned(sums)
    monkeypatch.setattr(fetch_data, "pinned", lambda: pinned)
    return tmp_path / "eval"


def run(folder: Path, url: str, *names: str) -> int:
    patience = "3" if "stalled" in names else "60"
    arguments = [*names, "--to", str(folder), "--url", url, "--timeout", patience]
    return int(fetch_data.main(arguments))


def test_a_file_is_fetched_once(
    mirror: tuple[str, type[Mirror]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = mirror
    assert run(folder, url, "good") == 0
    assert (folder / "good.json").read_bytes() == CONTENT
    assert run(folder, url, "good") == 0
    assert handler.asked == ["good.json"]
    assert capsys.readouterr().out == "good: fetched, 2 KiB\ngood: already present\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "HTTP 404"),
        ("wrong", "is not the pinned"),
        ("truncated", "incomplete download, 100 of 2150 bytes"),
        ("stalled", "timed out"),
    ],
)
def test_what_is_not_right_is_not_kept(
    mirror: tuple[str, type[Mirror]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    message: str,
) -> None:
    assert run(folder, mirror[0], "good", name) == 1
    error = capsys.readouterr().err
    assert message in error and f"{name}.json" in error and error.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["good.json"]


def test_another_file_in_its_place_is_left_alone(
    mirror: tuple[str, type[Mirror]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    (folder / "good.json").write_text("my own")
    assert run(folder, mirror[0], "good") == 1
    assert "remove it" in capsys.readouterr().err
    assert (folder / "good.json").read_text() == "my own" and mirror[1].asked == []
    assert fetch_data.main(["--list", "--to", str(folder)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["good  different", "absent  absent"]


def test_a_folder_is_a_mirror_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.json").write_bytes(CONTENT)
    assert run(folder, tmp_path.as_uri(), "good") == 0
    assert fetch_data.main(["--list", "--to", str(folder)]) == 0
    assert "good  present" in capsys.readouterr().out


def test_every_file_of_the_original_is_pinned() -> None:
    sums = fetch_data.pinned()
    assert len(sums) == 33 and {"gsm8k", "mmlu_pro", "rm", "human_legal_AI"} <= set(sums)
    assert all(len(value) == 64 for value in sums.values())


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = ["--to", str(tmp_path / "eval"), "--url", "http://127.0.0.1:9/eval"]
    for words, code, said in (
        (["all", *away], 1, "connection"),
        (["gsm9k"], 2, "gsm8k"),
        ([], 2, "no files given; allowed: all, "),
        (["--too"], 2, "--t"),
    ):
        assert fetch_data.main(words) == code
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not (tmp_path / "eval").exists()
