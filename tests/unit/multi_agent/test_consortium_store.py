"""Saved consortia: kept by name, and found by the roster."""

from pathlib import Path
from typing import Any

import pytest
from small_consortia import config

from swarm.errors import UserError
from swarm.models.base import Request
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.multi_agent.consortium.store import ConsortiumStore
from swarm.registry.registry import Roster

VOICE = "function/fake_models:function"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """llm's folder, which is not there yet; a home, a cache and a place of its own."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm" / "deeper"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "llm" / "deeper"


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
    with ConsortiumStore().open_transaction() as rows:
        rows.execute("INSERT INTO consortia VALUES ('bad', '{', '')")
        rows.execute("INSERT INTO consortia VALUES ('worse', '{\"members\": 3}', '')")
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
