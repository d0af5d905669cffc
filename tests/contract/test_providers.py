"""Named endpoints: the file that ships, a user's own over it, and what is wrong with one."""

from collections.abc import Callable
from pathlib import Path

import endpoints
import fake_models
import pytest

from swarm.errors import UserError
from swarm.models.base import Request
from swarm.models.providers import Providers
from swarm.models.rate_limit import Limits

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file and no variable of the user's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("MODEL_SWARMS_PROVIDERS", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of providers."""

    def written(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return written


def test_what_ships() -> None:
    providers = Providers.load()
    assert {"openai", "together", "ollama", "vllm"} < set(providers) and len(providers) == 12
    for name, one in providers.items():
        model = one.create_model("some/model:tag")
        here = "//localhost:" in one.base_url
        assert (one.api_key_env is None) == here and one.base_url.startswith("https") != here
        assert model.model == "some/model:tag" and not one.prices and name == one.name
        field = "max_completion_tokens" if name == "openai" else "max_tokens"
        assert model.tokens_field == field


def test_a_users_file_adds_and_changes(write: Write) -> None:
    own = write(
        "together: {limits: {concurrency: 2}, prices: {a/b: {prompt: 0.5, new: 2}}}\n"
        "vllm: {base_url: 'http://gpu-box:9000/v1/'}\n"
        "mine:\n  base_url: http://localhost:1/v1\n  body: {reasoning_effort: low}\n"
        "  temperature: 0.5\n  seed: 7\n  tokens_field: max_completion_tokens\n"
    )
    providers = Providers.load(own)
    together = providers["together"]
    assert together.limits == Limits(concurrency=2) and together.api_key_env == "TOGETHER_API_KEY"
    assert "a/b" in together.prices and "a/c" not in together.prices
    assert together.create_model("a/b").prices == {"prompt": 0.5, "new": 2}
    vllm = providers["vllm"]
    assert vllm.create_model("m").client.url == "http://gpu-box:9000/v1/chat/completions"
    assert vllm.limits.concurrency == 64 and vllm.samples_at_once == 16
    assert providers["mine"].create_model("m").tokens_field == "max_completion_tokens"
    assert providers["mine"].api_key_env is None


def test_settings_of_a_provider_are_sent_and_the_callers_go_first(write: Write) -> None:
    with endpoints.endpoint(fake_models.answer) as endpoint:
        own = write(
            f"mine: {{base_url: '{endpoint.url}', temperature: 0.5, seed: 7, body: {{top_k: 3}}}}"
        )
        provider = Providers.load(own)["mine"]
        provider.create_model("m").generate([Request("hi", 9)])
        provider.create_model("m", temperature=0.1, seed=None).generate([Request("hi", 9)])
    sent = [{k: v for k, v in a.body.items() if k != "messages"} for a in endpoint.asked]
    assert sent == [
        {"model": "m", "temperature": 0.5, "seed": 7, "top_k": 3, "max_tokens": 9},
        {"model": "m", "temperature": 0.1, "top_k": 3, "max_tokens": 9},
    ]


def test_the_environment_moves_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoints.endpoint(fake_models.answer) as endpoint:
        monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url + "/")
        Providers.load()["openai"].create_model("m").generate([Request("hi")])
        monkeypatch.setenv("OPENAI_API_KEY", fake_models.KEY)
        Providers.load()["openai"].create_model("m").generate([Request("hi")])
    without, with_key = endpoint.asked
    assert without.path == "/v1/chat/completions" and "max_tokens" in without.body
    assert "Authorization" not in without.headers
    assert with_key.headers["Authorization"] == f"Bearer {fake_models.KEY}"
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match="OPENAI_API_KEY is not set"):
        Providers.load()["openai"].create_model("m").check()
    monkeypatch.setenv("OPENAI_BASE_URL", "localhost:8000")
    with pytest.raises(UserError, match=r"environment variable OPENAI_BASE_URL: .*http://"):
        Providers.load()["openai"].create_model("m")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("together: {base_ur: x}", r"together: base_ur: no such key; .* base_url\?"),
        ("together: {api_key: SECRET}", r"together: api_key: .* did you mean api_key_env\?"),
        ("together: {api_key_env: SECRET}", "together: api_key_env: must be the name of an"),
        ("together: {base_url: 'https://u:SECRET@host/v1'}", "must not contain a user, password"),
        ("together: {limits: {concurency: 3}}", r"limits.concurency: .* mean concurrency\?"),
        ("together: {limits: 5}", r"together: limits: must be a mapping such as"),
        ("together: {samples_at_once: true}", "samples_at_once: must be an integer"),
        ("together: {temperature: hot}", "temperature: must be a number, at least 0, or null"),
        ("together: {limits: {concurrency: SECRET}}", "together: limits.concurrency: must be"),
        ("together: {prices: {m: {new: SECRET}}}", "together: prices: must be a mapping"),
        ("together: {prices: {m: {input: 3}}}", r"together: prices: .*\{prompt: 0.1"),
        ("newer: {api_key_env: A_KEY}", "newer: base_url: is missing; .* URL"),
        ("newer:", r"newer: must be a mapping such as \{base_url"),
        ("a/b: {base_url: http://a}", "'a/b': a provider name must not contain /"),
        ("[together]", r"must have the form PROVIDER: \{base_url"),
        ("together: {base_url: 'SECRET", r"line \d: is not valid yaml: found unexpected end"),
        ("together: {api_key_env: *SECRET}", "mine.yaml line 1: is not valid yaml$"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_file_provider_and_key(
    write: Write, text: str, words: str
) -> None:
    own = write(text.replace("SECRET", fake_models.KEY))
    with pytest.raises(UserError, match=words) as error:
        Providers.load(own)
    told = str(error.value)
    assert told.startswith(str(own)) and "\n" not in told and fake_models.KEY not in told
