"""Settings are checked by their types, and a mistake is one line with the key and what it takes."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from swarm._util.settings import Positive, Settings, Share, Text, checked, parse_settings
from swarm.errors import UserError


@checked("task")
class Task:
    def __init__(
        self,
        file: Text,
        limit: Positive | None = None,
        mode: Literal["a", "b"] = "a",
        on: bool = False,
        share: Share = 0.5,
        names: list[str] | None = None,
    ) -> None:
        self.limit = limit


@checked("optimizer")
@dataclass(kw_only=True)
class Options:
    particles: Positive = 3
    starts: list[float] = field(default_factory=list)


class Sampling(Settings):
    name: str
    temperature: Share = 1


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Task, {"file": ""}, "task.file=: must be text, not empty"),
        (Task, {}, "task.file: is missing; it must be text, not empty"),
        (Task, {"file": "x", "limit": 0}, "task.limit=0: must be an integer, at least 1, or null"),
        (
            Task,
            {"file": "x", "limit": True},
            "task.limit=true: must be an integer, at least 1, or null",
        ),
        (Task, {"file": "x", "mode": "c"}, "task.mode=c: must be a or b"),
        (Task, {"file": "x", "on": 1}, "task.on=1: must be true or false"),
        (
            Task,
            {"file": "x", "share": float("nan")},
            "task.share=NaN: must be a number, at least 0, at most 1",
        ),
        (
            Task,
            {"file": "x", "names": ["a", 3]},
            "task.names[1]=3: must be a list, each text, or null",
        ),
        (
            *(Task, {"file": "x", "limt": 2}),
            "task.limt: no such key; did you mean limit? allowed: file, limit, mode, on, share, "
            "names",
        ),
        (Options, {"particles": 0}, "optimizer.particles=0: must be an integer, at least 1"),
        (Options, {"starts": ["x"]}, "optimizer.starts[0]=x: must be a list, each a number"),
    ],
)
def test_a_constructor_names_the_key(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        kind(**given)
    assert str(caught.value) == message


def test_what_fits_is_kept() -> None:
    assert Task("items.json", 4).limit == 4
    assert Task("items.json", share=1).limit is None
    assert Options().starts == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": 3}, "a.yaml.name=3: must be text"),
        ({"name": "x", "temperature": 3}, "a.yaml.temperature=3: must be a number, at least 0"),
        ({"nam": "x"}, "a.yaml.name: is missing; it must be text"),
        ([1], "a.yaml=[1]: must be a mapping"),
    ],
)
def test_a_file_is_checked_as_a_whole(given: object, message: str) -> None:
    assert parse_settings(Sampling, {"name": "x"}).temperature == 1
    with pytest.raises(UserError) as caught:
        parse_settings(Sampling, given, "a.yaml")
    assert str(caught.value).startswith(message)
