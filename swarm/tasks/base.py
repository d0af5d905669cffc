"""A task maps a model to a number; it knows nothing of searches, folders or devices."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple

from swarm.errors import UserError
from swarm.models.base import Completion, Example, Request, prompt_text

SPLITS = ("dev", "test")

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
    """

    value: float
    answer: str | None
    text: str = ""
    part: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)


class Candidate(NamedTuple):
    """A scored answer to an item.

    Attributes:
        text: As the model generated it.
        ends: Whether the text has to end after it.
        value: Its score, scaled from 0, the item's worst, to 1, the best.
    """

    text: str
    ends: bool
    value: float


TaskRun = Generator[list[Request], list[Completion], list[Score]]
"""A running task: yields requests, receives their completions, returns one score per item."""


class Setup:
    """What a task or a scorer needs besides its settings; nothing by default.

    Attributes:
        needs_setup: Whether scores need a model, a key or the user's code, which may cost time or
            money.
    """

    needs_setup: bool = False

    def check(self) -> None:
        """Check quickly, before anything is written, that all requirements are met.

        Raises:
            UserError: A key, a package or a file is missing.
        """

    def open(self, device: str) -> None:
        """Load or connect, once per worker; `device` is the device of the worker's model."""

    def source_digests(self) -> Mapping[str, str]:
        """Return a digest of each source of the scores that the settings only name, by its key.

        For example "function source": the identity of a run contains it.

        Raises:
            UserError: A source is missing.
        """
        return {}


class Task(Setup, ABC):
    """Items of two splits, the requests for them, and the scoring of the answers.

    A subclass defines `items`, `run` and `grade`; everything else has a neutral default, which a
    subclass may replace by a property.

    Attributes:
        name: The name in records and reports.
        about: What was understood of a file whose format was not given; else empty.
        chat: Whether prompts are user turns in the model's chat template; "auto" until a search has
            decided.
        max_prompt_tokens: Items with a longer prompt are left out; `None` leaves none out.
        highest: Upper bound of the items' values, whose mean is the utility; `None` if there is
            none.
        lowest: Lower bound of the items' values.
        votes: Whether several models can vote on the answers; not on free texts.
        constants: Answers, besides the gold ones, that a model might give to every item
            ("abstain").
        rounds: Number of rounds of requests about an item; prompts are routed in tasks of one
            round.
        signal: What a search maximizes, if the task has a choice; else empty.
        tasks: The parts of a mixture by name; empty for any other task.
        black_box: Whether gold answers are texts to imitate, while a scorer values other texts too.
    """

    name: str
    about: str = ""
    chat: bool | Literal["auto"] = False
    max_prompt_tokens: int | None = None
    highest: float | None = None
    lowest: float = 0.0
    votes: bool = True
    constants: Sequence[str] = ()
    rounds: int = 1
    signal: str = ""
    tasks: "Mapping[str, Task]" = {}  # noqa: RUF012 - never written
    black_box: bool = False

    @abstractmethod
    def items(self, split: str) -> Sequence[Item]:
        """Return the items of "dev" or "test"; the first call reads and checks the file.

        Raises:
            UserError: The file is missing or not in the task's format, or the split is empty.
        """

    @abstractmethod
    def run(self, items: Sequence[Item]) -> TaskRun:
        """Request answers to all items and score them, in the same way for dev and test."""

    @abstractmethod
    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of a parsed answer, from a single model or from a vote."""

    def utility(self, scores: Sequence[Score]) -> float:
        """Return the number that a search maximizes, in the scores' unit: the mean value."""
        return fmean(score.value for score in scores)

    def replace_items(self, split: str, items: Sequence[Item]) -> None:
        """Replace a split's items from now on, by a part of them."""
        raise UserError(f"task.max_prompt_tokens: task {self.name} cannot leave items out")

    @property
    def metric_task(self) -> "Task":
        """The task on the same items by its metric, where a search maximizes another signal."""
        return self

    @property
    def gold_error(self) -> str | None:
        """Why there are no gold answers, whose loss a gradient can descend; `None` if there are."""
        return f"task {self.name} has no gold answers to compute a gradient from"

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """Return each item's prompt together with its gold answer.

        Raises:
            UserError: There are none.
        """
        raise UserError(str(self.gold_error))

    @property
    def scores_error(self) -> str | None:
        """Why scored texts cannot teach; `None` if an item has one request, for a text."""
        item = self.items("dev")[0]
        requests = first_round(self, [item])
        if self.rounds == 1 and len(requests) == 1 and not requests[0].choices:
            return None
        return f"task {self.name} has no single text as the answer to an item"

    def resolve(self, item: Item) -> "tuple[Task, Item]":
        """Return the task that an item belongs to, and the item there; a mixture's is a part's."""
        return self, item

    def scored_part(self, item: Item, text: str) -> tuple[str, bool]:
        """Return the part of a generated text that its score depends on, and whether it ends there.

        A text that `Request.stop_check` did not end is one that the model has ended.
        """
        check = first_round(self, [item])[0].stop_check
        return text, check is None or not check(text)

    def scored_example(self, item: Item, candidates: Sequence[Candidate]) -> Example:
        """Return an item's prompt with scored answers."""
        (request,) = first_round(self, [item])
        texts, ends, values = zip(*candidates, strict=True)
        relative, limit = not {*values} <= {0.0, 1.0}, request.token_limit
        return Example(
            request.prompt, texts, values=values, relative=relative, ends=ends, limit=limit
        )

    def calibrate(self, scores: Sequence[Score]) -> Mapping[str, Any] | None:
        """Set the scale of the values from the dev scores of all experts, and return it.

        Returns:
            The scale, for the record; `None` if values have a scale of their own.
        """
        return None

    def restore_scale(self, scale: Mapping[str, Any]) -> None:
        """Set a scale that `calibrate` returned."""

    def apply_scale(self, score: Score) -> Score:
        """Return the score with its value on the scale; unchanged without a scale."""
        return score

    def check_scale(self, alone: bool = True) -> None:
        """Check that values are meaningful where no experts set the scale, as in an evaluation.

        Args:
            alone: The task is no part of a mixture.

        Raises:
            UserError: They are not.
        """


class SplitTask(Task):
    """A task that loads a split when its items are read for the first time."""

    def __post_init__(self) -> None:
        self._splits: dict[str, tuple[Item, ...]] = {}

    @abstractmethod
    def load_items(self, split: str) -> Sequence[Item]:
        """Return the items of "dev" or "test"; see `items`."""

    def items(self, split: str) -> tuple[Item, ...]:
        if split not in SPLITS:
            raise UserError(f"split={split}: must be one of {', '.join(SPLITS)}")
        if split not in self._splits:
            self.replace_items(split, self.load_items(split))
        return self._splits[split]

    def replace_items(self, split: str, items: Sequence[Item]) -> None:
        self._splits[split] = tuple(items)


def first_round(task: Task, items: Sequence[Item]) -> list[Request]:
    """Return the requests of a task's first round."""
    game = task.run(items)
    requests = next(game, [])
    game.close()
    return requests


def first_prompts(task: Task, items: Sequence[Item]) -> list[list[str]]:
    """Return the different prompts of each item's first round, mostly one."""
    rounds = (first_round(task, [item]) for item in items)
    return [list(dict.fromkeys(prompt_text(one.prompt) for one in mine)) for mine in rounds]


def prompt_form(task: Task) -> str:
    """Return which of `swarm.models.base.PROMPT_FORMS` the task's first prompt has."""
    requests = first_round(task, task.items("dev")[:1])
    return "plain" if any(isinstance(one.prompt, str) for one in requests) else "chat"


def unparsed_rate(scores: Sequence[Score]) -> float:
    """Return the share of unparsed answers, 0 to 1; 0 without scores.

    Next to an accuracy, it separates wrong answers from answers that could not be parsed.
    """
    return sum(score.answer is None for score in scores) / len(scores) if scores else 0.0
