"""The trace of a collaboration, and its replay without anybody to ask."""

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from endpoints import Asked, Reply, chat, endpoint
from fake_agents import Speaker, Streamer, slot

from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Message, Request, Token
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits
from swarm.models.trace import Replay, Trace, TracingModel
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.presets import build_mixture
from swarm.multi_agent.types import AgentSpec, Transcript

KEY = "sk-very-secret-0123456789"
DEAD = UserError("it is gone")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def calls(path: Path) -> list[str]:
    """The calls without when and in which run, in an order of their own."""
    kept = [{k: v for k, v in one.items() if k not in ("run", "time")} for one in records(path)]
    return sorted(json.dumps(one, sort_keys=True) for one in kept if "call" in one)


def test_one_line_a_call(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "new" / "trace.jsonl", {"preset": "mine", "version": "1"})
    slots = [slot("a", count=2, temperature=0.5), slot("b", DEAD)]
    mixture = MixtureOfAgents(slots, slot("z"), trace=trace)
    mixture.generate([Request((Message("user", "why?\u2028\ud800"),), 9, stop=("x",))])
    header, *lines = records(trace.path)
    assert header["about"] == {"preset": "mine", "version": "1"}
    assert {one["run"] for one in [header, *lines]} == {trace.run} and len(lines) == 4
    by_name = {(one["call"]["name"], one["call"]["sample"]): one for one in lines}
    assert by_name["a", 1]["call"] == {"name": "a", "role": "proposer", "layer": 1, "sample": 1}
    assert by_name["a", 1]["request"] == {
        "messages": [{"role": "user", "content": "why?\u2028\ud800"}],
        "max_new_tokens": 9,
        "temperature": 0.5,
        "stop": ["x"],
        "sample": 1,
    }
    assert by_name["a", 1]["answer"] == {
        "text": "<a says 2>",
        "prompt_tokens": 10,
        "new_tokens": 3,
        "cost": 0.5,
        "model": "a",
    }
    assert by_name["b", 0]["error"] == "it is gone" and "answer" not in by_name["b", 0]
    assert by_name["z", 0]["call"]["role"] == "aggregator"
    assert by_name["z", 0]["time"] >= header["time"] and header["time"].endswith("+00:00")


def test_a_completion_comes_back_whole(tmp_path: Path) -> None:
    said = Completion(
        "so",
        (-0.5, -2.0),
        3,
        4,
        (True, False),
        (1, 2),
        0.25,
        "hm",
        "length",
        (Token("s", -0.1, (("s", -0.1), ("t", -3.0))), Token("o", -0.2)),
        "m-1",
        1.5,
        True,
    )
    TracingModel(Speaker("m", lambda _: said), "m", Trace(tmp_path / "t")).generate([Request("?")])
    (again,) = Replay(tmp_path / "t").get_model("m").generate([Request("?")])
    assert again == said and isinstance(again.tokens[0], Token)
    assert (again.model, again.seconds, again.cached) == ("m-1", 1.5, True)


def test_the_same_collaboration_is_replayed_without_anybody(tmp_path: Path) -> None:
    preset = {
        "proposers": [{"model": "a", "count": 3}, {"model": "b", "system": "so"}, "dead"],
        "aggregator": "last",
        "fallback": "spare",
        "layers": 3,
    }
    models: dict[str, Any] = {
        name: Speaker(name, says)
        for name, says in {
            "a": None,
            "b": None,
            "dead": DEAD,
            "last": DEAD,
            "spare": "so be it",
        }.items()
    }
    requests = [Request("why?", 7), Request((Message("user", "and who?"),), 7, seed=3)]
    first = build_mixture(preset, models.__getitem__, trace=Trace(tmp_path / "one")).run(requests)
    replay = Replay(tmp_path / "one")
    again = build_mixture(preset, replay.get_model, trace=Trace(tmp_path / "two")).run(requests)
    assert again == first and all(isinstance(one, Transcript) for one in first)
    assert calls(tmp_path / "one") == calls(tmp_path / "two") and len(calls(tmp_path / "one")) == 24
    with pytest.raises(
        UserError, match=r"layer 1: 0 of 5 proposers answered .* a: no answer to this request"
    ):
        build_mixture(preset, replay.get_model).generate([Request("who?")])


def test_a_streamed_answer_is_in_the_trace(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t")
    for streamer in (Streamer("z", "one ", "two"), Streamer("z", "one ", DEAD)):
        mixture = MixtureOfAgents([slot("a")], AgentSpec(streamer, "z"), trace=trace)
        mixture.run([Request("why?")], lambda number, event: None)
    pieces = MixtureOfAgents(
        [slot("a")], AgentSpec(Streamer("z", "x", "y"), "z"), trace=trace
    ).stream(Request("why?"))
    assert next(pieces) == Delta("x")
    pieces.close()
    mine = [one for one in records(trace.path) if one.get("call", {}).get("name") == "z"]
    assert mine[0]["answer"]["text"] == "one two" and mine[0]["call"]["layer"] == 2
    assert [one.get("error") for one in mine[1:]] == ["it is gone", "closed before its end"]


def test_no_key_reaches_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)

    def answer(asked: Asked) -> Reply:
        if asked.body["model"] == "dead":
            return Reply({"error": f"the key {asked.headers['Authorization']} is none"}, 401)
        return chat("fine")

    with endpoint(answer) as server:
        slots = [
            AgentSpec(OpenAI(name, server.url, "MY_KEY", limits=Limits(retries=0)), name)
            for name in ("a", "dead")
        ]
        mixture = MixtureOfAgents(slots, slots[0], trace=Trace(tmp_path / "t", {"who": "a"}))
        mixture.generate([Request("why?")])
        assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"
    text = (tmp_path / "t").read_text()
    assert KEY not in text and KEY[5:] not in text and "401" in text


def test_what_is_asked_again_is_answered_in_order(tmp_path: Path) -> None:
    model = TracingModel(Speaker("m"), "m", Trace(tmp_path / "t"))
    asked = [Request("?"), Request("?"), Request("!")]
    model.generate_each(asked)
    again = Replay(tmp_path / "t").get_model("m")
    texts = [one.text for one in again.generate([*asked, Request("?")])]
    assert texts == ["<m says 1>", "<m says 2>", "<m says 3>", "<m says 2>"]
    with pytest.raises(
        UserError, match=r"^m: no answer to this request in the trace .*: .*\"prompt\": \"#\""
    ):
        again.generate([Request("#")])
    with pytest.raises(UserError, match="m: no answer to this request"):
        again.generate([Request("?", temperature=1.0)])
    assert again.generate([Request("!", timeout=5, stop_check=str.isdigit)])[0].text == "<m says 3>"


def test_traced_is_as_its_model(tmp_path: Path) -> None:
    inner = Speaker("m", lambda request: DEAD if request.prompt == "bad" else "fine")
    model = TracingModel(inner, "m", Trace(tmp_path / "t"), {"role": "judge"})
    good, bad = model.generate_each([Request("good"), Request("bad")])
    assert isinstance(good, Completion) and bad is DEAD
    with pytest.raises(UserError, match="it is gone"):
        model.generate([Request("good"), Request("bad")])
    model.check()
    model.open("cpu")
    assert inner.ready == ["checked", "cpu"]
    assert records(tmp_path / "t")[1]["call"] == {"name": "m", "role": "judge"}
    assert len(records(tmp_path / "t")) == 5
    bare = TracingModel(type("Bare", (), {})(), "bare", Trace(tmp_path / "u"))
    bare.check()
    bare.open("cpu")


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    trace = pickle.loads(pickle.dumps(Trace(tmp_path / "t")))
    model = TracingModel(Speaker("m", "long " * 5000), "m", trace)

    def ask(thread: int) -> None:
        for number in range(20):
            model.generate([Request(f"{thread} {number}")])

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = records(tmp_path / "t")
    assert len(found) == 161
    assert {one["request"]["prompt"] for one in found[1:]} == {
        f"{thread} {number}" for thread in range(8) for number in range(20)
    }


def test_a_torn_line_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t"
    model = TracingModel(Speaker("m", "fine"), "m", Trace(path, {"run": 1}))
    model.generate([Request("a"), Request("b")])
    path.write_bytes(path.read_bytes()[:-30])
    replay = Replay(path)
    assert "line 3 is incomplete" in caplog.text and replay.about == {"run": 1}
    assert replay.get_model("m").generate([Request("a")])[0].text == "fine"
    with pytest.raises(UserError, match="m: no answer to this request"):
        replay.get_model("m").generate([Request("b")])
    again = TracingModel(Speaker("m", "better"), "m", Trace(path, {"run": 2}))
    again.generate([Request("b")])
    replay = Replay(path)
    assert replay.about == {"run": 2} and replay.get_model("m") is replay.get_model("m")
    assert replay.get_model("m").generate([Request("b")])[0].text == "better"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"about": {}}\n{"call": {}, "request": {}}', "line 2: not a call: KeyError"),
        ("[1]", "line 1: not a call"),
        ('{"call": {"name": "m"}, "request": {}, "answer": {"txt": 1}}', "line 1: not a call"),
        (b"\xff\xfe", "cannot read the trace"),
        ("proposers: [a]", "is not a trace: it contains no calls"),
    ],
)
def test_what_is_no_trace_is_named(text: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        Replay(tmp_path / "t")


def test_who_was_not_asked_and_where_nothing_can_be_written(tmp_path: Path) -> None:
    TracingModel(Speaker("m"), "m", Trace(tmp_path / "t")).generate([Request("?")])
    with pytest.raises(UserError, match=r"has no answers of n; available: m$"):
        Replay(tmp_path / "t").get_model("n")
    with pytest.raises(UserError, match=r"cannot read the trace .*none"):
        Replay(tmp_path / "none")
    with pytest.raises(UserError, match=r"cannot write the trace .*below: "):
        Trace(tmp_path / "t" / "below")
    with pytest.raises(UserError, match=r"cannot write the trace .*: Is a directory"):
        Trace(tmp_path)
