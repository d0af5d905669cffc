"""A model behind an OpenAI-compatible endpoint, on the loopback."""

import asyncio
import logging
import pickle
import re
import signal
import sqlite3
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from endpoints import Asked, Endpoint, Reply, chat, endpoint, in_turn

from swarm._util.threads import shared_event_loop
from swarm.errors import UserError
from swarm.models.base import Completion, Message, Request, Token
from swarm.models.cache import Cache
from swarm.models.http_errors import (
    AccessDenied,
    NotFound,
    RateLimited,
    RequestTimeout,
    ServerFault,
)
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits

KEY = "sk-very-secret-0123456789"


def model(server: Endpoint, **more: Any) -> OpenAI:
    given = {"model": "small", "base_url": server.url, "api_key_env": None, **more}
    return OpenAI(**given)


def echo(asked: Asked) -> Reply:
    return chat(f"you said {asked.body['messages'][-1]['content']}")


def test_turns_and_plain_prompts_are_chats() -> None:
    with endpoint(echo) as server:
        mine = model(server, seed=7, body={"top_p": 0.5}, prices={"prompt": 0.5, "new": 2})
        turns = (Message("system", "be kind"), Message("user", "hello"))
        answers = mine.generate([Request("plain", 5), Request(turns, 9)])
    cost = 10 * 0.5e-6 + 3 * 2e-6
    assert [(a.text, a.prompt_tokens, a.new_tokens, a.finish) for a in answers] == [
        ("you said plain", 10, 3, "stop"),
        ("you said hello", 10, 3, "stop"),
    ]
    assert [answer.cost for answer in answers] == pytest.approx([cost, cost])
    assert (mine.totals.calls, mine.totals.prompt_tokens, mine.totals.new_tokens) == (2, 20, 6)
    assert mine.totals.cost == pytest.approx(2 * cost) and mine.totals.cached == 0
    bodies = sorted((asked.body for asked in server.asked), key=lambda body: body["max_tokens"])
    common = {"model": "small", "temperature": 0.0, "seed": 7, "top_p": 0.5}
    plain = [{"role": "user", "content": "plain"}]
    assert bodies[0] == {"messages": plain, "max_tokens": 5, **common}
    assert [turn["role"] for turn in bodies[1]["messages"]] == ["system", "user"]
    assert {asked.path for asked in server.asked} == {"/v1/chat/completions"}
    assert "Authorization" not in server.asked[0].headers


def test_a_body_keeps_the_order_of_its_keys() -> None:
    """Servers write the properties of a schema in it."""
    properties = {"reasoning": {"type": "string"}, "answer": {"type": "string"}}
    with endpoint(echo) as server:
        model(server, body={"response_format": {"properties": properties}}).generate([Request("a")])
    sent = server.asked[0].body["response_format"]["properties"]
    assert list(sent) == ["reasoning", "answer"]


@pytest.mark.parametrize(
    ("reply", "text", "thoughts"),
    [
        (chat("8", reasoning_content="let me see"), "8", "let me see"),
        (chat("8", reasoning_content=None, reasoning="let me see"), "8", "let me see"),
        (chat(None, reasoning="all of it"), "", "all of it"),
        (chat([{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "8"}]), "8", "so"),
        (chat([{"type": "thinking", "thinking": [{"type": "text", "text": "so"}]}]), "", "so"),
        (chat("\ud800 \0 𝄞"), "\ud800 \0 𝄞", ""),
        (chat(None), "", ""),
    ],
)
def test_thoughts_are_no_part_of_the_text(
    reply: Reply, text: str, thoughts: str, tmp_path: Path
) -> None:
    with endpoint(in_turn(reply)) as server:
        mine = model(server, cache=Cache(str(tmp_path / "a.sqlite")))
        done = [mine.generate([Request("a")])[0] for _ in range(2)]
    assert done[0] == done[1] == Completion(text, (), 10, 3, reasoning=thoughts, finish="stop")
    assert [c.cached for c in done] == [False, True] and done[0].seconds == done[1].seconds > 0


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "upstream is gone", "code": 502}},
        {"choices": []},
        "text",
        {"choices": [{"message": {"content": 5}}]},
        {"choices": {"a": 1}},
        {"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": float("inf")}},
    ],
)
def test_what_is_no_completion_is_asked_again(body: Any) -> None:
    with endpoint(in_turn(Reply(body), chat("well"))) as server:
        assert model(server, limits=Limits(retries=1)).generate([Request("a")])[0].text == "well"
        assert len(server.asked) == 2
    with (
        endpoint(in_turn(Reply(body))) as server,
        pytest.raises(ServerFault, match=r"^small \(http.*invalid response: .+") as caught,
    ):
        model(server, limits=Limits(retries=0)).generate([Request("a")])
    words = str(caught.value)
    assert not re.search(r"object|subscript|attribute|indices|argument|convert|Error", words), words


def test_kept_answers_are_not_paid_for_twice(tmp_path: Path) -> None:
    cache = {"cache": Cache(str(tmp_path / "answers.sqlite"))}
    numbers = iter(range(99))
    with endpoint(lambda asked: chat(f"answer {next(numbers)}")) as server:
        asked = [Request("a"), Request("b"), Request("a")]
        first = model(server, **cache).generate(asked)
        again = model(server, **cache, limits=Limits(concurrency=1, timeout=5))
        assert again.generate(asked) == first and len(server.asked) == 2
        assert (again.totals.calls, again.totals.cached, again.totals.prompt_tokens) == (0, 2, 0)
        for other in ({"model": "big"}, {"seed": 1}, {"temperature": 0.5}, {"body": {"a": 1}}):
            model(server, **cache, **other).generate([Request("a")])
        model(server, **cache).generate([Request("a", 17)])
        assert len(server.asked) == 7
        warm = model(server, **cache, temperature=1.0)
        samples = warm.generate([Request("a")] * 3)
        more = warm.generate([Request("a")] * 4)
        assert more[:3] == samples and len({one.text for one in more}) == 4
        assert len(server.asked) == 11


def test_a_request_that_is_under_way_is_not_paid_for_again(tmp_path: Path) -> None:
    """Also where its sender is interrupted: the others then send it themselves."""
    cache, sent = Cache(str(tmp_path / "answers.sqlite")), threading.Event()
    found: dict[int, list[Completion]] = {}

    def answer(asked: Asked) -> Reply:
        sent.set()
        time.sleep(0.3)
        return chat(f"answer {len(server.asked)}")

    def ask(number: int) -> None:
        found[number] = model(server, cache=cache).generate([Request("a")])

    with endpoint(answer) as server:
        pieces = model(server, cache=cache)
        first = asyncio.run_coroutine_threadsafe(
            pieces._answer([(pieces.prepare(Request("a")), 0)]), shared_event_loop()._loop
        )
        assert sent.wait(5)
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        first.cancel()
        for thread in threads:
            thread.join(10)
        assert len(server.asked) == 2 and found[0] == found[1] == found[2]


def test_an_interrupt_loses_no_answer_that_has_come(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply:
        late = int(asked.body["messages"][-1]["content"]) >= 20
        return Reply(chat("well").body, wait=60.0 if late else 0.0)

    def interrupt() -> None:
        """When all that will come is kept, and as many more as may be are under way."""
        count, kept = "SELECT COUNT(*) FROM responses", 0
        while len(server.asked) < 36 or kept < 20:
            time.sleep(0.01)
            with suppress(sqlite3.Error), closing(sqlite3.connect(file)) as connection:
                [kept] = connection.execute(count).fetchone()
        signal.pthread_kill(main, signal.SIGINT)

    main, file = threading.main_thread().ident or 0, tmp_path / "answers.sqlite"
    with endpoint(answer) as server:
        mine = model(server, cache=Cache(str(file)))
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            mine.generate([Request(f"{n}") for n in range(40)])
        before = len(server.asked)
        assert all(c.cached for c in mine.generate([Request(f"{n}") for n in range(20)]))
        assert len(server.asked) == before < 40


@pytest.mark.parametrize("way", ["generate", "generate_each", "stream"])
def test_answers_that_cannot_be_kept_are_told(way: str, tmp_path: Path) -> None:
    """Somebody takes the table away while the endpoint answers."""

    def answer(asked: Asked) -> Reply:
        if len(server.asked) > 1:
            with sqlite3.connect(file) as connection:
                connection.execute("DROP TABLE IF EXISTS responses")
        return echo(asked)

    file, words = tmp_path / "answers.sqlite", "cannot be used: no such table"
    with endpoint(answer) as server:
        mine = model(server, cache=Cache(str(file)))
        mine.generate([Request("first")])
        if way == "generate_each":
            found = mine.generate_each([Request("a"), Request("b")])
            assert [words in str(error) for error in found] == [True] * 2
            return
        with pytest.raises(UserError, match=words):
            list(mine.stream(Request("a")) if way == "stream" else mine.generate([Request("a")]))


@pytest.mark.parametrize("reason", ["content_filter", "context_length_exceeded"])
def test_a_text_that_is_refused_has_an_empty_answer(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.body["messages"][-1]["content"] == "bad":
            return Reply({"error": {"message": "not that", "code": reason}}, 400)
        return echo(asked)

    with endpoint(answer) as server:
        mine = model(server, cache=Cache(str(tmp_path / "answers.sqlite")))
        texts = [c.text for c in mine.generate([Request("a"), Request("bad"), Request("b")])]
        assert texts == ["you said a", "", "you said b"]
        assert mine.totals.failed == 1 and "not that" in caplog.text
        assert mine.generate([Request("bad")])[0].text == ""
        assert len(server.asked) == 3


def test_a_request_has_settings_of_its_own() -> None:
    """They go before the model's; what it does not say is not sent; samples differ in the seed."""
    with endpoint(echo) as server:
        mine = model(server, seed=7, temperature=0.5, limits=Limits(concurrency=1, retries=0))
        mine.generate(
            [
                Request("a"),
                Request("a", temperature=0.0, stop=("\n", "Q:"), timeout=5.0),
                Request("a", temperature=1.0, seed=20, sample=3),
                Request("a", sample=2),
                Request("a", sample=2),
                Request("b", top_logprobs=5),
                Request("b", top_logprobs=-1),
            ]
        )
        model(server, temperature=0.0, seed=7).generate([Request("a", sample=4)])
    plain = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 16,
        "model": "small",
        "temperature": 0.5,
        "seed": 7,
    }
    told = plain | {"messages": [{"role": "user", "content": "b"}], "logprobs": True}
    assert [asked.body for asked in server.asked] == [
        plain,
        plain | {"temperature": 0.0, "stop": ["\n", "Q:"]},
        plain | {"temperature": 1.0, "seed": 23},
        plain | {"seed": 9},
        plain | {"seed": 10},
        told | {"top_logprobs": 5},
        told,
        plain | {"temperature": 0.0},
    ]


def told(text: str = "a!") -> Reply:
    """An answer with log probabilities."""
    top = [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": -2.0}]
    reply = chat(text)
    content = [{"token": "a", "logprob": -0.25, "top_logprobs": top}, {"token": "!", "logprob": 0}]
    reply.body["choices"][0]["logprobs"] = {"content": content}
    return reply


@pytest.mark.parametrize("lacking", [None, {"content": []}])
def test_an_answer_without_its_log_probabilities_is_asked_for_again(
    lacking: Any, tmp_path: Path
) -> None:
    """One such answer is no failure, and none is ever kept."""
    silent = chat("a!")
    silent.body["choices"][0]["logprobs"] = lacking
    cache = Cache(str(tmp_path / "a.sqlite"))
    with endpoint(in_turn(silent, told())) as server:
        mine = model(server, cache=cache)
        found = [mine.generate([Request("a", top_logprobs=2)])[0] for _ in range(2)]
        assert found[0] == found[1] and found[1].cached and len(server.asked) == 2
        assert found[1].tokens == (Token("a", -0.25, (("a", -0.25), ("b", -2.0))), Token("!", 0.0))
        server.answer = in_turn(silent)
        mine = model(server, cache=cache)
        (lacks,) = mine.generate([Request("b", top_logprobs=2)])
        assert lacks.text == "a!" and not lacks.tokens and len(server.asked) == 5
        mine.generate([Request("c", top_logprobs=2)])
        assert len(server.asked) == 6, "the endpoint never tells them, and is not pressed"
        server.answer = in_turn(told())
        again = model(server, cache=cache).generate([Request("b", top_logprobs=2)])
        assert again[0].tokens and not again[0].cached


def many(asked: Asked) -> Reply:
    """As many different answers as are asked for."""
    mark = asked.time
    texts = [f"{mark} {n}" for n in range(asked.body.get("n", 1))]
    choices = [{"message": {"content": text}, "finish_reason": "stop"} for text in texts]
    usage = {"prompt_tokens": 11, "completion_tokens": 7 * len(texts) + 1}
    return Reply({"choices": choices, "usage": usage})


def test_samples_of_one_prompt_in_one_request(tmp_path: Path) -> None:
    keep = {"temperature": 1.0, "samples_at_once": 4, "cache": Cache(str(tmp_path / "a.sqlite"))}
    with endpoint(many) as server:
        mine = model(server, **keep)
        done = mine.generate([Request("a"), Request("b")] * 6)
        sent = sorted((a.body["messages"][0]["content"], a.body.get("n")) for a in server.asked)
        assert sent == [("a", 2), ("a", 4), ("b", 2), ("b", 4)]
        assert len({c.text for c in done}) == 12 and not any(c.cached for c in done)
        assert sum(c.prompt_tokens for c in done) == 44 == mine.totals.prompt_tokens
        assert sum(c.new_tokens for c in done) == 12 * 7 + 4 and mine.totals.calls == 12
        again = mine.generate([Request("b"), Request("a")] * 6)
        assert [c.text for c in again[::2]] == [c.text for c in done[1::2]]
        one = mine.generate([Request("a", sample=9), Request("a", sample=5)])
        assert one[1] == done[10] and server.asked[-1].body.get("n") is None
        # A seed makes the samples differ, one by one; greedy answers do not differ.
        before = len(server.asked)
        model(server, **keep, seed=1).generate([Request("a")] * 3)
        assert {a.body.get("n") for a in server.asked[before:]} == {None}
        model(server, **keep).generate([Request("c", temperature=0.0)] * 3)
        assert len(server.asked) == before + 4
        # Who asks for more than one answer by hand has the first, and pays for all.
        (first,) = model(server, body={"n": 3}).generate([Request("d")])
        assert first.text.endswith(" 0") and (first.prompt_tokens, first.new_tokens) == (11, 22)


def test_a_server_that_does_not_know_n_is_asked_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(asked: Asked) -> Reply:
        return chat(f"{asked.time}")

    with endpoint(answer) as server:
        mine = model(server, temperature=1.0, samples_at_once=3)
        for _ in range(2):
            assert len({c.text for c in mine.generate([Request("a")] * 7)}) == 7
        sizes = [asked.body.get("n", 1) for asked in server.asked]
    assert sorted(sizes[:3]) == [1, 3, 3] and sizes[3:] == [1] * 11
    assert caplog.text.count("fewer samples") == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply({"error": "no such key"}, 401), AccessDenied),
        (Reply({"error": "no such model"}, 404), NotFound),
        (Reply({"error": {"message": "pay", "code": "insufficient_quota"}}, 429), RateLimited),
        (Reply({"error": "tomorrow"}, 429, {"Retry-After": "7200"}), RateLimited),
    ],
)
def test_what_holds_for_all_requests_is_asked_once(reply: Reply, kind: type[Exception]) -> None:
    asked = [Request(f"{n}") for n in range(30)]
    with endpoint(in_turn(chat("well"), reply)) as server:
        mine = model(server, limits=Limits(concurrency=2))
        found = mine.generate_each(asked)
        assert isinstance(found[0], Completion) or isinstance(found[1], Completion)
        assert [type(f) for f in found[2:]] == [kind] * 28 and len(server.asked) <= 4
    with endpoint(in_turn(Reply({"error": "busy"}, 500), reply)) as server:
        found = model(server, limits=Limits(concurrency=1, retries=3)).generate_each(asked)
        assert [type(f) for f in found] == [kind] * 30 and len(server.asked) == 2


def test_an_answer_has_a_time_limit_with_all_its_repetitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.models.http.FIRST_WAIT", 0.1)
    with endpoint(in_turn(Reply({"error": "busy"}, 503))) as server:
        (late,) = model(server).generate_each([Request("a", timeout=1.0)])
        words = r"^small .* no response within 1 s; \d attempts; last error: .*503 .*busy$"
        assert isinstance(late, RequestTimeout) and re.match(words, str(late))
        server.answer = in_turn(Reply({"error": "later"}, 429, {"Retry-After": "60"}))
        began = time.monotonic()
        with pytest.raises(RequestTimeout, match="asks to wait 60 s"):
            model(server).generate([Request("a", timeout=50.0)])
        assert time.monotonic() - began < 40
        waits = {"a": 60.0}
        server.answer = lambda asked: Reply(
            chat("well").body, wait=waits.get(asked.body["messages"][0]["content"], 0.0)
        )
        stalled, well = model(server).generate_each([Request("a", timeout=0.3), Request("b")])
        assert str(stalled).endswith("no response within 0.3 s") and isinstance(well, Completion)


WRONG: dict[str, dict[str, Any]] = {
    "model=: must be text": {"model": ""},
    "max_completion_tokens": {"tokens_field": "tokens"},
    "samples_at_once=0": {"samples_at_once": 0},
    "prices=": {"prices": {"new": -1}},
    "base_url=null: must be text": {"base_url": None},
    "must not contain a user, password or key": {"base_url": f"https://u:{KEY}@host/v1"},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_settings_are_named(wrong: str) -> None:
    with pytest.raises(UserError, match=re.escape(wrong)) as caught:
        OpenAI(**{"model": "small", **WRONG[wrong]})
    assert KEY not in str(caught.value)
    with pytest.raises(UserError, match="no model is set"):
        OpenAI(None).check()


def test_the_key_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the cache, the log, an exception or a pickle, even where a server repeats it."""
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    with endpoint(lambda asked: chat(f"your key is {asked.headers['Authorization']}")) as server:
        mine = model(server, api_key_env="MY_KEY", cache=Cache(str(tmp_path / "a.sqlite")))
        assert mine.generate([Request("a")])[0].text == "your key is Bearer ***"
        assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"
        server.answer = lambda asked: Reply({"error": asked.headers["Authorization"]}, 401)
        with pytest.raises(AccessDenied, match="check the key in MY_KEY") as caught:
            mine.generate([Request("b")])
        again = pickle.loads(pickle.dumps(mine))
        server.answer = echo
        assert again.generate([Request("c")])[0].text == "you said c"
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    shown = f"{caught.value!r} {caught.value.content} {caplog.text} {mine.__dict__}"
    assert b"your key is" in kept and "so far" in caplog.text
    assert KEY.encode() not in kept + pickle.dumps((mine, caught.value)) + shown.encode()
