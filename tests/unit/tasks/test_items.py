"""Data files: their forms, their errors, and items that dev and test have in common."""

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
from swarm.tasks import dataset
from swarm.tasks.base import Item, Score
from swarm.tasks.dataset import assign_shared_items, balance_domains, item_identity
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.free_text import FreeText, Scorer
from swarm.tasks.multiple_choice import MultipleChoice

Warned = Callable[[], list[str]]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Warned:
    """What has been warned of so far."""
    monkeypatch.setattr(logging.getLogger("swarm"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def lines(path: Path, items: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
    return path


def questions(task: Any, split: str) -> list[str]:
    return [item["question"] for item in task.items(split)]


def complaint(task: Any, split: str = "dev") -> str:
    with pytest.raises(UserError) as caught:
        task.items(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_lines_and_lists_name_their_split_or_are_divided(tmp_path: Path) -> None:
    items = [{**i, "split": "test" if i["id"] % 3 else "dev"} for i in match_items(9)]
    for file in (lines(tmp_path / "a.jsonl", items), write(tmp_path / "a.json", items)):
        task = ExactMatch("mine", str(file))
        assert questions(task, "dev") == [f"Question {n}?" for n in (0, 3, 6)]
        assert len(task.items("test")) == 6
    split = {"dev": match_items(3), "test": match_items(8)[3:]}
    files = {name: str(lines(tmp_path / f"{name}.jsonl", rows)) for name, rows in split.items()}
    task = ExactMatch("mine", files)
    assert len(task.items("dev")) == 3 and len(task.items("test")) == 5
    assert "not a list" in complaint(ExactMatch("mine", {"dev": files["dev"]}), "test")
    # Without splits a third is dev, whatever the order, the ids and repetitions.
    rows = [{"question": f"{n}?", "answer": "1"} for n in range(12)]
    given = (
        str(lines(tmp_path / "b.jsonl", rows)),
        str(write(tmp_path / "b.json", rows[::-1])),
        str(lines(tmp_path / "c.jsonl", [*rows, rows[0], {**rows[1], "id": "x"}])),
        dataset.InMemoryItems(rows),
    )
    divided = [{s: set(questions(ExactMatch("m", file), s)) for s in split} for file in given]
    assert all(one == divided[0] for one in divided)
    assert (len(divided[0]["dev"]), len(divided[0]["test"])) == (4, 8)
    assert ExactMatch("mine", given[0]).items("dev")[0]["id"] >= 1


def test_a_limit_keeps_the_domains_in_proportion(tmp_path: Path) -> None:
    items = [
        {"question": f"{n}?", "answer": "1", "id": n, "domain": "x" if n < 30 else "y"}
        for n in range(40)
    ]
    file = str(write(tmp_path / "small.json", {"dev": items, "test": match_items(6)}))
    ids = {}
    for limit in (4, 8, 20, None, 99):
        chosen = ExactMatch("small", file, dev_limit=limit).items("dev")
        ids[limit] = [item["id"] for item in chosen]
        assert len(chosen) == min(limit or 40, 40)
        assert Counter(item["domain"] for item in chosen)["y"] * 4 == len(chosen)
    assert ids[20] == ids[None][:20] and ids[8] == ids[20][:8]
    assert balance_domains(balance_domains(items)) == balance_domains(items)
    # A seed draws others in the same proportion; of one seed few are the first of more.
    drawn = {}
    for seed in range(3):
        tasks = [ExactMatch("s", file, limit, dev_seed=seed) for limit in (8, 4)]
        drawn[seed], few = ([item["id"] for item in task.items("dev")] for task in tasks)
        assert sum(n >= 30 for n in drawn[seed]) == 2 and few == drawn[seed][:4]
        assert tasks[0].items("test") == ExactMatch("s", file).items("test")
    assert len({tuple(sorted(one)) for one in (*drawn.values(), ids[8])}) == 4


def test_ids_are_the_files_or_positions(tmp_path: Path) -> None:
    items = [{"question": f"{n}?", "answer": "1", "id": n // 2} for n in range(16)]
    file = str(write(tmp_path / "small.json", {"dev": items}))
    assert [i["id"] for i in ExactMatch("m", file, ids="position").items("dev")] == [*range(16)]
    text = complaint(ExactMatch("mine", file))
    assert '8 ids occur more than once in dev: "0", "1", "2", "3", "4" and 3 more' in text
    assert "task.ids=position" in text


GOOD = {"question": "?", "choices": {"A": "x", "B": "y"}, "answer": "A", "id": "i7"}
WRONG_ITEMS: list[tuple[dict[str, Any], str]] = [
    ({"answer": "C"}, "'i7': its \"answer\" is not among its choices: 'C' is not one of A, B"),
    ({"choices": {"A": "x"}}, "at least two"),
    ({"choices": {"A": "x", "b": "y"}}, 'is not one capital letter: "b"'),
    ({"choices": {"A": "x", "B": " "}}, "an empty choice: B"),
    ({"question": ""}, '"question" is empty'),
    ({"id": [1]}, "its id is neither a number nor a string"),
    ({"question": "\ud800"}, "an unpaired surrogate"),
]


def test_a_wrong_item_is_named(tmp_path: Path) -> None:
    for change, message in WRONG_ITEMS:
        wrong = {**GOOD, **change}
        file = write(tmp_path / "small.json", {"dev": [{**GOOD, "id": "i6"}, wrong]})
        text = complaint(MultipleChoice("small", str(file)))
        assert message in text and text.startswith(f"{file}: dev item")
    write(file, {"dev": [wrong, wrong, {**GOOD, "id": "i6"}]})
    text = complaint(MultipleChoice("small", str(file)))
    assert "2 of 3 dev items are wrong; the first: dev item" in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.json", "{", "not valid JSON"),
        ("m.json", "[]", '"dev" is not a list of at least one item'),
        ("m.json", '{"dev": [3]}', "item 0: it is not an object"),
        ("m.json", '{"dev": [{"q": "?", "a": "1"}]}', 'it has no "question", but "q", "a"'),
        ("m.json", '[{"split": "dev"}, {"split": ["dev"]}]', "item 1: its \"split\" is ['dev']"),
        ("m.json", '{"a": 1}\n{"a": 2}', "if it has one item per line, rename it to .jsonl"),
        ("m.jsonl", '{"a": 1}\n\n{"a"', "m.jsonl, line 3: is not JSON"),
        ("m.jsonl", b"\xff\xfe{}", "m.jsonl, line 1: is not UTF-8"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = complaint(ExactMatch("small", str(file)))
    assert message in said and str(file) in said


def test_a_missing_file_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "run `python -m swarm.fetch_data els" in complaint(MultipleChoice("elsewhere"))
    assert "mine.json is missing: check the path" in complaint(MultipleChoice("m", "mine.json"))
    write(tmp_path / "data" / "eval" / "elsewhere.json", {"dev": choice_items(2)})
    assert len(MultipleChoice("elsewhere").items("dev")) == 2


class Anything(Scorer):
    """A scorer of which nothing is asked."""

    def score(self, items: Any, texts: Any) -> list[Score]:
        raise AssertionError("nothing is played here")


def test_the_fields_of_the_prompt_tell_items_apart(tmp_path: Path, warned: Warned) -> None:
    items = [{"context": f"c{n}", "prompt": "What is it?", "id": n} for n in range(6)]
    file = str(write(tmp_path / "mine.json", {"dev": items[:4], "test": items[4:]}))
    task = FreeText("mine", file, scorer=Anything(), template="{context}: {prompt}")
    assert len(task.items("dev")) == 4 and len(task.items("test")) == 2 and warned() == []
    assert len(FreeText("mine", file, scorer=Anything()).items("dev")) == 4
    assert any("3 of 4 dev items are duplicates" in line for line in warned())


# Items that dev and test have in common.


def yes_or_no(count: int, swapped: bool = False) -> list[dict[str, Any]]:
    """Every third is a yes; with `swapped` the letters change places."""
    choices = dict(zip("AB", ("No", "Yes") if swapped else ("Yes", "No"), strict=True))
    letters = {text: letter for letter, text in choices.items()}
    golds = ["Yes" if n % 3 == 0 else "No" for n in range(count)]
    return [
        {"question": f"Is it {n}?", "choices": choices, "answer": letters[gold], "id": f"i{n}"}
        for n, gold in enumerate(golds)
    ]


def gold(item: Item) -> str:
    return str(item["choices"][item["answer"]])


def test_the_same_item_is_seen_under_other_letters_and_ids() -> None:
    item, other = yes_or_no(1)[0], yes_or_no(1, swapped=True)[0]
    assert item["answer"] != other["answer"]
    assert item_identity({**item, "id": 1, "domain": "x"}) == item_identity(other)
    assert item_identity({**item, "answer": "B"}) != item_identity(item)
    assert item_identity({**item, "choices": {"A": "Yes", "B": "Maybe"}}) != item_identity(item)
    numbers = ({"question": "?", "answer": answer} for answer in (7, "7"))
    assert len(set(map(item_identity, numbers))) == 1
    assert item_identity({"prompt": "a"}) != item_identity({"prompt": "b"})


@pytest.mark.parametrize("swapped", [False, True])
def test_shared_items_are_divided_evenly(tmp_path: Path, swapped: bool, warned: Warned) -> None:
    content = {"dev": yes_or_no(30), "test": yes_or_no(30, swapped)[::-1]}
    file = write(tmp_path / "leaky.json", content)
    task = MultipleChoice("leaky", str(file))
    dev, test = task.items("dev"), task.items("test")
    assert pickle.loads(pickle.dumps(task)).items("dev") == dev
    assert {i["question"] for i in (*dev, *test)} == {i["question"] for i in content["dev"]}
    assert len(dev) == len(test) == 15
    assert Counter(map(gold, dev)) == Counter(map(gold, test)) == {"Yes": 5, "No": 10}
    (line,) = warned()
    assert "leaky.json: 30 items are in both dev and test; 15 stay in dev, 15 in test" in line
    assert "task.dedupe=false" in line and "and 25 more" in line
    # Neither the order of the splits nor that of the files counts.
    backwards = MultipleChoice("leaky", str(file))
    assert (backwards.items("test"), backwards.items("dev")) == (test, dev)
    kept = assign_shared_items(content["dev"], content["test"])
    assert kept == assign_shared_items(content["dev"][::-1], content["test"][::-1])
    whole = MultipleChoice("leaky", str(file), dedupe=False)
    assert len(whole.items("dev")) == len(whole.items("test")) == 30
    assert "they stay in both (task.dedupe=true" in warned()[-1]


def test_only_what_is_shared_is_touched(tmp_path: Path, warned: Warned) -> None:
    dev, test = match_items(20), match_items(30)[17:]
    file = str(write(tmp_path / "some.json", {"dev": dev, "test": test}))
    task = ExactMatch("some", file)
    found = {split: questions(task, split) for split in ("dev", "test")}
    assert not set(found["dev"]) & set(found["test"])
    assert found["dev"][:17] == [item["question"] for item in dev[:17]]
    assert (len(found["dev"]), len(found["test"])) == (19, 11) and len(warned()) == 1
    assert ExactMatch("some", file, test_limit=11).items("test") == task.items("test")
    # Positions stay those of the file.
    task = ExactMatch("some", file, ids="position")
    assert [i["question"] for i in task.items("dev")] == found["dev"]
    assert all(item["question"] == f"Question {item['id']}?" for item in task.items("dev"))


def test_a_split_that_is_nothing_but_leak_or_wrong_says_so(tmp_path: Path) -> None:
    file = str(write(tmp_path / "one.json", {"dev": match_items(3), "test": match_items(1)}))
    task = ExactMatch("one", file)
    assert len(task.items("dev")) == 3
    assert "all items of test are in dev, too; set task.dedupe=false" in complaint(task, "test")
    # The errors of the other split are its own.
    wrong = [{"question": "?"}, {"answer": 1}, *match_items(2)]
    file = str(write(tmp_path / "half.json", {"dev": match_items(4), "test": wrong}))
    task = ExactMatch("half", file)
    assert len(task.items("dev")) == 3
    assert "2 of 4 test items are wrong; the first: test item 0" in complaint(task, "test")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("dev_limit", 0, "an integer, at least 1, or null"),
        ("parser", "strict", "anchored"),
        ("signal", "log", "accuracy, logprob or both"),
        ("file", {"train": 1}, "text"),
        ("parsers", "anchored", "did you mean parser"),
    ],
)
def test_a_wrong_key_is_named(key: str, value: object, allowed: str) -> None:
    for kind in (MultipleChoice, ExactMatch):
        with pytest.raises(UserError) as caught:
            kind(**{"name": "small", key: value})  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"task.{key}") and allowed in str(caught.value)
