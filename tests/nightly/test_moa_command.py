"""python -m swarm.moa as people and programs start it, with endpoints on the loopback."""

import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import searches
from endpoints import DONE, Asked, Endpoint, Reply, chat, endpoint, event, piece, streamed
from swarm.moa.arguments import parse_arguments

from swarm.moa.__main__ import main
from swarm.moa.cli import build_settings

KEY = "sk-very-secret-0123456789"
STRANGE = "[/INST] a[i] [bold]"
AGAIN = ["--aggregator", "big", "--reference_models", "one,two"]


def answer(asked: Asked, model: str = "") -> Reply:
    """Each model says its name; the big one in pieces, with a null among them."""
    model = model or asked.body["model"]
    if model == "dead":
        return Reply({"error": {"message": f"no such model {KEY}"}}, status=404)
    if model == "slow":
        return Reply(pieces=[piece("begun"), *[0.02, piece(".")] * 1000, DONE])
    text = f"{model} says {STRANGE}"
    if not asked.body.get("stream"):
        return chat(text)
    usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}
    null = event({"choices": [{"index": 0, "delta": {"content": None}}]})
    return Reply(
        pieces=[
            piece("", role="assistant"),
            piece(text[:7]),
            null,
            piece(text[7:]),
            piece(finish="stop"),
            event(usage),
            DONE,
        ]
    )


@contextmanager
def server(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[Endpoint]:
    with endpoint(answer) as made:
        patch.setenv("OPENAI_BASE_URL", made.url)
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setenv("MODEL_SWARMS_CACHE", str(folder))
        yield made


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint that is the default provider, and a cache of its own."""
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    with server(monkeypatch, tmp_path / "cache") as made:
        yield made


VALUES = {
    "preset": "lite",
    "aggregator": "a",
    "model": "a",
    "reference_models": "a,b:2",
    "fallback": "c",
    "providers": "file.yaml",
    "base": "smollm2",
    "pool": "folder",
    "device": "cpu",
    "temperature": "0.5",
    "max_tokens": "7",
    "rounds": "3",
    "round": "3",
    "layers": "4",
    "strategy": "rank",
    "prompt": "paper",
    "system": "Be brief.",
    "context": "900",
    "seed": "3",
    "num_proc": "2",
    "timeout": "1.5",
    "quorum": "2",
    "trace": "t.jsonl",
    "replay": "r.jsonl",
    "multi_turn": "false",
}
SWITCHES = ("no_cache", "no_multi_turn", "json", "no_stream", "quiet", "list")


@pytest.mark.parametrize("name", [*VALUES, *SWITCHES])
def test_every_option_in_both_spellings(name: str) -> None:
    value = [VALUES[name]] if name in VALUES else []
    found = [parse_arguments([f"--{one}", *value]) for one in (name, name.replace("_", "-"))]
    if value:
        found += [parse_arguments([f"--{name.replace('_', '-')}={value[0]}"])]
    assert found[0] != parse_arguments([]) and all(one == found[0] for one in found)


def test_the_tables_of_options_are_whole() -> None:
    from swarm.moa.arguments import build_parser

    known = {word.lstrip("-") for word in build_parser()._option_string_actions} - {"h", "help"}
    assert known == {*VALUES, *SWITCHES}


def test_lists_and_truth_values() -> None:
    assert parse_arguments(
        ["--reference_models", "a,b", "--reference-models", "c"]
    ).reference_models == [
        "a,b",
        "c",
    ]
    assert parse_arguments(["--multi-turn", "question"]).question == "question"
    assert parse_arguments(["--rounds", "2", "--layers", "3"]).rounds == 2
    assert parse_arguments(["--", "--strange-question"]).question == "--strange-question"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--agregator", "x"], "did you mean --aggregator?"),
        (["two", "words"], "words: quote the question"),
        (["--max_tokens", "0"], "--max_tokens: '0' is not an integer of 1 or more"),
        (["--temperature", "hot"], "--temperature: 'hot' is not a number"),
        (["--rounds", "2", "--layers", "2"], "contradict each other"),
        (["--multi_turn=maybe"], "'maybe' is not true or false"),
        (["--preset", "ligth", "?"], "did you mean lite?"),
        (["--preset", "self", "?"], "with --model NAME"),
        (["--list", "?"], "--list can be combined"),
        (["--model", "", "?"], "--aggregator: the value is empty"),
        (["--preset", " ", "?"], "--preset: the value is empty"),
        (["--preset", "local", "--num_proc", "2", "?"], "--num_proc has no effect"),
        (["--preset", "lite", "--device", "cpu", "?"], "--device has no effect"),
        ([*AGAIN, "--no-multi-turn", "?"], "--multi_turn has no effect"),
        ([*AGAIN, "--json", "--no-stream", "?"], "--no_stream has no effect"),
        ([*AGAIN, "--rounds", "0", "?"], "--reference_models has no effect"),
        ([*AGAIN, "--quorum", "3", "?"], "quorum=3: there are only 2 answers"),
        (["--model", "big", "--reference_models", "a,,b", "?"], "a name is missing"),
        (["--replay", "nowhere.jsonl", "?"], "cannot read the trace nowhere.jsonl"),
        (["--replay", "a", "--trace", "a", "?"], "would overwrite"),
        (["--providers", "nowhere.yaml", *AGAIN, "?"], "nowhere.yaml: cannot be read"),
        (["  "], "the question is empty"),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert main(words) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.count("\n") == 1 and err.startswith("error: ")


def wanted(*words: str) -> Any:
    return build_settings(parse_arguments(words), {})


def test_without_flags_the_key_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    assert wanted().origin == "preset local, as TOGETHER_API_KEY is not set"
    monkeypatch.setenv("TOGETHER_API_KEY", KEY)
    made = wanted()
    assert made.origin == "preset together, as TOGETHER_API_KEY is set"
    assert made.request_fields == {"temperature": 0.7, "max_tokens": 512}


def test_flags_are_stronger_than_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "proposers: [{model: a, temperature: 0.1, count: 2}, b]\n"
        "aggregator: {model: c, max_tokens: 5, system: Hm.}\nquorum: 2\nprompt: paper\n"
    )
    kept = wanted("--preset", str(file), "--seed", "4", "--rounds", "2").mixture
    assert kept["proposers"][0] == {"model": "a", "temperature": 0.1, "count": 2}
    assert (kept["quorum"], kept["prompt"], kept["layers"], kept["seed"]) == (2, "paper", 3, 4)
    changed = wanted(
        "--preset",
        str(file),
        "--model",
        "d",
        "--reference_models",
        "qwen2:7b:3,e",
        "--temperature",
        "0.9",
        "--max-tokens",
        "8",
        "--prompt",
        "safe",
    )
    slot = {"temperature": 0.9, "max_tokens": 8}
    assert changed.mixture["proposers"] == [
        {"model": "qwen2:7b", "count": 3, **slot},
        {"model": "e", "count": 1, **slot},
    ]
    assert changed.mixture["aggregator"] == {"model": "d", "system": "Hm.", **slot}
    assert changed.mixture["prompt"] == "safe" and changed.request_fields["temperature"] == 0.9


def test_one_model_fills_what_a_preset_leaves_open() -> None:
    made = wanted("--preset", "self", "--model", "qwen2:7b").mixture
    assert made["proposers"][0]["model"] == made["aggregator"]["model"] == "qwen2:7b"
    both = wanted("--model", "a", "--reference_models", "b")
    assert both.origin == "no preset" and "quorum" not in both.mixture


def test_one_question(
    loopback: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    words = [
        *AGAIN,
        "--temperature",
        "0.25",
        "--max_tokens",
        "33",
        "--seed",
        "9",
        "--system",
        "Hm.",
    ]
    assert main([*words, "--trace", str(trace), "Why?"]) == 0
    out, err = capsys.readouterr()
    assert out == f"big says {STRANGE}\n"
    first, layer, last = err.splitlines()
    assert first == "no preset: one, two propose, big answers; 3 calls per question"
    assert re.match(r"layer 1 of 2: 2 of 2 answered \(\w+ \d\.\d s, 3 tokens; \w+ ", layer)
    assert last.startswith("layer 2 of 2: 1 of 1 answered (big")
    bodies = [asked.body for asked in loopback.asked]
    assert len(bodies) == 3
    assert {(b["temperature"], b["max_tokens"], b["seed"]) for b in bodies} == {(0.25, 33, 9)}
    assert bodies[-1]["model"] == "big" and f"two says {STRANGE}" in str(bodies[-1]["messages"])
    assert loopback.asked[0].headers["Authorization"] == f"Bearer {KEY}"
    everything = (
        out
        + err
        + "".join(p.read_bytes().decode("latin-1") for p in tmp_path.rglob("*") if p.is_file())
    )
    assert "two says" in everything and KEY not in everything


def test_again_is_kept_and_replayed_without_a_network(
    loopback: Endpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = str(tmp_path / "trace.jsonl")
    flags = [*AGAIN, "--fallback", "other", "--temperature", "0.3", "--max_tokens", "9"]
    assert main([*flags, "--trace", trace, "--quiet", "Why?"]) == 0
    first, _ = capsys.readouterr()
    assert main([*flags, "Why?"]) == 0
    again, err = capsys.readouterr()
    assert again == first and "one from the cache, 3 tokens" in err and len(loopback.asked) == 3
    assert main([*flags, "--no_cache", "--quiet", "Why?"]) == 0 and len(loopback.asked) == 6
    capsys.readouterr()
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert main(["--replay", trace, "Why?"]) == 0
    replayed, err = capsys.readouterr()
    assert replayed == first and f"as in {trace}" in err and len(loopback.asked) == 6
    assert main(["--replay", trace, "--quiet", "Another?"]) == 1
    assert "no answer to this request in the trace" in capsys.readouterr().err
    assert main(["--replay", trace, "--timeout", "3", "Why?"]) == 2
    assert "a replay calls no model" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["-"]])
def test_standard_input_is_one_question(
    words: list[str],
    loopback: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why\nis it?\n"))
    assert main([*AGAIN, "--quiet", *words]) == 0
    assert capsys.readouterr() == (f"big says {STRANGE}\n", "")
    assert loopback.asked[0].body["messages"] == [{"role": "user", "content": "Why\nis it?"}]


def test_json_and_a_dead_proposer(loopback: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--aggregator", "big", "--reference_models", "one:2,dead"]
    assert main([*words, "--json", "--quiet", "Why?"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["answer"] == f"big says {STRANGE}" and told["models"] == ["one", "dead", "big"]
    assert [len(layer) for layer in told["stages"]] == [3, 1]
    assert [stage["sample"] for stage in told["stages"][0]] == [0, 1, 0]
    assert told["calls"] == {"all": 4, "cached": 0, "failed": 1} and told["cost"] is None
    assert told["tokens"] == {"prompt": 30, "new": 9}
    assert "404" in told["warnings"][0]
    assert err.splitlines() == [f"warning: {words}" for words in told["warnings"]]
    assert KEY not in out + err


def test_nobody_answers(loopback: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--aggregator", "big", "--reference_models", "dead", "--json", "Why?"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "error: layer 1: 0 of 1 proposers answered" in err.splitlines()[-1]
    assert KEY not in err


def test_as_many_at_once_as_was_said(loopback: Endpoint) -> None:
    words = ["--aggregator", "big", "--reference_models", "one:8", "--quiet"]
    loopback.answer = lambda asked: Reply(**{**vars(answer(asked)), "wait": 0.02})
    assert main([*words, "--num_proc", "2", "Why?"]) == 0
    assert loopback.peak == 2


def test_prices_are_told(
    loopback: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "providers.yaml"
    file.write_text("openai: {prices: {one: {prompt: 100000, new: 200000}}}\n")
    assert main([*AGAIN, "--json", "--providers", str(file), "Why?"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [stage["cost"] for stage in told["stages"][0]] == [1.6, None]
    assert told["cost"] == 1.6


def environment(**more: str) -> dict[str, str]:
    return searches.environment(**more)


def test_help_and_list_load_nothing_heavy() -> None:
    for words, least in (["--help"], "--reference_models"), (["--list"], "local/rooms"):
        command = [sys.executable, "-X", "importtime", "-m", "swarm.moa", *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0 and least in done.stdout
        loaded = set(re.findall(r"\| +(\w+)", done.stderr))
        assert "argparse" in loaded and not loaded & {"torch", "aiohttp", "transformers", "llm"}


def test_a_reader_that_has_enough(loopback: Endpoint) -> None:
    loopback.answer = lambda asked: (
        streamed(*["x" * 4000] * 200) if asked.body.get("stream") else chat("a")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.moa", *AGAIN, "--quiet", "Why?"],
        env=environment(**{k: os.environ[k] for k in ("OPENAI_BASE_URL", "MODEL_SWARMS_CACHE")}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stderr
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=120) == 1 and process.stderr.read() == ""


class Terminal:
    """A chat in a real terminal of 80 columns, without colour."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        keep = {
            k: os.environ[k] for k in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "MODEL_SWARMS_CACHE")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarm.moa", *words],
            env=environment(TERM="xterm", NO_COLOR="1", COLUMNS="80", LINES="30", **keep),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # So that a Ctrl-C that is typed interrupts it.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.seen = ""

    def until(self, text: str, seconds: float = 120.0) -> str:
        """Read to where `text` stands; gives what came until then."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready = select.select([self._ours], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"{text!r} did not come: {self.seen!r}"
            try:
                part = os.read(self._ours, 65536)
            except OSError:
                raise AssertionError(f"{text!r} did not come: {self.seen!r}") from None
            self.seen += part.decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())


def test_a_chat_in_a_terminal(loopback: Endpoint) -> None:
    terminal = Terminal("--aggregator", "big", "--reference_models", "one,two")
    shown = terminal.until(">>> ")
    assert "no preset: one, two propose, big answers" in shown
    terminal.type("Why?\n")
    shown = terminal.until(">>> ")
    assert f"big says {STRANGE}\r\n" in shown and "layer 1 of 2: 2 of 2 answered" in shown
    assert "waiting for" in shown, "no live line"
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", shown), "colour in spite of NO_COLOR"
    terminal.type("/stages\n")
    assert f"one says {STRANGE}" in terminal.until(">>> ")
    loopback.answer = lambda asked: answer(asked, "slow" if asked.body.get("stream") else "")
    terminal.type("And then?\n")
    terminal.until("begun")
    terminal.type("\x03")
    assert "stopped" in terminal.until(">>> ")
    assert loopback.left.wait(60), "the answer goes on"
    loopback.answer = answer
    terminal.type("Still there?\n")
    assert f"big says {STRANGE}" in terminal.until(">>> ")
    told = [turn["content"] for turn in loopback.asked[-2].body["messages"]]
    assert told == ["Why?", f"big says {STRANGE}", "Still there?"]
    terminal.type("half a line")
    terminal.until("half a line")
    time.sleep(0.5)
    terminal.type("\x03")
    try:
        shown = terminal.until(">>> ", 10)
    except AssertionError:  # it came just before readline waited: the next line shows it
        terminal.type("\n")
        shown = terminal.until(">>> ")
    assert "leaves the chat" in shown
    terminal.type("\x04")
    assert terminal.process.wait(timeout=120) == 0


def test_remote_proposers_need_an_aggregator(
    loopback: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--reference_models", "one,local/rooms", "hi"]) == 2
    said = capsys.readouterr().err
    assert "--aggregator: name the model" in said and "of one;" in said
    assert not loopback.asked
    given = parse_arguments(["--reference_models", "local/rooms", "hi"])
    assert build_settings(given, {}).mixture["aggregator"]["model"] == "local/base"


@pytest.mark.parametrize("preset", ["together", "lite", "paper"])
def test_a_retired_aggregator_is_a_warning(
    preset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def some_retired(asked: Asked) -> Reply:
        gone = "Qwen" in asked.body["model"]
        words = f"the model {asked.body['model']} does not exist"
        return Reply({"error": {"message": words}}, status=404) if gone else answer(asked)

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
