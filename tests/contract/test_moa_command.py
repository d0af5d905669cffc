"""python -m swarm.moa with endpoints on the loopback."""

import io
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from endpoints import Asked, Endpoint, Reply, chat, endpoint, streamed

from swarm.moa.__main__ import main
from swarm.moa.cli import build_settings, moa

KEY = "sk-very-secret-0123456789"
STRANGE = "[/INST] a[i] [bold]"
AGAIN = "--aggregator big --reference_models one,two"
Capture = pytest.CaptureFixture[str]


def answer(asked: Asked) -> Reply:
    """Each model says its name, in pieces if that is asked for."""
    model = asked.body["model"]
    if model == "dead":
        return Reply({"error": {"message": f"no such model {KEY}"}}, status=404)
    text = f"{model} says {STRANGE}"
    return streamed(text[:7], text[7:]) if asked.body.get("stream") else chat(text)


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint that is the default provider, and a cache of its own."""
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    with endpoint(answer) as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
        yield made


MISTAKES = {
    "--agregator x": "Did you mean '--aggregator'?",
    "two words": "unexpected extra argument",
    "--max_tokens 0": "'--max-tokens': 0: must be an integer, at least 1",
    "--temperature hot": "'--temperature': hot: must be a number, at least 0",
    "--rounds 2 --layers 2 ?": "contradict each other",
    "--preset ligth ?": "did you mean lite?",
    "--preset self ?": "with --model NAME",
    "--model '' ?": ": must be text, not empty",
    "--preset local --num_proc 2 ?": "--num-proc has no effect",
    "--preset lite --device cpu ?": "--device has no effect",
    f"{AGAIN} --no-multi-turn ?": "--multi-turn has no effect",
    f"{AGAIN} --json --no-stream ?": "--no-stream has no effect",
    f"{AGAIN} --rounds 0 ?": "--reference-models has no effect",
    f"{AGAIN} --quorum 3 ?": "quorum=3: there are only 2 answers",
    "--model big --reference_models a,,b ?": "a name is missing",
    f"--providers nowhere.yaml {AGAIN} ?": "nowhere.yaml: cannot be read",
    "--reference_models one,local/rooms hi": "--aggregator: name the model",
    "'  '": "the question is empty",
}


def test_mistakes_are_told_in_one_line(loopback: Endpoint, capsys: Capture) -> None:
    for words, told in MISTAKES.items():
        assert main(shlex.split(words)) in (1, 2)
        out, err = capsys.readouterr()
        assert out == "" and told in err and err.count("\n") == 1 and err.startswith("error: ")
    assert not loopback.asked


def wanted(words: str) -> Any:
    """The settings of a command line."""
    return build_settings(moa.make_context("moa", words.split()).params)


def test_flags_are_stronger_than_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "proposers: [{model: a, temperature: 0.1, count: 2}, b]\n"
        "aggregator: {model: c, max_tokens: 5, system: Hm.}\nquorum: 2\nprompt: paper\n"
    )
    kept, origin = wanted(f"--preset {file} --seed 4 --rounds 2")
    assert origin == f"preset {file}" and kept.proposers[0].temperature == 0.1
    assert (kept.quorum, kept.prompt.form, kept.layers, kept.seed) == (2, "paper", 3, 4)
    words = "--model d --reference_models qwen2:7b:3,e --temperature 0.9 --max-tokens 8"
    changed, _ = wanted(f"--preset {file} {words} --prompt safe")
    told = [(one.model, one.count, one.temperature, one.max_tokens) for one in changed.agents]
    assert told == [("qwen2:7b", 3, 0.9, 8), ("e", 1, 0.9, 8), ("d", 1, 0.9, 8)]
    assert changed.aggregator.system == "Hm." and changed.prompt.form == "safe"
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    assert wanted("")[1] == "preset local, as TOGETHER_API_KEY is not set"
    monkeypatch.setenv("TOGETHER_API_KEY", KEY)
    assert wanted("")[1] == "preset together, as TOGETHER_API_KEY is set"
    made, _ = wanted("--preset self --model qwen2:7b")
    assert {one.model for one in made.agents} == {"qwen2:7b"}


def test_one_question(loopback: Endpoint, tmp_path: Path, capsys: Capture) -> None:
    words = f"{AGAIN} --temperature 0.25 --max_tokens 33 --seed 9 --system Hm.".split()
    assert main([*words, "--trace", str(tmp_path / "trace.jsonl"), "Why?"]) == 0
    out, err = capsys.readouterr()
    assert out == f"big says {STRANGE}\n"
    first, *calls = err.splitlines()
    assert first == "no preset: one, two propose, big answers; 3 calls per question"
    assert len(calls) == 3 and calls[2].startswith("layer 2, aggregator big: ")
    bodies = [asked.body for asked in loopback.asked]
    assert {(b["temperature"], b["max_tokens"], b["seed"]) for b in bodies} == {(0.25, 33, 9)}
    assert bodies[-1]["model"] == "big" and f"two says {STRANGE}" in str(bodies[-1]["messages"])
    assert loopback.asked[0].headers["Authorization"] == f"Bearer {KEY}"
    files = [p.read_bytes().decode("latin-1") for p in tmp_path.rglob("*") if p.is_file()]
    everything = "".join([out, err, *files])
    assert "two says" in everything and KEY not in everything
    assert main([*words, "Why?"]) == 0
    again, err = capsys.readouterr()
    assert again == out and "one: from the cache" in err and len(loopback.asked) == 3
    assert main([*words, "--no_cache", "--quiet", "Why?"]) == 0
    assert len(loopback.asked) == 6


@pytest.mark.parametrize("words", [[], ["-"]])
def test_standard_input_is_one_question(
    words: list[str], loopback: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why\nis it?\n"))
    assert main([*AGAIN.split(), "--quiet", *words]) == 0
    assert capsys.readouterr() == (f"big says {STRANGE}\n", "")
    assert loopback.asked[0].body["messages"] == [{"role": "user", "content": "Why\nis it?"}]


def test_json_prices_and_a_dead_proposer(
    loopback: Endpoint, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "providers.yaml"
    file.write_text("openai: {prices: {one: {prompt: 100000, new: 200000}}}\n")
    words = f"--aggregator big --reference_models one:2,dead --providers {file} --json --quiet"
    assert main([*words.split(), "Why?"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["answer"] == f"big says {STRANGE}" and told["models"] == ["one", "dead", "big"]
    assert [stage["sample"] for stage in told["stages"][0]] == [0, 1, 0]
    assert told["calls"] == {"all": 4, "cached": 0, "failed": 1} and told["cost"] == 3.2
    assert err.splitlines() == [f"warning: {words}" for words in told["warnings"]]
    assert "404" in err and KEY not in out + err
    assert main("--aggregator big --reference_models dead --json Why?".split()) == 1
    out, err = capsys.readouterr()
    assert out == "" and "error: layer 1: 0 of 1 proposers answered" in err.splitlines()[-1]


def test_as_many_at_once_as_was_said(loopback: Endpoint) -> None:
    words = "--aggregator big --reference_models one:8 --quiet --num_proc 2 Why?"
    loopback.answer = lambda asked: Reply(**{**vars(answer(asked)), "wait": 0.02})
    assert main(words.split()) == 0
    assert loopback.peak == 2


@pytest.mark.parametrize("preset", ["together", "lite", "paper"])
def test_a_retired_aggregator_is_a_warning(
    preset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    def some_retired(asked: Asked) -> Reply:
        gone = Reply({"error": {"message": "the model does not exist"}}, status=404)
        return gone if "Qwen" in asked.body["model"] else answer(asked)

    monkeypatch.setenv("TOGETHER_API_KEY", KEY)
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    with endpoint(some_retired) as made:
        file = tmp_path / "mine.yaml"
        file.write_text(f"together: {{base_url: {made.url}, api_key_env: TOGETHER_API_KEY}}\n")
        code = main(["--preset", preset, "--providers", str(file), "hi"])
        said = capsys.readouterr()
    assert code == 0, said.err
    assert "meta-llama/Llama-3.3-70B-Instruct-Turbo says" in said.out
    assert "answered instead" in said.err
