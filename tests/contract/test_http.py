"""Many requests at once, to servers that answer, fail, stall, refuse and drop the line."""

import asyncio
import http.server
import os
import pickle
import random
import re
import threading
import time
import traceback
from typing import Any

import aiohttp
import file_servers
import pytest
from endpoints import Asked, Endpoint, Rationed, Reply, endpoint, in_turn

from swarm.errors import UserError
from swarm.models.http import Call, CallFailures, HttpClient
from swarm.models.http_errors import (
    AccessDenied,
    BadRequest,
    ConnectionFailed,
    NotFound,
    RateLimited,
    RequestError,
    ServerFault,
)
from swarm.models.rate_limit import AdaptiveThrottle, Limits
from swarm.models.transport import describe_connection_error

KEY = "sk-very-secret-0123456789"


def echo(asked: Asked) -> Reply:
    return Reply({"said": asked.body["n"]})


def client(server: Endpoint | str, key: str | None = None, **limits: Any) -> HttpClient:
    url = server if isinstance(server, str) else server.url
    return HttpClient("Echo", url, key, Limits(**limits))


def numbers(count: int) -> list[Call]:
    return [Call({"n": n}) for n in range(count)]


def said(number: int, content: Any) -> Any:
    if isinstance(content, BadRequest):
        raise content
    return content["said"]


def each(mine: HttpClient, calls: list[Call]) -> list[Any]:
    """The outcome of every call."""

    def ask(number: int, call: Call) -> None:
        try:
            [found[number]] = mine.run_calls([call], said)
        except UserError as error:
            found[number] = error

    found: dict[int, Any] = {}
    threads = [threading.Thread(target=ask, args=one) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(calls))]


def test_answers_come_in_order_and_threads_share_the_limit() -> None:
    """Also beside a running event loop, after a fork, and of a pickled client."""
    with endpoint(lambda asked: Reply({"said": asked.body["n"]}, wait=0.01)) as server:
        mine = client(server, concurrency=5)
        found = each(mine, numbers(30))
        assert mine.run_calls(numbers(30), said) == found == list(range(30))
        assert 2 <= server.peak <= 5 and mine.run_calls([], said) == []

        async def notebook() -> list[int]:
            return mine.run_calls(numbers(3), said)

        assert asyncio.run(notebook()) == [0, 1, 2]
        child = os.fork()
        if child == 0:
            os._exit(0 if mine.run_calls(numbers(3), said) == [0, 1, 2] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert pickle.loads(pickle.dumps(mine)).run_calls(numbers(2), said) == [0, 1]


@pytest.mark.parametrize("status", [408, 429, 503])
def test_what_may_pass_is_asked_again(status: int) -> None:
    failing = Reply({"error": {"message": "busy"}}, status)
    with endpoint(in_turn(failing, Reply({"said": "well"}))) as server:
        mine = client(server, retries=2)
        assert mine.run_calls(numbers(1), said) == ["well"]
        assert len(server.asked) == 2 and mine.repeated == 1


@pytest.mark.parametrize(
    "broken",
    [
        Reply(drop=True),
        Reply(b'{"said": '),
        Reply({"other": 1}),
        Reply(None),
        Reply(b"[" * 100_000),
        Reply(b"\xff\xfe"),
    ],
)
def test_lost_connections_and_wrong_answers_are_asked_again(broken: Reply) -> None:
    with endpoint(in_turn(broken, Reply({"said": "well"}))) as server:
        assert client(server, retries=1).run_calls(numbers(1), said) == ["well"]
    with endpoint(in_turn(broken)) as server:
        kind = ConnectionFailed if broken.drop else ServerFault
        with pytest.raises(kind, match=r"^Echo \(http.*2 attempts$"):
            client(server, retries=1).run_calls(numbers(1), said)


def test_a_response_of_any_size_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.models.http.MAX_RESPONSE_BYTES", 1000)
    with endpoint(lambda _: Reply({"said": "well" * 300})) as server:
        with pytest.raises(BadRequest, match=r"^Echo \(http.*exceeds 0 MiB$"):
            client(server).run_calls(numbers(1), said)
        assert len(server.asked) == 1


def test_waits_grow_and_are_spread() -> None:
    fault = ServerFault("busy")

    def failures(count: int, **more: Any) -> CallFailures:
        return CallFailures(Limits(retries=6), AdaptiveThrottle(), count, **more)

    for count in range(6):
        most, waits = 0.25 * 1.4**count, [failures(count).add(fault, 0.0) for _ in range(50)]
        assert all(w is not None and most / 2 <= w <= most for w in waits)
        assert len(set(waits)) > 10
        assert failures(count).add(BadRequest("wrong"), 0.0) is None
    assert failures(1, first_fault=time.monotonic() - 301).add(fault, 0.0) is None
    assert failures(6).add(fault, 0.0) is None


@pytest.mark.parametrize("status", [429, 503])
def test_a_retry_after_delays_its_request_alone(status: int) -> None:
    def answer(asked: Asked) -> Reply:
        first = asked.body["n"] == 0 and len(zeros) == 0
        zeros.extend([asked.time] * (asked.body["n"] == 0))
        return Reply({"error": "later"}, status, {"Retry-After": "2"}) if first else echo(asked)

    zeros: list[float] = []
    with endpoint(answer) as server:
        mine = client(server, concurrency=2, retries=1)
        assert mine.run_calls(numbers(20), said) == list(range(20))
        others = [asked.time for asked in server.asked if asked.body["n"]]
    assert zeros[1] - zeros[0] >= 1.99 and max(others) < zeros[1]
    assert mine.throttle.rate is None and not mine.throttle.remaining_pause > 0


def test_requests_refused_at_random_do_not_lower_the_rate() -> None:
    """One in eight, before the others that were sent at the same time are answered."""

    def answer(asked: Asked) -> Reply:
        with server.lock:
            refused = draw.random() < 0.125
        if refused:
            return Reply({"error": "slow down"}, 429, {"Retry-After": "1"})
        return Reply({"said": asked.body["n"]}, wait=0.05)

    draw = random.Random(1)
    with endpoint(answer) as server:
        mine = client(server, concurrency=64, retries=0)
        began = time.monotonic()
        assert mine.run_calls(numbers(400), said) == list(range(400))
        assert time.monotonic() - began < 15 and mine.throttle.rate is None


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, AccessDenied, "401 Unauthorized: not you; check the key in ECHO_KEY"),
        (404, NotFound, "404 Not Found: not you; check the URL and the model's name"),
        (422, BadRequest, "422 Unprocessable.*: not you"),
        (307, BadRequest, "307 Temporary Redirect: not you; it points to http://elsewhere/"),
        (499, BadRequest, "499: not you"),
    ],
)
def test_what_will_not_pass_is_not_asked_again(
    status: int, kind: type[RequestError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_KEY", KEY)
    reply = Reply(
        {"error": {"message": "not\n\x1b you"}}, status, {"Location": "http://elsewhere/"}
    )
    with endpoint(in_turn(reply)) as server:
        with pytest.raises(kind, match=words) as caught:
            client(server, "ECHO_KEY").run_calls(numbers(1), said)
        assert type(caught.value) is kind and isinstance(caught.value, UserError)
        assert len(server.asked) == 1 and str(caught.value).isprintable()
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is kind and str(again) == str(caught.value)


def test_requests_are_sent_at_the_pace_that_is_set() -> None:
    with endpoint(echo) as server:
        mine = client(server, requests_per_minute=1200)
        began = time.monotonic()
        mine.run_calls(numbers(6), said)
        mine.run_calls(numbers(5), said)
        times = sorted(asked.time for asked in server.asked)
    assert len(times) == 11
    early = [n for n, at in enumerate(times) if at < began + n * 0.05 - 0.001]
    assert not early, f"they came too early: {early} of {[at - began for at in times]}"


def test_a_key_that_comes_back_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_KEY", f" {KEY}\n")
    elsewhere = Reply({}, 301, {"Location": f"http://elsewhere/?key={KEY}"})
    with endpoint(in_turn(elsewhere)) as server, pytest.raises(BadRequest) as caught:
        client(server, "ECHO_KEY").run_calls(numbers(1), said)
    assert "http://elsewhere/?key=***" in str(caught.value)
    with endpoint(lambda asked: Reply({"said": asked.headers["Authorization"]})) as server:
        assert client(server, "ECHO_KEY").run_calls(numbers(1), said) == ["Bearer ***"]
        assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"


def test_secrets_in_the_configuration_are_refused_and_not_repeated() -> None:
    for url in (f"https://me:{KEY}@host/v1", f"https://host/v1?key={KEY}"):
        with pytest.raises(UserError, match="api_key_env") as caught:
            client(url)
        assert KEY not in str(caught.value)
    for name in (KEY, "AIzaSyExample", "", 5):
        with pytest.raises(UserError, match="name of an environment variable") as caught:
            HttpClient("Echo", "https://host/v1", name)  # type: ignore[arg-type]
        assert not name or str(name) not in str(caught.value)
    for wrong in ("host/v1", None, "https://[::1/v1", "http://host:0/v1", "http://host:port/v1"):
        with pytest.raises(UserError, match=r"http://.*a port from 1 to 65535"):
            HttpClient("Echo", wrong, None)  # type: ignore[arg-type]
    for limits in ({"concurrency": True}, {"retries": -1}, {"timeout": None}):
        with pytest.raises(UserError, match=f"limits.{next(iter(limits))}="):
            Limits(**limits)  # type: ignore[arg-type]


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with endpoint(echo) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        assert client("http://somewhere.invalid/v1").run_calls(numbers(1), said) == [0]
        assert proxy.asked[0].path == "http://somewhere.invalid/v1"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with endpoint(echo) as direct:
            assert client(direct).run_calls(numbers(1), said) == [0]
            assert len(direct.asked) == 1


def test_the_password_of_a_proxy_is_shown_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the proxy refuses the line, and not where its URL is none."""
    monkeypatch.setattr("urllib.request.proxy_bypass", lambda host: False)

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            self.send_error(407)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    mine = client("https://somewhere.invalid/v1", retries=0)
    with file_servers.serving(Refusing) as url:
        monkeypatch.setenv("https_proxy", url.replace("://", f"://me:{KEY}@"))
        mine.check()
        words = r"the proxy returned 407 Proxy Authentication Required$"
        with pytest.raises(ConnectionFailed, match=words) as caught:
            mine.run_calls(numbers(1), said)
    assert KEY not in "".join(traceback.format_exception(caught.value))
    for wrong in (f"me:{KEY}@host:8", f"http://me:{KEY}@host:no", f"http://me:{KEY}@[::1"):
        monkeypatch.setenv("https_proxy", wrong)
        with pytest.raises(UserError, match="variable https_proxy: must begin") as told:
            mine.check()
        assert KEY not in "".join(traceback.format_exception(told.value))
        assert KEY not in describe_connection_error(aiohttp.InvalidURL(wrong))


@pytest.mark.parametrize("after", [None, "1", "0"])
def test_a_rate_limit_loses_nothing(after: str | None) -> None:
    """Not with one repetition allowed, and not with many more requests under way than it lets."""
    limited = Rationed(40.0, after, echo)
    with endpoint(limited) as server:
        mine = client(server, concurrency=64, retries=0)
        began = time.monotonic()
        assert mine.run_calls(numbers(160), said) == list(range(160))
        taken = time.monotonic() - began
    assert taken < 10 * 160 / 40, "the pace is far below what the endpoint accepts"
    assert limited.refused < 120, "it was pressed on"
    assert mine.throttle.rate is not None


def test_a_rate_limit_that_never_ends_is_an_error() -> None:
    with endpoint(in_turn(Reply({"error": "slow down"}, 429))) as server:
        mine = client(server, rate_limit_timeout=2.0, retries=6, concurrency=4)
        found = each(mine, numbers(4))
        assert len(server.asked) < 40
    words = r"slow down; no retry after 2 s \(limits.rate_limit_timeout\)(; \d+ attempts)?$"
    assert all(isinstance(one, RateLimited) and re.search(words, str(one)) for one in found)


def test_a_request_that_is_always_refused_does_not_take_the_others_along() -> None:
    """One above a limit of tokens is refused for ever, while others are accepted."""

    def answer(asked: Asked) -> Reply:
        return Reply({"error": "too large"}, 429) if asked.body["n"] == 7 else echo(asked)

    with endpoint(answer) as server:
        found = each(client(server, rate_limit_timeout=1.0, concurrency=4), numbers(14))
    assert isinstance(found.pop(7), RateLimited) and found == [n for n in range(14) if n != 7]


def test_a_rate_limited_model_holds_no_place_while_it_waits() -> None:
    """Requests of one model wait for 5 s; another model of the endpoint is answered at once."""

    def told(asked: Asked) -> Reply:
        if asked.body["model"] == "slow":
            return Reply({"error": {"message": "slower"}}, 429, {"Retry-After": "5"})
        return echo(asked)

    with endpoint(told) as server:
        shared = client(server, concurrency=2)
        slow, quick = shared.for_model("slow"), shared.for_model("quick")
        calls = [Call({"n": n, "model": "slow"}) for n in range(8)]
        for _ in range(8):
            threading.Thread(target=each, args=(slow, calls), daemon=True).start()
        while not slow.throttle.remaining_pause > 0:
            time.sleep(0.01)
        threading.Thread(target=each, args=(slow, calls[:2]), daemon=True).start()
        began = time.monotonic()
        found = quick.run_calls([Call({"n": n, "model": "quick"}) for n in range(8)], said)
        assert found == list(range(8)) and time.monotonic() - began < 2


def test_a_refusal_after_a_lull_keeps_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers slower than the window say nothing of what the server accepts."""
    now = 1000.0
    monkeypatch.setattr("swarm.models.rate_limit.time.monotonic", lambda: now)
    throttle = AdaptiveThrottle()
    for _ in range(10):
        throttle.record_refusal(throttle.record_send(), None)
    for _ in range(40):
        now += 0.1
        throttle.record_success(throttle.record_send())
    rate, now = throttle.rate, now + 60.0
    throttle.record_refusal(throttle.record_send(), None)
    assert rate is not None and throttle.rate == pytest.approx(0.95 * rate)
