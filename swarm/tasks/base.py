"""Protocols of a task, which maps a model to a number and is independent of search and devices."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from swarm.models.base import Completion, Example, Request, prompt_text

Item = Mapping[str, Any]
"""One example as in the data file; its "id" is unique in its split."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one answer to one item.

    Attributes:
        value: Higher is better; 0 or 1 where an answer is right or wrong.
        answer: The answer parsed from the text, in the form of the gold answer; `None` if parsing
            failed, empty if there was no text to parse.
        text: The model's text, for the record.
        part: In a mixture of tasks, the part that the item belongs to; else empty.
        measures: Further measurements by name, for the record: a reward, a length.
        cut: Whether the text ends at the maximum number of tokens, before its answer was final.
    """

    value: float
    answer: str | None
    text: str = ""
    part: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)
    cut: bool = False


TaskRun = Generator[list[Request], list[Completion], list[Score]]
"""A running task: yields requests, receives their completions, returns one score per item."""


class Task(Protocol):
    """Items of two splits, the requests for them, and the scoring of the answers.

    A task may have these optional attributes and protocols:

    - `highest: float`: the utility is the mean of the items' values (`mean_score`), each of them at
      most `highest`; required by an exact race.
    - `lowest: float`: lower bound of the items' values; 0 by default.
    - `votes = False`: models cannot vote on the answers (free text).
    - `constants: Sequence[str]`: answers, besides the gold ones, that a model might give to every
      item and that have a value ("abstain").
    - `metric_task: Task`: the same task and items scored by the task's metric, where a search
      optimizes another signal; else the task itself. See the function `metric_task`.
    - `RequiresSetup`: needs a key, a model or a connection.
    - `HasScoreScale`: its scale is measured on the pool's experts.
    - `HasGoldAnswers`: has gold answers, whose loss a gradient can descend.
    - `gold_error: str | None`: why items of this `HasGoldAnswers` have no gold answers; `None` if
      they have.
    - `black_box = True`: the loss of the gold answers is not the utility: they are reference texts,
      to be imitated, while a scorer values other texts too.
    - `HasSources`: its values depend on code or weights that its settings only name.
    - `rounds: int`: number of rounds of requests about an item; 1 by default. Prompts are routed
      (pool.routes) in tasks of one round only.
    """

    name: str

    def items(self, split: str) -> Sequence[Item]:
        """Return the items of "dev" or "test"; the first call reads and checks the file.

        Raises:
            UserError: The file is missing or not in the task's format, or the split is empty.
        """
        ...

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Request answers to all items and score them, in the same way for dev and test."""
        ...

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of a parsed answer, from a single model or from a vote."""
        ...

    def utility(self, scores: Sequence[Score]) -> float:
        """Return the number that a search maximizes, in the scores' unit."""
        ...


@runtime_checkable
class RequiresSetup(Protocol):
    """A task (or a scorer) with a resource to be checked and opened."""

    def check(self) -> None:
        """Check quickly, before anything is written, that all requirements are met.

        Raises:
            UserError: A key, a package or a file is missing.
        """
        ...

    def open(self, device: str) -> None:
        """Load or connect, once per worker; `device` is the device of the worker's model."""
        ...


@runtime_checkable
class HasScoreScale(Protocol):
    """A task whose scale of values is set by the experts' dev answers."""

    def calibrate(self, scores: Sequence[Score]) -> Mapping[str, Any]:
        """Set the scale from the dev scores of all experts, and return it for the record."""
        ...

    def restore_scale(self, scale: Mapping[str, Any]) -> None:
        """Set a scale that `calibrate` returned."""
        ...

    def apply_scale(self, score: Score) -> Score:
        """Return the score with its value on the scale; unchanged without a scale."""
        ...


@runtime_checkable
class HasGoldAnswers(Protocol):
    """A task with gold answers."""

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """Return each item's prompt together with its gold answer.

        Raises:
            UserError: A part of the task has no gold answers.
        """
        ...


@runtime_checkable
class HasSources(Protocol):
    """A task (or a scorer) whose values depend on code or weights that its settings only name."""

    def source_digests(self) -> Mapping[str, str]:
        """Return a digest of each source, by the setting's key and a label: "function source".

        Raises:
            UserError: A source is missing.
        """
        ...


def first_prompts(task: Task, items: Sequence[Item]) -> list[list[str]]:
    """Return the different prompts of each item's first round, mostly one."""
    found = []
    for item in items:
        game = task.run([item])
        prompts = [prompt_text(request.prompt) for request in next(game)]
        game.close()
        found.append(list(dict.fromkeys(prompts)))
    return found


def prompt_form(task: Task) -> str:
    """Return which of `swarm.models.base.PROMPT_FORMS` the task's first prompt has."""
    game = task.run(task.items("dev")[:1])
    requests = next(game, [])
    game.close()
    return "plain" if any(isinstance(one.prompt, str) for one in requests) else "chat"


def gold_answers_error(task: Task) -> str | None:
    """Return why a task, or a part of a mixture, has no gold answers; `None` if it has."""
    for part in getattr(task, "tasks", {}).values():
        if (wrong := gold_answers_error(part)) is not None:
            return wrong
    if not isinstance(task, HasGoldAnswers):
        return f"task {task.name} has no gold answers to compute a gradient from"
    wrong = getattr(task, "gold_error", None)
    return None if wrong is None else f"task {task.name} has no gold answers: {wrong}"


def is_black_box(task: Task) -> bool:
    """Return whether the loss of the gold answers of a task, or of a part, is not its utility."""
    parts = getattr(task, "tasks", {})
    return getattr(task, "black_box", False) or any(map(is_black_box, parts.values()))


def mean_score(scores: Sequence[Score]) -> float:
    """Return the mean value, the utility of most tasks, in the scores' unit.

    Raises:
        ValueError: `scores` is empty.
    """
    if not scores:
        raise ValueError("the mean of no scores")
    return fmean(score.value for score in scores)


def metric_task(task: Task) -> Task:
    """Return the task scored by its metric, independent of its search signal."""
    found: Task = getattr(task, "metric_task", task)
    return found


def unparsed_rate(scores: Sequence[Score]) -> float:
    """Return the share of unparsed answers, 0 to 1; 0 without scores.

    Next to an accuracy, it separates wrong answers from answers that could not be parsed.
    """
    return sum(score.answer is None for score in scores) / len(scores) if scores else 0.0
