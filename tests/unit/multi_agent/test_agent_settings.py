"""Settings of mixtures and consortia: as they are written, checked, saved and built."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_agents import Speaker, slot, stages
from small_consortia import config

from swarm._util.files import conf_folder
from swarm._util.settings import parse_settings
from swarm.errors import UserError
from swarm.models.base import Model, Request
from swarm.multi_agent import moa
from swarm.multi_agent.consortium import settings
from swarm.multi_agent.consortium.consortium import TIMEOUT, Consortium, build_consortium
from swarm.multi_agent.consortium.prompts import ROLES
from swarm.multi_agent.consortium.settings import ConsortiumSettings, parse_member
from swarm.multi_agent.moa import MixtureOfAgents, build_mixture
from swarm.multi_agent.presets import preset_names
from swarm.multi_agent.types import AgentSpec

KNOWN = ("x:8", "with,comma", "x:free")
LONG = "a:2,temperature=1,max_tokens=200,role=critic"
SPECS: dict[str, dict[str, Any]] = {
    "gpt-4o": {"model": "gpt-4o"},
    "qwen2:7b": {"model": "qwen2:7b"},
    "qwen2:7b:3": {"model": "qwen2:7b", "count": 3},
    "x:free:2": {"model": "x:free", "count": 2},
    "x:8": {"model": "x:8"},
    "y:8": {"model": "y", "count": 8},
    "with,comma": {"model": "with,comma"},
    LONG: {"model": "a", "count": 2, "temperature": 1.0, "max_tokens": 200, "role": "critic"},
    "a, timeout = 2.5 , temperature=0": {"model": "a", "timeout": 2.5, "temperature": 0.0},
    "a,system=x=1, y=2,role=b": {"model": "a", "system": "x=1, y=2", "role": "b"},
}


def test_members_as_text() -> None:
    for spec, expected in SPECS.items():
        found = parse_member(spec, KNOWN.__contains__).model_dump(exclude_none=True)
        assert found == {"count": 1, **expected}, spec
    assert parse_member("a", count=3).count == 3 and parse_member("a:1", count=3).count == 1
    members = ["a:2", "b", "a", "a,temperature=1", {"model": "b", "count": 4}]
    found = config(members=members).members
    told = [(one.model, one.count, one.temperature) for one in found]
    assert told == [("a", 3, None), ("b", 5, None), ("a", 1, 1.0)], "equal ones are added up"


def test_a_threshold_may_be_a_percentage() -> None:
    for given, read in ((0.8, 0.8), (80, 0.8), ("80%", 0.8), ("0.5", 0.5), (1, 1), (0, 0)):
        assert config(confidence_threshold=given).confidence_threshold == read


def refused(make: Any, *args: Any, **given: Any) -> str:
    """The line with which something is refused."""
    with pytest.raises(UserError) as error:
        make(*args, **given)
    return str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a,temprature=1", "a,temprature=1: temprature: no such key; allowed: temperature, "),
        ("a,role=b,role=c", "a,role=b,role=c: role is given twice"),
        ("a:0", "a:0: the sample count must be from 1 to 99"),
        (",role=b", "model=: must be text, not empty"),
    ],
)
def test_a_wrong_member_is_one_line(spec: str, message: str) -> None:
    assert refused(parse_member, spec).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"confidence_threshold": 101}, "confidence_threshold=101.0: must be a number, at least"),
        ({"confidence_threshold": 1.5}, "confidence_threshold=1.5: must be a number, at least 0"),
        ({"min_iterations": 4}, "min_iterations=4: is above max_iterations=3; raise that"),
        ({"strategy": "rnak"}, "strategy=rnak: must be default, pick-one, rank, vote"),
        ({"roles": "critic", "strategy": "roles"}, "roles=critic: must be a list, each text"),
        ({"roles": ["critic"]}, "roles: strategy=default has no roles"),
        ({"max_iteration": 3}, "max_iteration: no such key; did you mean max_iterations?"),
    ],
)
def test_a_wrong_option_is_one_line_in_a_file_and_in_python(
    given: dict[str, Any], message: str
) -> None:
    assert refused(config, **given).startswith(message)
    assert refused(Consortium, [slot("a")], slot("b"), **given).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"members": []}, "members: name at least one"),
        ({"arbiter": None}, "arbiter: required by strategy=default"),
        ({"arbiter": slot("x", count=2)}, "x: count=2: must be 1 for the arbiter"),
        ({"arbiter": None, "strategy": "vote", "fallback": slot("f")}, "fallback: has no effect"),
        ({"quorum": 3}, "quorum=3: there are only 2 members"),
        ({"strategy": "elimination"}, "keep=2: with 2 members none would be eliminated"),
        ({"strategy": "elimination", "keep": 1, "quorum": 2}, "quorum=2: must be at most keep=1"),
    ],
)
def test_settings_that_do_not_fit_the_members(given: dict[str, Any], message: str) -> None:
    fine = {"members": [slot("a"), slot("b")], "arbiter": slot("arbiter")}
    assert refused(Consortium, **{**fine, **given}).startswith(message)


def test_a_consortium_is_json_and_comes_back() -> None:
    members = ["a:2,temperature=0.5,role=critic", "b,system=Be brief.,timeout=3"]
    roles = {"roles": ["critic", "of my own"], "strategy": "roles"}
    first = config(members=members, fallback="d", max_cost=1.5, **roles)
    told = json.loads(json.dumps(first.to_dict()))
    assert parse_settings(ConsortiumSettings, told) == first
    expected = {"model": "a", "count": 2, "temperature": 0.5, "role": "critic"}
    assert told["members"][0] == expected
    theirs = {"models": {"a": 2, "b": 1}, "system_prompt": "Be brief.", "minimum_iterations": 2}
    theirs |= {"arbiter": "c", "strategy": "default", "judging_method": "rank"}
    ours = config(members=["a:2", "b"], system="Be brief.", min_iterations=2, strategy="rank")
    assert parse_settings(ConsortiumSettings, theirs) == ours
    assert config(strategy="voting").strategy == "vote"


def test_a_consortium_is_built_with_each_model_once_and_a_time_for_remote_ones() -> None:
    asked: list[str] = []

    def model_of(name: str) -> Model:
        asked.append(name)
        return Speaker(name)

    members = ["gpt-4o:2", "gpt-4o,temperature=1", "local/base", "a,timeout=7"]
    made = build_consortium(config(members=members, arbiter="gpt-4o"), model_of)
    assert asked == ["gpt-4o", "local/base", "a"]
    assert [one.timeout for one in made.agent_specs] == [TIMEOUT, TIMEOUT, None, 7, TIMEOUT]


def test_a_role_is_told_to_the_member_that_has_it() -> None:
    speakers = {name: Speaker(name, "yes") for name in "abc"}
    made = build_consortium(
        config(members=["a,role=critic", "b"], max_iterations=1), speakers.__getitem__
    )
    made.generate_each([Request("why?")])
    heard = {name: str(one.heard[0].prompt) for name, one in speakers.items()}
    assert ROLES["critic"] in heard["a"] and ROLES["critic"] not in heard["b"]


@pytest.mark.parametrize("name", preset_names("consortium"))
def test_presets_of_consortia(name: str) -> None:
    file = conf_folder() / "consortium" / f"{name}.yaml"
    found = settings.read_preset(name)
    assert file.read_text().startswith("# ") and settings.read_preset(file) == found
    assert build_consortium(found, Speaker).plan_calls().calls > 3


# Mixtures


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": 0}, "layers=0: must be an integer, at least 1"),
        ({"quorum": 3}, "quorum=3: there are only 2 answers a layer"),
        ({"strategy": "vote"}, "strategy=vote: must be aggregate, rank or sequential"),
        ({"prompt": "rude"}, "prompt.form=rude: must be safe or paper"),
        ({"strategy": "sequential", "reserve": 6}, "reserve=6: must be below window=6"),
        ({"strategy": "sequential", "layers": 3}, "layers=3: must be 2 with strategy=sequential"),
        ({"strategy": "rank", "layers": 1}, "layers=1: strategy=rank needs proposers"),
        ({"proposers": []}, "proposers: layers=2 needs at least one"),
        ({"aggregator": slot("z", count=2)}, "z: count=2: must be 1 for the aggregator"),
    ],
)
def test_a_wrong_value_of_a_mixture_is_named(given: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = {"proposers": [slot("a"), slot("b")], "aggregator": slot("z")}
    assert refused(MixtureOfAgents, **{**fine, **given}).startswith(message)


def test_a_wrong_agent_is_named() -> None:
    message = "a.temperature=NaN: must be a number, at least 0, or null"
    assert refused(AgentSpec, Speaker("a"), "a", temperature=float("nan")) == message
    assert refused(AgentSpec, Speaker("a"), "") == "name=: must be text, not empty"


CALLS = {"local": 5, "together": 5, "lite": 7, "paper": 13, "self": 7, "rank": 7, "sequential": 15}


@pytest.mark.parametrize("name", preset_names("moa"))
def test_every_preset_of_a_mixture_builds_and_answers(name: str) -> None:
    models: dict[str, Speaker] = {}
    mixture = build_mixture(
        moa.read_preset(name), lambda name: models.setdefault(name, Speaker(name)), "mine"
    )
    assert mixture.calls == len(stages(mixture).answers) == CALLS[name]
    if name in ("self", "rank", "sequential"):
        assert set(models) == {"mine"}
        assert "the preset names no model" in refused(build_mixture, moa.read_preset(name), Speaker)
    text = (conf_folder() / "moa" / f"{name}.yaml").read_text()
    assert text.startswith("# ") and (name == "local" or "arXiv" in text or "github.com" in text)


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("""\
proposers: [a, {model: b:7b, count: 2, temperature: 1, max_tokens: 9, system: so, timeout: 2}]
aggregator: c
fallback: {model: a}
strategy: rank
prompt: {form: paper, text: Merge.}
quorum: 2
""")
    models: dict[str, Speaker] = {}
    made = build_mixture(moa.read_preset(path), lambda name: models.setdefault(name, Speaker(name)))
    first, second = made.proposers
    assert (first.name, second.name, second.count, second.system) == ("a", "b:7b", 2, "so")
    assert (second.temperature, second.max_tokens, second.timeout) == (1, 9, 2)
    assert made.fallback and made.fallback.model is first.model
    assert (made.options.prompt.text, made.options.quorum) == ("Merge.", 2)


def test_a_wrong_preset_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, message in (
        ("proposers: [a]\nagregator: b", "aggregator: is missing"),
        ("proposers: [5]\naggregator: b", "proposers[0]=5: must be a list, each a mapping of "),
        ("proposers: [a", "cannot be read: while parsing"),
        ("", "null: must be a mapping"),
    ):
        path.write_text(text)
        told = refused(moa.read_preset, str(path))
        assert told.startswith(f"preset {path}") and message in told
    assert "did you mean paper? allowed: lite, " in refused(moa.read_preset, "paper2")
    assert "did you mean classic" in refused(settings.read_preset, "clasic")
    assert "none.yaml cannot be read: " in refused(moa.read_preset, tmp_path / "none.yaml")
