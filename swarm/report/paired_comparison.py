"""Comparison of the best expert with the best found, and the items they answer differently.

Questions are shown if the task's data files still contain the evaluated items.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from string import Formatter
from typing import Any

import numpy as np

from swarm._util.files import short_digest
from swarm.errors import UserError
from swarm.report.document import Block, ChangedItem, ChangedItems
from swarm.runs.folder import ParticleIndex, RunFolder
from swarm.runs.verdict import BY_DOMAIN, CONSTANT, EXPERT
from swarm.scorers.own_file import read_task
from swarm.stats.significance import mean_interval
from swarm.tasks.base import Item, TaskRun
from swarm.tasks.dataset import DataTask
from swarm.tasks.metrics import Measured, group_items_by_domain

Rows = list[dict[str, Any]]

MAX_ITEMS_SHOWN = 100
"""Maximum number of items won, and of items lost, that are shown."""

MAX_TEXT_LENGTH = 1_200
"""Maximum length of a question or an answer in characters; longer texts are cut."""

OWN_FILE = f"{read_task.__module__}.{read_task.__qualname__}"

NON_TEXT_KEYS = ("id", "part", "domain", "split", "answer")
"""Text fields of an item that are not part of its question."""


class PairedComparison:
    """Results of the best expert and the best found of a run.

    Results are read from the verdict; while the search is running, dev results are computed from
    its answers.

    Attributes:
        run: The run.
        verdict: Its verdict; `None` while the search is running.
        start, end: Their positions, as (iteration, particle).
        expert: Name of the best expert.
        labels: Display names of the two models.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run, self.verdict = run, run.verdict
        self.start, self.end = run.best_expert(), run.find_best()
        self.expert = run.experts[self.start[1]]
        self.labels = (f"best expert ({self.expert})", "best found")

    def results(self, split: str) -> tuple[Measured | None, Measured | None]:
        """Return the results of both on "dev", "confirm" or "test"; `None` if not evaluated."""
        if self.verdict is None:
            return self._dev_results if split == "dev" else (None, None)
        start, found = self.verdict.start_model, self.verdict.found
        if split == "confirm":
            kept = self.verdict.held_out
            return (kept.expert, kept.found) if kept else (None, None)
        return (start.dev, found.dev) if split == "dev" else (start.test, found.test)

    @cached_property
    def _dev_results(self) -> tuple[Measured | None, Measured | None]:
        return self._measure_dev(self.start), self._measure_dev(self.end)

    def _measure_dev(self, index: ParticleIndex) -> Measured | None:
        utility = float(self.run.utilities[index])
        if np.isnan(utility):
            return None
        rows = self.run.load_answers(index)
        unparsed = sum(row["answer"] is None for row in rows) / len(rows)
        values = answer_values(rows)
        found = mean_interval(values.tolist(), signed=bool((values < 0).any()))
        # The interval of a utility that is not the mean of the values depends on its task.
        plain = abs(found.mean - utility) < 1e-9 and not rows[0].get("part")
        low, high = (found.low, found.high) if plain else (np.nan, np.nan)
        return Measured(utility, low, high, len(rows), unparsed)

    def list_baselines(self) -> list[str]:
        """Return the names of the models whose answers can be compared with the best found's.

        The best expert comes first, then the baselines whose answers to the test items
        are stored, then the other initial experts, whose answers to dev items are.
        """
        run, tested = self.run, []
        if self.verdict and run.load_test_answers(self.end):
            labels = [one.label for one in self.verdict.alternatives]
            tested = [label for label in labels if self._load_baseline_answers(label) is not None]
        known = np.isfinite(run.utilities[0, : run.expert_count])
        experts = [name for name, one in zip(run.experts, known, strict=False) if one]
        return [self.labels[0], *tested, *(name for name in experts if name != self.expert)]

    def _load_baseline_answers(self, label: str) -> Rows | None:
        """Return a baseline's answers to the test items; `None` if they are not stored."""
        others = self.verdict.alternatives if self.verdict else []
        one = next(one for one in others if one.label == label)
        if one.name in (EXPERT, CONSTANT):
            return None
        if one.name == BY_DOMAIN:
            return self._load_routed_answers(one.choices)
        return self.run.load_answers_at(one.position) if one.position else None

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
            baseline: A name of `list_baselines`; the best expert by default.
        """
        run, start, end = self.run, self.start, self.end
        if baseline in run.experts:
            start = 0, run.experts.index(baseline)
            return "dev", run.load_answers(start), run.load_answers(end)
        other = baseline not in ("", self.labels[0])
        before = self._load_baseline_answers(baseline) if other else run.load_test_answers(start)
        after = run.load_test_answers(end)
        if before and after:
            return "test", before, after
        if other or np.isnan([run.utilities[start], run.utilities[end]]).any():
            return None
        return "dev", run.load_answers(start), run.load_answers(end)


def answer_values(rows: Rows) -> np.ndarray:
    """Return the values of the answers, [items]."""
    return np.array([row["value"] for row in rows], dtype=float)


def is_binary(*answers: Rows) -> bool:
    """Return whether every answer is either right or wrong."""
    return all(np.isin(answer_values(rows), (0.0, 1.0)).all() for rows in answers)


def name_test(before: Rows, after: Rows) -> str:
    """Return the name of the test that the search applies to the difference of these answers."""
    if after[0].get("part"):
        return "bootstrap over items, within each part"
    return "McNemar's exact" if is_binary(before, after) else "random sign flips"


def changed_items_blocks(models: PairedComparison, baseline: str = "") -> list[Block]:
    """Return the items that only one of the two models answers correctly.

    Args:
        baseline: The model compared with the best found, a name of
            `PairedComparison.list_baselines`; the best expert by default.
    """
    initial = baseline in ("", models.labels[0])
    if (found := models.paired_answers(baseline)) is None:
        return ["No two models have answered all items yet."]
    if initial and models.start == models.end:
        return ["The best found is the best expert: no item differs."]
    split, before, after = found
    questions, missing = load_questions(models, split)
    pairs = list(zip(before, after, strict=True))
    changes = answer_values(after) - answer_values(before)
    # The largest differences first; the run folder has all.
    won, lost = (
        [pairs[n] for n in np.argsort(-sign * changes, kind="stable") if sign * changes[n] > 0]
        for sign in (1, -1)
    )
    chosen = ", on which the best found was chosen" * (split == "dev")
    blocks: list[Block] = [
        f"Of {len(pairs)} {split} items{chosen}, the best found won {len(won)} and lost "
        f"{len(lost)}; {len(pairs) - len(won) - len(lost)} have equal scores."
    ]
    if missing:
        blocks.append(f"The questions are not shown: {missing}")
    titles = ("Better now", "Worse now")
    if is_binary(before, after):
        titles = ("Won: wrong before, right now", "Lost: right before, wrong now")
    names = (models.expert if initial else baseline, "best found")
    for title, some in zip(titles, (won, lost), strict=True):
        shown = [_build_item(pair, questions) for pair in some[:MAX_ITEMS_SHOWN]]
        cut = f", {len(shown)} of them shown" * (len(shown) < len(some))
        blocks.append(ChangedItems(f"{title} ({len(some)}{cut})", names, shown))
    return blocks


def _build_item(pair: Sequence[dict[str, Any]], questions: Mapping[str, Any]) -> ChangedItem:
    """Combine an item with the answers of both models."""
    before, after = pair
    name, part = str(before["id"]), before.get("part", "")
    item = questions.get(name, {})
    gold = item.get("answer")
    said = [
        (_cut("not read" if row["answer"] is None else row["answer"], 200), _cut(row["text"]))
        for row in (before, after)
    ]
    return ChangedItem(
        name if name.startswith(part) else f"{part}/{name}",
        _cut(_question_text(item)),
        "" if gold is None else _cut(gold, 200),
        said[0],
        said[1],
        (before["value"], after["value"]),
    )


def _question_text(item: Mapping[str, Any]) -> str:
    """Return question and choices; without "question" and "prompt", all texts of the item."""
    words = str(item.get("question", item.get("prompt", ""))) or "\n".join(
        text for name, text in item.items() if isinstance(text, str) and name not in NON_TEXT_KEYS
    )
    choices = item.get("choices")
    if isinstance(choices, Mapping):
        words += "".join(f"\n{letter}: {text}" for letter, text in choices.items())
    return words


def _cut(value: object, limit: int = MAX_TEXT_LENGTH) -> str:
    text = str(value)
    more = f" … ({len(text) - limit:,} more characters)" * (len(text) > limit)
    return text[:limit] + more


def load_questions(models: PairedComparison, split: str) -> tuple[dict[str, Any], str]:
    """Return the items by id from the task's data files, or the reason why they are missing."""
    run = models.run
    try:
        task = run.config["task"]
        found = list(iterate_data_items(task, split))
    except UserError as error:
        return {}, str(error)
    except (KeyError, TypeError):
        return {}, "no data file is named"
    if short_digest(found) != (run.test_items if split == "test" else run.identity["task items"]):
        left_out = task.get("max_prompt_tokens")
        return {}, "task.max_prompt_tokens has left some out" if left_out else (
            "the data file has changed since the run"
        )
    return {str(item["id"]): item for item in found}, ""


def iterate_data_items(task: Mapping[str, Any], split: str) -> Iterator[dict[str, Any]]:
    """Yield the items of the data files that a task's configuration names, as the task would.

    Only the files are read: the task is not instantiated, so that no code named in the
    configuration runs.

    Raises:
        UserError: A file is missing or invalid.
    """
    if task.get("_target_") == OWN_FILE:
        settings = {key: value for key, value in task.items() if key != "_target_"}
        yield from map(dict, read_task(**settings).items(split))
        return
    if "tasks" not in task:
        keys = ("file", "dev_limit", "test_limit", "ids", "dedupe", "dev_seed")
        data = _Items(task["name"], **{key: task[key] for key in keys if key in task})
        named = Formatter().parse(task.get("template", ""))
        data.fields = tuple(dict.fromkeys(name for _, name, _, _ in named if name))
        yield from map(dict, data.items(split))
        return
    parts = task["tasks"]
    named_parts = parts if isinstance(parts, Mapping) else {one["name"]: one for one in parts}
    for name, part in named_parts.items():
        for item in iterate_data_items(part, split):
            path = f"{name}/{item['part']}" if "tasks" in part else name
            yield {**item, "id": f"{name}/{item['id']}", "part": path, "item": item}


class _Items(DataTask):
    """The items of a task's file, of which nothing is asked."""

    def run(self, items: Sequence[Item]) -> TaskRun:
        raise NotImplementedError

    def grade(self, item: Item, answer: str | None) -> float:
        raise NotImplementedError
