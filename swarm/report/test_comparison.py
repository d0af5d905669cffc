"""The items that two models answered differently, with the questions as far as they are found."""

from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any, NamedTuple

import numpy as np

from swarm._util.files import short_digest
from swarm.errors import UserError
from swarm.report.document import ChangedItem, ChangedItems, ReportSection, TextBlock
from swarm.runs.run_reader import PositionIndex, RunFolder
from swarm.stats.tests import mean_interval
from swarm.tasks.dataset import DataFile

# The two models that a report compares: the best initial expert and the best found.

Rows = list[dict[str, Any]]


class SplitResult(NamedTuple):
    """A model on a split.

    Attributes:
        ends: Of the 95 % interval; `None` where the folder does not tell it.
        unparsed: Share of answers that could not be read.
    """

    utility: float
    ends: tuple[float, float] | None
    items: int
    unparsed: float | None
    parts: dict[str, float]


class TestComparison:
    """Best initial expert ("starting") and best found ("ending") of a run.

    What the search measured at its end is taken from there; before, dev is measured here.

    Attributes:
        run: The run.
        places: Where they are: (iteration, particle).
        expert: The name of the best initial expert.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run, self.metrics = run, run.metrics
        self.places: dict[str, PositionIndex] = {
            "starting": run.best_expert(),
            "ending": run.find_best(),
        }
        self.expert = run.experts[self.places["starting"][1]]
        self._measured: dict[tuple[str, str], SplitResult | None] = {}

    @property
    def model_labels(self) -> dict[str, str]:
        """What they are called."""
        return {"starting": f"best initial expert ({self.expert})", "ending": "best found"}

    @property
    def is_tested(self) -> bool:
        """Whether they were compared on the test split."""
        return "test_gain" in self.metrics

    def split_result(self, who: str, split: str) -> SplitResult | None:
        """A model on "dev", "confirm" or "test"; `None` where it was not asked."""
        if (who, split) not in self._measured:
            self._measured[who, split] = self._read_split_result(who, split)
        return self._measured[who, split]

    def _read_split_result(self, who: str, split: str) -> SplitResult | None:
        found = self.metrics
        if split == "confirm":
            one = found.get("confirm")
            return one and SplitResult(one[who], one[f"{who}_interval"], one["items"], None, {})
        name = f"{who}_best_{'validation' if split == 'dev' else 'single_test'}"
        utility = found.get(f"{name}_{'utility' if split == 'dev' else 'accuracy'}")
        if utility is not None:
            return SplitResult(
                utility,
                found[f"{name}_interval"],
                found[f"{name}_items"],
                found.get(f"{name}_unparsed_rate"),
                found.get(f"{name}_parts", {}),
            )
        return self._dev_result(who) if split == "dev" else None

    def _dev_result(self, who: str) -> SplitResult | None:
        utility = float(self.run.utilities[self.places[who]])
        if np.isnan(utility):
            return None
        rows = self.run.load_answers(self.places[who])
        unparsed = sum(row["answer"] is None for row in rows) / len(rows)
        found = mean_interval(
            answer_values(rows).tolist(), signed=bool((answer_values(rows) < 0).any())
        )
        # A utility that is no mean has another interval, which only its task can tell.
        plain = abs(found.mean - utility) < 1e-9 and not rows[0].get("part")
        return SplitResult(
            utility, (found.low, found.high) if plain else None, len(rows), unparsed, {}
        )

    def constant_result(self, split: str) -> SplitResult | None:
        """The best constant answers by domain; `None` where they were not measured."""
        found = (self.metrics.get("constant_answers") or {}).get("by_domain", {}).get(split)
        return found and SplitResult(found["utility"], found["interval"], found["items"], 0.0, {})

    def baseline_results(self) -> dict[str, dict[str, SplitResult | None]]:
        """What the best found was compared with, by label, on each split."""

        def parse_split_result(one: dict[str, Any] | None) -> SplitResult | None:
            if one is None:
                return None
            parts = one.get("parts", {})
            return SplitResult(
                one["utility"], one["interval"], one["items"], one["unparsed_rate"], parts
            )

        found = self.metrics.get("baselines", ())
        return {
            one["label"]: {
                split: parse_split_result(one.get(split)) for split in ("dev", "confirm", "test")
            }
            for one in found
        }

    def vote_result(self, split: str) -> SplitResult | None:
        """The vote of the best; `None` where there is none."""
        found = self.metrics
        by_size = found.get("ensemble_dev_by_size")
        if split == "dev" and by_size:
            items = found["ending_best_validation_items"]
            return SplitResult(by_size[found["ensemble_size"] - 1], None, items, None, {})
        name = "ending_top-k_ensemble_test"
        if split == "test" and f"{name}_accuracy" in found:
            ends, items = found[f"{name}_interval"], found[f"{name}_items"]
            unparsed, parts = found.get(f"{name}_unparsed_rate"), found.get(f"{name}_parts", {})
            return SplitResult(found[f"{name}_accuracy"], ends, items, unparsed, parts)
        return None

    def paired_answers(self) -> tuple[str, Rows, Rows] | None:
        """What both answered item by item: to test, else to dev; and which of them it is."""
        before, after = (self.run.load_test_answers(place) for place in self.places.values())
        if before and after:
            return "test", before, after
        if any(np.isnan(self.run.utilities[place]) for place in self.places.values()):
            return None
        before, after = (self.run.load_answers(place) for place in self.places.values())
        return "dev", before, after


def answer_values(rows: Rows) -> np.ndarray:
    """[items] what answers were worth."""
    return np.array([row["value"] for row in rows], dtype=float)


def is_binary(rows: Rows) -> bool:
    """Whether every answer is right or wrong."""
    return bool(np.isin(answer_values(rows), (0.0, 1.0)).all())


def name_test(before: Rows, after: Rows) -> str:
    """Which test the search makes of a difference between these answers."""
    if after[0].get("part"):
        return "bootstrap over items, within each part"
    return "McNemar's exact" if is_binary(before) and is_binary(after) else "random sign flips"


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
        words = (
            "The best found is the best initial expert: no item differs."
            if found
            else "No two models have answered all items yet."
        )
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
    blocks: list[Any] = [
        TextBlock(_describe_changes(split, len(pairs), len(won), len(lost), share < 1, missing))
    ]
    for title, some in zip(titles, (won, lost), strict=True):
        shown = [build_changed_item(*pair, questions) for pair in some[: round(share * len(some))]]
        blocks.append(ChangedItems(f"{title} ({len(some)})", len(some), names, shown))
    return ReportSection("flips", "Item by item", how, blocks)


def _describe_changes(
    split: str, items: int, won: int, lost: int, cut: bool, missing: str
) -> list[str]:
    chosen = ", on which the best found was chosen" if split == "dev" else ""
    told = [
        f"Of {items} {split} items{chosen}, the best found won {won} and lost {lost}; "
        f"{items - won - lost} are worth the same."
    ]
    if cut:
        told.append(
            f"Of these {won + lost} items the page shows {MAX_ITEMS_SHOWN}, won and lost in "
            "proportion, the "
            "largest differences first; the run folder has all."
        )
    return [*told, missing] if missing else told


def build_changed_item(
    before: dict[str, Any], after: dict[str, Any], questions: Mapping[str, Any]
) -> ChangedItem:
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
        return (
            {},
            MISSING_QUESTIONS
            + (str(error) if isinstance(error, UserError) else "no data file is named"),
        )
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
