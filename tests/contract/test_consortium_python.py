"""Consortia in Python, the models of names, saved consortia, and the record of their runs."""

import asyncio
import json
import multiprocessing
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_models
import pytest
from fake_agents import Speaker
from small_consortia import config

from swarm._util.settings import parse_settings
from swarm.consortium import create_consortium
from swarm.consortium.api import ConsortiumConfig, Orchestrator
from swarm.errors import UserError
from swarm.models.base import Message, Request
from swarm.models.function import FunctionModel
from swarm.models.llm import LLM
from swarm.models.openai import OpenAI
from swarm.multi_agent.consortium.consortium import Consortium, build_consortium, result_to_json
from swarm.multi_agent.consortium.settings import ConsortiumSettings, parse_member
from swarm.multi_agent.consortium.store import ConsortiumStore, RunLog
from swarm.registry.registry import Roster

VOICE = "function/fake_models:function"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """llm's folder, which is not there; a home, a cache and a place of its own, and no key."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm" / "deeper"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    for name in ("MODEL_SWARMS_PROVIDERS", "OPENAI_BASE_URL", "OPENAI_API_KEY", "TOGETHER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "llm" / "deeper"


def came(
    settings: ConsortiumSettings, says: dict[str, Any], prompt: str = "why?"
) -> dict[str, Any]:
    """The result of a consortium of speakers."""
    speakers = {name: Speaker(name, said) for name, said in says.items()}
    made = build_consortium(settings, speakers.__getitem__)
    (found,) = made.run([Request(prompt)])
    assert not isinstance(found, UserError), found
    return result_to_json(made, prompt, found.iterations, found.answers, found)


def judged(confidence: float, text: str = "so it is") -> str:
    return f"<synthesis>{text}</synthesis><confidence>{confidence}</confidence>"


SAYS = {"a": "yes\nConfidence: 0.9", "b": UserError("b is away"), "c": judged(0.95)}


def test_a_run_is_recorded_whole() -> None:
    settings = config(max_iterations=1)
    found = came(settings, SAYS)
    number = RunLog().add("mine", settings, found)
    run = RunLog().get(number[:8])
    assert json.loads(json.dumps(run)) == run
    assert run["id"] == number and run["name"] == "mine" and run["status"] == "done"
    assert (run["prompt"], run["answer"], run["confidence"]) == ("why?", "so it is", 0.95)
    assert (run["iterations"], run["calls"], run["cost"]) == (1, 3, 1.0)
    assert run["result"] == found and parse_settings(ConsortiumSettings, run["config"]) == settings
    first, away = run["result"]["model_responses"]
    assert (first["model"], first["response"], first["confidence"]) == ("a", "yes", 0.9)
    assert (away["model"], away["error"]) == ("b", "b is away")
    assert run["result"]["synthesis"]["raw_arbiter_response"] == judged(0.95)


def test_runs_are_listed_the_newest_first_by_day_and_by_name(folder: Path) -> None:
    assert RunLog().list() == []
    with pytest.raises(UserError, match="abc: no run with this id"):
        RunLog().get("abc")
    assert not folder.exists(), "reading makes no file"
    for n, name in enumerate(("x", "y", "x")):
        RunLog().add(name, config(), {"original_prompt": str(n)}, "e")
    prompts = lambda **how: [run["prompt"] for run in RunLog().list(**how)]  # noqa: E731
    assert prompts() == ["2", "1", "0"] and prompts(limit=1) == ["2"]
    assert prompts(name="x") == ["2", "0"] and prompts(since="2999-01-01") == []
    assert prompts(since=time.strftime("%Y-%m-%d")) == ["2", "1", "0"]
    assert json.dumps(RunLog().list())
    with pytest.raises(UserError, match="since: 'yesterday' is not a date"):
        RunLog().list(since="yesterday")
    # Half a character costs no answer.
    settings = parse_settings(ConsortiumSettings, {"members": ["a"], "strategy": "vote"})
    number = RunLog().add(None, settings, came(settings, {"a": "so \ud800"}, "why \udc80"))
    found = RunLog().get(number)
    assert found["answer"] == "so ?" and found["result"]["model_responses"]


def added(path: Path, runs: int) -> None:
    """Record runs; in another process, too."""
    for n in range(runs):
        RunLog(path).add("many", config(), {"original_prompt": str(n)}, "e")


def test_threads_and_processes_record_at_the_same_time(tmp_path: Path) -> None:
    path, failed = tmp_path / "deeper" / "consortium.db", []

    def work() -> None:
        try:
            added(path, 10)
        except BaseException as error:
            failed.append(error)

    started = multiprocessing.get_context("fork")
    workers: list[Any] = [started.Process(target=added, args=(path, 10)) for _ in range(2)]
    threads = [threading.Thread(target=work) for _ in range(8)]
    for one in (*workers, *threads):
        one.start()
    for one in (*workers, *threads):
        one.join()
    assert failed == [] and [worker.exitcode for worker in workers] == [0, 0]
    assert len(RunLog(path).list(limit=200)) == 100
    with sqlite3.connect(path) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_arguments_of_older_programs() -> None:
    pieces = "function/fake_models:pieces"
    same: dict[str, Any] = {"arbiter": VOICE, "max_iterations": 4, "quorum": 2}
    made = create_consortium(
        models=[f"{VOICE}:1", pieces],
        confidence_threshold=99,
        minimum_iterations=2,
        system_prompt="Be brief.",
        default_count=3,
        raw=True,
        judging_method="rank",
        **same,
    )
    same |= {"strategy": "rank", "confidence_threshold": 0.99, "min_iterations": 2}
    expected = config(members=[f"{VOICE}:1", f"{pieces}:3"], system="Be brief.", **same)
    assert dict(made.config) == dict(expected)
    assert create_consortium([VOICE], arbiter=VOICE, system="Be kind.").config.system == "Be kind."
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"models": VOICE}, "must be a list of at least one name"),
        ({"models": []}, "must be a list of at least one name"),
        ({"arbiter": VOICE, "quorom": 2}, "quorom: no such key; did you mean quorum"),
        ({"arbiter": "function/fake_models:nobody"}, "fake_models has no function nobody"),
    )
    for settings, words in wrong:
        with pytest.raises(UserError, match=words):
            create_consortium(**{"models": [VOICE], **settings})
    with pytest.raises(UserError, match="OPENAI_API_KEY is not set"):
        Orchestrator(ConsortiumConfig({VOICE: 2}, arbiter="openai/gpt-4o")).orchestrate("seventeen")
    for positional in (({VOICE: 1}, "sys", 0.7, 2, 1, VOICE, "rank"), ({VOICE: 1},)):
        with pytest.raises(TypeError, match="by position"):
            ConsortiumConfig(*positional, models={VOICE: 1})


def test_prompts_are_answered_for_themselves_and_unrecorded(folder: Path) -> None:
    made = create_consortium([VOICE], arbiter=VOICE, max_iterations=1, raw=True)
    first = made.orchestrate("seventeen")
    turns = (Message("user", "two"), Message("assistant", "so"), Message("user", "three"))
    second = made.orchestrate(turns)
    assert first["original_prompt"] == "seventeen" and second["original_prompt"] == "three"
    told = second["model_responses"][0]["response"]
    assert "three" in told and "two" in told and "seventeen" not in told
    assert first["synthesis"]["raw_arbiter_response"] and json.dumps(first)
    without = create_consortium([VOICE], arbiter=VOICE, max_iterations=1).orchestrate("seventeen")
    assert "raw_arbiter_response" not in json.dumps(without)
    assert not (folder / "consortium.db").exists()


def test_nothing_is_asked_without_a_question_and_the_first_member_arbitrates_if_need_be() -> None:
    made = create_consortium([f"{VOICE}:2"], max_iterations=1, confidence_threshold=1)
    assert made.config.arbiter == parse_member(VOICE) and made.config.confidence_threshold == 1
    assert create_consortium([VOICE], strategy="vote").config.arbiter is None
    for prompt in ("", " \n", [], [Message("user", " ")]):
        with pytest.raises(UserError, match="the prompt is empty"):
            made.orchestrate(prompt)
    found = made.orchestrate("seventeen")
    assert found["metadata"]["cost"] is None and found["model_responses"][0]["cost"] is None


def test_who_is_cancelled_asks_no_further() -> None:
    begun, go = threading.Event(), threading.Event()

    def says(request: Request) -> str:
        begun.set()
        go.wait(5)
        return "A"

    made, member = create_consortium([VOICE], arbiter=VOICE), Speaker("a", says)
    made.consortium = build_consortium(config(members=["a"], arbiter="a"), lambda name: member)

    async def leave() -> None:
        task = asyncio.create_task(made.aorchestrate("why?"))
        await asyncio.to_thread(begun.wait, 5)
        task.cancel()
        await asyncio.wait([task])
        go.set()

    asyncio.run(leave())  # waits for the thread
    assert len(member.heard) == 1


def test_it_works_beside_a_running_loop() -> None:
    made = create_consortium([f"{VOICE}:2"], strategy="vote", max_iterations=1)

    async def notebook() -> None:
        assert made.orchestrate("one")["synthesis"]["synthesis"]
        ticks = asyncio.create_task(asyncio.sleep(0, "the loop goes on"))
        found = await asyncio.gather(*(made.aorchestrate(f"{n}") for n in range(3)))
        assert [one["original_prompt"] for one in found] == ["0", "1", "2"]
        assert await ticks

    asyncio.run(notebook())


@pytest.fixture
def talker(folder: Path) -> Iterator[Any]:
    model = fake_models.llm_model()
    with fake_models.in_llm(model, fake_models.llm_model("x:8")):
        yield model


def test_a_name_alone_is_llms_model_then_a_saved_one_then_the_rosters(
    talker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ConsortiumStore().save("mine", config(members=["talker"], arbiter="talker", max_iterations=1))
    ConsortiumStore().save("talker", config())
    monkeypatch.setenv("OPENAI_API_KEY", fake_models.KEY)
    members = Roster(cache=None)
    assert isinstance(members.member("talker"), LLM) and isinstance(members.member("x:8"), LLM)
    assert isinstance(members.member("llm/talker"), LLM)
    assert isinstance(members.member("openai/gpt-4o"), OpenAI)
    assert isinstance(members.member("some-model"), OpenAI)
    assert isinstance(members.member(VOICE), FunctionModel)
    assert isinstance(members.member("mine"), Consortium)
    assert members.member("mine") is members.member("consortium/mine") is members.member("llm/mine")
    assert all(map(members.is_known_name, ("x:8", "llm/x:8", "mine")))
    assert not members.is_known_name("y:8")
    assert isinstance(Roster().model("talker"), OpenAI)
    anywhere = Roster(cache=None).model("consortium/mine")
    assert isinstance(anywhere, Consortium) and isinstance(anywhere.members[0], LLM)
    (answer,) = members.member("mine").generate([Request("hi", max_new_tokens=9)])
    assert answer.text and talker.asked


def test_without_llm_its_models_are_the_rosters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm", None)
    monkeypatch.setenv("OPENAI_API_KEY", fake_models.KEY)
    assert isinstance(Roster(cache=None).member("gpt-4o"), OpenAI)
    assert not Roster(cache=None).is_known_name("gpt-4o")


# Saved consortia


def test_what_is_put_is_there(folder: Path) -> None:
    assert ConsortiumStore().list_names() == []
    for wrong in (ConsortiumStore().get, ConsortiumStore().remove):
        with pytest.raises(UserError, match="mine: no consortium of this name is saved; none is"):
            wrong("mine")
    names: tuple[Any, ...] = ("", "a b", "a/b", "a,b", "a:2", "mine.yaml", "-a", 3, "a\n")
    for name in names:
        with pytest.raises(UserError, match="is not a consortium name"):
            ConsortiumStore().save(name, config())
    assert not folder.exists(), "reading makes no file"
    ConsortiumStore().save("mine", config())
    ConsortiumStore().save("another", config(system="Be brief."))
    assert ConsortiumStore().list_names() == ["another", "mine"]
    assert ConsortiumStore().get("mine") == config()
    assert ConsortiumStore().get("another").system == "Be brief."
    assert ConsortiumStore(folder / "consortium.db").list_names() == ["another", "mine"]
    ConsortiumStore().remove("another")
    assert ConsortiumStore().list_names() == ["mine"]


def test_a_bad_row_hides_no_other(folder: Path) -> None:
    ConsortiumStore().save("good", config())
    insert = "INSERT INTO consortia VALUES (?, ?, '')"
    ConsortiumStore().write((insert, ["bad", "{"]), (insert, ["worse", '{"members": 3}']))
    assert ConsortiumStore().list_names() == ["bad", "good", "worse"]
    assert ConsortiumStore().get("good") == config()
    with pytest.raises(UserError, match="bad: the saved config is not JSON"):
        ConsortiumStore().get("bad")
    with pytest.raises(UserError, match=r"worse\.members=3: must be a list"):
        ConsortiumStore().get("worse")
    for file in folder.glob("consortium.db*"):
        file.unlink()
    (folder / "consortium.db").write_bytes(b"no database" * 99)
    for use in (ConsortiumStore().list_names, lambda: ConsortiumStore().save("mine", config())):
        with pytest.raises(UserError, match=r"consortium.db cannot be used: .*LLM_USER_PATH"):
            use()


def spoken(**settings: Any) -> Any:
    return config(**{"members": [VOICE], "arbiter": VOICE, "max_iterations": 1, **settings})


def test_the_roster_finds_saved_ones_presets_and_files(tmp_path: Path) -> None:
    ConsortiumStore().save("mine", spoken(members=[f"{VOICE}:2", "moa/./mix.yaml"]))
    (tmp_path / "mix.yaml").write_text(f"proposers: [{VOICE}]\naggregator: {VOICE}\n")
    (tmp_path / "own.yaml").write_text(f"members: [consortium/mine]\narbiter: {VOICE}\n")
    roster = Roster()
    found = roster.model("consortium/mine")
    assert isinstance(found, Consortium) and found is roster.model("consortium/mine")
    (answer,) = roster.model("consortium/own.yaml").generate([Request("hi", max_new_tokens=99)])
    assert answer.text
    assert isinstance(roster.model("consortium/council"), Consortium)
    with pytest.raises(UserError, match=r"did you mean mine.*presets are classic, council, local"):
        roster.model("consortium/mien")


def test_what_contains_itself_is_told_with_the_way(tmp_path: Path) -> None:
    ConsortiumStore().save("alone", spoken(members=["consortium/alone", VOICE]))
    ConsortiumStore().save("first", spoken(members=["moa/./mix.yaml"]))
    ConsortiumStore().save("last", spoken(arbiter="consortium/first"))
    (tmp_path / "mix.yaml").write_text(f"proposers: [{VOICE}]\naggregator: consortium/last\n")
    told = "^consortium/alone contains itself: consortium/alone -> consortium/alone$"
    with pytest.raises(UserError, match=told):
        Roster().model("consortium/alone")
    with pytest.raises(UserError, match=r"first -> moa/./mix.yaml -> consortium/last -> cons"):
        Roster().model("consortium/first")
