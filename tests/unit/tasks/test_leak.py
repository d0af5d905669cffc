"""Items that dev and test have in common: found whatever their letters, warned of, divided."""

import json
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from task_items import choice_items, match_items, write

from swarm.errors import UserError
from swarm.tasks.dataset import assign_shared_items, item_identity
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.multiple_choice import MultipleChoice

ORIGINAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "eval"


Warned = Callable[[], list[str]]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Warned:
    """What has been warned of so far."""
    # A run that was in this process before keeps the package's log to its own folder.
    monkeypatch.setattr(logging.getLogger("swarm"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def yes_or_no(count: int, swapped: bool = False) -> list[dict[str, Any]]:
    """Every third is a yes; with `swapped` the letters change places."""
    texts = ("No", "Yes") if swapped else ("Yes", "No")
    choices = dict(zip("AB", texts, strict=True))
    letters = {text: letter for letter, text in choices.items()}
    golds = ["Yes" if n % 3 == 0 else "No" for n in range(count)]
    return [
        {"question": f"Is it {n}?", "choices": choices, "answer": letters[gold], "id": f"i{n}"}
        for n, gold in enumerate(golds)
    ]


def gold(item: Any) -> str:
    return str(item["choices"][item["answer"]])


def test_the_same_item_is_seen_under_other_letters_and_ids() -> None:
    item, other = yes_or_no(1)[0], yes_or_no(1, swapped=True)[0]
    assert item["answer"] != other["answer"]
    assert item_identity({**item, "id": 1, "domain": "x"}) == item_identity(other)
    assert item_identity({**item, "answer": "B"}) != item_identity(item)
    assert item_identity({**item, "choices": {"A": "Yes", "B": "Maybe"}}) != item_identity(item)
    assert item_identity({"question": "?", "answer": 7}) == item_identity(
        {"question": "?", "answer": "7"}
    )
    assert item_identity({"prompt": "a"}) != item_identity({"prompt": "b"})


@pytest.mark.parametrize("swapped", [False, True])
def test_shared_items_are_divided_evenly(tmp_path: Path, swapped: bool, warned: Warned) -> None:
    content = {"dev": yes_or_no(30), "test": yes_or_no(30, swapped)[::-1]}
    file = write(tmp_path / "leaky.json", content)
    task = MultipleChoice("leaky", str(file))
    dev, test = task.items("dev"), task.items("test")
    assert pickle.loads(pickle.dumps(task)).items("dev") == dev
    assert {i["question"] for i in dev} | {i["question"] for i in test} == {
        item["question"] for item in content["dev"]
    }
    assert len(dev) == len(test) == 15
    assert Counter(map(gold, dev)) == Counter(map(gold, test)) == {"Yes": 5, "No": 10}
    assert all(item["choices"]["A"] == ("No" if swapped else "Yes") for item in test)
    (line,) = warned()
    assert "leaky.json: 30 items are in both dev and test; 15 stay in dev, 15 in test" in line
    assert "task.dedupe=false" in line and "\n" not in line
    # The order in which the splits are asked for changes nothing, nor does the files' order.
    backwards = MultipleChoice("leaky", str(file))
    assert (backwards.items("test"), backwards.items("dev")) == (test, dev)
    kept = assign_shared_items(content["dev"], content["test"])
    assert kept == assign_shared_items(content["dev"][::-1], content["test"][::-1])


def test_the_file_can_be_kept_as_it_is(tmp_path: Path, warned: Warned) -> None:
    file = write(tmp_path / "leaky.json", {"dev": yes_or_no(9), "test": yes_or_no(9)})
    task = MultipleChoice("leaky", str(file), dedupe=False)
    assert len(task.items("dev")) == len(task.items("test")) == 9
    (line,) = warned()
    assert "9 items" in line and "stay in both" in line and "task.dedupe=true" in line


def test_only_what_is_shared_is_touched(tmp_path: Path) -> None:
    dev, test = match_items(20), match_items(30)[17:]
    file = str(write(tmp_path / "some.json", {"dev": dev, "test": test}))
    task = ExactMatch("some", file)
    questions = {split: [i["question"] for i in task.items(split)] for split in ("dev", "test")}
    assert not set(questions["dev"]) & set(questions["test"])
    assert questions["dev"][:17] == [item["question"] for item in dev[:17]]
    assert questions["test"][-10:] == [item["question"] for item in test[-10:]]
    assert (len(questions["dev"]), len(questions["test"])) == (19, 11)
    assert ExactMatch("some", file, test_limit=11).items("test") == task.items("test")


def test_no_warning_without_a_leak(tmp_path: Path, warned: Warned) -> None:
    items = choice_items(8)
    # The same question with other options is another item.
    others = [{**i, "choices": {**i["choices"], "D": "something else"}} for i in items]
    file = str(write(tmp_path / "clean.json", {"dev": items, "test": others}))
    task = MultipleChoice("clean", file)
    assert len(task.items("dev")) == len(task.items("test")) == 8
    assert warned() == []


def test_positions_stay_those_of_the_file(tmp_path: Path) -> None:
    file = str(write(tmp_path / "leaky.json", {"dev": match_items(9), "test": match_items(9)}))
    task = ExactMatch("leaky", file, ids="position")
    for split in ("dev", "test"):
        assert all(item["question"] == f"Question {item['id']}?" for item in task.items(split))


def test_a_split_that_is_nothing_but_leak_says_so(tmp_path: Path) -> None:
    file = str(write(tmp_path / "one.json", {"dev": match_items(3), "test": match_items(1)}))
    task = ExactMatch("one", file)
    assert len(task.items("dev")) == 3
    with pytest.raises(UserError, match=r"one.json: all items of test are in dev, too; .*dedupe"):
        task.items("test")
    assert len(ExactMatch("one", file, dedupe=False).items("test")) == 1


def test_faults_of_the_other_split_are_its_own(tmp_path: Path) -> None:
    wrong = [{"question": "?"}, 3, *match_items(2)]
    file = str(write(tmp_path / "half.json", {"dev": match_items(4), "test": wrong}))
    task = ExactMatch("half", file)
    assert len(task.items("dev")) == 3
    with pytest.raises(UserError, match=r"2 of 4 test items are wrong: .*: 0.*: 1"):
        task.items("test")


def real(name: str) -> Path:
    path = ORIGINAL / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{name}.json of the original is not on this machine")
    return path


@pytest.mark.parametrize(
    ("name", "half", "golds"),
    [
        ("hearsay", 47, ({"Yes": 20, "No": 27}, {"Yes": 21, "No": 26})),
        ("citation_prediction_classification", 54, ({"Yes": 27, "No": 27},) * 2),
    ],
)
def test_the_legal_files_become_disjoint(name: str, half: int, golds: tuple[Any, Any]) -> None:
    file = str(real(name))
    task = MultipleChoice(name, file)
    dev, test = task.items("dev"), task.items("test")
    assert len(dev) == len(test) == half
    assert not {item_identity(item) for item in dev} & {item_identity(item) for item in test}
    assert (Counter(map(gold, dev)), Counter(map(gold, test))) == golds
    assert len(MultipleChoice(name, file, dedupe=False).items("test")) == 2 * half


@pytest.mark.parametrize("name", ["knowledge_crosswords", "mmlu", "medqa", "medmcqa", "hellaswag"])
def test_the_other_files_stay_as_they_are(name: str) -> None:
    file = real(name)
    content = json.loads(file.read_text(encoding="utf-8"))
    task = MultipleChoice(name, str(file), ids="position")
    for split in ("dev", "test"):
        assert len(task.items(split)) == len(content[split])
