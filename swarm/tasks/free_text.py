"""Free text: each item is a prompt, and a scorer assigns values to a model's texts."""

from collections.abc import Callable, Sequence
from string import Formatter
from typing import Protocol, runtime_checkable

from swarm._util import validation
from swarm.errors import UserError
from swarm.models.base import Example, Message, Request
from swarm.tasks.base import Item, RequiresSetup, Score, TaskRun, mean_score
from swarm.tasks.dataset import DataFile, DataFiles, DataFileTask, text_field_error
from swarm.tasks.search_signal import format_continuation

REFERENCE_FIELD = "reference"
"""Field of the items' reference texts, unless `FreeText(reference=...)` names another."""


class Scorer(Protocol):
    """Scores texts: a rule, a classifier, a reward model or a judge.

    A scorer may also be `swarm.tasks.base.RequiresSetup`, with `check` and `open`, a `Grader` and
    `SupportsEarlyStop`.

    Attributes:
        highest: Upper bound of the values; `None` if there is none.
        votes: Whether models can vote on the answers.
    """

    highest: float | None
    votes: bool

    def item_error(self, item: Item) -> str | None:
        """Return an item's error, besides those of its prompt, or `None`."""
        ...

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        """Return one score per text, in order; never raises because of a text's content.

        Each score's `text` is the text; its `answer` is the parsed answer, `None` if there is none.
        """
        ...


@runtime_checkable
class Grader(Protocol):
    """A scorer whose parsed answers are not texts that it could score again."""

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of a parsed answer, from a single model or from a vote."""
        ...


@runtime_checkable
class SupportsEarlyStop(Protocol):
    """A scorer that can detect when more text cannot change the score, so that a model may stop."""

    def build_stop_check(self, item: Item) -> Callable[[str], bool] | None:
        """Return a check of one item's text so far; `None` if only the end of the text decides."""
        ...


class FreeText(DataFileTask):
    """Items with a prompt, `{"prompt": ...}` or the fields of `template`; a text is an answer.

    Args:
        name: The task's name.
        scorer: Assigns a value to an answer.
        file: Path of the data file, or of one for each split; `None` is data/eval/NAME.json.
        dev_limit: Maximum number of dev items; `None` is all (see `DataFile` for the order).
        test_limit: Maximum number of test items; `None` is all.
        ids: "file" or "position" (see `DataFile`).
        dedupe: Divide items that are in dev and in test alike between them (see `DataFile`).
        template: The prompt, with the item's fields in braces.
        chat: Send the prompt as one user turn through the model's chat template.
        max_new_tokens: Maximum number of generated tokens.
        too_long: Treatment of items that exceed the model's context (see `DataFile`).
        reference: Field of the dev items that contains a reference text: one worth imitating, such
            as the preferred answer or a canonical solution; of a list the first. A search may
            descend the loss of these texts, while the scorer alone decides what is better. `None`
            is "reference" if all dev items have it; a field that is named has to be in all of them.

    Raises:
        UserError: A value is not allowed.
    """

    black_box = True

    def __init__(
        self,
        name: str,
        scorer: Scorer,
        file: DataFiles | None = None,
        dev_limit: int | None = None,
        test_limit: int | None = None,
        ids: str = "file",
        dedupe: bool = True,
        template: str = "{prompt}",
        chat: bool = False,
        max_new_tokens: int = 200,
        too_long: str = "refuse",
        reference: str | None = None,
    ) -> None:
        self.scorer = scorer
        self.template, self.fields = template, _template_fields(template)
        named = validation.check_optional_text("reference", reference)
        if named in self.fields:
            raise UserError(f"task.reference={named}: must not be a field of task.template.")
        self.reference, self.reference_field = named, named or REFERENCE_FIELD
        self._references_of: Sequence[Item] | None = None
        self._gold_error: str | None = None
        limits = (dev_limit, test_limit)
        self.data = DataFile(
            name, file, *limits, ids, self._item_error, dedupe, self.fields, too_long=too_long
        )
        self.name = self.data.name
        self.chat = validation.check_bool("chat", chat)
        self.max_new_tokens = validation.check_positive_int("max_new_tokens", max_new_tokens)
        self.votes = scorer.votes
        if scorer.highest is not None:
            self.highest = scorer.highest

    def check(self) -> None:
        """Check the scorer if it has setup; see `RequiresSetup.check`."""
        if isinstance(self.scorer, RequiresSetup):
            self.scorer.check()

    def open(self, device: str) -> None:
        """Open the scorer if it has setup; see `RequiresSetup.open`."""
        if isinstance(self.scorer, RequiresSetup):
            self.scorer.open(device)

    def items(self, split: str) -> Sequence[Item]:
        """Return the items of "dev" or "test"; see `Task.items`."""
        if split == "dev" and self.reference and (wrong := self.gold_error):
            raise UserError(f"task.reference={self.reference}: {wrong}.")
        return super().items(split)

    @property
    def gold_error(self) -> str | None:
        """Why a dev item has no reference text; `None` if all have one."""
        field = self.reference_field
        if field in self.fields:
            return f'"{field}" is part of the prompt'
        items = self.data.items("dev")
        if self._references_of is not items:
            self._references_of, self._gold_error = items, _missing_references(items, field)
        return self._gold_error

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `swarm.tasks.base.HasGoldAnswers`: the reference text, and the end of the text."""
        return [self._reference_example(item) for item in items]

    def _reference_example(self, item: Item) -> Example:
        prompt = self.build_request(item).prompt
        value = item[self.reference_field]
        # Indentation belongs to a text that is code.
        text = str(value[0] if isinstance(value, list) else value).rstrip()
        answer = text if text[0].isspace() else format_continuation(prompt, text)
        return Example(prompt, (answer,), final=True)

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Request a text for every item in one round."""
        completions = yield [self.build_request(item) for item in items]
        return self.scorer.score(items, [completion.text for completion in completions])

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of a parsed answer; by default it is scored as a text."""
        if isinstance(self.scorer, Grader):
            return self.scorer.grade(item, answer)
        return self.scorer.score([item], [answer or ""])[0].value

    def utility(self, scores: Sequence[Score]) -> float:
        """Return the mean value, in the scorer's unit."""
        return mean_score(scores)

    def build_request(self, item: Item) -> Request:
        """Return the request for one item."""
        text = self.build_prompt(item)
        decided = (
            self.scorer.build_stop_check(item)
            if isinstance(self.scorer, SupportsEarlyStop)
            else None
        )
        prompt = (Message("user", text),) if self.chat else text
        return Request(prompt, self.max_new_tokens, stop_check=decided)

    def build_prompt(self, item: Item) -> str:
        """Return the template filled in with the item's fields."""
        return self.template.format_map(item)

    def _item_error(self, item: Item) -> str | None:
        for field in self.fields:
            if (error := text_field_error(item, field)) is not None:
                return error
        return self.scorer.item_error(item)


def _missing_references(items: Sequence[Item], field: str) -> str | None:
    """Return how many items have no reference text in a field, or `None`."""
    lacking = [(item, wrong) for item in items if (wrong := _reference_error(item, field))]
    if not lacking:
        return None
    first, wrong = lacking[0]
    have = "none" if len(lacking) == len(items) else f"only {len(items) - len(lacking)}"
    what = f'{have} of {len(items)} dev items have a text in "{field}"'
    return f"{what} (item {first['id']!r}: {wrong})"


def _reference_error(item: Item, field: str) -> str | None:
    """Return why an item has no reference text in a field, or `None`."""
    if field not in item:
        return f'it has no "{field}"'
    value = item[field]
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, bool) or not isinstance(first, (str, int, float)):
        return "neither a text, a number, nor a list of these"
    return None if str(first).strip() else "it is empty"


def _template_fields(template: object) -> tuple[str, ...]:
    """Return the field names of a template."""
    try:
        parts = list(Formatter().parse(validation.check_text("template", template)))
    except ValueError as error:
        raise UserError(f"task.template: {template!r} is not a valid template: {error}.") from None
    fields = tuple(dict.fromkeys(name for _, name, _, _ in parts if name is not None))
    if not fields or not all(name.isidentifier() for name in fields):
        raise UserError(
            f'task.template: {template!r} must contain fields of the items, e.g. "{{question}}".'
        )
    return fields
