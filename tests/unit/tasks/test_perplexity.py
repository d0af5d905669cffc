"""Perplexity: windows of a text, and their bits a byte."""

import json
import math
from pathlib import Path

import pytest
from task_items import Unscored, played

from swarm.errors import UserError
from swarm.models.base import Completion, Model, Request
from swarm.tasks.perplexity import Perplexity, count_bytes, preceding_context, split_windows

WORDS = " ".join(f"word {n}, and {n * n % 97} more;\n" for n in range(200))


def text_file(folder: Path, content: str = WORDS) -> str:
    path = folder / "text.txt"
    path.write_text(content, encoding="utf-8")
    return str(path)


def test_windows_are_the_text() -> None:
    for text in (WORDS, "a" * 500, "é " * 300, "  x  ", "one", "\n\n\n" + WORDS[:99] + "\n\n"):
        parts = split_windows(text, 90)
        assert all(text[at : at + len(part)] == part and part.strip() for at, part in parts)
        assert "".join(part for _, part in parts).strip() == text.strip()
        assert all(len(part) <= 90 for _, part in parts)
    assert [part[-1] for _, part in split_windows(WORDS, 90)].count(" ") == 0
    assert split_windows(" \n ", 2) == []


def test_a_context_begins_with_a_word() -> None:
    assert preceding_context("one two three four", 13, 8) == " three"
    assert preceding_context("one two three four", 13, 100) == "one two three"
    assert preceding_context("one two", 0, 10) == preceding_context("one two", 3, 0) == ""


def test_dev_and_test_are_disjoint_halves(tmp_path: Path) -> None:
    file = text_file(tmp_path)
    task = Perplexity(file=file, window=100, context=40)
    dev, test = task.items("dev"), task.items("test")
    assert len(dev) - len(test) in (0, 1)
    starts = sorted(int(str(item["id"]).split(":")[1]) for item in (*dev, *test))
    assert len(set(starts)) == len(dev) + len(test) and starts[0] == 0
    parts = {item["id"]: item["answer"] for item in (*dev, *test)}
    assert "".join(parts[f"0:{start}"] for start in starts) == WORDS
    for item in (*dev, *test):
        start = int(str(item["id"]).split(":")[1])
        assert WORDS[:start].endswith(item["prompt"]) and len(item["prompt"]) <= 40
    other = Perplexity(file=file, window=100, context=40, seed=1).items("dev")
    assert [item["id"] for item in other] != [item["id"] for item in dev]
    few = Perplexity(file=file, window=100, context=40, dev_limit=5).items("dev")
    assert [item["id"] for item in few] == [item["id"] for item in dev[:5]]


def test_texts_of_a_jsonl_file_stay_apart(tmp_path: Path) -> None:
    rows = [{"text": "one two three"}, {"text": ""}, {"text": "a second text of more words"}]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    task = Perplexity(file=str(path), window=14, context=100)
    items = {item["id"]: item for split in ("dev", "test") for item in task.items(split)}
    assert set(items) == {"0:0", "2:0", "2:13"}
    assert items["0:0"]["prompt"] == items["2:0"]["prompt"] == ""
    assert items["2:13"]["prompt"] == "a second text"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"\x89PNG\xff\x00", "is not UTF-8"),
        ("a.txt", b"abc\x00def", "zero bytes"),
        ("a.txt", b"short", "lower task.window"),
        ("a.jsonl", b'{"text": "one"}\n{"words": "two"}', "line 2"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*{message}"):
        Perplexity(file=str(tmp_path / name)).items("dev")


def test_wrong_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.window=0"):
        Perplexity(window=0)
    for file, message in ((None, "task.file: name"), (str(tmp_path / "no.txt"), "cannot be read")):
        with pytest.raises(UserError, match=message):
            Perplexity(file=file).items("dev")
    with pytest.raises(UserError, match="dev, test"):
        Perplexity(file=text_file(tmp_path)).items("train")


class Guessing(Model):
    """Holds every byte for one of so many that are equally likely; a token is two bytes."""

    def __init__(self, likely: float) -> None:
        self.nats = math.log(likely)

    def generate(self, requests: list[Request]) -> list[Completion]:
        sizes = [count_bytes(request.choices[0]) for request in requests]
        return [Completion("", (-n * self.nats,), choice_tokens=(n // 2,)) for n in sizes]


def test_the_utility_is_of_all_bytes(tmp_path: Path) -> None:
    """Whatever the windows' lengths: 16 equally likely bytes are 4 bits."""
    rows = [{"text": "é" * n} for n in range(1, 40)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = Perplexity(file=str(path))
    items = task.items("dev")
    scores = played(task, items, Guessing(16))
    assert task.utility(scores) == pytest.approx(-4.0)
    assert len({score.value for score in scores}) > 10
    assert all(score.measures["bits_per_byte"] == pytest.approx(4.0) for score in scores)
    assert scores[0].measures["perplexity"] == pytest.approx(256.0)
    assert all(score.value <= task.highest for score in played(task, items, Guessing(1)))
    for item, score in zip(items, scores, strict=True):
        assert score.answer and task.grade(item, score.answer) == score.value


def test_numbers_that_overflow_are_worth_eight_bits(tmp_path: Path) -> None:
    task = Perplexity(file=text_file(tmp_path))
    items = task.items("dev")
    for logprob in (math.nan, -math.inf):
        scores = [task.score_completion(item, Completion("", (logprob,))) for item in items]
        assert task.utility(scores) == pytest.approx(-8.0)
        assert all(score.answer is None for score in scores)
    assert task.score_completion(items[0], Completion("", (-1e9,), choice_tokens=(3,))).value < -1e5
    with pytest.raises(UserError, match="log probability"):
        played(task, items, Unscored())


def test_a_seed_draws_other_dev_windows_and_the_same_test_windows(tmp_path: Path) -> None:
    file = text_file(tmp_path)

    def ids(split: str, seed: int | None, limit: int | None = 4) -> list[str]:
        task = Perplexity(file=file, window=100, context=40, dev_limit=limit, dev_seed=seed)
        return [item["id"] for item in task.items(split)]

    drawn = {seed: ids("dev", seed) for seed in (None, 0, 1, 2)}
    assert len({tuple(sorted(one)) for one in drawn.values()}) == 4
    assert ids("dev", 1, 2) == drawn[1][:2] and sorted(ids("dev", 1, None)) == sorted(
        ids("dev", None, None)
    )
    assert ids("test", None) == ids("test", 0) == ids("test", 1)
