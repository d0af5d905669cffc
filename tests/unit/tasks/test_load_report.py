"""What is said of a data file when it is loaded, whichever form it has."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from task_items import choice_items, match_items, write

from swarm.errors import UserError
from swarm.tasks import dataset
from swarm.tasks.base import Item
from swarm.tasks.dataset import DataFile, text_field_error
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.free_text import FreeText
from swarm.tasks.multiple_choice import MultipleChoice

ORIGINAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "eval"
Warned = Callable[[], list[str]]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Warned:
    """What has been warned of so far."""
    # A run that was in this process before keeps the package's log to its own folder.
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
    text = str(caught.value)
    assert "\n" not in text
    return text


# The forms of a file.


def test_lines_that_say_their_split(tmp_path: Path) -> None:
    items = [{**i, "split": "test" if i["id"] % 3 else "dev"} for i in match_items(9)]
    for file in (lines(tmp_path / "a.jsonl", items), write(tmp_path / "a.json", items)):
        task = ExactMatch("mine", str(file))
        assert [item["id"] for item in task.items("dev")] == [0, 3, 6]
        assert [item["id"] for item in task.items("test")] == [1, 2, 4, 5, 7, 8]


def test_a_file_for_each_split(tmp_path: Path) -> None:
    files = {
        "dev": str(lines(tmp_path / "a.jsonl", match_items(3))),
        "test": str(write(tmp_path / "b.json", match_items(9)[3:])),
    }
    task = ExactMatch("mine", files)
    assert questions(task, "dev") == [f"Question {n}?" for n in range(3)]
    assert questions(task, "test") == [f"Question {n}?" for n in range(3, 9)]
    assert '"test" is not a list of at least one item' in complaint(
        ExactMatch("mine", {"dev": files["dev"]}), "test"
    )
    with pytest.raises(UserError, match=r"task.file: .*train.* is not a file for each of dev"):
        ExactMatch("mine", {"train": files["dev"]})
    with pytest.raises(UserError, match=r"task.file.dev: 5 is not a string"):
        ExactMatch("mine", {"dev": 5})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json"])
def test_a_file_without_splits_is_divided_by_content(tmp_path: Path, name: str) -> None:
    def divided(items: list[dict[str, Any]]) -> dict[str, set[str]]:
        put = lines if name.endswith("l") else write
        task = ExactMatch("mine", str(put(tmp_path / name, items)))
        return {split: set(questions(task, split)) for split in ("dev", "test")}

    items = match_items(30)
    found = divided(items)
    assert len(found["dev"]) == 10 and len(found["test"]) == 20
    assert divided(items[::-1]) == found
    bare = [{"question": i["question"], "answer": i["answer"], "domain": "x"} for i in items]
    assert divided(bare) == found  # ids and domains do not count
    moved = divided(match_items(31))["dev"] ^ found["dev"]
    assert len(moved - {"Question 30?"}) <= 1
    assert len(divided(match_items(2))["dev"]) == 1


def test_equal_items_are_on_one_side(tmp_path: Path, warned: Warned) -> None:
    items = match_items(12)
    task = ExactMatch("mine", str(lines(tmp_path / "mine.jsonl", [*items, *items])), ids="position")
    assert len(task.items("dev")) == 8 and len(task.items("test")) == 16
    assert not set(questions(task, "dev")) & set(questions(task, "test"))
    assert len(warned()) == 2 and all("are duplicates" in line for line in warned())


def test_places_are_ids_where_there_are_none(tmp_path: Path) -> None:
    items = [{"question": i["question"], "answer": i["answer"]} for i in match_items(6)]
    split = [{**item, "split": "dev"} for item in items]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n" + "\n\n".join(map(json.dumps, split)) + "\n\n", encoding="utf-8")
    assert [i["id"] for i in ExactMatch("mine", str(file)).items("dev")] == [2, 4, 6, 8, 10, 12]
    file = write(tmp_path / "mine.json", items)
    task = ExactMatch("mine", str(file))
    ids = {item["id"]: item["question"] for s in ("dev", "test") for item in task.items(s)}
    assert ids == {n: f"Question {n}?" for n in range(6)}


def test_a_byte_order_mark_and_odd_ends_of_lines_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    items = [{**item, "note": "a\u2028b\x85c"} for item in match_items(3)]
    text = "\r\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert len(ExactMatch("mine", str(file)).items("test")) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.jsonl", '{"a": 1}\n{"a": \n', "m.jsonl line 2: it is not valid JSON: "),
        ("m.jsonl", '{"a": 1}\n\n[1]\n', "m.jsonl line 3: it is not an object"),
        (
            "m.jsonl",
            '{"a": 1}\n{"a": \n[]\nx\n5\n',
            "m.jsonl: 4 of 5 lines are wrong: it is not valid JSON (2: 2, 4); "
            "it is not an object (2: 3, 5)",
        ),
        ("m.json", '[{"a": 1}, 2, [], 3]', "m.json: 3 of 4 items are wrong: it is not an object ("),
        ("m.jsonl", "", 'm.jsonl: "dev" is not a list of at least one item'),
        (
            "m.jsonl",
            '{"split": "dev"}\n{"a": 1}',
            'line 2: its "split" is missing; if one item has',
        ),
        ("m.jsonl", '{"split": "train"}', "line 1: its \"split\" is 'train'"),
        ("m.json", '[{"split": "dev"}, {"split": ["dev"]}]', "item 1: its \"split\" is ['dev']"),
        ("m.json", '[{"a": 1}, 2]', "m.json item 1: it is not an object"),
        ("m.json", '{"a": 1}\n{"a": 2}', "if it has one item per line, rename it to .jsonl"),
        ("m.json", '"dev"', "is neither an object nor a list"),
        ("m.json", '{"dev": {"a": 1}}', '"dev" is not a list of at least one item'),
    ],
)
def test_what_is_no_file_of_items_is_named(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    assert message in complaint(ExactMatch("mine", str(tmp_path / name)))


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b"\xff\xfe{}")
    assert "m.jsonl is not readable" in complaint(ExactMatch("mine", str(tmp_path / "m.jsonl")))
    write(tmp_path / "b.json", {"dev": match_items(1)})
    for file, message in (
        ("none.jsonl", "is missing: see task.file"),
        ("b.json", "must be a list, as"),
    ):
        assert message in complaint(ExactMatch("mine", {"dev": str(tmp_path / file)}))


# The faults of items.


def broken_items() -> list[dict[str, Any]]:
    items = choice_items(20)
    for place in (3, 5, 7, 9, 11, 13, 15):
        items[place]["answer"] = "E"
    items[0]["question"] = " "
    items[2]["choices"] = {**items[2]["choices"], "B": ""}
    del items[4]["answer"]
    return items


def test_all_wrong_items_are_told_by_kind(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.json", {"dev": broken_items(), "test": choice_items(1)})
    text = complaint(MultipleChoice("mine", str(file)))
    assert text.startswith(f"{file}: 10 of 20 dev items are wrong: ")
    assert 'its "question" is empty (1: item-10)' in text
    assert "it has an empty choice (1: item-12)" in text
    assert 'it has no "answer" (1: item-14)' in text
    among = "(7: item-13, item-15, item-17, item-19, item-21 and 2 more)"
    assert f'its "answer" is not among its choices {among}' in text


def test_one_wrong_item_is_told_in_full(tmp_path: Path) -> None:
    items = choice_items(3)
    items[1]["answer"] = "E"
    file = write(tmp_path / "mine.json", {"dev": items})
    assert complaint(MultipleChoice("mine", str(file))) == (
        f"{file}: dev item 'item-11': its \"answer\" is not among its choices:"
        " 'E' is not one of A, B, C, D."
    )


def test_a_split_of_another_kind_of_entries_is_told_with_the_rest(tmp_path: Path) -> None:
    entries = [3, {**match_items(1)[0], "id": True}, {"question": "\ud800", "answer": "1"}, None]
    text = complaint(ExactMatch("mine", str(write(tmp_path / "mine.json", {"dev": entries}))))
    assert "4 of 4 dev items are wrong: it is not an object (2: 0, 3); its id is neither" in text
    assert "an unpaired surrogate, which is not a character (1: 2)" in text


def test_ids_that_repeat_are_told(tmp_path: Path) -> None:
    items = [{**item, "id": item["id"] // 2} for item in match_items(16)]
    text = complaint(ExactMatch("mine", str(write(tmp_path / "mine.json", {"dev": items}))))
    assert '8 ids occur more than once in dev: "0", "1", "2", "3", "4" and 3 more; make' in text


# What is warned of.


def test_items_that_repeat_are_warned_of_and_stay(tmp_path: Path, warned: Warned) -> None:
    dev = choice_items(6)
    texts = dev[2]["choices"].values()
    again = {**dev[2], "id": "again", "choices": dict(zip("DCBA", texts, strict=True))}
    again["answer"] = "DCBA"["ABCD".index(dev[2]["answer"])]
    other = {**dev[3], "id": "other", "answer": "ABCD"[("ABCD".index(dev[3]["answer"]) + 1) % 4]}
    file = write(tmp_path / "mine.json", {"dev": [*dev, again, other], "test": choice_items(9)[6:]})
    task = MultipleChoice("mine", str(file))
    for _ in range(2):
        assert len(task.items("dev")) == 8 and len(task.items("test")) == 3
    assert warned() == [
        f"{file}: 1 of 8 dev items are duplicates (question, choices and answer) and are scored"
        " as well: id again."
    ]


def test_the_ids_of_a_leak_are_told(tmp_path: Path, warned: Warned) -> None:
    items = match_items(12)
    file = write(tmp_path / "mine.json", {"dev": items[:8], "test": items[1:]})
    ExactMatch("mine", str(file)).items("test")
    (line,) = warned()
    assert line.endswith("In dev they are ids 1, 2, 3, 4, 5 and 2 more.") and "7 items" in line


def test_the_lines_of_items_without_ids_are_told(tmp_path: Path, warned: Warned) -> None:
    items = [{"question": f"{n}?", "answer": "1", "split": "dev"} for n in range(6)]
    items += [{**items[2], "split": "test"}, {**items[4]}]
    file = lines(tmp_path / "mine.jsonl", items)
    assert ExactMatch("mine", str(file)).items("dev")
    again, shared = warned()
    assert again.endswith("are scored as well: line 8.")
    assert shared.endswith("In dev they are line 3.")
    named = lines(tmp_path / "named.jsonl", [{**one, "id": f"n{n}"} for n, one in enumerate(items)])
    assert ExactMatch("mine", str(named), ids="position").items("dev")
    assert warned()[2].endswith("are scored as well: line 8.")


def test_the_fields_that_a_prompt_is_made_of_tell_items_apart(
    tmp_path: Path, warned: Warned
) -> None:
    class Anything:
        highest, votes = 1.0, False

        def item_error(self, item: Item) -> str | None:
            return None

        def score(self, items: Any, texts: Any) -> Any:
            raise AssertionError("nothing is played here")

    items = [{"context": f"c{n}", "prompt": "What is it?", "id": n} for n in range(6)]
    file = str(write(tmp_path / "mine.json", {"dev": items[:4], "test": items[4:]}))
    task = FreeText("mine", Anything(), file, template="{context}: {prompt}")
    assert len(task.items("dev")) == 4 and len(task.items("test")) == 2
    assert warned() == []
    assert len(FreeText("mine", Anything(), file).items("dev")) == 4
    assert any("3 of 4 dev items are duplicates" in line for line in warned())
    assert dataset.item_identity(items[0], ("context", "prompt")) != dataset.item_identity(items[0])


def test_the_first_ids_and_how_many_more() -> None:
    assert dataset.format_ids([1]) == "1" and dataset.format_ids(range(5)) == "0, 1, 2, 3, 4"
    assert dataset.format_ids(range(7)) == "0, 1, 2, 3, 4 and 2 more"


LEAKS = {"hearsay": 94, "citation_prediction_classification": 108}


@pytest.mark.skipif(not ORIGINAL.is_dir(), reason="the original's files are not on this machine")
def test_the_originals_files_are_warned_of_only_for_their_leaks(warned: Warned) -> None:
    for file in sorted(ORIGINAL.glob("*.json")):
        before = len(warned())
        first = json.loads(file.read_text(encoding="utf-8"))["dev"][0]
        kind = MultipleChoice if "choices" in first else ExactMatch
        task: Any = kind(file.stem, str(file), ids="position")
        if "question" not in first:
            file_keys = (file.stem, str(file), None, None, "position")
            task = DataFile(*file_keys, lambda item: text_field_error(item, "prompt"))
        assert task.items("dev") and task.items("test")
        said = warned()[before:]
        assert len(said) == (file.stem in LEAKS)
        assert all(f"{LEAKS[file.stem]} items are in both dev and test" in line for line in said)
