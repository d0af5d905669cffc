"""Many answers in one pool: kept as they come, failures told and never kept, nothing for ever."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare_endpoint
import endpoints
import pytest
import searches
import warm_python
from compare_endpoint import KEY, asked, repeats, script

from swarm.compare import Config, ModelAdapter, Question, Runner
from swarm.compare.sampling.backends import open_answer_cache
from swarm.compare.sampling.resolve import sample_cache_keys
from swarm.compare.sampling.scheduler import as_completed, run_scripts
from swarm.compare.sampling.types import ModelCall, SampleOutcome, SampleRequest, Script
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Completion, Model, Request

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)


def texts(heard: Sequence[SampleOutcome]) -> list[str | None]:
    """What was said; `None` where it failed."""
    return [one.text if isinstance(one, Completion) else None for one in heard]


def test_answers_come_in_order_and_are_asked_once() -> None:
    with compare_endpoint.endpoint() as server:
        ask = [script(asked(f"q{n % 7}"), n % 3) for n in range(60)]
        assert texts(run_scripts(ask)) == [f"so: q{n % 7}" for n in range(60)]
        assert len(server.asked) == 21
        assert texts(run_scripts([script(asked("q3"), n) for n in range(3)])) == ["so: q3"] * 3
        assert len(server.asked) == 21, "a kept answer was asked for"


def test_raising_the_samples_asks_for_the_new_ones_alone() -> None:
    with compare_endpoint.endpoint() as server:
        for samples, requests in ((3, 6), (4, 8), (4, 8), (2, 8)):
            run_scripts(
                [script(asked(f"q{n}"), sample) for n in range(2) for sample in range(samples)]
            )
            assert len(server.asked) == requests


def test_of_many_samples_those_that_lack_are_asked() -> None:
    """Samples of one request are looked up together, and told as their own."""

    def many(what: ModelCall, samples: range) -> Script[list[str]]:
        heard = yield [SampleRequest(what, sample) for sample in samples]
        return [one.text for one in heard]

    count = iter(range(1000))
    with compare_endpoint.endpoint(lambda _: endpoints.chat(f"answer {next(count)}")) as server:
        [first] = run_scripts([many(asked(), range(30))])
        assert sorted(first) == sorted(f"answer {n}" for n in range(30))
        open_answer_cache().delete(sample_cache_keys([SampleRequest(asked(), 7)]))
        [second, part] = run_scripts([many(asked(), range(40)), many(asked(), range(5, 29))])
        assert len(server.asked) == 30 + 11
        assert second[:7] + second[8:30] == first[:7] + first[8:] and second[7] not in first
        assert part == second[5:29]


def test_greedy_samples_of_an_endpoint_are_asked_each() -> None:
    with compare_endpoint.endpoint() as server:
        run_scripts([script(asked(temperature=0), n) for n in range(3)])
        assert len(server.asked) == 3


def test_a_script_goes_on_with_what_it_hears_before_others_begin() -> None:
    """An answer streams to its judge: with one worker they alternate."""

    def judged(n: int) -> Script[str]:
        [first] = yield [SampleRequest(asked(f"q{n}"))]
        both = yield [
            SampleRequest(asked(f"judge {first.text}")),
            SampleRequest(asked("a constant")),
        ]
        return " ".join(one.text for one in both)

    Config.max_workers = 1
    with compare_endpoint.endpoint() as server:
        assert run_scripts([judged(n) for n in range(3)])[2] == "so: judge so: q2 so: a constant"
        said = server.texts()
    assert len(said) == 7, "the constant is asked once"
    assert said.index("judge so: q0") < said.index("q2")


def test_a_failure_is_told_not_kept_and_asked_again() -> None:
    broken = {"q1", "q3"}

    def answer(request: endpoints.Asked) -> endpoints.Reply:
        if request.body["messages"][-1]["content"] in broken:
            return endpoints.Reply({"error": {"message": "no luck"}}, 400)
        return repeats(request)

    with compare_endpoint.endpoint(answer) as server:
        ask = [asked(f"q{n}") for n in range(5)]
        heard = run_scripts([script(one) for one in ask])
        assert texts(heard) == ["so: q0", None, "so: q2", None, "so: q4"]
        assert "no luck" in str(heard[1])
        broken.clear()
        assert None not in texts(run_scripts([script(one) for one in ask]))
        assert len(server.asked) == 7


def test_a_model_that_is_nowhere_costs_the_others_nothing() -> None:
    def answer(request: endpoints.Asked) -> endpoints.Reply:
        if request.body["model"] == "unknown":
            return endpoints.Reply({"error": {"message": "no such model"}}, 404)
        return repeats(request)

    with compare_endpoint.endpoint(answer) as server:
        ask = [asked(f"q{n}", model) for n in range(20) for model in ("small", "unknown")]
        heard = run_scripts([script(one) for one in ask])
        assert texts(heard[::2]) == [f"so: q{n}" for n in range(20)]
        assert texts(heard[1::2]) == [None] * 20
        assert len(server.asked) == 21, "a model that is not there is asked once"


def test_what_is_not_found_has_its_reason() -> None:
    Config.url_key_pairs = []
    [heard] = run_scripts([script(asked(model="gpt-9"))])
    assert isinstance(heard, UserError) and "gpt-9" in str(heard) and "OPENAI_API_KEY" in str(heard)


def test_a_server_that_always_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are repeated so often and no more; then nothing new is asked of it."""
    monkeypatch.setattr("swarm.models.http.FIRST_WAIT", 0.001)
    with compare_endpoint.endpoint(lambda _: endpoints.Reply({}, 500)) as server:
        began = time.monotonic()
        heard = run_scripts([script(asked(f"q{n}")) for n in range(300)])
        assert texts(heard) == [None] * 300
        assert time.monotonic() - began < 10
        assert len(server.asked) == 39, "three requests, 13 times each"
    [later] = run_scripts([script(asked("q0"))])
    assert isinstance(later, UserError), "the server is gone"


def test_a_prompt_that_fails_for_ever_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.models.http.FIRST_WAIT", 0.001)

    def answer(request: endpoints.Asked) -> endpoints.Reply:
        if request.body["messages"][-1]["content"] == "q0":
            return endpoints.Reply({}, 500)
        return repeats(request)

    Config.max_workers = 1
    with compare_endpoint.endpoint(answer):
        assert texts(run_scripts([script(asked(f"q{n}")) for n in range(4)])) == [
            None,
            "so: q1",
            "so: q2",
            "so: q3",
        ]


def test_a_silent_server_meets_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.models.http.MAX_RETRY_S", -1.0)
    Config.timeout = 0.2
    with compare_endpoint.endpoint(lambda _: endpoints.Reply({}, wait=60.0)):
        began = time.monotonic()
        [heard] = run_scripts([script(asked())])
        assert isinstance(heard, UserError) and "0.2 s" in str(heard)
        assert time.monotonic() - began < 50


INTERRUPTED = """
import sys
from swarm.compare import Config
sys.path.insert(0, "tests/helpers")
from compare_endpoint import asked, script
from swarm.compare.sampling.scheduler import run_scripts
Config.cache_dir = sys.argv[1]
Config.url_key_pairs = [(sys.argv[2], "a-key-of-ours", "FAKE_API_KEY")]
run_scripts([script(asked(f"q{n}")) for n in range(2000)])
"""


def test_an_interrupt_ends_the_asking_and_loses_no_answer(settings: Path) -> None:
    def slowly(request: endpoints.Asked) -> endpoints.Reply:
        return endpoints.Reply(repeats(request).body, wait=0.1)

    with compare_endpoint.endpoint(slowly) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, str(settings), server.url],
            cwd=searches.ROOT,
            env=searches.environment(),
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
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
        kept = len(
            open_answer_cache().get(sample_cache_keys([SampleRequest(one) for one in whole]))
        )
        assert kept >= came >= 40
        assert texts(run_scripts([script(one) for one in whole])) == [
            f"so: q{n}" for n in range(2000)
        ]
        # What was under way when it ended may have been counted late.
        assert 0 <= len(server.asked) - sent - (2000 - kept) <= 100


def test_an_error_in_a_script_keeps_what_came() -> None:
    def broken(n: int) -> Script[None]:
        yield [SampleRequest(asked(f"q{n}"))]
        if n == 5:
            raise RuntimeError("a mistake in the script")

    Config.max_workers = 1
    with compare_endpoint.endpoint(), pytest.raises(RuntimeError, match="a mistake"):
        run_scripts([broken(n) for n in range(20)])
    # The endpoint is gone.
    assert texts(run_scripts([script(asked(f"q{n}")) for n in range(6)])) == [
        f"so: q{n}" for n in range(6)
    ]


def test_two_processes_lose_no_answer_of_each_other(settings: Path) -> None:
    """200 answers each, of which half are the same."""
    code = INTERRUPTED.replace("range(2000)", "range(int(sys.argv[3]), int(sys.argv[3]) + 200)")
    with compare_endpoint.endpoint() as server:
        both = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(settings), server.url, str(first)],
                cwd=searches.ROOT,
                env=searches.environment(),
            )
            for first in (0, 100)
        ]
        assert [process.wait(200) for process in both] == [0, 0]
        before = len(server.asked)
        assert before <= 400
        run_scripts([script(asked(f"q{n}")) for n in range(300)])
        assert len(server.asked) == before


def test_runs_in_several_threads_share_the_endpoint() -> None:
    found: dict[int, list[str | None]] = {}
    Config.max_workers = 8

    def work(thread: int) -> None:
        found[thread] = texts(run_scripts([script(asked(f"{thread} {n}")) for n in range(30)]))

    with compare_endpoint.endpoint() as server:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {t: [f"so: {t} {n}" for n in range(30)] for t in range(4)}
        assert server.peak <= 8


def test_as_completed_gives_each_when_it_is_there() -> None:
    held = threading.Event()

    def answer(request: endpoints.Asked) -> endpoints.Reply:
        if request.body["messages"][-1]["content"] == "q0":
            held.wait(10)
        return repeats(request)

    with compare_endpoint.endpoint(answer):
        run_scripts([script(asked("warm"))])
        came = as_completed([script(asked(f"q{n}")) for n in range(3)])
        first = [next(came)[0], next(came)[0]]
        held.set()
        assert sorted(first) == [1, 2] and next(came)[0] == 0


class Shouts(Model):
    """A model of one's own; counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The last turn in capitals."""
        self.asked += requests
        return [Completion(request.prompt[-1].content.upper()) for request in requests]


def test_a_model_of_ones_own_is_a_class_with_generate() -> None:
    own = Config.models["shouts"] = Shouts()
    ask = [script(asked(f"q{n}", "shouts"), sample) for n in range(5) for sample in range(2)]
    assert texts(run_scripts(ask))[:3] == ["Q0", "Q0", "Q1"]
    assert len(own.asked) == 10 and own.asked[0].max_new_tokens == 5
    [again] = run_scripts([script(asked("q3", "shouts"), 1)])
    assert again.cached and len(own.asked) == 10
    [heard] = run_scripts([script(asked("q", "shouts", logit_bias={1: 2}))])
    assert "shouts: logit_bias is not supported" in str(heard)
    [heard] = run_scripts([script(asked([{"type": "text", "text": "hi"}], "shouts"))])
    assert "accepts text only" in str(heard)
    Config.models["wrong"] = object()
    [heard] = run_scripts([script(asked("q", "wrong"))])
    assert isinstance(heard, InvalidArgument) and "no method generate" in str(heard)


class Ends(Shouts):
    """A model that wants to end the process."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Nothing."""
        raise SystemExit(3)


def test_a_model_that_ends_the_process_is_a_failure_of_its_own() -> None:
    Config.models |= {"ends": Ends(), "shouts": Shouts()}
    first, second = run_scripts([script(asked("q", "ends")), script(asked("q", "shouts"))])
    assert isinstance(first, UserError) and "SystemExit" in str(first)
    assert texts([second]) == ["Q"]


def test_functions_and_consortia_are_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(searches.HELPERS)
    [heard] = run_scripts([script(asked("hi", "function/fake_models:function"))])
    assert heard.text == "user: hi"
    [heard] = run_scripts([script(asked("hi", "local/no-such-expert"))])
    assert isinstance(heard, UserError) and "no-such-expert" in str(heard)


def test_the_key_is_written_nowhere(settings: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def answer(request: endpoints.Asked) -> endpoints.Reply:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        return endpoints.chat(f"your key is {KEY}")

    Config.verbose = True
    with compare_endpoint.endpoint(answer):
        heard = run_scripts([script(asked())])
        print(heard, Config.client_for_model("small"), repr(Config.client_cache))
        Config.client_for_model("small")
    assert KEY.encode() not in b"".join(file.read_bytes() for file in settings.glob("*"))
    assert KEY not in "".join(capfd.readouterr())
    assert "***" in heard[0].text


def test_a_changed_adapter_is_another_request() -> None:
    with compare_endpoint.endpoint() as server:
        run_scripts([script(asked())])
        ModelAdapter.register(lambda model: model == "small", lambda p, _: {**p, "top_p": 0.5})
        run_scripts([script(asked())])
        run_scripts([script(asked(model="other"))])
        assert [one.body.get("top_p") for one in server.asked] == [None, 0.5, None]


def test_runner_gives_texts_and_what_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    def params(text: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": text}], "temperature": 0.5}

    with compare_endpoint.endpoint() as server:
        runner = Runner("small")
        text, sent = runner.get_text(params("hello"))
        assert text == "so: hello"
        assert sent == {"timeout": 60, "model": "small", **params("hello")}
        assert server.asked[-1].body == {"model": "small", **params("hello")}
        many = [{"params": params(one), "_number": n} for n, one in enumerate(("a", "bad", "c"))]
        came = runner.get_many(runner.get_text, many)
        found = {given["_number"]: said for given, said in came}
        assert found[0][0] == "so: a" and found[1] == (None, {}) and found[2][0] == "so: c"
        assert "I do not answer that" in capsys.readouterr().err
        ordered = runner.get_many(lambda a: (a, {}), [{"a": n} for n in range(9)], in_order=True)
        assert [said for _, (said, _) in ordered] == list(range(9))
        with pytest.raises(UserError, match="I do not answer that"):
            runner.get_text(params("bad"))
        with pytest.raises(InvalidArgument, match="messages"):
            runner.get_text({"temperature": 1})


def test_a_wrong_call_of_many_ends_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(Runner):
        def get_text(self, params: Any) -> Any:
            """In capitals."""
            text, sent = super().get_text(params)
            return text.upper(), sent

    def call(messages: Any) -> dict[str, Any]:
        return {"params": {"messages": messages}}

    hi = [{"role": "user", "content": "hi"}]
    with compare_endpoint.endpoint():
        for runner, said in ((Runner("small"), "so: hi"), (Loud("small"), "SO: HI")):
            calls = [call(hi), call("hi"), call([{"role": "user", "content": 5}])]
            found = list(runner.get_many(runner.get_text, calls, in_order=True))
            assert [answer[0] for _, answer in found] == [said, None, None]
            assert "call 1 failed: messages: 'hi' is not a conversation" in capsys.readouterr().err
            with pytest.raises(InvalidArgument, match="max_workers=-1"):
                list(runner.get_many(runner.get_text, calls, max_workers=-1))


def test_a_slip_in_an_adapter_comes_out_before_anything_is_asked() -> None:
    ModelAdapter.register(lambda model: model == "big", lambda params, model: params.clear())
    question = Question.create(type="free_form", paraphrases=["a"])
    with compare_endpoint.endpoint() as server:
        with pytest.raises(InvalidArgument, match="gave None in place of a dict"):
            question.df({"g": ["small", "big"]})
        assert not server.asked


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"messages": "hi"}, "small: messages='hi' is not a list of turns"),
        ({"messages": [{"role": "user", "content": 5}]}, "is not a list of turns"),
        ({"max_tokens": "7"}, "small: max_tokens='7': must be an integer"),
    ],
)
def test_what_an_adapter_gives_can_be_sent(wrong: dict[str, Any], told: str) -> None:
    ModelAdapter.register(lambda model: True, lambda params, model: {**params, **wrong})
    with compare_endpoint.endpoint():
        [heard] = run_scripts([script(asked())])
    assert told in str(heard)


def test_an_adapter_that_asks_models_does_not_wait_for_itself() -> None:
    def asks(params: dict[str, Any], model: str) -> dict[str, Any]:
        hi = [{"role": "user", "content": "hi"}]
        return {**params, "user": Runner("other").get_text({"messages": hi})[0]}

    ModelAdapter.register(lambda model: model == "small", asks)
    judge = {"type": "free_form_judge", "model": "small", "paraphrases": ["{answer}?"]}
    with compare_endpoint.endpoint() as server:
        plain = Question.create(type="free_form", paraphrases=["a"])
        assert list(plain.df({"g": ["small"]}).answer) == ["so: a"]
        assert server.asked[-1].body["user"] == "so: hi"
        judged = Question.create(type="free_form", paraphrases=["b"], judges={"so": judge})
        assert "cannot query models" in judged.df({"g": ["big"]}).error[0]


def test_fields_beside_the_body_are_put_into_it_or_refused() -> None:
    given: dict[str, Any] = {}
    ModelAdapter.register(lambda model: True, lambda params, model: {**params, **given})
    with compare_endpoint.endpoint() as server:
        given["extra_body"] = {"provider": {"order": ["one"]}}
        run_scripts([script(asked())])
        assert server.asked[0].body["provider"] == {"order": ["one"]}
        assert "extra_body" not in server.asked[0].body
        for wrong, told in (
            ({"extra_headers": {"X": "1"}}, "extra_headers is not supported"),
            ({"metadata": object()}, "the request is not JSON"),
        ):
            given.update(wrong)
            [heard] = run_scripts([script(asked())])
            assert told in str(heard)
            given.clear()


def test_models_of_ones_own_that_are_made_otherwise_are_others() -> None:
    class Says(Model):
        def __init__(self, word: str) -> None:
            self.word = word

        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            """The word."""
            return [Completion(self.word)] * len(requests)

    for word in ("one", "two"):
        Config.models = {"own": Says(word)}
        assert texts(run_scripts([script(asked(model="own"))])) == [word]


def test_what_a_model_of_ones_own_raises_ends_no_other() -> None:
    class Slips(Model):
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            """Nothing."""
            raise ZeroDivisionError("a slip of my own")

    Config.models = {"slips": Slips()}
    with compare_endpoint.endpoint():
        failed, answer = run_scripts([script(asked(model="slips")), script(asked())])
    assert str(failed) == "slips: ZeroDivisionError: a slip of my own"
    assert texts([answer]) == ["so: hello"]


def test_importing_brings_nothing_heavy() -> None:
    code = (
        "from swarm.compare import Config, ModelAdapter, Question, Runner\n"
        "import json, sys; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [warm_python.COLD, "-c", code],
        cwd=searches.ROOT,
        check=True,
        text=True,
        env=searches.environment(),
        capture_output=True,
    )
    heavy = {"torch", "transformers", "pandas", "numpy", "matplotlib", "fastapi", "aiohttp"}
    assert not heavy & set(json.loads(done.stdout))


def test_settings_are_checked() -> None:
    for name, value in (("max_workers", 0), ("timeout", "soon"), ("requests_per_minute", 0)):
        with (
            Config.override(**{name: value}),
            pytest.raises(InvalidArgument, match=f"Config.{name}"),
        ):
            run_scripts([script(asked())])
    with (
        pytest.raises(InvalidArgument, match="unknown setting workers"),
        Config.override(workers=3),
    ):
        pass
    assert Config.max_workers == 100 and Config.timeout == 60


@pytest.mark.parametrize("after", [None, "1"])
def test_a_rate_limited_endpoint_loses_no_answer(after: str | None) -> None:
    """100 requests are under way at once, and the endpoint accepts 30 a second."""
    limited = endpoints.Rationed(30.0, after, repeats)
    with compare_endpoint.endpoint(limited) as server:
        began = time.monotonic()
        heard = run_scripts([script(asked(), n) for n in range(200)])
        taken = time.monotonic() - began
    assert texts(heard) == ["so: hello"] * 200
    assert taken < 10 * 200 / 30 and len(server.asked) < 400


def test_requests_a_minute_can_be_set() -> None:
    Config.requests_per_minute = 1200
    limited = endpoints.Rationed(30.0, "1", repeats)
    with compare_endpoint.endpoint(limited):
        began = time.monotonic()
        assert None not in texts(run_scripts([script(asked(), n) for n in range(30)]))
        assert time.monotonic() - began > 29 / 20 - 0.1 and limited.refused == 0


def several(request: endpoints.Asked) -> endpoints.Reply:
    """As many answers as are asked for."""
    reply = repeats(request)
    choices = reply.body["choices"] * request.body.get("n", 1)
    return endpoints.Reply({**reply.body, "choices": choices})


def test_samples_that_are_counted_are_asked_for_together() -> None:
    """The prompt is paid once; what is kept is not asked for again, and one by one where `n` is
    not known, or is refused."""

    def probabilities(count: int) -> None:
        calls = [
            {"params": {"messages": [{"role": "user", "content": f"q{n}"}]}, "num_samples": count}
            for n in range(8)
        ]
        runner = Runner("small")
        found = {tuple(said[0]) for _, said in runner.get_many(runner.sample_probs, calls)}
        assert found == {(f"so: q{n}",) for n in range(8)}

    with compare_endpoint.endpoint(several) as server:
        probabilities(7)
        assert [one.body["n"] for one in server.asked] == [7] * 8
        probabilities(9)
        assert [one.body["n"] for one in server.asked[8:]] == [2] * 8
    with compare_endpoint.endpoint() as server:
        probabilities(7)
        assert len(server.asked) == 56, "an endpoint that gives one answer, whatever n is"

    def refusing(request: endpoints.Asked) -> endpoints.Reply:
        if "n" in request.body:
            return endpoints.Reply({"error": {"message": "n must be 1"}}, 400)
        return repeats(request)

    with compare_endpoint.endpoint(refusing) as server:
        probabilities(3)
        assert 24 < len(server.asked) <= 32


def test_an_explicit_max_completion_tokens_is_sent() -> None:
    """Whatever a question's own max_tokens are."""
    sent = asked(model="gpt-5-mini", max_completion_tokens=300).api_kwargs
    assert sent["max_completion_tokens"] == 300 and "max_tokens" not in sent
