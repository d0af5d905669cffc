"""A task from a file as people have it: formats, columns, splits, parsers."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import tiny

from swarm._util.cli import normalize_arguments
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.executors import Job, Worker
from swarm.executors.inline import InlineExecutor
from swarm.executors.worker import LOSS
from swarm.loop.prompt_form import both_forms, measure_forms
from swarm.pool.pool import Pool
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
        writer = csv.DictWriter(
            file, ROWS[0], delimiter="\t" if path.suffix == ".tsv" else ",;"[path.stem == "b"]
        )
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
    "b.csv": write_csv,
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
        assert ("3 of train not used" in task.about) == (len(names) == 3)


def test_questions_in_both_splits_are_counted() -> None:
    rows = {"dev": [{"question": "Q", "answer": "a"}, {"question": "R", "answer": "b"}]}
    task = task_of({**rows, "test": [{"question": "Q", "answer": "c"}]})
    assert "2 dev, 1 test; 1 question in both" in task.about


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"that": "x", "answer": "y"}], "no column of the questions among that, answer; re"),
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
    (tmp_path / "a").mkdir()
    given = ["pool=a,b", "task=données.csv"]
    assert normalize_arguments(given) == [
        *("pool=adapters", "pool.folder='a,b'"),
        *("task=file", "++task.file='données.csv'", "++task.name=donn_es"),
    ]
    for kept in (
        ["task=nlgraph_mini"],
        ["pool=adapters,models"],
        ["--config-dir=mine", "task=mine"],
        ["pool=models"],
    ):
        assert normalize_arguments(kept) == kept


def test_two_paths_make_a_search(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    write_csv(tmp_path / "mine.csv")
    words = [f"pool={tiny_pool / 'amber'},{tiny_pool / 'birch'}", "task=mine.csv", "name=run"]
    words += [f"model={tiny_llama}", "optimizer=random", "optimizer.max_iterations=1", "ensemble=0"]
    done = commands.run("swarm.search", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "12 items: Question -> Answer; 4 dev, 8 test" in done.err
    decided = re.search(r"prompts (use|do not use) the chat template .* on 4 dev items", done.out)
    assert decided, done.out
    folder = tmp_path / "search" / "run"
    config = json.loads((folder / "config.json").read_text())
    note = json.loads((folder / "global_best" / "swarm.json").read_text())
    assert config["task"]["chat"] is (decided[1] == "use")
    assert note["prompt_form"] == ("chat" if config["task"]["chat"] else "plain")
    assert note["experts"] == ["amber", "birch"]
    kept = json.loads((folder / "command.json").read_text())["arguments"]
    again = commands.run("swarm.search", *kept, cwd=tmp_path)
    assert again.code == 0 and "task.chat=auto" not in again.out
    assert json.loads((folder / "config.json").read_text()) == config
    # What it found is an adapter like any other.
    assert Pool(f"{tiny_pool},{folder}/global_best").open().names == [*tiny.NAMES, "global_best"]


def test_the_form_follows_what_the_experts_were_trained_on(
    tiny_llama: Path, tiny_pool: Path
) -> None:

    task = task_of([{"question": f"Say {n}.", "answer": f"{n} birds"} for n in range(12)])
    base, pool, engine = BaseModel(str(tiny_llama)), Pool(str(tiny_pool)), HFEngine()
    pool.open(base)
    executor = InlineExecutor()
    executor.open(Worker(base, pool, both_forms(task), engine))
    found = measure_forms(task, executor, len(pool.names), len(pool.groups), True)
    executor.close()
    losses = []
    for chat in (False, True):
        task.chat = chat
        executor.open(Worker(base, pool, task, engine))
        jobs = [
            Job(n, (tuple(row),), LOSS, (item,))
            for n, (row, item) in enumerate(
                (row, item) for row in np.eye(len(pool.names)).tolist() for item in range(4)
            )
        ]
        values = [one.gradient.loss for one in executor.map(jobs) if one.gradient]
        losses.append(np.reshape(values, (-1, 4)).min(axis=0).mean())
        executor.close()
    assert found == pytest.approx(losses, rel=1e-5)


def test_adapters_of_the_hub_are_read_from_its_cache(tmp_path: Path, tiny_pool: Path) -> None:
    for name in ("amber", "birch"):
        home = tmp_path / "hub" / f"models--user--{name}"
        shutil.copytree(tiny_pool / name, home / "snapshots" / "abc")
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("abc")
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    offline |= {"MODEL_SWARMS_CACHE": str(tmp_path / "cache")}

    def check(names: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "swarm.pool", "check", names]
        environment = searches.environment(**offline)
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = check("hf://user/amber,hf://user/birch")
    assert done.returncode == 0 and "amber" in done.stdout and "birch" in done.stdout, done.stderr
    done = check("hf://user/other,hf://user/birch")
    assert "hf://user/other cannot be downloaded, nor is it cached" in done.stderr
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (1, 1)
