"""A task maps a model to a number; it knows nothing of particles, folders or GPUs."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from swarm.models.base import Completion, Example, Request

Item = Mapping[str, Any]
"""One example as the data file has it; always with an "id" that is unique in its split."""


@dataclass(frozen=True, slots=True)
class Score:
    """What one answer to one item was worth.

    Attributes:
        value: Higher is better; 0 or 1 where an answer is right or wrong.
        answer: What was read from the text, in the form the gold answer has; `None` if nothing
            could be read, empty if nothing was there to be read.
        text: The model's text, for the record.
        part: In a mixture of tasks, the part that the item belongs to; else empty.
        measures: What else was measured, by name, for the record: a reward, a length.
    """

    value: float
    answer: str | None
    text: str = ""
    part: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)


TaskRun = Generator[list[Request], list[Completion], list[Score]]
"""A task being played: yields requests, is sent their completions, returns one score an item."""


class Task(Protocol):
    """Items of two splits, how to put them to a model, and what the answers are worth.

    A task may say more of itself, by attributes that this protocol does not ask for:

    - `highest: float`: the utility is the mean of the items' values (`mean`), each of them
      `highest` at most; an exact race needs it.
    - `lowest: float`: no item's value is lower; 0 if it is not there.
    - `votes = False`: the answers are not such that models could vote on them (a free text).
    - `constants: Sequence[str]`: answers, beside the gold ones, that a model might give to every
      item and that have a value ("abstain").
    - `plain: Task`: the same task by its own measure, of the same items, where a search goes by
      another signal; else the task itself. See the function `plain`.
    - `Prepared`: it needs a key, a model or a connection of its own.
    - `Calibrated`: its scale is measured on the pool's experts.
    - `Supervised`: it has gold answers, whose loss a gradient can descend.
    - `Sourced`: its values depend on code or weights that its settings only name.
    """

    name: str

    def items(self, split: str) -> Sequence[Item]:
        """The items of "dev" or "test"; reads and checks the file at the first call.

        Raises:
            UserError: The file is missing, is not of the task's format, or the split is empty.
        """
        ...

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Ask about every item; dev and test are played alike."""
        ...

    def grade(self, item: Item, answer: str | None) -> float:
        """The value of a parsed answer, whoever gave it (a vote of several models, say)."""
        ...

    def utility(self, scores: Sequence[Score]) -> float:
        """The number that a search raises; in the scores' unit."""
        ...


@runtime_checkable
class RequiresSetup(Protocol):
    """A task (or a scorer) with something of its own to be checked and opened."""

    def check(self) -> None:
        """Look, quickly and before anything is written, for what will be needed.

        Raises:
            UserError: A key, a package or a file is missing.
        """
        ...

    def open(self, device: str) -> None:
        """Load or connect, once in each worker; `device` is where the worker's model lives."""
        ...


@runtime_checkable
class HasScoreScale(Protocol):
    """A task whose values are on a scale that its experts' own dev answers set."""

    def calibrate(self, scores: Sequence[Score]) -> Mapping[str, Any]:
        """Set the scale by these scores of all experts on dev; gives it, for the record."""
        ...

    def restore_scale(self, scale: Mapping[str, Any]) -> None:
        """Set the scale that `calibrate` gave."""
        ...

    def apply_scale(self, score: Score) -> Score:
        """The score with its value on the scale, from its measures; as it is without a scale."""
        ...


@runtime_checkable
class HasGoldAnswers(Protocol):
    """A task with gold answers."""

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """Each item's prompt, as the task puts it, with its gold answer.

        Raises:
            UserError: A part of the task has no gold answers.
        """
        ...


@runtime_checkable
class HasSources(Protocol):
    """A task (or a scorer) whose values depend on code or weights that its settings only name."""

    def source_digests(self) -> Mapping[str, str]:
        """A digest of each of them, by the key of the setting and a word: "function source".

        Raises:
            UserError: One is not there.
        """
        ...


def has_gold_answers(task: Task) -> bool:
    """Whether the task, and each part of a mixture, is `Supervised`."""
    parts = getattr(task, "tasks", {})
    return isinstance(task, HasGoldAnswers) and all(map(has_gold_answers, parts.values()))


def mean_score(scores: Sequence[Score]) -> float:
    """The mean value, which is the utility of most tasks; in the scores' unit.

    Raises:
        ValueError: There is no score.
    """
    if not scores:
        raise ValueError("the mean of no scores")
    return fmean(score.value for score in scores)


def metric_task(task: Task) -> Task:
    """The task by its own measure, whatever signal it is searched by."""
    found: Task = getattr(task, "metric_task", task)
    return found


def unparsed_rate(scores: Sequence[Score]) -> float:
    """The share of answers, 0 to 1, from which nothing could be read; 0 of no scores.

    Beside an accuracy it tells a model that does not know from one that is not understood.
    """
    return sum(score.answer is None for score in scores) / len(scores) if scores else 0.0
