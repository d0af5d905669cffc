"""Answers that come in pieces: whole, cut anywhere, broken off, stalled, and left by the reader."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from endpoints import (
    DONE,
    Asked,
    Endpoint,
    Reply,
    chat,
    endpoint,
    event,
    in_turn,
    piece,
    streamed,
)

from swarm.models.base import Completion, Delta, Request, Stream, Token
from swarm.models.cache import Cache
from swarm.models.http_errors import (
    BadRequest,
    ConnectionFailed,
    RequestError,
    RequestTimeout,
    ServerFault,
)
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits
from swarm.models.transport import EventStreamParser

KEY = "sk-very-secret-0123456789"
ASK = Request("a")


def model(server: Endpoint, retries: int = 1, timeout: float = 60.0, **more: Any) -> OpenAI:
    limits = Limits(retries=retries, timeout=timeout, rate_limit_timeout=600.0 * (retries > 0))
    return OpenAI(
        **{"model": "small", "base_url": server.url, "api_key_env": None, "limits": limits, **more}
    )


def drained(stream: Stream) -> tuple[list[Delta], Completion]:
    """All pieces, and the whole."""
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def said(pieces: list[Delta]) -> tuple[str, str]:
    return "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)


def sent(*pieces: bytes | float, drop: bool = False) -> Reply:
    return Reply(pieces=pieces, drop=drop)


def test_pieces_come_as_they_are_sent_and_make_the_whole() -> None:
    read = threading.Event()

    def pieces() -> Iterator[bytes | float]:
        yield piece("one ")
        assert read.wait(60)
        yield from (0.3, piece("two"), piece(finish="length"), DONE)

    with endpoint(lambda asked: Reply(pieces=pieces())) as server:
        mine = model(server, body={"top_p": 0.5})
        stream = mine.stream(ASK)
        assert next(stream) == Delta("one ")
        read.set()
        rest, done = drained(stream)
        assert rest == [Delta("two")]
    assert (done.text, done.finish, done.cached) == ("one two", "length", False)
    assert done.seconds >= 0.3
    body = server.asked[0].body
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["top_p"] == 0.5 and body["messages"][0]["content"] == "a"


def test_a_stream_is_the_answer_that_generate_gives(tmp_path: Path) -> None:
    """Same tokens, cost and cache: either finds what the other has kept, in one piece."""

    def answer(asked: Asked) -> Reply:
        return streamed("well ", "said") if "stream" in asked.body else chat("well said")

    prices = {"prompt": 1.0, "new": 2.0}
    with endpoint(answer) as server:
        mine = model(server, cache=Cache(str(tmp_path / "a.sqlite")), prices=prices)
        pieces, done = drained(mine.stream(ASK))
        assert pieces == [Delta("well "), Delta("said")]
        assert done == model(server, prices=prices).generate([ASK])[0]
        assert (done.prompt_tokens, done.new_tokens, done.cost) == (10, 3, 16e-6)
        assert mine.generate([ASK]) == [done] and mine.generate([ASK])[0].cached
        assert drained(mine.stream(ASK)) == ([Delta("well said")], done)
        assert len(server.asked) == 2 and (mine.totals.calls, mine.totals.cached) == (1, 3)
        kept = mine.generate([Request("b")])
        assert drained(mine.stream(Request("b"))) == ([Delta("well said")], kept[0])
        for sample in (0, 1, 0):
            drained(mine.stream(Request("c", temperature=1.0, sample=sample)))
        assert len(server.asked) == 5


ODD = """data: {"choices": [{"delta":\r
data: {"content": "grüß 𝄞 "}}]}\r
\r
: keep alive\r
\r
id: 7
retry: 5
data:{"choices":
data: [{"delta": {"content": "dich\\n"}}]}

event: x\rdata: {"choices": [{"delta": {"content": "€"}}]}\r\rdata: {"choices": [], "usage": null}



data: {"choices": [{"delta": {"content": null}, "finish_reason": null}]}

data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}

data: [DONE]"""


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_streams_may_be_cut_anywhere(size: int) -> None:
    data = b"\xef\xbb\xbf" + ODD.encode()
    found = EventStreamParser()
    cut = [data[i : i + size] for i in range(0, len(data), size)]
    events = [event for chunk in cut for event in found.feed(chunk)] + list(found.feed(b"\n\n"))
    assert [name for name, _ in events] == ["", "", "x", "", "", "", ""]
    assert events[-1] == ("", "[DONE]")
    with endpoint(in_turn(sent(*cut))) as server:
        pieces, done = drained(model(server, retries=0).stream(ASK))
    assert said(pieces) == ("grüß 𝄞 dich\n€", "") and done.text == "grüß 𝄞 dich\n€"


@pytest.mark.parametrize(
    ("text", "answer", "thoughts"),
    [
        ("\n <thinking>\na < b </think\n</thinking>\n8", "\n8", "\na < b </think\n"),
        ("<think>never ended </thi", "", "never ended </thi"),
        ("<thin air", "<thin air", ""),
        ("an answer with <think> in it </think>", "an answer with <think> in it </think>", ""),
        ("", "", ""),
    ],
)
def test_thoughts_are_told_apart_wherever_the_text_is_cut(
    text: str, answer: str, thoughts: str
) -> None:
    replies = streamed(*text), streamed(text), chat(text)
    with endpoint(in_turn(*replies)) as server:
        mine = model(server)
        for _ in range(2):
            pieces, done = drained(mine.stream(ASK))
            assert said(pieces) == (answer, thoughts)
            assert (done.text, done.reasoning) == (answer, thoughts.strip())
        assert mine.generate([ASK])[0] == done


def test_log_probabilities_come_with_the_pieces() -> None:
    def token(text: str) -> dict[str, Any]:
        top = [{"token": text, "logprob": -0.5}, {"token": "?", "logprob": -1.5}]
        return {"content": [{"token": text, "logprob": -0.5, "top_logprobs": top}]}

    events = [
        event({"choices": [{"delta": {"content": t}, "logprobs": token(t)}]}) for t in ("a", "b")
    ]
    with endpoint(in_turn(sent(*events, piece(finish="stop"), DONE))) as server:
        _, done = drained(model(server).stream(Request("a", top_logprobs=2)))
    assert done.tokens == tuple(Token(t, -0.5, ((t, -0.5), ("?", -1.5))) for t in ("a", "b"))
    assert server.asked[0].body["logprobs"] is True and server.asked[0].body["top_logprobs"] == 2


BROKEN = {
    "cut short": (sent(piece("half an")), ServerFault, "the connection closed before"),
    "dropped": (sent(piece("half an"), drop=True), ConnectionFailed, "the connection failed"),
    "cut in an event": (sent(piece("half an"), b'data: {"cho'), ServerFault, "is not JSON"),
    "an error event": (
        sent(piece("half an"), b'event: error\ndata: {"message": "gone"}\n\n'),
        ServerFault,
        "gone",
    ),
    "stalled": (sent(piece("half an"), 30, DONE), RequestTimeout, "no response within 3 s"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_breaks_off_is_an_error_and_never_a_short_answer(fault: str, tmp_path: Path) -> None:
    """Not repeated after the first piece: the caller has it already."""
    reply, kind, words = BROKEN[fault]
    with endpoint(in_turn(reply, streamed("well"))) as server:
        limit = 3 if fault == "stalled" else 60
        mine = model(server, timeout=limit, cache=Cache(str(tmp_path / "a.sqlite")))
        stream = mine.stream(ASK)
        assert next(stream) == Delta("half an")
        with pytest.raises(kind, match=words) as caught:
            next(stream)
        assert len(server.asked) == 1 and str(caught.value).startswith("small (http")
        assert drained(mine.stream(ASK))[1].text == "well"


EMPTY_HANDED = {
    "cut short": sent(piece(role="assistant")),
    "no choices": sent(DONE),
    "dropped at once": Reply(drop=True),
    "an error": sent(event({"error": {"message": "gone"}})),
    "half of JSON": Reply(b'{"choices": [{"mess'),
    "stalled": sent(b": wait\n\n", 30, DONE),
    "429": Reply({"error": "slow down"}, 429, {"Retry-After": "0"}),
    "an error as JSON": Reply({"error": {"message": "gone"}}),
}


@pytest.mark.parametrize("fault", EMPTY_HANDED)
def test_what_breaks_off_before_the_first_piece_is_asked_again(fault: str) -> None:
    with endpoint(in_turn(EMPTY_HANDED[fault], streamed("well"))) as server:
        limit = 3 if fault == "stalled" else 60
        mine = model(server, timeout=limit)
        assert drained(mine.stream(ASK))[1].text == "well"
        assert len(server.asked) == 2 and mine.client.repeated == 1
        server.answer = in_turn(EMPTY_HANDED[fault])
        with pytest.raises(RequestError, match=r"^small \(http"):
            drained(model(server, retries=0, timeout=limit).stream(ASK))
        assert len(server.asked) == 3


def test_a_server_without_stream_options_is_asked_without_them() -> None:
    wrong = {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs"}]}

    def answer(asked: Asked) -> Reply:
        return Reply(wrong, 422) if "stream_options" in asked.body else streamed("well")

    with endpoint(answer) as server:
        mine = model(server)
        assert [drained(mine.stream(ASK))[1].text for _ in range(2)] == ["well", "well"]
        assert ["stream_options" in asked.body for asked in server.asked] == [True, False, False]
        server.answer = in_turn(Reply({"error": "no such temperature"}, 400))
        with pytest.raises(BadRequest, match="no such temperature"):
            drained(model(server).stream(ASK))


def test_whoever_leaves_ends_the_request() -> None:
    endless = Reply(pieces=[piece("on and "), *[0.05, piece("on ")] * 2000])
    main = threading.main_thread().ident or 0
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))

    def answer(asked: Asked) -> Reply:
        if len(server.asked) == 2:
            timer.start()
        return endless

    with endpoint(answer) as server:
        stream = model(server).stream(ASK)
        assert next(stream) == Delta("on and ")
        stream.close()
        assert server.left.wait(30)
        server.left.clear()
        with pytest.raises(KeyboardInterrupt):
            drained(model(server).stream(ASK))
        assert server.left.wait(30)


def test_the_key_is_kept_nowhere_even_if_it_comes_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    halves = streamed(f"it is {KEY} or {KEY[:9]}", KEY[9:])
    with endpoint(in_turn(halves)) as server:
        mine = model(server, api_key_env="MY_KEY", cache=Cache(str(tmp_path / "a.sqlite")))
        pieces, done = drained(mine.stream(ASK))
    assert done.text == "it is *** or ***" and pieces[0].text == f"it is *** or {KEY[:9]}"
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"it is ***" in kept and KEY.encode() not in kept


PARTS: dict[str, list[Any]] = {
    "as OpenAI": [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": "{"}},
        {"index": 1, "id": "b", "function": {"name": "g", "arguments": "1"}},
        {"index": 0, "function": {"arguments": "}"}},
    ],
    "counted from 1": [
        {"index": 1, "id": "a", "function": {"name": "f", "arguments": "{"}},
        {"index": 1, "id": "", "function": {"name": "f", "arguments": "}"}},
        {"index": 2, "id": "b", "function": {"name": "g", "arguments": "1"}},
    ],
    "whole, all numbered 0": [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"index": 0, "id": "b", "function": {"name": "g", "arguments": "1"}},
    ],
    "without numbers": [
        {"id": "a", "function": {"name": "f", "arguments": "{"}},
        {"function": {"arguments": "}"}},
        {"id": "b", "function": {"name": "g", "arguments": "1"}},
    ],
    "other ids later": [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}},
        {"index": 0, "id": "x", "function": {"name": None, "arguments": "}"}},
        {"index": 1, "id": "b", "function": {"name": "g", "arguments": "1"}},
    ],
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_tool_calls_are_joined(kind: str) -> None:
    events = [piece(tool_calls=[part]) for part in PARTS[kind]]
    with endpoint(lambda asked: sent(*events, piece(finish="tool_calls"), DONE)) as server:
        pieces, done = drained(model(server).stream(ASK))
    assert done.tool_calls == (
        {"id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "function": {"name": "g", "arguments": "1"}},
    )
    parts = [part for one in pieces for part in one.tool_calls]
    places = {part["function"].get("name") or "": part["index"] for part in parts}
    assert (places["f"], places["g"]) == (0, 1) and done.finish == "tool_calls"
