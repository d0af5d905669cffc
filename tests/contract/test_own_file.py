"""A task from a file as people have it: formats, columns, splits, parsers."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from swarm._util.cli import normalize_arguments
from swarm.errors import UserError
from swarm.scorers.own_file import estimate_tokens, read_task
from swarm.tasks.base import SPLITS, Item
from swarm.tasks.dataset import DataTask, InMemoryItems
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.free_text import FreeText
from swarm.tasks.multiple_choice import MultipleChoice

ROWS = [{"Question": f"Say {n}.", "Answer": f"It is {n}"} for n in range(12)]
ABC = {"A": "one", "B": "two", "C": "three"}


def task_of(rows: Any, **more: Any) -> DataTask:
    return read_task(InMemoryItems(rows), "mine", **more)


def every_item(task: DataTask) -> list[Item]:
    return sorted((i for s in SPLITS for i in task.items(s)), key=lambda item: item["id"])


def write_lines(path: Path) -> None:
    path.write_text("\n".join(map(json.dumps, ROWS)))


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).to_parquet(path)


def save_dataset(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(path)


WRITERS = {
    "a.jsonl": write_lines,
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": write_parquet,
    "saved": save_dataset,
}


@pytest.mark.parametrize("name", WRITERS)
def test_formats_give_the_same_items(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    task = read_task(str(tmp_path / name), "mine")
    found = [(item["question"], item["answer"]) for item in every_item(task)]
    assert found == [tuple(row.values()) for row in ROWS]
    assert task.about.startswith("12 items: Question -> Answer; 4 dev, 8 test; what counts")


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"prompt": "Q", "completion": " a "}, "Q", "a"),
        ({"instruction": "Do", "input": "it", "output": "a"}, "Do\nit", "a"),
        ({"instruction": "Do", "input": "", "output": "a"}, "Do", "a"),
        ({"problem": "Q", "target": 7}, "Q", 7),
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}]},
         "Q", "a"),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "a"}]},
         "Q", "a"),
        ({"question": "Q", "choices": ["one", "two", "three"], "answer": 0}, "Q", "A"),
        ({"question": "Q", "choices": '["one", "two", "three"]', "answer": "b"}, "Q", "B"),
        ({"question": "Q", "choices": {"text": ["one", "two"], "label": ["1", "2"]},
          "answerKey": "2"}, "Q", "B"),
        ({"ctx": "Q", "endings": ["one", "two"], "label": "two"}, "Q", "B"),
        ({"question": "Q", **ABC, "answer": "C"}, "Q", "C"),
    ],
)  # fmt: skip
def test_columns(row: dict[str, Any], question: str, answer: object) -> None:
    item = task_of({"dev": [row], "test": [row]}, dedupe=False).items("dev")[0]
    assert (item["question"], item["answer"]) == (question, answer)
    if isinstance(choices := item.get("choices"), dict):
        assert all(ABC[letter] == text for letter, text in choices.items())


def test_the_answers_decide_the_class() -> None:
    def of(*answers: Any, **more: Any) -> Any:
        return task_of([{"question": f"Q{n}", "answer": a} for n, a in enumerate(answers)], **more)

    line, number, text = of("a b", "c", "d"), of("7", "yes", 3), of("a\nb", "c", "d")
    assert isinstance(line, ExactMatch) and line.parser == "whole"
    assert isinstance(number, ExactMatch) and number.parser == "anchored"
    assert isinstance(text, FreeText) and text.gold_error is None
    assert line.max_new_tokens == 2 + estimate_tokens(" a b")
    assert (of("a", "b", max_new_tokens=50, parser="cased", chat=True).max_new_tokens) == 50
    choice = task_of([{"question": f"Q{n}", **ABC, "answer": "A"} for n in range(3)])
    assert isinstance(choice, MultipleChoice) and choice.chat == "auto"


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["train"], ["train", "train"]),
        (["train", "test"], ["train", "test"]),
        (["train", "validation"], ["train", "validation"]),
        (["train", "valid", "test"], ["valid", "test"]),
        (["dev", "test"], ["dev", "test"]),
    ],
)
def test_the_last_split_is_test(names: list[str], kept: list[str], tmp_path: Path) -> None:
    rows = {name: [{"question": f"{name} {n}", "answer": "a"} for n in range(3)] for name in names}
    for name, mine in rows.items():
        (tmp_path / f"{name}-00000.json").write_text(json.dumps(mine))
    flat = [{**row, "split": name} for name, mine in rows.items() for row in mine]
    for task in (task_of(rows), task_of(flat), read_task(str(tmp_path), "mine")):
        found = [{i["question"].split()[0] for i in task.items(split)} for split in SPLITS]
        assert found == [{name} for name in kept]


def test_questions_in_both_splits_are_counted() -> None:
    rows = {"dev": [{"question": "Q", "answer": "a"}, {"question": "R", "answer": "b"}]}
    task = task_of({**rows, "test": [{"question": "Q", "answer": "c"}]})
    assert "2 dev, 1 test; 1 question in both" in task.about


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "x", "answer": "y"}], "no column of the questions among text, answer; re"),
        ([{"question": "x", "y": "y"}], "no column of the answers among question, y"),
        ([{"messages": [{"role": "user", "content": "Q"}]}], "its turns have no answer"),
        ([], "has no items"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_one_line(rows: list[Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        task_of(rows)


def test_paths_become_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "task").mkdir(parents=True)
    (tmp_path / "mine" / "task" / "mine.yaml").touch()
    given = ["pool=a/b,hf://user/c", "task=my items.csv", "model=org/base", "gpus=0,1"]
    assert normalize_arguments(given) == [
        *("pool=adapters", "pool.folder='a/b,hf://user/c'"),
        *("task=file", "++task.file='my items.csv'", "++task.name=my_items"),
        *("model=local", "model.path='org/base'", "gpus=[0,1]"),
    ]
    for kept in (["task=nlgraph_mini"], ["--config-dir=mine", "task=mine"], ["pool=models"]):
        assert normalize_arguments(kept) == kept
