"""The server as OpenAI's own client meets it: answers, pieces, errors, keys, clients that go."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import endpoints
import fake_models
import httpx2 as httpx
import openai
import pydantic
import pytest
from model_server import Slow, Told, served

from swarm.errors import UserError
from swarm.models.base import Completion, Message, Model, Request, Token
from swarm.models.cache import Cache
from swarm.models.function import FunctionModel
from swarm.models.http_errors import BadRequest, RateLimited, RequestTimeout, ServerFault
from swarm.models.openai import OpenAI
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec
from swarm.pool.pool import Pool
from swarm.registry.registry import Roster
from swarm.serve.api_errors import HttpError
from swarm.serve.chat_request import NEUTRAL_VALUES, ChatBody
from swarm.serve.limits import MAX_BODY_BYTES

HI: Any = [{"role": "user", "content": "hi"}]
KEY = "sk-served-0123456789"


# Each client of its own would read the machine's certificates again.
HTTP = httpx.Client()


@cache
def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


def post(url: str, body: Any = None, **how: Any) -> httpx.Response:
    """A request as a program without a client of its own sends it."""
    asked = {"model": "function/pieces", "messages": HI, **(body or {})}
    return HTTP.post(f"{url}/chat/completions", **{"json": asked, **how})


def until(what: Any) -> None:
    """Wait until it is so."""
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


THOUGHT = Completion("Blue.", (), 7, 2, cost=0.25, reasoning="Light scatters.", finish="length")
TOKENS = (Token("Bl", -0.5, (("Bl", -0.5), ("Gr", -1.0))), Token("ué", float("-inf"), ()))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    models = {
        "function/pieces": FunctionModel(fake_models.pieces),
        "moa/thinks": Told(THOUGHT),
        "openai/gpt": Told(Completion("Blué", (), 1, 2, tokens=TOKENS)),
        "a/twice": Told(Completion("1")),
        "b/twice": Told(Completion("2")),
    }
    with served(models) as found:
        yield found


def test_models_and_answers(url: str) -> None:
    asked = client(url)
    names = [model.id for model in asked.models.list()]
    assert names == ["function/pieces", "moa/thinks", "openai/gpt", "a/twice", "b/twice"]
    assert asked.models.retrieve("moa/thinks").owned_by == "model-swarms"
    assert HTTP.get(url.replace("/v1", "/health")).json() == {"status": "ok"}
    with pytest.raises(openai.NotFoundError, match="did you mean moa/thinks") as caught:
        asked.models.retrieve("moa/think")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match=r"did you mean a/twice or b/twice"):
        asked.chat.completions.create(model="twice", messages=HI)
    answer = asked.chat.completions.create(model="thinks", messages=HI)
    assert answer.object == "chat.completion" and answer.model == "moa/thinks"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Blue.")
    assert choice.message.reasoning_content == "Light scatters."
    assert choice.finish_reason == "length" and choice.logprobs is None
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, "cost": 0.25}
    assert answer.usage.model_dump(exclude_none=True) == usage
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    turns: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": fake_models.ODD},
        {"role": "assistant", "content": "aye", "refusal": None, "tool_calls": None},
        {"role": "user", "content": parts},
    ]
    answer = asked.chat.completions.create(model="pieces", messages=turns)
    odd = f"user: {fake_models.ODD} / system: Be brief."
    assert answer.choices[0].message.content == f"user: one\ntwo / assistant: aye / {odd}"


def test_what_is_asked_arrives() -> None:
    model = Told(Completion("a"), Completion("b"), Completion("c"))
    with served({"local/m": model}, longest=77) as url:
        ask = client(url).chat.completions.create
        answer = ask(model="m", messages=HI, n=3, temperature=0.5, seed=4, max_tokens=9, stop="!")
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        ask(model="m", messages=HI, max_completion_tokens=5, extra_headers={"x": "y"})
        ask(model="m", messages=HI, user="u", store=False, metadata={"a": "b"}, top_p=1)
    for n, heard in enumerate(sorted(model.heard[:3], key=lambda one: one.sample)):
        assert heard.prompt == (Message("user", "hi"),)
        assert (heard.sample, heard.temperature, heard.seed) == (n, 0.5, 4)
        assert (heard.max_new_tokens, heard.stop, heard.top_logprobs) == (9, ("!",), 0)
    assert [one.max_new_tokens for one in model.heard[3:]] == [5, 77]
    assert model.heard[-1].temperature is None and model.heard[-1].seed is None


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities(url: str, streamed: bool) -> None:
    ask = client(url).chat.completions.create
    asked: Any = {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": streamed}
    came = ask(model="gpt", **asked)
    choice = list(came)[-1].choices[0] if streamed else came.choices[0]
    first, second = choice.logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("Bl", -0.5, [66, 108])
    assert [(one.token, one.logprob) for one in first.top_logprobs] == [("Bl", -0.5), ("Gr", -1)]
    assert second.logprob == -9999.0 and bytes(second.bytes).decode() == "ué"
    with pytest.raises(openai.APIError, match="thinks does not return them") as caught:
        list(ask(model="thinks", **asked))
    assert caught.value.param == "logprobs"


WRONG: dict[str, dict[str, Any]] = {
    "messages": {"messages": []},
    "messages.[0].role": {"messages": [{"role": "function", "content": "x"}]},
    "messages.[0].tool_call_id": {"messages": [{"role": "tool", "content": "x"}]},
    "messages.[0].content.[0]": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    },
    "messages.[0].tool_calls": {
        "messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]
    },
    "temperature": {"temperature": -1},
    "max_tokens": {"max_tokens": 3, "max_completion_tokens": 4},
    "n": {"n": 129},
    "stop": {"stop": [""]},
    "stream_options": {"stream_options": {"include_usage": True}},
    "top_logprobs": {"top_logprobs": 2},
    "frequency_penalty": {"frequency_penalty": -3},
    "prompt_form": {"prompt_form": "x"},
    "logit_bias": {"logit_bias": {"50256": -100}},
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tool_choice": "required"},
}


@pytest.mark.parametrize("parameter", WRONG)
def test_what_cannot_be_done_is_refused_by_name(parameter: str, url: str) -> None:
    came = post(url, WRONG[parameter])
    assert came.status_code == 400
    error = came.json()["error"]
    assert error["param"] == parameter and error["type"] == "invalid_request_error"
    assert error["message"].lstrip("'").startswith(parameter) and "\n" not in error["message"]
    body = {"model": "m", "messages": HI, "top_k": None, **NEUTRAL_VALUES}
    asked = ChatBody.parse(body).to_request(endpoint=False, longest=5)
    assert asked == (Request((Message("user", "hi"),), 5), [])


def test_bodies_that_are_none(url: str) -> None:
    kind = {"Content-Type": "application/json"}
    for content, words in (
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "JSON obj"),
        (b'{"temperature": NaN}', "NaN is not a number"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"model": "m", "messages": [{"role": [], "content": "x"}]}', "must be system, "),
    ):
        came = post(url, json=None, content=content, headers=kind)
        assert came.status_code == 400 and words in came.json()["error"]["message"]
    plain = post(url, json=None, content=b"{}", headers={"Content-Type": "text/plain"})
    large = post(url, json=None, content=bytes(MAX_BODY_BYTES + 1), headers=kind)
    assert (plain.status_code, large.status_code) == (415, 413)
    assert large.json()["error"]["type"] == "invalid_request_error"
    for path, method, status in (("/v1/none", "GET", 404), ("/v1/models", "DELETE", 405)):
        came = HTTP.request(method, url.replace("/v1", path))
        assert came.status_code == status and path in came.json()["error"]["message"]
    assert HTTP.get(url.replace("/v1", "/docs")).status_code == 404


def test_pieces_come_when_they_are_made() -> None:
    model = Slow(["one ", "two ", "three"])
    with served({"local/slow": model}) as url:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        model.go.release()
        chunks = iter(client(url).chat.completions.create(model="slow", messages=HI, **options))
        assert next(chunks).choices[0].delta.role == "assistant"
        assert next(chunks).choices[0].delta.content == "one "
        assert model.given == 1
        model.go.release(2)
        rest = list(chunks)
    assert [c.choices[0].delta.content for c in rest[:2]] == ["two ", "three"]
    assert rest[2].choices[0].finish_reason == "stop"
    assert rest[3].choices == [] and rest[3].usage.total_tokens == 5 and len(rest) == 4
    assert {c.usage for c in rest[:3]} == {None} and len({c.id for c in rest}) == 1


def asked(url: str, **body: Any) -> socket.socket:
    """A connection on which a chat completion was asked for; closing it is going away."""
    where = httpx.URL(url)
    made = socket.create_connection((where.host, where.port))
    data = json.dumps({"messages": HI, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    made.sendall(head.encode() + data)
    return made


@pytest.mark.parametrize("streamed", [False, True])
def test_who_goes_away_ends_the_answer(streamed: bool) -> None:
    model = Slow()
    with served({"local/slow": model}) as url:
        with asked(url, model="slow", stream=streamed, n=2) as client_socket:
            model.go.release(2)
            until(lambda: model.given == 2 and len(model.heard) == 2)
            if streamed:
                assert client_socket.recv(1000).startswith(b"HTTP/1.1 200")
        until(lambda: all(one.stop_check and one.stop_check("") for one in model.heard))
        model.go.release(50)
        until(lambda: model.live == 0)
        assert len(model.heard) == 2 and model.given <= 4
        assert post(url, {"model": "none"}).status_code == 404


def test_who_goes_away_ends_the_members_that_can_be_told() -> None:
    begun, over = threading.Event(), threading.Event()

    class Local(Model):
        """Asks after each token whether to go on, as a model of this machine does."""

        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            """See `swarm.models.base.Model`."""
            begun.set()
            until(lambda: all(one.stop_check and one.stop_check("so far") for one in requests))
            over.set()
            return [Completion("so far") for _ in requests]

    member = AgentSpec(Local(), "member")
    with served({"moa/m": MixtureOfAgents([member], member)}) as url:
        with asked(url, model="m"):
            assert begun.wait(60) and not over.wait(0.05)
        assert over.wait(60)


def test_the_line() -> None:
    model, other = Slow(), Told(Completion("x"))
    with served({"local/slow": model, "f/f": other}, concurrency=1, queue=2) as url:
        with asked(url, model="slow"):
            until(lambda: model.heard)
            replies: list[httpx.Response] = []
            with asked(url, model="slow"):  # waits, and leaves the line below
                both = [
                    threading.Thread(target=lambda: replies.append(post(url, {"model": "f"})))
                    for _ in range(2)
                ]
                for one in both:
                    one.start()
                until(lambda: replies)
                assert replies[0].json()["error"]["type"] == "rate_limit_error"
                assert replies[0].headers["Retry-After"] == "1"
                assert len(model.heard) == 1 and not other.heard
        until(lambda: model.heard[0].stop_check and model.heard[0].stop_check(""))
        model.go.release()  # its thread sees at its next piece that nobody waits
        for one in both:
            one.join(60)
    assert replies[1].json()["choices"][0]["message"]["content"] == "x"
    assert len(model.heard) == 1


FAILED = [
    (UserError("no room"), 502, False),
    (BadRequest("at box: 400"), 400, False),
    (RateLimited("at box: 429", 7.0), 429, True),
    (RequestTimeout("at box: late"), 504, True),
    (ServerFault("at box: 503"), 502, True),
    (ZeroDivisionError("secret"), 500, False),
    (HttpError("no"), 400, False),
]


@pytest.mark.parametrize(("error", "status", "again"), FAILED, ids=lambda one: type(one).__name__)
def test_failures(error: Exception, status: int, again: bool, caplog: Any) -> None:
    long = Completion("", finish="context_length_exceeded")
    filtered = Completion("", finish="content_policy_violation")
    local = Told(UserError("too long"))
    models = {"moa/m": Told(error), "local/m": local, "a/long": Told(long), "a/bad": Told(filtered)}
    with served(models) as url:
        for streamed in (False, True):
            came = post(url, {"model": "moa/m", "stream": streamed})
            told = came.json()["error"]
            assert came.status_code == status and "secret" not in came.text
            assert came.headers["x-should-retry"] == ("true" if again else "false")
            assert ("Retry-After" in came.headers) == (status == 429)
            assert set(told) == {"message", "type", "param", "code"}
            assert told["message"] in caplog.text or status < 500
        assert post(url, {"model": "local/m"}).status_code == 400
        came = post(url, {"model": "long"})
        assert (came.status_code, came.json()["error"]["code"]) == (400, long.finish)
        choice = post(url, {"model": "bad"}).json()["choices"][0]
        assert choice["finish_reason"] == "content_filter"


def test_the_key(capfd: Any) -> None:
    with served({"a/m": Told(Completion("x"))}, key=KEY) as url:
        assert client(url, KEY).chat.completions.create(model="m", messages=HI).choices
        for wrong in ("", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", "Bearer ü", f"Basic {KEY}"):
            came = post(url, headers={"Authorization": wrong.encode()} if wrong else {})
            assert came.status_code == 401 and came.json()["error"]["code"] == "invalid_api_key"
            assert KEY not in came.text
        assert HTTP.get(f"{url}/models").status_code == 401
        assert HTTP.get(url.replace("/v1", "/health")).status_code == 200
        assert HTTP.get(f"{url}/models", headers={"Host": "box", "Authorization": f"bearer {KEY}"})
    assert KEY not in "".join(capfd.readouterr())


def test_models_of_this_machine(tiny_llama: Path, tiny_pool: Path, tmp_path: Path) -> None:
    preset = tmp_path / "two.yaml"
    preset.write_text(
        json.dumps(
            {
                "proposers": ["local/amber", "local/birch"],
                "aggregator": "local/base",
                "prompt": {"text": "Say it:"},
            }
        )
    )
    roster = Roster(base=str(tiny_llama), pool=tiny_pool, device="cpu", cache=None)
    names = ["local/base", "local/amber", f"moa/{preset}"]
    models = {name: roster.model(name) for name in names}
    asked: Any = {"messages": HI, "max_tokens": 6, "temperature": 1.0, "seed": 3}
    with served(models) as url:
        ask = client(url).chat.completions.create
        answer = ask(model="amber", n=3, logprobs=True, top_logprobs=2, **asked)
        texts = [choice.message.content for choice in answer.choices]
        alone = [
            Request((Message("user", "hi"),), 6, temperature=1.0, seed=3, sample=n)
            for n in range(3)
        ]
        assert texts == [one.text for one in models["local/amber"].generate(alone)]
        assert len(set(texts)) == 3 and answer.usage.completion_tokens <= 18
        told = answer.choices[0].logprobs.content
        assert len(told[0].top_logprobs) == 2 and "".join(t.token for t in told) == texts[0]
        chunks = list(ask(model=f"moa/{preset}", stream=True, **asked))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        (whole,) = models[f"moa/{preset}"].generate([alone[0]])
        assert said == whole.text and len(chunks) > 3
        long: Any = [{"role": "user", "content": "word " * 5000}]
        with pytest.raises(openai.BadRequestError, match="max_position_embeddings"):
            ask(model="base", messages=long)


def test_the_form_of_a_prompt_is_that_of_the_search(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """The best of a search without chat template continues the text, unless asked otherwise."""
    models: dict[str, Any] = {"function/pieces": FunctionModel(fake_models.pieces)}
    roster = Roster(base=str(tiny_llama), pool=tiny_pool, device="cpu", cache=None)
    for form in ("plain", "chat"):
        Pool(tiny_pool).open().save([1, 0, 0, 0], tmp_path / form, {"prompt_form": form})
        models[f"local/{form}"] = roster.model(f"local/{tmp_path / form}")
    prompts = {"plain": "hi", "chat": (Message("user", "hi"),)}
    own = {
        form: models["local/plain"].generate([Request(prompt, 6)])[0].text
        for form, prompt in prompts.items()
    }
    assert own["plain"] != own["chat"]
    with served(models) as url:
        for model in own:
            for form in (None, *own):
                came = post(url, {"model": model, "max_tokens": 6, "prompt_form": form}).json()
                assert came["choices"][0]["message"]["content"] == own[form or model]
        came = post(url, {"model": "pieces", "prompt_form": "plain"})
        assert came.status_code == 400 and came.json()["error"]["param"] == "prompt_form"


SHAPED: Any = {
    "top_p": 0.9,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.2,
    "reasoning_effort": "low",
}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}


class Sky(pydantic.BaseModel):
    """A reply in a form."""

    colour: str


def behind(url: str, **settings: Any) -> OpenAI:
    """A model of an endpoint of the test's."""
    return OpenAI("remote", url, None, cache=None, **settings)


def test_an_endpoint_gets_what_it_alone_can_apply() -> None:
    with (
        endpoints.endpoint(lambda asked: endpoints.chat('{"colour": "blue"}')) as there,
        served({"p/remote": behind(there.url), "p/traced": behind(there.url)}) as url,
    ):
        ask = client(url).chat.completions
        named: Any = [{"role": "user", "content": "hi", "name": "Bo"}]
        came = ask.with_raw_response.create(
            model="remote",
            messages=named,
            **SHAPED,
            logit_bias={"7": -100},
            functions=[TOOL["function"]],
            extra_body={"top_k": 5},
        )
        assert came.headers["x-ignored-parameters"] == "functions"
        sent = there.asked[-1].body
        assert {key: sent[key] for key in SHAPED} == SHAPED and sent["logit_bias"] == {"7": -100}
        assert sent["top_k"] == 5 and sent["messages"] == named and "functions" not in sent
        picture: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        ask.create(model="remote", messages=[{"role": "user", "content": picture}])
        assert there.asked[-1].body["messages"][0]["content"] == picture
        parsed = client(url).beta.chat.completions.parse(
            model="remote", messages=HI, response_format=Sky
        )
        assert parsed.choices[0].message.parsed == Sky(colour="blue")
        assert there.asked[-1].body["response_format"]["type"] == "json_schema"


def test_other_models_ignore_what_shapes_and_refuse_what_decides(url: str) -> None:
    ask = client(url).chat.completions
    named: Any = [{"role": "user", "content": "hi", "name": "Bo"}]
    came = ask.with_raw_response.create(
        model="thinks", messages=named, **SHAPED, tools=[TOOL], tool_choice="auto"
    )
    assert came.parse().choices[0].message.content == "Blue."
    ignored = came.headers["x-ignored-parameters"].split(", ")
    assert sorted(ignored) == sorted(["messages.name", "tools", *SHAPED])
    assert (
        "x-ignored-parameters"
        not in ask.with_raw_response.create(model="thinks", messages=HI).headers
    )
    with pytest.raises(openai.BadRequestError, match="is not supported by this model") as caught:
        client(url).beta.chat.completions.parse(model="thinks", messages=HI, response_format=Sky)
    assert caught.value.param == "response_format"
    one: Any = {"type": "function", "function": {"name": "f"}}
    for wrong in (
        {"tool_choice": "required", "tools": [TOOL]},
        {"tool_choice": one, "tools": [TOOL]},
        {"logit_bias": {"7": -100}},
    ):
        with pytest.raises(openai.BadRequestError, match="is not supported") as caught:
            ask.create(model="thinks", messages=HI, **wrong)
        assert caught.value.param == next(iter(wrong))
    none = ask.with_raw_response.create(
        model="thinks", messages=HI, tools=[TOOL], tool_choice="none", parallel_tool_calls=True
    )
    assert "x-ignored-parameters" not in none.headers
    for model in ("thinks", "pieces"):
        came = ask.with_raw_response.create(
            model=model, messages=HI, user="u", extra_body={"guided_choice": ["a"], "a\r\nb: c": 1}
        )
        assert came.headers["x-ignored-parameters"] == "user, guided_choice, a??b??c"
    for turn in (
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ):
        with pytest.raises(openai.BadRequestError, match="reads no tool calls"):
            ask.create(model="thinks", messages=[*HI, turn])


CALLS: Any = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}},
    {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
]


def parts(index: int, *arguments: str, **call: Any) -> Iterator[bytes]:
    """The events of one tool call, its arguments in pieces."""
    first = {**CALLS[index], **call, "function": {"name": "f", "arguments": ""}}
    yield endpoints.piece(tool_calls=[{"index": index, **first}])
    for piece in arguments:
        yield endpoints.piece(tool_calls=[{"index": index, "function": {"arguments": piece}}])


def a_tool_first(asked: endpoints.Asked) -> endpoints.Reply:
    """Calls two tools, and answers when it has their results."""
    if asked.body["messages"][-1]["role"] == "tool":
        return endpoints.chat("Sunny.")
    if "stream" not in asked.body:
        reply = endpoints.chat(None, tool_calls=CALLS)
        reply.body["choices"][0]["finish_reason"] = "tool_calls"
        return reply
    end = endpoints.piece(finish="tool_calls")
    told = [*parts(0, '{"city":', ' "Bern"}'), *parts(1, "{}")]
    return endpoints.Reply(pieces=[*told, end, endpoints.DONE])


@pytest.mark.parametrize("streamed", [False, True])
def test_an_endpoint_calls_tools_and_reads_their_results(streamed: bool, tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "a.sqlite"))
    with (
        endpoints.endpoint(a_tool_first) as there,
        served({"p/remote": OpenAI("remote", there.url, None, cache=cache)}) as url,
    ):
        how: Any = {"model": "remote", "tools": [TOOL], "tool_choice": "auto"}
        ask = client(url).chat.completions
        for _ in range(2):  # the second one is kept
            if streamed:
                with ask.stream(messages=HI, parallel_tool_calls=False, **how) as events:
                    answer = events.get_final_completion()
            else:
                answer = ask.create(messages=HI, parallel_tool_calls=False, **how)
            [choice] = answer.choices
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            calls = [one.model_dump(exclude={"index"}) for one in choice.message.tool_calls]
            for call in calls:
                call["function"].pop("parsed_arguments", None)
            assert calls == CALLS
        assert len(there.asked) == 1
        sent = there.asked[0].body
        assert [sent[key] for key in ("tools", "tool_choice")] == [[TOOL], "auto"]
        assert sent["parallel_tool_calls"] is False and sent["messages"] == HI
        turns: Any = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": CALLS},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
            {"role": "tool", "tool_call_id": "c2", "content": "none"},
        ]
        answer = ask.create(messages=turns, **how)
        assert answer.choices[0].message.content == "Sunny."
        assert answer.choices[0].finish_reason == "stop"
        turns[2]["content"] = "sun"
        assert there.asked[1].body["messages"] == turns
        named: Any = {"type": "function", "function": {"name": "f"}}
        ask.create(model="remote", messages=HI, tools=[TOOL], tool_choice=named)
        assert there.asked[2].body["tool_choice"] == named
