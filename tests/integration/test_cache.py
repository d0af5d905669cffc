"""Answers kept in one file: for later, for other processes, and without a key or a failure."""

import os
import pickle
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import endpoints
import fake_models
import pytest
import searches

from swarm import cache as entry
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Message, Request, Token, generate_each, stream
from swarm.models.cache import Cache, CachedModel, make_cache_key
from swarm.models.function import FunctionModel
from swarm.models.openai import OpenAI

WRITER = """
import sys
from swarm.models.cache import Cache
cache = Cache(sys.argv[1])
for n in range(300):
    cache.put(f"{n}", sys.argv[2])
    assert cache.get([f"{n}"])
"""


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


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path))
    Cache().put("a", 1)
    assert (tmp_path / "answers.sqlite").is_file()


def old_file(path: Path) -> str:
    """A file as the version before labels made them, with two answers."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        connection.executemany("INSERT INTO answers VALUES (?, ?)", [("old", "1"), ("0", '"kept"')])
    connection.close()
    return str(path)


@pytest.mark.parametrize("old", [False, True])
def test_processes_and_threads_share_a_file(tmp_path: Path, old: bool) -> None:
    file = str(tmp_path / "answers.sqlite")
    if old:
        old_file(tmp_path / "answers.sqlite")
    command = [sys.executable, "-c", WRITER, file]
    running = [
        subprocess.Popen([*command, name], env=searches.environment(), stderr=subprocess.PIPE)
        for name in ("one", "two", "three")
    ]
    cache, wrong = Cache(file), []

    def write(name: str) -> None:
        try:
            for n in range(300):
                cache.put(f"{n}", name)
        except UserError as error:
            wrong.append(error)

    threads = [threading.Thread(target=write, args=(f"thread {n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in running:
        assert process.wait(timeout=60) == 0, process.communicate()[1]
    assert wrong == []
    found = cache.get([f"{n}" for n in range(300)])
    assert len(found) == 300
    if old:
        assert cache.get(["old", "0"]) == {"old": 1, "0": "kept"}
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_forked_child_opens_the_file_itself(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "answers.sqlite"))
    cache.put("a", 1)
    child = os.fork()
    if child == 0:
        cache.put("b", 2)
        os._exit(0 if cache.get(["a"]) == {"a": 1} else 1)
    assert os.waitpid(child, 0)[1] == 0
    cache.put("c", 3)
    assert cache.get(["a", "b", "c"]) == {"a": 1, "b": 2, "c": 3}


def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"not a database" * 100)
    for file in (broken, tmp_path, broken / "below"):
        with pytest.raises(UserError, match=r"the cache .* cannot be used: .*cache=null"):
            Cache(str(file)).get(["a"])
    with pytest.raises(UserError, match=r"cache\.file=5"):
        Cache(5)  # type: ignore[arg-type]


def test_keys_change_with_every_part() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.0}
    keys = {
        make_cache_key("chat", "http://a", body),
        make_cache_key("chat", "http://b", body),
        make_cache_key("chat", "http://a", {**body, "temperature": 1.0}),
        make_cache_key("chat", "http://a", {**body, "seed": 1}),
        make_cache_key(
            "chat", "http://a", {**body, "messages": [{"role": "user", "content": "hi "}]}
        ),
        make_cache_key(
            "chat", "http://a", {**body, "messages": [{"role": "user", "content": "\ud800"}]}
        ),
        make_cache_key("chat", "http://a", body, 1),
    }
    assert len(keys) == 7
    assert make_cache_key("chat", {"b": 1, "a": 2}) == make_cache_key("chat", {"a": 2, "b": 1})


def test_ten_thousand_answers_are_read_quickly(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "answers.sqlite"))
    keys = [make_cache_key(n) for n in range(10_000)]
    with cache.open_connection() as connection:
        connection.execute("BEGIN")
        for key in keys:
            cache.put(key, {"text": "some words " * 50, "prompt_tokens": 9}, "m")
        connection.execute("COMMIT")
    took = []
    for _ in range(3):
        begun = time.process_time()
        assert len(cache.get(keys)) == 10_000
        took.append(time.process_time() - begun)
    assert min(took) < 1


@pytest.fixture
def kept(tmp_path: Path) -> str:
    """Four answers: of unknown age and model, of 2020, and two of today."""
    file = old_file(tmp_path / "answers.sqlite")
    cache = Cache(file)
    cache.put("then", "x" * 3000, "gpt-old")
    with cache.open_connection() as connection:
        connection.execute("UPDATE answers SET time = 1577880000 WHERE key = 'then'")
    cache.put("now", "y" * 1000, "gpt-new")
    cache.put("later", "z" * 1000, "gpt-new")
    return file


def test_info(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry.main(["info", "--file", kept])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{kept}: 5 responses (5.0 kB), ") and first.endswith(" on disk")
    today = time.strftime("%Y-%m-%d")
    assert [" ".join(line.split()) for line in lines] == [
        "gpt-old 1 response (3.0 kB), 2020-01-01",
        f"gpt-new 2 responses (2.0 kB), {today}",
        "unknown 2 responses (11 bytes), of unknown age",
    ]


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--older-than", "30d"], {"old", "0", "now", "later"}),
        (["--older-than", "5000w"], {"old", "0", "then", "now", "later"}),
        (["--model", "gpt-new"], {"old", "0", "then"}),
        (["--model", "unknown"], {"then", "now", "later"}),
        (["--larger-than", "2.1kB"], {"now", "later"}),
        (["--larger-than", "1GB"], {"old", "0", "then", "now", "later"}),
        (["--all"], set()),
    ],
)
def test_prune(
    kept: str, arguments: list[str], left: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    everything = ["old", "0", "then", "now", "later"]
    entry.main(["prune", "--dry-run", "--file", kept, *arguments])
    assert set(Cache(kept).get(everything)) == set(everything)
    would = capsys.readouterr().out
    entry.main(["prune", "--file", kept, *arguments])
    done = capsys.readouterr().out
    assert would.replace("would remove", "removed") == done
    assert f"removed {5 - len(left)} response" in done
    assert set(Cache(kept).get(everything)) == left
    assert ("2 of them are of unknown age" in done) == (arguments[0] == "--older-than")


def test_prune_gives_the_disk_its_space_back(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "answers.sqlite"))
    for n in range(200):
        cache.put(f"{n}", "x" * 10_000, "m")
    before = cache.path.stat().st_size
    entry.main(["prune", "--larger-than", "100kB", "--file", str(cache.path)])
    assert cache.path.stat().st_size < before / 5
    assert len(cache.get([f"{n}" for n in range(200)])) == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune", "--model", "gpt-ol"], r"--model gpt-ol: no responses in .* mean gpt-old\?"),
        (["prune", "--older-than", "30"], "'30' is not a duration such as 30d"),
        (["prune", "--larger-than", "1 giraffe"], "is not a size such as 1GB"),
        (["prune"], "one of the arguments .* is required"),
        (["prune", "--all", "--model", "x"], "not allowed with"),
        ([], r"required: info \| prune"),
    ],
)
def test_what_is_asked_wrongly_is_said(
    kept: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(entry.main([*arguments, *(["--file", kept] if arguments else [])]))
    assert end.value.code and re.search(words, capsys.readouterr().err)


def test_nothing_is_made_by_looking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["info"], ["prune", "--all"]):
        entry.main([*verb, "--file", str(tmp_path / "none.sqlite")])
        assert "no responses are cached yet" in capsys.readouterr().out
    assert not (tmp_path / "none.sqlite").exists()


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
    first = generate_each(model, [Request("a"), Request("fail"), Request("b")])
    again = generate_each(model, [Request("b"), Request("fail"), Request("a")])
    assert isinstance(first[1], UserError) and asked == ["a", "fail", "b", "fail"]
    assert [again[2], again[0]] == [first[0], first[2]]
    assert isinstance(again[0], Completion) and again[0].cached and not first[2].cached  # type: ignore[union-attr]
    assert list(stream(model, Request("a"))) == [Delta("1", "r")] and len(asked) == 4
    list(stream(model, Request("c")))
    assert model.generate([Request("c")])[0].cached
    with pytest.raises(UserError, match="ValueError: no"):
        model.generate([Request("d"), Request("fail")])
    assert model.generate([Request("d")])[0].cached
    other = CachedModel(counting(asked), cache, ("two",), "two")
    assert not other.generate([Request("a")])[0].cached

    def late(prompt: object) -> str:
        model.generate([Request("e")])
        return "late"

    # Another process was first: what it has kept is the answer, now and later.
    second = CachedModel(FunctionModel(late), cache, ("one",), "one")
    (answer,) = second.generate([Request("e")])
    assert answer == model.generate([Request("e")])[0] and answer.text != "late"


def test_everything_that_changes_an_answer_is_in_the_key(tmp_path: Path) -> None:
    asked: list[object] = []
    cache = Cache(str(tmp_path / "answers.sqlite"))
    model = CachedModel(counting(asked), cache, ("one",), "one")
    different = [
        Request("a"),
        Request((Message("user", "a"),)),
        Request((Message("system", "a"),)),
        Request("a", 17),
        Request("a", temperature=1.0),
        Request("a", temperature=0.0),
        Request("a", seed=1),
        Request("a", stop=("x",)),
        Request("a", top_logprobs=2),
        Request("a", sample=1),
        Request(
            "a ",
        ),
        Request("a", choices=("b",)),
    ]
    found = generate_each(model, different)
    assert len(asked) == len(different) - 1, "a function cannot score choices"
    assert generate_each(model, different)[:-1] == found[:-1] and len(asked) == len(different) - 1
    alike = [Request("a", timeout=9.0), Request("a", stop_check=str.isupper)]
    assert model.generate(alike[:1])[0].cached and model.generate(alike[1:])[0].cached
    samples = [Request("s", temperature=1.0)] * 3
    assert len({one.text for one in model.generate(samples)}) == 3
    assert model.generate([Request("s", temperature=1.0, sample=2)])[0].cached
    greedy = [Request("s", temperature=0.0), Request("s", temperature=0.0, sample=5)]
    assert len({one.text for one in model.generate(greedy)}) == 1


def test_a_key_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALKER_KEY", fake_models.KEY)

    def careless(asked: endpoints.Asked) -> endpoints.Reply:
        return endpoints.chat(f"you sent {asked.headers['Authorization']}")

    with endpoints.endpoint(careless) as endpoint:
        model = OpenAI(
            "m", endpoint.url, "TALKER_KEY", cache=Cache(str(tmp_path / "answers.sqlite"))
        )
        assert model.generate([Request("hi")])[0].text == "you sent Bearer ***"
        list(stream(model, Request("ho")))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [p for p in files if fake_models.KEY.encode() in p.read_bytes()]


ASKER = """
import sys
from swarm.models import Request
from swarm.models.cache import Cache
from swarm.models.openai import OpenAI
url, file, count = sys.argv[1:]
model = OpenAI("small", url, None, temperature=None, cache=Cache(file))
requests = [Request(f"q{n}") for n in range(int(count))]
print("\\n".join(done.text for done in model.generate(requests)), flush=True)
"""


def test_of_two_processes_one_pays(tmp_path: Path) -> None:
    """Both have all answers, the same, and no request was made twice."""
    file, count = str(tmp_path / "answers.sqlite"), 40
    numbers = iter(range(10_000))
    said = lambda asked: endpoints.chat(f"answer {next(numbers)}")  # noqa: E731
    with endpoints.endpoint(lambda asked: replace(said(asked), wait=0.05)) as server:
        command = [sys.executable, "-c", ASKER, server.url, file, str(count)]
        running = [
            subprocess.Popen(command, env=searches.environment(), stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        first, second = (process.communicate(timeout=120)[0] for process in running)
        assert len(server.asked) == count
    assert first == second and len(first.splitlines()) == count
    with Cache(file).open_connection() as connection:
        assert connection.execute("SELECT COUNT(*) FROM claims").fetchone() == (0,)


def test_a_claim_of_a_dead_process_expires(tmp_path: Path) -> None:
    file = str(tmp_path / "answers.sqlite")
    claims = (
        "import sys, time; from swarm.models.cache import Cache\n"
        "print(Cache(sys.argv[1]).claim(['a', 'b'])[1], flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", claims, file],
        env=searches.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "['a', 'b']\n"
    cache = Cache(file)
    assert cache.claim(["a", "b", "c"]) == ({}, ["c"])
    process.kill()
    process.wait()
    assert cache.claim(["a", "b", "c"]) == ({}, ["a", "b", "c"])
    cache.put("a", 1)
    cache.release(["a", "b"])
    assert cache.claim(["a", "b", "c"]) == ({"a": 1}, ["b", "c"])


def test_a_failure_passes_the_claim_on(tmp_path: Path) -> None:
    """What another process has failed to get is asked for; a fork is a process of its own."""
    file, asked = str(tmp_path / "answers.sqlite"), []
    cache = Cache(file)
    fails = (
        "import sys; from swarm.models.cache import Cache\n"
        "cache = Cache(sys.argv[1]); cache.claim(['a']); print('claimed', flush=True)\n"
        "sys.stdin.readline(); cache.release(['a']); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", fails, file]
    process = subprocess.Popen(
        command,
        env=searches.environment(),
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdin and process.stdout.readline()

    def fail() -> None:
        asked.append("failed")
        process.stdin.write("\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]

    def answers(keys: Sequence[str]) -> dict[str, int]:
        asked.append("again")
        return {key: cache.put(key, 7) for key in keys}

    timer = threading.Timer(0.4, fail)
    timer.start()
    try:
        assert cache.once(["a"], answers) == ({"a": 7}, {}) and asked == ["failed", "again"]
        assert cache.once(["a"], answers) == ({}, {"a": 7}) and len(asked) == 2
    finally:
        timer.join()
        process.communicate("\n", timeout=60)
    cache.claim(["b"])
    assert cache.claim(["b"]) == ({}, ["b"]), "a process is not held back by itself"
    child = os.fork()
    if not child:
        held = cache.claim(["b", "c"]) == ({}, ["c"])
        late = cache.once(["b"], answers, timeout=0.2) == ({"b": 7}, {})
        os._exit(0 if held and late else 1)
    assert os.waitpid(child, 0)[1] == 0
