"""A consortium's configuration: as it is written, saved, was saved by older programs, and built."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fake_agents import Speaker
from small_consortia import config
from swarm.multi_agent.consortium.config import (
    ConsortiumSettings,
    MemberSpec,
    build_consortium,
    parse_member,
    preset_names,
    read_preset,
)

from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.models.base import Model, Request
from swarm.multi_agent.consortium.prompts import ROLES

KNOWN = ("x:8", "with,comma", "x:free")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("gpt-4o", MemberSpec("gpt-4o")),
        ("gpt-4o:2", MemberSpec("gpt-4o", 2)),
        ("qwen2:7b", MemberSpec("qwen2:7b")),
        ("qwen2:7b:3", MemberSpec("qwen2:7b", 3)),
        ("x:free", MemberSpec("x:free")),
        ("x:free:2", MemberSpec("x:free", 2)),
        ("x:8", MemberSpec("x:8")),
        ("x:8:2", MemberSpec("x:8", 2)),
        ("y:8", MemberSpec("y", 8)),
        ("with,comma", MemberSpec("with,comma")),
        (
            "a:2,temperature=1,max_tokens=200,role=critic",
            MemberSpec("a", 2, 1.0, 200, role="critic"),
        ),
        ("a, timeout = 2.5 , temperature=0", MemberSpec("a", 1, 0.0, timeout=2.5)),
        (
            "a,system=Be brief, be kind,role=b",
            MemberSpec("a", system="Be brief, be kind", role="b"),
        ),
        ("a,system=x=1, y=2", MemberSpec("a", system="x=1, y=2")),
    ],
)
def test_a_member_as_it_is_written(spec: str, expected: MemberSpec) -> None:
    assert parse_member(spec, KNOWN.__contains__) == expected


def test_a_count_is_given_to_members_that_say_none() -> None:
    assert [parse_member(spec, count=3).count for spec in ("a", "qwen2:7b", "a:1", "a:2")] == [
        3,
        3,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("a,temprature=1", "'temprature' is not known; did you mean temperature"),
        ("a,temperature=hot", "temperature=hot is not a number"),
        ("a,max_tokens=1.5", "max_tokens=1.5 is not a number"),
        ("a,system=", "system= has no value"),
        ("a,role=b,role=c", "role is given twice"),
        ("a:0", "must be from 1 to 99"),
        (",role=b", "is not a model name"),
        (3, "3 is not a member"),
    ],
)
def test_a_member_that_is_none(spec: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_member(spec)


def test_a_member_given_twice_counts_as_both() -> None:
    members = ["a:2", "b", "a", "a,temperature=1", {"model": "b", "count": 4}]
    assert config(members=members).members == (
        *(MemberSpec("a", 3), MemberSpec("b", 5)),
        MemberSpec("a", 1, 1.0),
    )


@pytest.mark.parametrize(("given", "read"), [(0.8, 0.8), (80, 0.8), (1, 1), (99.5, 0.995), (0, 0)])
def test_a_threshold_may_be_a_percentage(given: float, read: float) -> None:
    assert config(confidence_threshold=given).confidence_threshold == read


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"members": []}, "members: name at least one model"),
        ({"members": [{"count": 2}]}, r"members\[0\].model: name the model"),
        ({"members": [{"model": "a", "heat": 2}]}, r"members\[0\]: 'heat' is not known"),
        (
            {"members": ["a,temperature=-1"]},
            "a: temperature=-1.0: must be null or a number, 0 or more",
        ),
        ({"members": {"a": 0}}, "a: count=0: must be an integer, 1 or more"),
        ({"confidence_threshold": 101}, "confidence_threshold=101"),
        ({"confidence_threshold": "high"}, "confidence_threshold='high'"),
        ({"min_iterations": 4, "max_iterations": 3}, "min_iterations"),
        ({"max_iterations": 0}, "max_iterations=0"),
        ({"strategy": "rnak"}, "strategy='rnak'"),
        ({"roles": "critic", "strategy": "roles"}, "roles"),
        ({"max_iteration": 3}, "'max_iteration' is not known; did you mean max_iterations"),
        ({"system": "a", "system_prompt": "b"}, "system_prompt and system are the same"),
        ({"strategy_params": {"keep_minimum": "x"}}, "strategy_params.keep_minimum='x'"),
    ],
)
def test_a_value_that_is_not_allowed_is_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        config(**settings)
    assert "\n" not in str(error.value)


def test_it_is_json_and_comes_back() -> None:
    first = config(
        members=["a:2,temperature=0.5,role=critic", "b,system=Be brief.,timeout=3"],
        fallback="d",
        roles=["critic", "of my own"],
        strategy="roles",
        max_cost=1.5,
        budget=9,
    )
    assert ConsortiumSettings.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    assert first.to_dict()["members"][0] == {
        "model": "a",
        "count": 2,
        "temperature": 0.5,
        "role": "critic",
    }


OLD = {
    "0.3": {
        "models": ["a", "b"],
        "system_prompt": "Be brief.",
        "confidence_threshold": 80.0,
        "max_iterations": 3,
        "arbiter": "c",
    },
    "0.5": {
        "models": {"a": 2, "b": 1},
        "system_prompt": None,
        "confidence_threshold": 0.9,
        "max_iterations": 2,
        "minimum_iterations": 1,
        "arbiter": "c",
    },
    "0.7": {
        "models": {"a": 1, "qwen2:7b": 1},
        "system_prompt": "",
        "confidence_threshold": 1.0,
        "max_iterations": 1,
        "minimum_iterations": 2,
        "arbiter": "c",
        "judging_method": "rank",
        "manual_context": True,
    },
    "0.8": {
        "models": {"a": 1, "b": 1, "e": 1},
        "system_prompt": None,
        "confidence_threshold": 0.8,
        "max_iterations": 3,
        "minimum_iterations": 1,
        "arbiter": "c",
        "judging_method": "rank",
        "manual_context": False,
        "strategy": "elimination",
        "strategy_params": {"eliminate_count": "1", "keep_minimum": "2", "elimination_delay": "1"},
        "embedding_backend": None,
        "embedding_model": "some-model",
        "embedding_cache_enabled": True,
        "category": None,
        "expected_agreement": None,
        "status": "running",
        "created_at": "2026-03-01T00:00:00",
    },
}


def test_every_older_format_is_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "swarm"):
        read = {age: ConsortiumSettings.from_dict(old) for age, old in OLD.items()}
    assert read["0.3"] == config(system="Be brief.", confidence_threshold=0.8)
    assert read["0.5"] == config(members=["a:2", "b"], confidence_threshold=0.9, max_iterations=2)
    assert read["0.7"] == config(
        members=["a", "qwen2:7b"],
        confidence_threshold=1,
        max_iterations=2,
        min_iterations=2,
        strategy="rank",
    )
    assert read["0.8"] == config(members=["a", "b", "e"], strategy="elimination")
    assert [record.getMessage().split("=")[0] for record in caplog.records] == [
        "max_iterations",
        "embedding_model",
        "strategy_params.elimination_delay",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"strategy": "voting", "strategy_params": {"similarity_threshold": "0.7"}},
            {"strategy": "vote", "similarity": 0.7},
        ),
        (
            {"strategy": "role", "strategy_params": {"roles": ["critic"]}},
            {"strategy": "roles", "roles": ["critic"]},
        ),
        ({"strategy": "default", "judging_method": "pick-one"}, {"strategy": "pick-one"}),
        ({"strategy": "semantic"}, {}),
        (
            {"strategy": "elimination", "strategy_params": {"keep_minimum": "3"}},
            {"strategy": "rank", "keep": 3},
        ),
        ({"strategy": None, "strategy_params": None}, {}),
    ],
)
def test_older_strategies_have_todays_names(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert ConsortiumSettings.from_dict({"models": ["a", "b"], "arbiter": "c", **old}) == config(
        **new
    )


def test_it_is_built_with_each_model_once() -> None:
    asked: list[str] = []

    def model_of(name: str) -> Model:
        asked.append(name)
        return Speaker(name)

    made = build_consortium(config(members=["a:2", "a,temperature=1", "b"], arbiter="a"), model_of)
    assert asked == ["a", "b"] and len(made.members) == 2


def test_a_role_is_told_to_the_member_that_has_it() -> None:
    speakers = {name: Speaker(name, "yes") for name in "abc"}
    build_consortium(
        config(members=["a,role=critic", "b"], max_iterations=1), speakers.__getitem__
    ).generate_each([Request("why?")])
    heard = {name: str(one.heard[0].prompt) for name, one in speakers.items()}
    assert ROLES["critic"] in heard["a"] and ROLES["critic"] not in heard["b"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_as_agreed(name: str) -> None:
    file = conf_folder() / "consortium" / f"{name}.yaml"
    assert file.read_text().startswith("# ")
    assert read_preset(name).members and read_preset(file) == read_preset(name)


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("members: ['a:2,temperature=1', {model: 'b:8'}]\narbiter: {model: c}\n")
    assert read_preset(file) == config(members=["a:2,temperature=1", "b:8:1"])
    file.write_text("members: [a]\narbitre: b\n")
    with pytest.raises(UserError, match=r"mine.yaml: .*'arbitre' is not known; did you mean arb"):
        read_preset(file)
    file.write_text("members: [")
    with pytest.raises(UserError, match=r"mine.yaml cannot be read"):
        read_preset(file)
    with pytest.raises(UserError, match="did you mean classic"):
        read_preset("clasic")
