"""Models by name: which one a name is, how often it is asked, and what is said of a wrong one."""

import json
import linecache
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import endpoints
import fake_models
import pytest
import searches

from swarm.errors import UserError
from swarm.models.base import Request
from swarm.models.cache import Cache
from swarm.models.function import FunctionModel
from swarm.models.llm import LLM
from swarm.models.openai import OpenAI
from swarm.models.providers import Provider, Providers, split_sample_count
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.registry.registry import Roster, model_identity

VARIABLES = ("MODEL_SWARMS_PROVIDERS", "OPENAI_BASE_URL", "OPENAI_API_KEY", "TOGETHER_API_KEY")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file, key or kept answer of the user's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[endpoints.Endpoint]:
    with endpoints.endpoint(fake_models.answer) as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2:7b", ("qwen2:7b", 1)),
        ("qwen2:7b:3", ("qwen2:7b", 3)),
        ("qwen2:latest", ("qwen2:latest", 1)),
        ("openrouter/google/gemma-3:free:2", ("openrouter/google/gemma-3:free", 2)),
        ("name:8:1", ("name:8", 1)),
        ("function/module:name:2", ("function/module:name", 2)),
        ("a:", ("a:", 1)),
        ("a:-1", ("a:-1", 1)),
        ("a:²", ("a:²", 1)),
    ],
)
def test_counts(name: str, expected: tuple[str, int]) -> None:
    assert split_sample_count(name) == expected


@pytest.mark.parametrize(
    ("environment", "name", "host", "model"),
    [
        ({}, "together/openai/gpt-oss-20b", "api.together.ai", "openai/gpt-oss-20b"),
        ({}, "ollama/qwen2:7b", "localhost:11434", "qwen2:7b"),
        ({"OPENAI_BASE_URL": "http://box/v1"}, "openai/x", "box", "x"),
        (
            {"OPENAI_BASE_URL": "http://box/v1", "TOGETHER_API_KEY": "k", "OPENAI_API_KEY": "k"},
            "Qwen/x",
            "box",
            "Qwen/x",
        ),
        ({"OPENAI_API_KEY": "k"}, "Qwen/x", "api.openai.com", "Qwen/x"),
        ({"OPENAI_API_KEY": "k", "TOGETHER_API_KEY": "k"}, "Qwen/x", "api.together.ai", "Qwen/x"),
        ({"OPENAI_API_KEY": "k", "TOGETHER_API_KEY": "k"}, "gpt-4o", "api.openai.com", "gpt-4o"),
        ({"TOGETHER_API_KEY": "k"}, "some-model", "api.together.ai", "some-model"),
        ({"TOGETHER_API_KEY": "k"}, "deepseek-ai/D", "api.together.ai", "deepseek-ai/D"),
    ],
)
def test_which_endpoint_a_name_is_of(
    environment: dict[str, str], name: str, host: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    found = Roster().model(name)
    assert isinstance(found, OpenAI) and found.model == model
    assert found.client.url.split("/")[2] == host


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("", "gpt-4o", "OPENAI_API_KEY, TOGETHER_API_KEY .* OPENAI_BASE_URL .*local/base, ollama/"),
        ("", "opnai/gpt-4o", r"opnai/gpt-4o: did you mean openai/gpt-4o\?$"),
        ("OPENAI_API_KEY", "lokal/base", r"did you mean local/base\? .* write openai/lokal/base"),
        ("TOGETHER_API_KEY", "llama/x:7b", r"did you mean ollama/x:7b\?"),
        ("TOGETHER_API_KEY", "functions/a:b", r"did you mean function/a:b\?"),
        ("", "local/", "local/: the model name is missing after local/"),
        ("", " ", "is not a model name"),
        ("", "moa/nothing", "preset 'nothing': not found"),
    ],
)
def test_a_wrong_name_is_one_line(
    key: str, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key:
        monkeypatch.setenv(key, "k")
    with pytest.raises(UserError, match=words) as error:
        Roster().model(name)
    assert "\n" not in str(error.value)


def test_a_name_has_one_model_of_its_kind(tmp_path: Path) -> None:
    roster = Roster(cache=Cache(str(tmp_path / "answers.sqlite")))
    kinds = {
        "function/fake_models:function": FunctionModel,
        "llm/talker": LLM,
        "ollama/a": OpenAI,
        "moa/lite": MixtureOfAgents,
    }
    for name, kind in kinds.items():
        assert isinstance(roster.model(name), kind)
        assert roster.model(name) is roster.model(name)
    again = pickle.loads(pickle.dumps(roster))
    assert isinstance(again.model("function/fake_models:pieces"), FunctionModel)


def test_answers_of_endpoints_and_llm_are_kept_and_those_of_functions_are_not(
    server: endpoints.Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    providers = Providers({"mine": Provider(name="mine", base_url=server.url)})
    kept = {"mine/m": True, "llm/talker": True, "function/fake_models:function": False}
    with fake_models.in_llm(fake_models.llm_model()):
        for name, is_kept in kept.items():
            for again in (False, True):
                (answer,) = Roster(providers).model(name).generate([Request("hi")])
                assert answer.cached == (again and is_kept)
    assert len(server.asked) == 1 and "temperature" not in server.asked[0].body
    assert not Roster(providers, cache=None).model("mine/m").generate([Request("hi")])[0].cached


def test_what_tells_a_model_from_its_namesakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("spoken.py").write_text("def say(prompt):\n    return 'one'\n")
    Path("a.yaml").write_text("proposers: [mine/m:2, llm/talker]\naggregator: mine/m\n")
    weights = shutil.copytree(tiny_llama, tmp_path / "tiny") / "model.safetensors"
    names = ("mine/m", "function/spoken:say", "moa/a.yaml", "local/tiny", "llm/talker")

    def told(**settings: object) -> dict[str, str]:
        sys.modules.pop("spoken", None)
        linecache.clearcache()
        provider = Provider.parse("mine", {"base_url": "http://box/v1", **settings})
        roster = Roster(Providers({"mine": provider}))
        return {name: json.dumps(model_identity(roster.model(name))) for name in names}

    first = told()
    assert first == told()
    changed = told(body={"top_k": 5})
    assert {name for name in names if changed[name] != first[name]} == {"mine/m", "moa/a.yaml"}
    Path("spoken.py").write_text("def say(prompt):\n    return 'two'\n")
    Path("a.yaml").write_text("proposers: [mine/m:2]\naggregator: mine/m\n")
    data = bytearray(weights.read_bytes())
    data[-4:] = b"\0\0\0\0"
    weights.write_bytes(bytes(data))
    changed = told()
    assert {name for name in names if changed[name] != first[name]} == set(names[1:4])


def test_everything_is_checked_before_anything_is_asked(
    server: endpoints.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    roster = Roster()
    roster.check(["gpt-4o:3", "qwen2:7b:2", "function/fake_models:function"])
    roster.open("cpu")
    for name, words in (
        ("together/Qwen/x:2", "TOGETHER_API_KEY is not set"),
        ("llm/nothing", "llm has no such model"),
        ("gpt-4o:100", "from 1 to 99"),
    ):
        with pytest.raises(UserError, match=words):
            Roster().check([name])
    assert server.asked == []


def test_a_roster_is_light() -> None:
    heavy = ("torch", "transformers", "aiohttp", "llm")
    code = (
        "import sys; from swarm.api import Roster; Roster().model('function/json:dumps');"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=searches.ROOT,
        env=searches.environment(),
        check=True,
    )
    assert out.stdout.strip() == "[]"
