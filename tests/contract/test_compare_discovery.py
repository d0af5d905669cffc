"""Which endpoint has a model: looked for where it can be, once, and not for ever."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import compare_endpoint
import endpoints
import pytest
from compare_endpoint import KEY, asked, repeats, script

from swarm.compare import Config, ModelAdapter, NoClientForModel
from swarm.compare.sampling.discovery import ENDPOINT_INDEX, may_host_model
from swarm.compare.sampling.scheduler import run_scripts
from swarm.errors import InvalidArgument, UserError

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)


def has(*models: str) -> Any:
    """An endpoint's answers, that has these models alone."""

    def answer(request: endpoints.Asked) -> endpoints.Reply:
        if request.body["model"] in models:
            return repeats(request)
        return endpoints.Reply({"error": {"message": "no such model"}}, 404)

    return answer


@contextmanager
def several(**models: tuple[str, ...]) -> Iterator[dict[str, endpoints.Endpoint]]:
    """An endpoint by the name of each variable, with its models; all are known."""
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(endpoints.endpoint(has(*there)))
            for name, there in models.items()
        }
        Config.url_key_pairs = [(one.url, f"{KEY}-{name}", name) for name, one in running.items()]
        yield running


@contextmanager
def nobody() -> Iterator[str]:
    """A base URL where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def test_keys_of_the_environment_are_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OPENAI_API_KEY_1",
        "OPENAI_API_KEY",
        "OPENROUTER_API_KEY",
        "TINKER_API_KEY_b",
        "ANTHROPIC_API_KEY",
        "MY_OPENAI_API_KEY",
        "OPENAI_API_KEYS",
    ):
        monkeypatch.setenv(name, f"key-of-{name}")
    monkeypatch.setenv("OPENAI_API_KEY_EMPTY", " ")
    Config.url_key_pairs = None
    found = {variable: (url, key) for url, key, variable in Config.url_key_pairs}
    assert sorted(found) == [
        "ANTHROPIC_API_KEY",
        "OPENAI_API_KEY",
        "OPENAI_API_KEY_1",
        "OPENROUTER_API_KEY",
        "TINKER_API_KEY_b",
    ]
    assert found["OPENAI_API_KEY_1"] == ("https://api.openai.com/v1", "key-of-OPENAI_API_KEY_1")
    assert found["OPENROUTER_API_KEY"][0] == "https://openrouter.ai/api/v1"
    assert "tinker" in found["TINKER_API_KEY_b"][0]


def test_a_server_of_ones_own_stands_for_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-server")
    monkeypatch.setenv("OPENAI_API_KEY_2", "of-openai")
    with endpoints.endpoint(has("any/model")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        Config.url_key_pairs = None
        assert [(url, key) for url, key, _ in Config.url_key_pairs] == [
            (server.url, "of-the-server"),
            ("https://api.openai.com/v1", "of-openai"),
        ]
        [heard] = run_scripts([script(asked("hi", "any/model"))])
        assert heard.text == "so: hi"


def test_a_model_of_this_process_has_no_endpoint() -> None:
    with several(A_KEY=("local/base",)) as there:
        with pytest.raises(NoClientForModel, match="in this process"):
            Config.client_for_model("local/base")
        assert not there["A_KEY"].asked


def test_a_setting_that_is_none_is_told() -> None:
    with pytest.raises(InvalidArgument, match=r"Config.max_worker: .* did you mean max_workers\?"):
        Config.max_worker = 3


@pytest.mark.parametrize(
    ("host", "theirs", "others"),
    [
        ("api.openai.com", ["gpt-4.1", "ft:gpt-4.1:org::id", "o3"], ["openai/o3", "tinker://a"]),
        ("openrouter.ai", ["openai/o3", "meta-llama/llama-3:free"], ["gpt-4.1", "tinker://a/b"]),
        ("api.anthropic.com", ["claude-opus-4"], ["gpt-4.1", "anthropic/claude-opus-4"]),
        ("tinker.thinkingmachines.dev", ["tinker://a/b", "Qwen/Qwen3-8B"], ["gpt-4.1"]),
        ("localhost:8000", ["gpt-4.1", "a/b", "tinker://a"], []),
    ],
)
def test_a_model_is_looked_for_where_its_name_can_be(
    host: str, theirs: list[str], others: list[str]
) -> None:
    url = f"https://{host}/v1"
    assert [may_host_model(url, name) for name in theirs + others] == [
        *[True] * len(theirs),
        *[False] * len(others),
    ]


def test_the_lowest_variable_that_works_is_taken() -> None:
    with several(B_KEY=("m", "n"), A_KEY_1=("m",), A_KEY=("other",)) as there:
        assert Config.client_for_model("m").base_url == there["A_KEY_1"].url
        assert Config.client_for_model("n").variable == "B_KEY"
        assert [len(one.asked) for one in there.values()] == [2, 2, 2]
        heard = run_scripts([script(asked(f"q{n}", "m")) for n in range(5)])
        assert heard[4].text == "so: q4"
        assert [len(one.asked) for one in there.values()] == [2, 7, 2]


def test_what_was_found_is_remembered_by_later_processes() -> None:
    with several(A_KEY=("other",), B_KEY=("m",)) as there:
        assert Config.client_for_model("m").variable == "B_KEY"
        pairs, folder = Config.url_key_pairs, Config.cache_dir
        Config.reset()
        Config.url_key_pairs, Config.cache_dir = pairs, folder
        assert Config.client_for_model("m").variable == "B_KEY"
        assert [len(one.asked) for one in there.values()] == [1, 1]


def test_a_model_that_has_moved_is_looked_for_again() -> None:
    with several(A_KEY=("m",), B_KEY=()) as there:
        run_scripts([script(asked("q0", "m"))])
        there["A_KEY"].answer, there["B_KEY"].answer = has(), has("m")
        [first] = run_scripts([script(asked("q1", "m"))])
        [second] = run_scripts([script(asked("q1", "m"))])
        assert isinstance(first, UserError) and second.text == "so: q1"


def test_the_only_place_that_is_possible_is_not_asked_before() -> None:
    with several(A_KEY=("m",)) as there:
        run_scripts([script(asked("q", "m"))])
        assert there["A_KEY"].texts() == ["q"]


def test_a_failure_is_not_remembered_when_the_endpoints_change() -> None:
    Config.url_key_pairs = []
    with pytest.raises(NoClientForModel, match="m: the model's location is unknown"):
        Config.client_for_model("m")
    with several(A_KEY=("m",)):
        assert Config.client_for_model("m").variable == "A_KEY"
        Config.url_key_pairs.clear()
        with pytest.raises(NoClientForModel):
            Config.client_for_model("m")


def test_one_dead_endpoint_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm.compare.sampling import discovery
    from swarm.models.rate_limit import Limits

    assert discovery.PROBE_LIMITS.timeout * (discovery.PROBE_LIMITS.retries + 1) <= 60
    monkeypatch.setattr(
        discovery, "PROBE_LIMITS", Limits(connect_timeout=3.0, timeout=3.0, retries=0)
    )
    with several(B_KEY=("m",)) as there, nobody() as silent:
        Config.url_key_pairs = [
            ("http://127.0.0.1:1/v1", "a", "A_KEY"),
            (silent, "a", "A_KEY_1"),
            *Config.url_key_pairs,
        ]
        began = time.monotonic()
        assert Config.client_for_model("m").base_url == there["B_KEY"].url
        assert time.monotonic() - began < 30


def test_many_at_once_look_once() -> None:
    with several(A_KEY=(), B_KEY=("m",)) as there:
        threads = [threading.Thread(target=Config.client_for_model, args=("m",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(one.asked) for one in there.values()] == [1, 1]


def test_the_same_name_elsewhere_is_another_model() -> None:
    with several(A_KEY=("m",)) as there:
        run_scripts([script(asked("q", "m"))])
        with several(A_KEY=("m",)) as other:
            run_scripts([script(asked("q", "m"))])
            assert len(there["A_KEY"].asked) == len(other["A_KEY"].asked) == 1


def test_a_provider_by_name_is_asked_where_no_router_may_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endpoints.endpoint(has("small")) as server:
        file = tmp_path / "providers.yaml"
        file.write_text(f"house: {{base_url: '{server.url}', api_key_env: null}}")
        monkeypatch.setenv("MODEL_SWARMS_PROVIDERS", str(file))
        from swarm.compare.sampling import resolve

        resolve._load_providers.cache_clear()
        Config.url_key_pairs = [("https://api.openai.com/v1", "key", "OPENAI_API_KEY")]
        [heard] = run_scripts([script(asked("hi", "house/small"))])
        resolve._load_providers.cache_clear()
        assert heard.text == "so: hi"
        assert server.asked[0].body["model"] == "small"


def needs(key: str) -> Any:
    """An endpoint's answers to this key alone."""

    def answer(request: endpoints.Asked) -> endpoints.Reply:
        if request.headers["Authorization"] == f"Bearer {key}":
            return repeats(request)
        return endpoints.Reply({"error": {"message": "revoked"}}, 401)

    return answer


def test_another_key_in_the_same_variable_is_used() -> None:
    with endpoints.endpoint(needs("new")) as server:
        for key, failed in (("old", True), ("new", False)):
            Config.url_key_pairs = [(server.url, key, "A")]
            [heard] = run_scripts([script(asked())])
            assert isinstance(heard, UserError) is failed


def test_a_key_that_is_revoked_gives_way_to_another() -> None:
    """The place is forgotten in the file too, not in this process alone."""
    with endpoints.endpoint(repeats) as server:
        Config.url_key_pairs = pairs = [(server.url, "old", "A"), (server.url, "new", "B")]
        assert Config.client_for_model("small").variable == "A"
        server.answer = needs("new")
        for failed in (True, False):
            ENDPOINT_INDEX.clear_all()
            Config.url_key_pairs = pairs
            [heard] = run_scripts([script(asked())])
            assert isinstance(heard, UserError) is failed


OUT = {
    "404": ({"error": {"message": "no such model", "code": "model_not_found"}}, 404),
    "quota": ({"error": {"message": "no quota", "code": "insufficient_quota"}}, 429),
}


@pytest.mark.parametrize("why", OUT)
@pytest.mark.parametrize("beside", ["nobody", "another key", "another endpoint"])
def test_after_a_refusal_of_all_a_second_run_sends_what_is_missing(
    why: str, beside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often it fails, what is kept is read, and one request a place finds out."""
    came, broken, lock = [0], [True], threading.Lock()

    def answer(request: endpoints.Asked) -> endpoints.Reply:
        with lock:
            came[0] += 1
            out = broken[0] and came[0] > 20
        return endpoints.Reply(*OUT[why]) if out else repeats(request)

    # Which of two has the model is asked with one request more.
    wants, looks = [script(asked(f"text {n}")) for n in range(60)], beside == "another key"
    with endpoints.endpoint(answer) as first, endpoints.endpoint(repeats) as second:
        url = {"nobody": None, "another key": first.url, "another endpoint": second.url}[beside]
        Config.max_workers = 8
        Config.url_key_pairs = [(first.url, KEY, "A"), *([(url, KEY + "2", "B")] if url else [])]
        good = sum(not isinstance(one, UserError) for one in run_scripts(wants))
        assert 18 <= good <= 20
        for _ in range(0 if beside == "another endpoint" else 2):
            before = len(first.asked)
            heard = run_scripts([script(asked(f"text {n}")) for n in range(60)])
            assert len(first.asked) - before == 1 + looks
            assert sum(not isinstance(one, UserError) for one in heard) == good
        broken[0] = beside == "another endpoint"
        before = len(first.asked) + len(second.asked)
        heard = run_scripts([script(asked(f"text {n}")) for n in range(60)])
        assert not any(isinstance(one, UserError) for one in heard)
        sent = len(first.asked) + len(second.asked) - before
        assert sent == 60 - good + (0 if url is None else 2)
        said = capsys.readouterr().err
        assert ("is used for missing answers" in said) == (beside == "another endpoint")
        Config.url_key_pairs = [(second.url, KEY, "B")]
        before = len(second.asked)
        run_scripts([script(asked(f"text {n}")) for n in range(60)])
        assert len(second.asked) - before == 60  # alone, it is another model


def test_a_client_tells_its_place_and_not_its_key() -> None:
    with several(A_KEY=("m",)) as there:
        client = Config.client_for_model("m")
        assert client.api_key == f"{KEY}-A_KEY" and KEY not in repr(client)
        said = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        assert said.choices[0].message.content == "so: hi"
        headers = {k.lower(): value for k, value in there["A_KEY"].asked[-1].headers.items()}
        assert headers["authorization"] == f"Bearer {KEY}-A_KEY"


def test_a_script_may_put_its_own_client_for_model_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine:
        def __init__(self, url: str) -> None:
            self.base_url, self.api_key = url, "mine"

    with endpoints.endpoint(repeats) as server:
        monkeypatch.setattr(Config, "client_for_model", lambda model: Mine(server.url))
        [heard] = run_scripts([script(asked("hi", "whatever"))])
        assert heard.text == "so: hi" and server.asked[0].headers["Authorization"] == "Bearer mine"


@pytest.mark.parametrize("pairs", ["http://localhost/v1", [("http://localhost/v1",)], [3], 7])
def test_pairs_that_are_none_are_told_without_a_key(pairs: Any) -> None:
    Config.url_key_pairs = pairs
    with pytest.raises(InvalidArgument, match="url_key_pairs"):
        Config.client_for_model("m")


def test_reasoning_models_have_their_own_parameters() -> None:
    params = {"messages": [], "max_tokens": 7}
    assert ModelAdapter.prepare(dict(params), "gpt-4.1") == {"model": "gpt-4.1", **params}
    for name in ("o3-mini", "openai/o3", "gpt-5.2"):
        assert ModelAdapter.prepare(dict(params), name) == {
            "model": name,
            "messages": [],
            "max_completion_tokens": 7,
            "reasoning_effort": "none",
        }
    assert ModelAdapter.test_request_params("gpt-4.1")["max_tokens"] == 1
    assert "max_completion_tokens" in ModelAdapter.test_request_params("o3")
    ModelAdapter.register(lambda model: model == "mine", lambda params, model: None)
    with pytest.raises(InvalidArgument, match="in place of a dict"):
        ModelAdapter.prepare({}, "mine")
    with pytest.raises(InvalidArgument, match="two functions"):
        ModelAdapter.register("gpt", None)
