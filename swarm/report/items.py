"""The items that two models answered differently, with the questions as far as they are found."""

from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any

from swarm.errors import UserError
from swarm.files import short_digest
from swarm.report.blocks import ChangedItem, ChangedItems, ReportSection, TextBlock
from swarm.report.compared import TestComparison, is_binary
from swarm.tasks.data import DataFile

MAX_ITEMS_SHOWN = 200
"""Items, won and lost together: more do not fit a page that is to be sent round."""

MAX_TEXT_LENGTH = 1_200
"""Of a question or a text; what is longer is cut."""

NON_TEXT_KEYS = ("id", "part", "domain", "split", "answer")
"""Texts of an item that are no part of a question."""

MISSING_QUESTIONS = "The questions are not shown: "


def changed_items_section(models: TestComparison) -> ReportSection:
    """What the best found got right that the best initial expert got wrong, and the reverse."""
    how = (
        "Open an item for its question and both texts. Some flips are always there: two models "
        "that are equally good differ too, in both directions."
    )
    found = models.paired_answers()
    if found is None or models.places["starting"] == models.places["ending"]:
        words = ("The best found is the best initial expert: no item differs." if found else
                 "No two models have answered all items yet.")  # fmt: skip
        return ReportSection("flips", "Item by item", how, [TextBlock([words])])
    split, before, after = found
    questions, missing = load_questions(models, split)
    pairs = list(zip(before, after, strict=True))
    won = [pair for pair in pairs if pair[1]["value"] > pair[0]["value"]]
    lost = [pair for pair in pairs if pair[1]["value"] < pair[0]["value"]]
    for one in (won, lost):
        one.sort(key=lambda pair: -abs(pair[1]["value"] - pair[0]["value"]))
    binary = is_binary(before) and is_binary(after)
    titles = ("Won: wrong before, right now", "Lost: right before, wrong now")
    if not binary:
        titles = ("Better now", "Worse now")
    share = min(MAX_ITEMS_SHOWN / max(1, len(won) + len(lost)), 1.0)
    names = (models.expert, "best found")
    blocks: list[Any] = [TextBlock(_describe_changes(split, len(pairs), len(won), len(lost), share < 1, missing))]
    for title, some in zip(titles, (won, lost), strict=True):
        shown = [build_changed_item(*pair, questions) for pair in some[: round(share * len(some))]]
        blocks.append(ChangedItems(f"{title} ({len(some)})", len(some), names, shown))
    return ReportSection("flips", "Item by item", how, blocks)


def _describe_changes(split: str, items: int, won: int, lost: int, cut: bool, missing: str) -> list[str]:
    chosen = ", on which the best found was chosen" if split == "dev" else ""
    told = [f"Of {items} {split} items{chosen}, the best found won {won} and lost {lost}; "
            f"{items - won - lost} are worth the same."]  # fmt: skip
    if cut:
        told.append(
            f"Of these {won + lost} items the page shows {MAX_ITEMS_SHOWN}, won and lost in proportion, the "
            "largest differences first; the run folder has all."
        )
    return [*told, missing] if missing else told


def build_changed_item(before: dict[str, Any], after: dict[str, Any], questions: Mapping[str, Any]) -> ChangedItem:
    """An item, and what both models answered to it."""
    name = str(before["id"])
    item = questions.get(name, {})
    part = before.get("part", "")
    return ChangedItem(
        name if not part or name.startswith(part) else f"{part}/{name}",
        _question_text(item),
        _gold_text(item),
        _answer_texts(before),
        _answer_texts(after),
        (before["value"], after["value"]),
    )


def _answer_texts(row: Mapping[str, Any]) -> tuple[str, str]:
    read = "not read" if row["answer"] is None else str(row["answer"])
    return _shorten_text(read, 200), _shorten_text(str(row["text"]))


def _question_text(item: Mapping[str, Any]) -> str:
    """What is asked; of an item with neither question nor prompt, all texts that it has."""
    words = str(item.get("question", item.get("prompt", ""))) or "\n".join(
        text for name, text in item.items() if isinstance(text, str) and name not in NON_TEXT_KEYS
    )
    choices = item.get("choices")
    if isinstance(choices, Mapping):
        words += "".join(f"\n{letter}: {text}" for letter, text in choices.items())
    return _shorten_text(words)


def _gold_text(item: Mapping[str, Any]) -> str:
    return _shorten_text(str(item["answer"]), 200) if item.get("answer") is not None else ""


def _shorten_text(words: str, most: int = MAX_TEXT_LENGTH) -> str:
    return words if len(words) <= most else f"{words[:most]} … ({len(words) - most:,} more letters)"


def load_questions(models: TestComparison, split: str) -> tuple[dict[str, Any], str]:
    """The items by id, as far as the task's data files tell them; else what is missing."""
    run = models.run
    asked = run.metrics.get("asked", {}).get("test_items")
    try:
        found = list(iterate_data_items(run.config["task"], split))
    except (UserError, KeyError, TypeError) as error:
        return {}, f"{MISSING_QUESTIONS}{error if isinstance(error, UserError) else 'no data file is named'}"
    if short_digest(found) != (asked if split == "test" else run.identity.get("task items")):
        return {}, f"{MISSING_QUESTIONS}what the data file has now is not what was asked"
    return {str(item["id"]): item for item in found}, ""


def iterate_data_items(task: Mapping[str, Any], split: str) -> Iterator[dict[str, Any]]:
    """The items of the data files that a task's configuration names, as the task gives them.

    Only files are read: the task itself, and what code it may name, is not made.

    Raises:
        UserError: A file is missing or wrong.
    """
    if "tasks" not in task:
        yield from (dict(item) for item in _open_data_file(task).items(split))
        return
    parts = task["tasks"]
    named = parts.items() if isinstance(parts, Mapping) else [(one["name"], one) for one in parts]
    for name, part in named:
        for item in iterate_data_items(part, split):
            path = f"{name}/{item['part']}" if "tasks" in part else name
            yield {**item, "id": f"{name}/{item['id']}", "part": path, "item": item}


def _open_data_file(task: Mapping[str, Any]) -> DataFile:
    """The data file of a task that is no mixture."""
    template = Formatter().parse(task.get("template", ""))
    return DataFile(
        task["name"],
        task.get("file"),
        task.get("dev_limit"),
        task.get("test_limit"),
        task.get("ids", "file"),
        lambda item: None,
        task.get("dedupe", True),
        tuple(dict.fromkeys(name for _, name, _, _ in template if name)),
        task.get("dev_seed"),
    )
