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

CHOICE = re.compile(r"\be (\d{3})\b")
"""Of an item, its last choice, which holds its number."""

VOTE = "vote of the proposers"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Any]]:
    """A folder with data, and a server whose `good` is right, whose `bad` is wrong."""
    searches.choice_file(tmp_path / "tiny.json")
    rows = json.loads((tmp_path / "tiny.json").read_text())["test"]
    gold = {row["id"]: row["answer"] for row in rows}

    def answer(asked: endpoints.Asked) -> endpoints.Reply:
        text = "\n".join(turn["content"] for turn in asked.body["messages"])
        right = gold[int(CHOICE.findall(text)[0])]
        wrong = "B" if right == "A" else "A"
        if asked.body["model"] == "dead":
            return endpoints.Reply({"error": {"message": "gone"}}, 404)
        last = right if asked.body["model"] == "good" else wrong
        return endpoints.chat(f"The answer is {last}.", prompt=20, new=5)

    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-a-test")
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    with endpoints.endpoint(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield tmp_path, server


def evaluated(place: Path, proposers: list[Any], aggregator: Any, *more: str, **how: Any) -> Any:
    """The evaluation of a preset on the test split of the small task."""
    file = place / "mine.yaml"
    file.write_text(yaml.safe_dump({"proposers": proposers, "aggregator": aggregator, **how}))
    words = ["model=moa", f"candidate.preset={file}", "task=mmlu", "task.scoring=generate"]
    words += [f"task.file={place / 'tiny.json'}", "device=cpu", "out=null", *more]
    return small_evaluations.evaluated(words)


def voices(result: Any, key: str) -> list[Any]:
    return [voice[key] for voice in result["voices"]]


def test_a_mixture_stands_beside_its_best_proposer(place: tuple[Path, Any]) -> None:
    folder, server = place
    result = evaluated(folder, ["good", "bad"], "follower")
    n = result["items"]
    assert voices(result, "utility")[:3] == [0, 1, 0]
    assert voices(result, "name")[1:] == ["good alone", "bad alone", VOTE]
    best = result["against_best"]
    assert best["best"] == "good alone" and best["gain"]["difference"] == -1
    lines = format_result(result)
    assert "best single proposer or vote: good alone" in lines and "loss" in lines
    # The proposers alone are asked nothing that the first layer has not asked.
    assert len(server.asked) == 3 * n == result["prompts"]
    assert voices(result, "calls")[:2] == [3 * n, n]
    assert voices(result, "tokens")[0] == 3 * n * 25


def test_samples_of_one_slot_have_one_voice_and_all_vote(place: tuple[Path, Any]) -> None:
    folder, server = place
    one = {"model": "good", "count": 3, "temperature": 1.0}
    result = evaluated(folder, [one, "bad", one], "good")
    alone = ["1. good alone", "2. bad alone", "3. good alone"]
    assert voices(result, "name")[1:] == [*alone, VOTE]
    assert voices(result, "utility") == [1, 1, 0, 1, 1]
    n = result["items"]
    assert len(server.asked) == 8 * n == result["prompts"], "the vote asks nothing"
    assert voices(result, "calls")[-1] == 7 * n
    # The vote of the same answers can beat the mixture.
    result = evaluated(folder, ["good", {"model": "good", "temperature": 1.0}, "bad"], "follower")
    assert (voices(result, "utility")[0], voices(result, "utility")[-1]) == (0, 1)
    # A preset may leave the model open; an aggregator alone has no rivals.
    slots = [{"model": None, "count": 2}]
    result = evaluated(folder, slots, {"model": None}, "candidate.model=good")
    assert voices(result, "name")[1:] == ["good alone", VOTE]
    result = evaluated(folder, [], "good", layers=1)
    assert len(result["voices"]) == 1 and "against_best" not in result


def test_a_dead_proposer_answers_nothing(
    place: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = place
    result = evaluated(folder, ["good", "dead"], "good")
    assert caplog.text.count("404 Not Found") == 1, "it is the same at every item"
    n = result["items"]
    assert voices(result, "calls") == [3 * n, n, n, 2 * n] and result["prompts"] == 3 * n
    assert voices(result, "utility") == [1, 1, 0, 1] and voices(result, "unparsed")[2] == 1
    with pytest.raises(UserError, match="0 of 1 proposers answered"):
        evaluated(folder, ["dead"], "good")
