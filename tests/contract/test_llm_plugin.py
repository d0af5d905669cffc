"""The plugin of the llm command: its cost, and saved consortia as models of llm."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import consortium_members
import fake_models
import llm
import pytest
import sqlite_utils
from click.testing import CliRunner, Result
from consortium_members import BLUE, DEAD, GREEN, JUDGE
from llm.cli import cli
from llm.migrations import migrate
from llm.parts import ToolCallPart, ToolResultPart
from llm.plugins import load_plugins, pm

from swarm._util.settings import parse_settings
from swarm.consortium import plugin
from swarm.multi_agent.consortium.settings import ConsortiumSettings
from swarm.multi_agent.consortium.store import ConsortiumStore, RunLog


def council(*members: str, **settings: Any) -> ConsortiumSettings:
    """The settings of these members and the judge."""
    return parse_settings(ConsortiumSettings, {"members": members, "arbiter": JUDGE, **settings})


COUNCIL = council(BLUE, GREEN, max_iterations=1)


@pytest.fixture(scope="module")
def empty_log(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """llm's log with its tables, which take time to make."""
    file = tmp_path_factory.mktemp("log") / "logs.db"
    log = sqlite_utils.Database(file)
    migrate(log)
    log.close()
    return file.read_bytes()


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder of llm's that does not exist yet, and the plugin in its place."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    for key in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TOGETHER_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    consortium_members.heard.clear()
    plugin.warned_messages.clear()
    load_plugins()
    assert plugin in pm.get_plugins()
    return tmp_path / "llm"


@pytest.fixture
def home(fresh: Path, empty_log: bytes) -> Path:
    """A folder of llm's that has been in use."""
    fresh.mkdir()
    (fresh / "logs.db").write_bytes(empty_log)
    return fresh


def typed(*words: str, stdin: str = "") -> Result:
    """What `llm` says."""
    return CliRunner().invoke(cli, words, input=stdin)


def fine(*words: str, stdin: str = "") -> Result:
    done = typed(*words, stdin=stdin)
    assert done.exit_code == 0, (done.stderr, done.exception)
    return done


def logs() -> list[dict[str, Any]]:
    """llm's log, the oldest first."""
    found = json.loads(fine("logs", "-n", "0", "--json").stdout)
    return sorted(found, key=lambda turn: turn["id"])


def test_a_conversation_goes_on_and_all_of_them_know_it(home: Path) -> None:
    ConsortiumStore().save("council", COUNCIL)
    assert fine("-m", "council", "My name is Ada.").stdout == "answer 1\n"
    consortium_members.heard.clear()
    assert fine("-c", "Who am I?").stdout == "answer 1\n"
    assert {name for name, _ in consortium_members.heard} == {"blue", "green", "judge"}
    for name, text in consortium_members.heard:
        assert "My name is Ada." in text and "answer 1" in text and "Who am I?" in text, name
    first, second = logs()
    assert first["conversation_id"] == second["conversation_id"]
    assert [run["prompt"] for run in RunLog().list()] == ["Who am I?", "My name is Ada."]
    consortium_members.heard.clear()
    fine("-m", "council", "Who am I?")
    assert not any("Ada" in text for _, text in consortium_members.heard)


def test_system_and_options_are_applied(home: Path) -> None:
    ConsortiumStore().save("council", council(BLUE, GREEN, system="Old words."))
    pirate, asked = "Speak as a pirate.", ("-m", "council", "Why?")
    fine(*asked, "-s", pirate, "-o", "min_iterations", "2", "-o", "confidence_threshold", "10")
    blue = [text for name, text in consortium_members.heard if name == "blue"]
    assert len(blue) == 2 and all(pirate in text for text in blue)
    assert "Old words." not in str(consortium_members.heard)
    assert any(name == "judge" and pirate in text for name, text in consortium_members.heard)
    consortium_members.heard.clear()
    fine(*asked, "-o", "strategy", "vote", "-o", "max_iterations", "1")
    assert "Old words." in consortium_members.heard[0][1]
    assert RunLog().list()[0]["strategy"] == "vote"
    for option, told in (
        (("strategy", "nope"), "Input should be 'default', 'pick-one'"),
        (("budget", "1"), "the first iteration takes 3 calls"),
        (("keep", "1"), "-o keep has no effect with strategy default; add -o strategy elimination"),
        (("confidence_threshold", "1.5"), "less than or equal to 1"),
        (("max_iterations", "0"), "max_iterations"),
        (("colour", "1"), "colour"),
    ):
        done = typed(*asked, "-o", *option)
        assert done.exit_code == 1 and told in done.stderr and done.stdout.strip() == ""


def test_progress_is_reasoning_and_the_result_is_in_the_log(home: Path) -> None:
    ConsortiumStore().save("council", COUNCIL)
    done = fine("-m", "council", "Why?")
    assert "iteration 1 of at most 1: confidence 0.6" in done.stderr
    assert "iteration" not in fine("-m", "council", "Why?", "-R").stderr
    assert fine("-m", "council", "Why?", "--no-stream").stdout == "answer 3\n"
    turn = logs()[0]
    assert turn["response"] == "answer 1" and f"member {BLUE}" in turn["reasoning"]
    assert turn["response_json"]["synthesis"]["dissent"] == "one says green"
    details = json.loads(turn["token_details"])
    assert details["calls"] == 3 and details["cost"] is None


def test_warnings_stand_in_the_stream_where_they_came_up(home: Path) -> None:
    ConsortiumStore().save("council", council(BLUE, GREEN, DEAD, max_iterations=1))
    lines = fine("-m", "council", "Why?").stderr.splitlines()
    (warned,) = (n for n, line in enumerate(lines) if line.startswith("warning: iteration 1: "))
    assert any(line.startswith(f"iteration 1, member {DEAD}") for line in lines[:warned])
    assert any("arbiter" in line for line in lines[warned:])
    assert "".join(lines).count("warning:") == 1 and "warning: " in logs()[0]["reasoning"]
    dead = council(DEAD)
    assert fine("-m", "council", "Why?", "--no-stream").stdout == "answer 2\n"
    ConsortiumStore().save("dead", dead)
    assert typed("-m", "dead", "Why?").exit_code == 1


def test_async_and_the_python_api(home: Path) -> None:
    ConsortiumStore().save("council", COUNCIL)
    assert fine("-m", "council", "Why?", "--async").stdout == "answer 1\n"

    async def ask() -> tuple[str, int, dict[str, Any]]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        response = llm.get_async_model("council").prompt("Why?")
        text = await response.text()
        ticking.cancel()
        return text, ticks, await response.json() or {}

    text, ticks, found = asyncio.run(ask())
    assert text == "answer 2" and ticks > 3 and found["metadata"]["calls"] == 3
    talk = llm.get_model("council").conversation()
    talk.prompt("My name is Ada.").text()
    consortium_members.heard.clear()
    assert talk.prompt("Who am I?").text() == "answer 1" and "Ada" in consortium_members.heard[0][1]


def test_nothing_is_asked_and_turns_of_tools(home: Path) -> None:
    ConsortiumStore().save("council", COUNCIL)
    fine("-m", "council", "Why?")
    consortium_members.heard.clear()
    for words in (("-m", "council"), ("-c",)):
        done = typed(*words, " ")
        assert done.exit_code == 1 and "Error: the prompt is empty" in done.stderr
    assert not consortium_members.heard
    clock = (ToolCallPart(name="clock"), ToolResultPart(name="clock", output="12"))
    tools = [llm.user("What time is it?"), llm.assistant(clock[0]), llm.tool_message(clock[1])]
    tools += [llm.assistant("Noon."), llm.user("Sure?")]
    assert llm.get_model("council").prompt(messages=tools).text() == "answer 1"
    blue = next(text for name, text in consortium_members.heard if name == "blue")
    assert blue.endswith("user: What time is it?\nassistant: Noon.\nuser: Sure?")


def test_without_models_and_keys_one_line_names_both_ways_out(home: Path) -> None:
    done = typed("consortium", "Why?")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "llm keys set openai" in done.stderr and "--consortium local" in done.stderr
    assert not RunLog().list()
    assert "local/rooms" in fine("consortium", "Why?", "--consortium", "local", "--dry-run").stdout


def test_names_of_other_models_are_left_to_them(home: Path) -> None:
    ConsortiumStore().save("talker", COUNCIL)
    with fake_models.in_llm(fake_models.llm_model()):
        done = fine("-m", "talker", "hi")
        assert done.stdout == "user: hi\n"
        assert done.stderr.count("the consortium talker is not registered") == 1
        done = typed("consortium", "save", "talker", "-m", BLUE, "--arbiter", JUDGE)
        assert done.exit_code == 1 and "llm already has a model of this name" in done.stderr
    assert fine("-m", "talker", "hi").stdout == "answer 1\n"


def test_whatever_is_wrong_with_the_file_llm_goes_on(home: Path) -> None:
    ConsortiumStore().save("council", COUNCIL)
    ConsortiumStore().save("bad", COUNCIL)
    with sqlite3.connect(home / "consortium.db") as rows:
        rows.execute("UPDATE consortia SET config = '{\"members\": []}' WHERE name = 'bad'")
    done = fine("-m", "council", "Why?")
    assert done.stdout == "answer 1\n" and done.stderr.count("the consortium bad cannot be") == 1
    for file in home.glob("consortium.db*"):
        file.unlink()
    (home / "consortium.db").write_bytes(b"no database" * 100)
    plugin.warned_messages.clear()
    done = fine("models")
    assert "OpenAI Chat: gpt-4o" in done.stdout
    assert done.stderr.count("cannot read the saved consortia") == 1


def test_with_another_plugin_of_this_name_it_says_which_one_answers() -> None:
    import click

    group = click.Group("llm")
    group.add_command(click.Command("consortium", callback=lambda: None))
    plugin.register_commands(group)
    try:
        done = CliRunner().invoke(group, ["consortium", "strategies"])
        assert done.exit_code == 0 and "model-swarms answers" in done.stderr
        assert "LLM_LOAD_PLUGINS=llm-consortium" in done.stderr
    finally:
        alone = click.Group("llm")
        plugin.register_commands(alone)
    assert "answers" not in CliRunner().invoke(alone, ["consortium", "strategies"]).stderr
