"""The trace of a collaboration, and its replay without anybody to ask."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_agents import Streamer, slot

from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Message, Request
from swarm.models.trace import Trace
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec

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
    mixture = MixtureOfAgents(slots, slot("z"))
    mixture.trace = trace
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


def test_a_streamed_answer_is_in_the_trace(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t")
    for streamer in (Streamer("z", "one ", "two"), Streamer("z", "one ", DEAD)):
        mixture = MixtureOfAgents([slot("a")], AgentSpec(streamer, "z"))
        mixture.trace = trace
        mixture.run([Request("why?")], lambda number, event: None)
    mixture = MixtureOfAgents([slot("a")], AgentSpec(Streamer("z", "x", "y"), "z"))
    mixture.trace = trace
    pieces = mixture.stream(Request("why?"))
    assert next(pieces) == Delta("x")
    pieces.close()
    mine = [one for one in records(trace.path) if one.get("call", {}).get("name") == "z"]
    assert mine[0]["answer"]["text"] == "one two" and mine[0]["call"]["layer"] == 2
    assert [one.get("error") for one in mine[1:]] == ["it is gone", "closed before its end"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    Trace(tmp_path / "t").add_call({"name": "m"}, Request("?"), Completion("fine"))
    with pytest.raises(UserError, match=r"cannot write the trace .*below: "):
        Trace(tmp_path / "t" / "below")
    with pytest.raises(UserError, match=r"cannot write the trace .*: Is a directory"):
        Trace(tmp_path)
