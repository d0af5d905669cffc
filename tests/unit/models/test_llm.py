"""Models of the `llm` package, registered with it as plugins do."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_models
import llm
import pytest

from swarm.errors import UserError
from swarm.models.base import Delta, Message, Request
from swarm.models.http_errors import RateLimited, RequestTimeout
from swarm.models.llm import LLM

TURNS = (
    Message("system", "s"),
    Message("user", "u1"),
    Message("assistant", "a1"),
    Message("user", "u2"),
    Message("user", "u3"),
)


class Old(llm.Model):
    """Reads the conversation as plugins did before llm 0.32; has no options, does not stream."""

    model_id = "old"

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Any:
        assert not stream
        turns = [("system", prompt.system)] if prompt.system else []
        for before in conversation.responses:
            turns += [("user", before.prompt.prompt), ("assistant", before.text_or_raise())]
        yield fake_models.rule([*turns, ("user", prompt.prompt)])


class Keyed(llm.KeyModel):
    """Wants a key, and says it when it fails, as careless servers do."""

    model_id = "keyed"
    needs_key, key_env_var = "keyed", "TALKER_KEY"

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any, key: str | None
    ) -> Any:
        raise llm.ModelError(f"the key {key}\nis not liked")


class Thinker(llm.Model):
    """Thinks aloud."""

    model_id, can_stream = "thinker", True

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Any:
        from llm.parts import StreamEvent

        yield StreamEvent("reasoning", "hm")
        yield "so "
        yield "be it"


class TooMany(Exception):
    """What clients raise after a 429, as openai.RateLimitError."""

    status_code = 429

    def __init__(self, headers: dict[str, str], code: str = "") -> None:
        super().__init__("slow down")
        self.response = SimpleNamespace(status_code=429, headers=headers)
        self.body = {"code": code}


class Rationed(llm.Model):
    """Accepts a request every 50 ms, and refuses the others."""

    model_id, needs_key, key_env_var = "rationed", "keyed", "TALKER_KEY"

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.code, self.refused, self.free, self.lock = "", 0, 0.0, threading.Lock()

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Any:
        with self.lock:
            now = time.monotonic()
            if now < self.free:
                self.refused += 1
                raise TooMany(self.headers, self.code)
            self.free = now + 0.05
        yield f"so: {prompt.prompt}"


@pytest.fixture(autouse=True)
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    model = fake_models.llm_model()
    with fake_models.in_llm(model, Old(), Keyed(), Thinker(), Rationed()):
        yield model


def test_options_are_asked_for_where_there_are_such(
    talker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    talker.asked.clear()
    LLM("talker").generate([Request("hi", 7, temperature=0.3, seed=4, sample=2)])
    assert dict(talker.asked[0][0].options) == {"temperature": 0.3, "max_tokens": 7, "seed": 6}
    assert not caplog.records
    old = LLM("old")
    with caplog.at_level(logging.WARNING):
        old.generate([Request("hi", temperature=0.3), Request("ho", temperature=0.2)])
    assert sorted(record.getMessage() for record in caplog.records) == [
        "llm/old: the model has no option temperature, which is ignored",
    ]


@pytest.mark.parametrize(
    "reported",
    [
        {"choices": [{"finish_reason": "length"}]},
        {"stop_reason": "max_tokens"},
        {"candidates": [{"finishReason": "MAX_TOKENS"}]},
        {"done_reason": "length"},
        {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
    ],
)
def test_every_name_of_a_reached_token_limit_is_read(
    talker: Any, reported: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        response.response_json = reported
        yield "half"

    assert LLM("talker").generate([Request("hi")])[0].finish == ""
    monkeypatch.setattr(talker, "execute", execute)
    assert LLM("talker").generate([Request("hi")])[0].finish == "length"


def test_old_and_new_plugins_hear_the_whole_conversation() -> None:
    expected = "user: u2\n\nu3 / assistant: a1 / user: u1 / system: s"
    for name in ("talker", "old"):
        assert LLM(name).generate([Request(TURNS)])[0].text == expected
        assert LLM(name).generate([Request("plain")])[0].text == "user: plain"
    (error,) = LLM("talker").generate_each([Request(TURNS[:3])])
    assert str(error) == "llm/talker: the last turn must be the user's"


def test_usage_thoughts_and_pieces() -> None:
    (said,) = LLM("talker").generate([Request("one two")])
    assert not (Path(os.environ["LLM_USER_PATH"]) / "logs.db").exists()
    assert (said.prompt_tokens, said.new_tokens, said.model) == (1, 3, "talker")
    pieces = list(LLM("thinker").stream(Request("hi")))
    assert pieces == [Delta("", "hm"), Delta("so "), Delta("be it")]
    (thought,) = LLM("thinker").generate([Request("hi")])
    assert (thought.text, thought.reasoning) == ("so be it", "hm")
    assert len(list(LLM("talker").stream(Request("a long text")))) > 3
    assert len(list(LLM("old").stream(Request("a long text")))) == 1


def test_keys_are_llms_and_stay_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TALKER_KEY", raising=False)
    with pytest.raises(UserError, match=r"llm/keyed: No key found.*llm keys set keyed.*TALKER_KEY"):
        LLM("keyed").check()
    monkeypatch.setenv("TALKER_KEY", fake_models.KEY)
    LLM("keyed").check()
    (error,) = LLM("keyed").generate_each([Request("hi")])
    assert str(error) == "llm/keyed: the key *** is not liked"
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert fake_models.KEY not in caplog.text
    assert not [path for path in written if fake_models.KEY in path.read_text(errors="replace")]


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    models = LLM("talker"), LLM("keyed"), LLM("talker", concurrency=3)
    for model in models:
        model.prepare(Request("hi"))
    assert [model.batches for model in models] == [1, 8, 3]
    with pytest.raises(UserError, match=r"llm/talkr: llm has no such .* did you mean llm/talker\?"):
        LLM("talkr").check()
    with pytest.raises(UserError, match="llm/talker: cannot score choices"):
        LLM("talker").generate([Request("hi", 0, ("a", "b"))])
    with pytest.raises(UserError, match="must be text"):
        LLM(" ")
    monkeypatch.setitem(sys.modules, "llm", None)
    with pytest.raises(UserError, match=r'needs the package llm: pip install -e ".*\[llm\]"'):
        LLM("talker").check()


@pytest.mark.parametrize("headers", [{}, {"Retry-After-Ms": "60"}])
def test_a_rate_limit_is_waited_for(headers: dict[str, str]) -> None:
    """40 requests to a model that accepts 20 a second; each is answered."""
    model: Any = llm.get_model("rationed")
    model.headers = headers
    asked = LLM("rationed", concurrency=8)
    said = asked.generate_each([Request(str(n)) for n in range(40)])
    assert [getattr(one, "text", one) for one in said] == [f"so: {n}" for n in range(40)]
    assert model.refused and asked.client.throttle.rate is not None
    assert model.refused < 20, "the rate fell"
    assert asked.client.throttle.active == 0


def test_a_rate_limit_ends_with_the_timeout_and_at_a_quota() -> None:
    model: Any = llm.get_model("rationed")
    model.free = time.monotonic() + 60
    began = time.monotonic()
    (said,) = LLM("rationed").generate_each([Request("hi", timeout=0.7)])
    assert isinstance(said, RequestTimeout) and time.monotonic() - began < 2
    model.code, refused = "insufficient_quota", model.refused
    (said,) = LLM("rationed").generate_each([Request("hi")])
    assert isinstance(said, RateLimited) and model.refused == refused + 1
    assert "slow down" in str(said)
