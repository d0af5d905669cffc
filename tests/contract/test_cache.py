"""Answers kept in one file: for later, for other processes, and without a key or a failure."""

import json
import pickle
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import endpoints
import pytest
import searches

from swarm import cache as entry
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Message, Model, Request, Token
from swarm.models.cache import Cache
from swarm.models.function import FunctionModel
from swarm.models.openai import OpenAI
from swarm.models.sampling import CachedModel, sample_key


def test_values_stay(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "deep" / "answers.sqlite"))
    assert cache.get(["a"]) == {} and cache.get([]) == {}
    values = {"a": 0.0, "b": None, "c": {"text": "\ud800 \0 ü 𝄞"}, "d": [1, "x"]}
    for key, value in values.items():
        assert cache.put(key, value) == value
    assert cache.put("a", "another") == 0.0
    for again in (cache, Cache(cache.file), pickle.loads(pickle.dumps(cache))):
        assert again.get(["d", "none", "a", "b", "c"]) == values
    many = [f"key {n}" for n in range(2000)]
    for key in many:
        cache.put(key, key)
    assert cache.get(many) == {key: key for key in many}


def start(program: str, *arguments: str) -> "subprocess.Popen[str]":
    """Run a program on a cache."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=searches.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


READER = """
import json, sys
from swarm.models.cache import Cache
print(json.dumps(Cache(sys.argv[1]).get(json.loads(sys.argv[2]))))
"""


def read_elsewhere(file: str, keys: Sequence[str]) -> dict[str, object]:
    """What another process finds."""
    reader = start(READER, file, json.dumps(keys))
    return dict(json.loads(reader.communicate(timeout=60)[0]))


@pytest.mark.parametrize("lost", ["everything", "-wal", "replaced"])
def test_a_file_that_is_lost_beneath_a_connection_is_opened_again(
    tmp_path: Path, lost: str
) -> None:
    file = tmp_path / "answers.sqlite"
    cache = Cache(str(file))
    cache.put("a", 1)
    if lost == "replaced":
        other = Cache(str(tmp_path / "other.sqlite"))
        other.put("c", 3)
        del other
        (tmp_path / "other.sqlite").replace(file)
    for path in tmp_path.glob("answers.sqlite-*" if lost == "replaced" else "answers.sqlite*"):
        if lost != "-wal" or path.name.endswith(lost):
            path.unlink()
    assert cache.put("b", 2) == 2
    wanted = {"replaced": {"c": 3}, "-wal": {"a": 1}}.get(lost, {}) | {"b": 2}
    assert read_elsewhere(str(file), ["a", "b", "c"]) == wanted == cache.get(["a", "b", "c"])


PUTTER = """
import os, sys, threading, time
from swarm.models.cache import Cache
cache = Cache(sys.argv[1])
def put(part):
    for n in range(int(sys.argv[3])):
        key = f"{sys.argv[2]} {part} {n}"
        cache.put(key, key * 20)
        os.write(1, f"{key}\\n".encode())
threads = [threading.Thread(target=put, args=(part,)) for part in "ab"]
for thread in threads:
    thread.start()
    time.sleep(0.05)  # the first has put something before the second opens the file
for thread in threads:
    thread.join()
"""


def lost_to_kills(file: str, chance: random.Random) -> tuple[int, list[str]]:
    """How many answers were put, and those of them that a further process does not find.

    One process puts all the time, one ends, one is killed, and at last the first is killed.
    """
    host = start(PUTTER, file, "host", "100000")
    assert host.stdout
    first = host.stdout.readline()
    ending = start(PUTTER, file, "ending", str(chance.randrange(1, 100)))
    killed = start(PUTTER, file, "killed", "100000")
    time.sleep(chance.uniform(0.1, 0.6))
    killed.kill()
    said = [first, ending.communicate(timeout=60)[0], killed.communicate(timeout=60)[0]]
    time.sleep(chance.uniform(0.0, 0.1))
    host.kill()
    said.append(host.communicate(timeout=60)[0])
    # A kill may cut the last line.
    keys = [line[:-1] for one in said for line in one.splitlines(True) if line.endswith("\n")]
    found = Cache(file).get(keys)
    return len(keys), [key for key in keys if found.get(key) != key * 20]


def test_no_answer_is_lost_to_kills(tmp_path: Path) -> None:
    chance = random.Random(0)
    for n in range(3):
        number, lost = lost_to_kills(str(tmp_path / f"{n}.sqlite"), chance)
        assert number > 10 and not lost


def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"not a database" * 100)
    for file in (broken, tmp_path, broken / "below"):
        with pytest.raises(UserError, match=r"the cache .* cannot be used: .*cache=null"):
            Cache(str(file)).get(["a"])
    with pytest.raises(UserError, match=r"cache\.file=5"):
        Cache(5)  # type: ignore[arg-type]


@pytest.fixture
def kept(tmp_path: Path) -> str:
    """Two answers of 2020, one of an unknown model, and two of today."""
    cache = Cache(str(tmp_path / "answers.sqlite"))
    cache.put("old", "kept")
    cache.put("then", "x" * 3000, "gpt-old")
    cache.run(lambda connection: connection.execute("UPDATE responses SET time = 1577880000"))
    cache.put("now", "y" * 1000, "gpt-new")
    cache.put("later", "z" * 1000, "gpt-new")
    return str(cache.path)


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--older-than", "30d"], {"now", "later"}),
        (["--model", "gpt-new"], {"old", "then"}),
        (["--model", "unknown"], {"then", "now", "later"}),
        (["--larger-than", "2.015kB"], {"now", "later"}),
        (["--all"], set()),
    ],
)
def test_info_and_prune(
    kept: str, arguments: list[str], left: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    everything = ["old", "then", "now", "later"]
    entry.main(["info", "--file", kept])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{kept}: 4 responses (5.03 kB), ") and first.endswith(" on disk")
    assert [" ".join(line.split()) for line in lines] == [
        "model responses size stored",
        "gpt-old 1 3.01 kB 2020-01-01",
        f"gpt-new 2 2.01 kB {time.strftime('%Y-%m-%d')}",
        "unknown 1 9 B 2020-01-01",
    ]
    entry.main(["prune", "--dry-run", "--file", kept, *arguments])
    assert set(Cache(kept).get(everything)) == set(everything)
    would = capsys.readouterr().out
    entry.main(["prune", "--file", kept, *arguments])
    done = capsys.readouterr().out
    assert would.replace("would remove", "removed") == done
    assert f"removed {4 - len(left)} response" in done
    assert set(Cache(kept).get(everything)) == left


WRONG = {
    "--model|gpt-ol": r"--model gpt-ol: no responses in .* mean gpt-old\?",
    "--older-than|30": "one of the units m, h, d, w",
    "--larger-than|1 giraffe": "one of the units kb, mb, gb, tb",
    "--all|--model|x": "give one of --older-than",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_what_is_asked_wrongly_is_said(
    kept: str, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(["prune", *arguments.split("|"), "--file", kept])
    assert re.search(WRONG[arguments], capsys.readouterr().err)
    none = kept + ".none"
    for verb in (["info"], ["prune", "--all"]):
        entry.main([*verb, "--file", none])
        assert "no responses are cached yet" in capsys.readouterr().out
    assert not Path(none).exists()


def counting(asked: list[object]) -> FunctionModel:
    """A model that says how often it was asked, and fails at "fail"."""

    def function(prompt: object) -> Completion:
        asked.append(prompt)
        if prompt == "fail":
            raise ValueError("no")
        tokens = (Token("a", -0.5, (("a", -0.5), ("b", -1.0))),)
        return Completion(f"{len(asked)}", tokens=tokens, reasoning="r", cost=0.25, new_tokens=3)

    return FunctionModel(function)


def test_a_cached_model_asks_once_and_keeps_no_failure(tmp_path: Path) -> None:
    asked: list[object] = []
    cache = Cache(str(tmp_path / "answers.sqlite"))
    model = CachedModel(counting(asked), cache, ("one",), "one")
    first = model.generate_each([Request("a"), Request("fail"), Request("b")])
    again = model.generate_each([Request("b"), Request("fail"), Request("a")])
    assert isinstance(first[1], UserError) and asked == ["a", "fail", "b", "fail"]
    assert [again[2], again[0]] == [first[0], first[2]]
    assert isinstance(again[0], Completion) and again[0].cached and not first[2].cached  # type: ignore[union-attr]
    assert list(model.stream(Request("a"))) == [Delta("1", "r")] and len(asked) == 4
    list(model.stream(Request("c")))
    assert model.generate([Request("c")])[0].cached
    with pytest.raises(UserError, match="ValueError: no"):
        model.generate([Request("d"), Request("fail")])
    assert model.generate([Request("d")])[0].cached
    other = CachedModel(counting(asked), cache, ("two",), "two")
    assert not other.generate([Request("a")])[0].cached

    def late(prompt: object) -> str:
        Cache(cache.file).put(f"{second.prepare(Request('e')).key}:0", {"text": "early"})
        return "late"

    # Another process was first: what it has kept is the answer, now and later.
    second = CachedModel(FunctionModel(late), cache, ("one",), "one")
    assert [one.text for one in second.generate([Request("e")])] == ["early"]
    assert model.generate([Request("e")])[0].text == "early"


def test_everything_that_changes_an_answer_is_in_the_key(tmp_path: Path) -> None:
    asked: list[object] = []
    model = CachedModel(counting(asked), Cache(str(tmp_path / "answers.sqlite")), ("one",), "one")
    turns = [(Message(role, "a"),) for role in ("user", "system")]
    changes = [{"temperature": 1.0}, {"temperature": 0.0}, {"seed": 1}, {"stop": ("x",)}]
    changes += [{"top_logprobs": 2}, {"sample": 1}, {"max_new_tokens": 17}, {}]
    different = [*map(Request, ["a ", *turns]), *(Request("a", **one) for one in changes)]  # type: ignore[arg-type]
    found = model.generate(different)
    assert len(asked) == len(different)
    alike = [Request("a", timeout=9.0), Request("a", stop_check=str.isupper)]
    assert all(model.generate([one])[0].cached for one in [*different, *alike])
    assert model.generate(different) == found and len(asked) == len(different)
    samples = [Request("s", temperature=1.0)] * 3
    assert len({one.text for one in model.generate(samples)}) == 3
    assert model.generate([Request("s", temperature=1.0, sample=2)])[0].cached
    greedy = [Request("s", temperature=0.0), Request("s", temperature=0.0, sample=5)]
    assert len({one.text for one in model.generate(greedy)}) == 1


def lone_warning(caplog: pytest.LogCaptureFixture, file: Path) -> bool:
    """Whether the file was named as damaged, once."""
    messages = [record.getMessage() for record in caplog.records]
    return messages == [f"{file} is damaged; damaged answers are requested again"]


@pytest.mark.parametrize(
    "change",
    [
        "value = replace(value, '1', '2')",
        "value = x'ff'",
        "value = 5",
        "value = printf('%.*c', 100000, '[')",
        "sha256 = 'text'",
    ],
)
def test_a_damaged_row_is_missing_and_replaced(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[object] = []
    cache = Cache(str(tmp_path / "answers.sqlite"))
    model = CachedModel(counting(asked), cache, ("one",), "one")
    requests = [Request("a"), Request("b")]
    before = model.generate(requests)
    key = sample_key(model.prepare(requests[0]), 0)
    cache.run(lambda c: c.execute(f"UPDATE responses SET {change} WHERE key = ?", (key,)))
    again = model.generate(requests)
    assert [one.cached for one in again] == [False, True] and again[1] == before[1]
    assert asked == ["a", "b", "a"] and lone_warning(caplog, cache.path)
    assert model.generate(requests) == again and len(asked) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        {"text": "a", "new_tokens": "3"},
        {"text": "a", "strange": 1},
        {"text": "a", "tokens": [["a", -1.0]]},
        {"text": "a", "tokens": [["a", -1.0, [[1, 2]]]]},
        {"text": "a", "tool_calls": [1]},
    ],
    ids=str,
)
def test_what_is_no_completion_is_missing_and_replaced(
    tmp_path: Path, wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(str(tmp_path / "answers.sqlite"))
    model = CachedModel(counting([]), cache, ("one",), "one")
    key = sample_key(model.prepare(Request("a")), 0)
    cache.put(key, wrong)
    assert list(model.stream(Request("a"))) == [Delta("1", "r")]
    assert model.generate([Request("a")])[0].cached
    with endpoints.endpoint(lambda asked: endpoints.chat("fine")) as endpoint:
        client = OpenAI("m", endpoint.url, None, cache=cache, prices={"prompt": 1, "new": 1})
        cache.put(sample_key(client.prepare(Request("hi")), 0), wrong)
        for number in range(2):
            (answer,) = client.generate([Request("hi")])
            assert answer.text == "fine" and answer.cached == bool(number)
        assert len(endpoint.asked) == 1
    assert lone_warning(caplog, cache.path)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_model_that_asks_for_what_it_is_answering_gets_an_answer(
    tmp_path: Path, batch_size: int
) -> None:
    """Neither its own request nor one that is queued behind it is waited for."""

    class Asking(Model):
        depth = 0

        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            self.depth += 1
            if self.depth == 1:
                return ask()[: len(requests)]
            return [Completion(f"{one.prompt} {self.depth}") for one in requests]

    asking = Asking()
    model = CachedModel(asking, Cache(str(tmp_path / "c")), ["m"], "m", batch_size)

    def ask() -> list[Completion]:
        return model.generate([Request("a"), Request("b")])

    with ThreadPoolExecutor() as pool:
        texts = [one.text for one in pool.submit(ask).result(20)]
    assert [text[0] for text in texts] == ["a", "b"]
    assert [one.text for one in ask()] == texts
