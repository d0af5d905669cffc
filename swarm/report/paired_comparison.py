"""Comparison of the best initial expert with the best found, and the items they answer differently.

Questions are shown if the task's data files still contain the evaluated items.
"""

from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

import numpy as np

from swarm._util.files import short_digest
from swarm.errors import UserError
from swarm.report.document import ChangedItem, ChangedItems, ReportSection, TextBlock
from swarm.runs.folder import ParticleIndex, RunFolder
from swarm.runs.verdict import BY_DOMAIN, CONSTANT, EXPERT, Compared
from swarm.stats.significance import mean_interval
from swarm.tasks.base import Item, TaskRun
from swarm.tasks.dataset import DataTask
from swarm.tasks.metrics import Measured, group_items_by_domain

Rows = list[dict[str, Any]]


class PairedComparison:
    """Results of the best initial expert ("starting") and the best found ("ending") of a run.

    Results are read from the final metrics; while the search is running, dev results are computed
    from its answers.

    Attributes:
        run: The run.
        places: Their positions, as (iteration, particle).
        expert: Name of the best initial expert.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run, self.verdict = run, run.verdict
        self.places: dict[str, ParticleIndex] = {
            "starting": run.best_expert(),
            "ending": run.find_best(),
        }
        self.expert = run.experts[self.places["starting"][1]]
        self._measured: dict[tuple[str, str], Measured | None] = {}

    @property
    def model_labels(self) -> dict[str, str]:
        """Display names of the two models."""
        return {"starting": f"best initial expert ({self.expert})", "ending": "best found"}

    @property
    def is_tested(self) -> bool:
        """True if the two were compared on the test split."""
        return self.verdict is not None and self.verdict.tested

    def split_result(self, label: str, split: str) -> Measured | None:
        """Return the result of a model on "dev", "confirm" or "test"; `None` if not evaluated."""
        if (label, split) not in self._measured:
            self._measured[label, split] = self._read_split_result(label, split)
        return self._measured[label, split]

    def _read_split_result(self, label: str, split: str) -> Measured | None:
        verdict = self.verdict
        if verdict is None:
            return self._dev_result(label) if split == "dev" else None
        if split == "confirm":
            kept = verdict.held_out
            return (kept.expert if label == "starting" else kept.found) if kept else None
        model = verdict.start_model if label == "starting" else verdict.found
        return model.dev if split == "dev" else model.test

    def _dev_result(self, label: str) -> Measured | None:
        utility = float(self.run.utilities[self.places[label]])
        if np.isnan(utility):
            return None
        rows = self.run.load_answers(self.places[label])
        unparsed = sum(row["answer"] is None for row in rows) / len(rows)
        values = answer_values(rows)
        found = mean_interval(values.tolist(), signed=bool((values < 0).any()))
        # The interval of a utility that is not the mean of the values depends on its task.
        plain = abs(found.mean - utility) < 1e-9 and not rows[0].get("part")
        low, high = (found.low, found.high) if plain else (np.nan, np.nan)
        return Measured(utility, low, high, len(rows), unparsed)

    def vote_result(self, split: str) -> Measured | None:
        """Return the result of the ensemble's vote; `None` without one."""
        vote = self.verdict.vote if self.verdict else None
        if vote is None or split == "test":
            return vote.test if vote else None
        if split != "dev" or self.verdict is None:
            return None
        return Measured(vote.dev, np.nan, np.nan, self.verdict.dev.n)

    def list_baselines(self) -> list[str]:
        """Return the names of the models whose answers can be compared with the best found's.

        The best initial expert comes first, then the baselines whose answers to the test items
        are stored, then the other initial experts, whose answers to dev items are.
        """
        tested = self.run.load_test_answers(self.places["ending"]) if self.is_tested else None
        found = [one.label for one in self._others()] if tested else []
        known = np.isfinite(self.run.utilities[0, : self.run.expert_count])
        experts = [name for name, one in zip(self.run.experts, known, strict=False) if one]
        return [
            self.model_labels["starting"],
            *(label for label in found if self._load_baseline_answers(label) is not None),
            *(name for name in experts if name != self.expert),
        ]

    def _load_baseline_answers(self, label: str) -> Rows | None:
        """Return a baseline's answers to the test items; `None` if they are not stored."""
        one = next(one for one in self._others() if one.label == label)
        if one.name == BY_DOMAIN:
            return self._load_routed_answers(one.choices)
        return self.run.load_answers_at(one.position) if one.position else None

    def _others(self) -> list[Compared]:
        """Return the alternatives besides the best initial expert that a model answered."""
        others = self.verdict.alternatives if self.verdict else []
        return [one for one in others if one.name not in (EXPERT, CONSTANT)]

    def _load_routed_answers(self, experts: Mapping[str, str]) -> Rows | None:
        """Return the test answers of each domain's expert; `None` without the task's data file."""
        questions, _ = load_questions(self, "test")
        items, found = list(questions.values()), dict[int, dict[str, Any]]()
        for domain, indices in group_items_by_domain(items).items():
            if domain not in experts:
                return None
            position = self.run.positions[0, self.run.experts.index(experts[domain])]
            if whole := self.run.load_answers_at(position):
                rows = [whole[n] for n in indices]
            else:
                digest = short_digest([dict(items[n]) for n in indices])
                rows = self.run.load_answers_at(position, digest) or []
            if len(rows) != len(indices):
                return None
            found |= zip(indices, rows, strict=True)
        return [found[n] for n in sorted(found)] or None

    def paired_answers(self, baseline: str = "") -> tuple[str, Rows, Rows] | None:
        """Return the split and both models' answers to its items: test if evaluated, else dev.

        Args:
            baseline: A name of `list_baselines`; the best initial expert by default.
        """
        if baseline and baseline != self.model_labels["starting"]:
            if baseline in self.run.experts:
                expert = self.run.load_answers((0, self.run.experts.index(baseline)))
                return "dev", expert, self.run.load_answers(self.places["ending"])
            before = self._load_baseline_answers(baseline)
            after = self.run.load_test_answers(self.places["ending"])
            return ("test", before, after) if before and after else None
        before, after = (self.run.load_test_answers(index) for index in self.places.values())
        if before and after:
            return "test", before, after
        if any(np.isnan(self.run.utilities[index]) for index in self.places.values()):
            return None
        before, after = (self.run.load_answers(index) for index in self.places.values())
        return "dev", before, after


def answer_values(rows: Rows) -> np.ndarray:
    """Return the values of the answers, [items]."""
    return np.array([row["value"] for row in rows], dtype=float)


def is_binary(rows: Rows) -> bool:
    """Return whether every answer is either right or wrong."""
    return bool(np.isin(answer_values(rows), (0.0, 1.0)).all())


def name_test(before: Rows, after: Rows) -> str:
    """Return the name of the test that the search applies to the difference of these answers."""
    if after[0].get("part"):
        return "bootstrap over items, within each part"
    return "McNemar's exact" if is_binary(before) and is_binary(after) else "random sign flips"


MAX_ITEMS_SHOWN = 200
"""Maximum number of changed items shown, which limits the size of the page."""

MAX_TEXT_LENGTH = 1_200
"""Maximum length of a question or an answer in characters; longer texts are cut."""

NON_TEXT_KEYS = ("id", "part", "domain", "split", "answer")
"""Text fields of an item that are not part of its question."""

MISSING_QUESTIONS = "The questions are not shown: "


def changed_items_section(models: PairedComparison, baseline: str = "") -> ReportSection:
    """Build the section of items that only one of the two models answers correctly.

    Args:
        baseline: The model compared with the best found, a name of
            `PairedComparison.list_baselines`; the best initial expert by default.
    """
    how = (
        "Open an item for its question and both texts. Some flips always occur: equally good "
        "models differ, too, in both directions."
    )
    found = models.paired_answers(baseline)
    initial = baseline in ("", models.model_labels["starting"])
    if found is None or (initial and models.places["starting"] == models.places["ending"]):
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
    names = (models.expert if initial else baseline, "best found")
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
    sentences = [
        f"Of {items} {split} items{chosen}, the best found won {won} and lost {lost}; "
        f"{items - won - lost} have equal scores."
    ]
    if cut:
        sentences.append(
            f"Of these {won + lost} items {MAX_ITEMS_SHOWN} are shown, won and lost in "
            "proportion, the largest differences first; the run folder has all."
        )
    return [*sentences, missing] if missing else sentences


def build_changed_item(
    before: dict[str, Any], after: dict[str, Any], questions: Mapping[str, Any]
) -> ChangedItem:
    """Combine an item with the answers of both models."""
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
    """Return question and choices; without "question" and "prompt", all texts of the item."""
    words = str(item.get("question", item.get("prompt", ""))) or "\n".join(
        text for name, text in item.items() if isinstance(text, str) and name not in NON_TEXT_KEYS
    )
    choices = item.get("choices")
    if isinstance(choices, Mapping):
        words += "".join(f"\n{letter}: {text}" for letter, text in choices.items())
    return _shorten_text(words)


def _gold_text(item: Mapping[str, Any]) -> str:
    return _shorten_text(str(item["answer"]), 200) if item.get("answer") is not None else ""


def _shorten_text(words: str, limit: int = MAX_TEXT_LENGTH) -> str:
    return (
        words
        if len(words) <= limit
        else f"{words[:limit]} … ({len(words) - limit:,} more characters)"
    )


def load_questions(models: PairedComparison, split: str) -> tuple[dict[str, Any], str]:
    """Return the items by id from the task's data files, or an explanation why they are missing."""
    run = models.run
    item_ids = run.test_items
    try:
        found = list(iterate_data_items(run.config["task"], split))
    except (UserError, KeyError, TypeError) as error:
        return (
            {},
            MISSING_QUESTIONS
            + (str(error) if isinstance(error, UserError) else "no data file is named"),
        )
    if short_digest(found) != (item_ids if split == "test" else run.identity.get("task items")):
        cause = "the data file has changed since the run"
        if run.config["task"].get("max_prompt_tokens"):
            cause = "task.max_prompt_tokens has left some out"
        return {}, f"{MISSING_QUESTIONS}{cause}"
    return {str(item["id"]): item for item in found}, ""


def iterate_data_items(task: Mapping[str, Any], split: str) -> Iterator[dict[str, Any]]:
    """Yield the items of the data files that a task's configuration names, as the task would.

    Only the files are read: the task is not instantiated, so that no code named in the
    configuration runs.

    Raises:
        UserError: A file is missing or invalid.
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


class _Items(DataTask):
    """The items of a task's file, of which nothing is asked."""

    def run(self, items: Sequence[Item]) -> TaskRun:
        raise NotImplementedError

    def grade(self, item: Item, answer: str | None) -> float:
        raise NotImplementedError


def _open_data_file(task: Mapping[str, Any]) -> _Items:
    """Open the data file of a task that is not a mixture."""
    template = Formatter().parse(task.get("template", ""))
    found = _Items(
        task["name"],
        task.get("file"),
        task.get("dev_limit"),
        task.get("test_limit"),
        task.get("ids", "file"),
        task.get("dedupe", True),
        task.get("dev_seed"),
    )
    found.fields = tuple(dict.fromkeys(name for _, name, _, _ in template if name))
    return found
