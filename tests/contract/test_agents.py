"""A Mixture of Agents on a task, with each of its proposers beside it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import endpoints
import pytest
import searches
import small_evaluations
import yaml

from swarm.errors import UserError
from swarm.evaluation.evaluation import format_result
from swarm.evaluation.models import MoACandidate, NamedModelCandidate
from swarm.registry.registry import Roster

CHOICE = re.compile(r"\be (\d{3})\b")
"""Of an item, its last choice, which holds its number."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Any]]:
    """A folder with data, and a server whose `good` is right, whose `bad` is wrong."""
    searches.choice_file(tmp_path / "tiny.json")
    gold = {
        row["id"]: row["answer"] for row in json.loads((tmp_path / "tiny.json").read_text())["test"]
    }

    def answer(asked: endpoints.Asked) -> endpoints.Reply:
        text = "\n".join(turn["content"] for turn in asked.body["messages"])
        right = gold[int(CHOICE.findall(text)[0])]
        wrong = "B" if right == "A" else "A"
        name = asked.body["model"]
        if name == "dead":
            return endpoints.Reply({"error": {"message": "gone"}}, 404)
        last = {"good": right, "bad": wrong, "follower": wrong}[name]
        return endpoints.chat(f"The answer is {last}.", prompt=20, new=5)

    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-a-test")
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    with endpoints.endpoint(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield tmp_path, server


def evaluated(place: Path, preset: dict[str, Any], *more: str) -> dict[str, Any]:
    """The evaluation of a preset on the test split of the small task."""
    file = place / "mine.yaml"
    file.write_text(yaml.safe_dump(preset))
    return small_evaluations.evaluated(
        [
            "model=moa",
            f"candidate.preset={file}",
            "task=mmlu",
            f"task.file={place / 'tiny.json'}",
            "task.scoring=generate",
            "device=cpu",
            "out=null",
            *more,
        ]
    )


def test_a_mixture_stands_beside_its_best_proposer(place: tuple[Path, Any]) -> None:
    folder, server = place
    result = evaluated(folder, {"proposers": ["good", "bad"], "aggregator": "follower"})
    mixture, good, bad, _ = result["voices"]
    n = result["items"]
    assert (mixture["utility"], good["utility"], bad["utility"]) == (0, 1, 0)
    assert [good["name"], bad["name"]] == ["good alone", "bad alone"]
    assert (
        result["against_best"]["best"] == "good alone"
        and result["against_best"]["gain"]["difference"] == -1
    )
    lines = format_result(result)
    assert "best single proposer or vote: good alone" in lines and "loss" in lines
    # The proposers alone are asked nothing that the first layer has not asked.
    assert len(server.asked) == 3 * n == result["prompts"]
    assert (mixture["calls"], good["calls"], mixture["tokens"]) == (3 * n, n, 3 * n * 25)


def test_samples_of_one_slot_have_one_voice(place: tuple[Path, Any]) -> None:
    folder, server = place
    one = {"model": "good", "count": 3, "temperature": 1.0}
    result = evaluated(folder, {"proposers": [one, "bad", one], "aggregator": "good"})
    names = [voice["name"] for voice in result["voices"]]
    assert names[1:] == [
        "1. good alone",
        "2. bad alone",
        "3. good alone",
        "vote of the proposers",
    ]
    assert [voice["utility"] for voice in result["voices"]] == [1, 1, 0, 1, 1]
    n = result["items"]
    assert len(server.asked) == 8 * n == result["prompts"], "the vote asks nothing"
    assert result["voices"][-1]["calls"] == 7 * n


def test_the_vote_of_the_same_answers_can_beat_the_mixture(place: tuple[Path, Any]) -> None:
    folder, _ = place
    preset = {
        "proposers": ["good", {"model": "good", "temperature": 1.0}, "bad"],
        "aggregator": "follower",
    }
    result = evaluated(folder, preset)
    assert result["voices"][0]["utility"] == 0 and result["voices"][-1]["utility"] == 1
    assert result["voices"][-1]["name"] == "vote of the proposers"


def test_a_dead_proposer_answers_nothing(
    place: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = place
    result = evaluated(folder, {"proposers": ["good", "dead"], "aggregator": "good"})
    assert caplog.text.count("404 Not Found") == 1, "it is the same at every item"
    n = result["items"]
    assert [voice["calls"] for voice in result["voices"]] == [3 * n, n, n, 2 * n]
    assert result["prompts"] == 3 * n
    assert [voice["utility"] for voice in result["voices"]] == [1, 1, 0, 1]
    assert result["voices"][2]["unparsed"] == 1
    with pytest.raises(UserError, match="0 of 1 proposers answered"):
        evaluated(folder, {"proposers": ["dead"], "aggregator": "good"})


def test_a_preset_may_leave_the_model_open(place: tuple[Path, Any]) -> None:
    folder, _ = place
    slots = {"proposers": [{"model": None, "count": 2}], "aggregator": {"model": None}}
    result = evaluated(folder, slots, "candidate.model=good")
    assert [voice["name"] for voice in result["voices"]][1:] == [
        "good alone",
        "vote of the proposers",
    ]


def test_an_aggregator_alone_has_no_rivals(place: tuple[Path, Any]) -> None:
    folder, _ = place
    result = evaluated(folder, {"proposers": [], "aggregator": "good", "layers": 1})
    assert len(result["voices"]) == 1 and "against_best" not in result


def test_another_mixture_inside_is_another_evaluation(
    place: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = place
    inner = folder / "inner.yaml"

    def fingerprint(aggregator: str) -> str:
        inner.write_text(yaml.safe_dump({"proposers": ["good"], "aggregator": aggregator}))
        outer = folder / "outer.yaml"
        outer.write_text(yaml.safe_dump({"proposers": [f"moa/{inner}"], "aggregator": "good"}))
        found = MoACandidate(str(outer), Roster(cache=None)).fingerprint()
        assert found == NamedModelCandidate(f"moa/{outer}", Roster(cache=None)).fingerprint()
        return found

    first = fingerprint("good")
    assert first == fingerprint("good") and first != fingerprint("bad")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    assert first != fingerprint("good"), "other models behind the same names"
