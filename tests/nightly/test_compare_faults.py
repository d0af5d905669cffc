"""Experiments under faults: interrupts, kills, two processes, limits; and the page in a browser."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import compare_endpoint
import endpoints
import headless_browser
import pandas as pd
import pytest
import searches
from compare_endpoint import KEY, asked, repeats, script, texts

from swarm.compare import Config, Question, config
from swarm.compare.sampling import open_answer_cache, replay_scripts, run_scripts
from swarm.models.rate_limit import Limits

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)


ASKS = """
import sys
from swarm.compare import Config
sys.path.insert(0, "tests/helpers")
from compare_endpoint import asked, script
from swarm.compare.sampling import run_scripts
Config.cache_dir = sys.argv[1]
Config.url_key_pairs = [(sys.argv[2], "a-key-of-ours", "FAKE_API_KEY")]
run_scripts([script(asked(f"q{n}")) for n in range(int(sys.argv[3]), int(sys.argv[4]))])
"""


def start_asking(folder: Path, url: str, first: int, last: int) -> "subprocess.Popen[str]":
    """Another process that asks some of the questions q0, q1, ..."""
    return subprocess.Popen(
        [sys.executable, "-c", ASKS, str(folder), url, str(first), str(last)],
        cwd=searches.ROOT,
        env=searches.environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_an_interrupt_ends_the_asking_and_loses_no_answer(settings: Path) -> None:
    def slowly(request: endpoints.Asked) -> endpoints.Reply:
        return endpoints.Reply(repeats(request).body, wait=0.1)

    with compare_endpoint.endpoint(slowly) as server:
        process = start_asking(settings, server.url, 0, 2000)
        while len(server.asked) < 150:
            time.sleep(0.01)
            assert process.poll() is None, process.stderr and process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        sent = len(server.asked)
        assert "KeyboardInterrupt" in said and "are stored" in said
        assert sent < 1500, "it went on"
        came = int(said.split("interrupted: ")[1].split(" of ")[0])
        Config.url_key_pairs = [(server.url, KEY, "FAKE_API_KEY")]
        server.answer = repeats
        whole = [asked(f"q{n}") for n in range(2000)]
        _, keys = replay_scripts(script(one) for one in whole)
        kept = len(open_answer_cache().get(keys))
        assert kept >= came >= 40
        assert texts(run_scripts([script(one) for one in whole])) == [
            f"so: q{n}" for n in range(2000)
        ]
        # What was under way when it ended may have been counted late.
        assert 0 <= len(server.asked) - sent - (2000 - kept) <= 100


@contextmanager
def nobody() -> Iterator[str]:
    """A base URL where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def test_one_dead_endpoint_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.PROBE_LIMITS.timeout * (config.PROBE_LIMITS.retries + 1) <= 60
    quick = Limits(connect_timeout=3.0, timeout=3.0, retries=0)
    monkeypatch.setattr(config, "PROBE_LIMITS", quick)
    with endpoints.endpoint(repeats) as there, nobody() as silent:
        Config.url_key_pairs = [
            ("http://127.0.0.1:1/v1", "a", "A_KEY"),
            (silent, "a", "A_KEY_1"),
            (there.url, KEY, "B_KEY"),
        ]
        began = time.monotonic()
        assert Config.client_for_model("m").base_url == there.url
        assert time.monotonic() - began < 30


def test_a_page_of_answers_in_a_browser(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    kwargs = {"messages": [{"role": "user", "content": "Name a song."}]}
    rows = [
        {"model": f"m{n % 2}", "answer": f"song {n} {hostile}", "score": n, "api_kwargs": kwargs,
         "probs": {"7": 0.5, "8": 0.5}, "error": None}
        for n in range(30)
    ]  # fmt: skip
    page_file = Question.view(
        pd.DataFrame(rows),
        sort_by="score",
        sort_ascending=False,
        open_browser=False,
        filename=tmp_path / "page.html",
    )
    with (
        headless_browser.opened() as browser,
        headless_browser.shown(browser, page_file.as_uri()) as page,
    ):
        assert page.locator(".answer").first.inner_text() == f"song 29 {hostile}"
        page.locator("select[name=model]").select_option("m0")
        assert "of 15 (30 in all)" in page.locator("#count").inner_text()
        page.get_by_label("Search").fill('song -"song 28"')
        assert page.locator(".answer").first.inner_text() == f"song 26 {hostile}"
        page.locator("#next").click()
        assert page.locator(".answer").first.inner_text() == f"song 24 {hostile}"
        page.locator("#size").select_option("10")
        assert page.locator("article").count() == 10
        page.locator("#down").click()
        assert page.locator(".answer").first.inner_text() == f"song 0 {hostile}"
