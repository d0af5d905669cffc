"""Free text: each item is a prompt, and a scorer assigns values to a model's texts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from string import Formatter

from swarm._util.settings import Positive, Text, checked
from swarm.errors import UserError
from swarm.models.base import Example, Message, Request
from swarm.tasks.base import Item, Score, Setup, TaskRun
from swarm.tasks.dataset import DataTask, missing_field_error, text_field_error
from swarm.tasks.questions import Prompt, format_continuation

REFERENCE_FIELD = "reference"
"""Field of the items' reference texts, unless `FreeText(reference=...)` names another."""


class Scorer(Setup, ABC):
    """Scores texts: a rule, a classifier, a reward model or a judge.

    Attributes:
        highest: Upper bound of the values; `None` if there is none.
        votes: Whether models can vote on the answers.
    """

    highest: float | None = None
    votes = False

    @abstractmethod
    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        """Return one score per text, in order; never raises because of a text's content.

        Each score's `text` is the text; its `answer` is the parsed answer, `None` if there is none.
        """

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of a parsed answer; by default it is scored as a text."""
        return self.score([item], [answer or ""])[0].value

    def item_error(self, item: Item) -> str | None:
        """Return an item's error, besides those of its prompt, or `None`."""
        return None

    def build_stop_check(self, item: Item) -> Callable[[str], bool] | None:
        """Return a check whether more text can change the score; `None` if it always can."""
        return None


@checked("task")
@dataclass(eq=False)
class FreeText(DataTask):
    """Items with a prompt, `{"prompt": ...}` or the fields of `template`; a text is an answer.

    Args:
        scorer: Assigns a value to an answer.
        template: The prompt, with the item's fields in braces.
        chat: Send the prompt as one user turn through the model's chat template.
        max_new_tokens: Maximum number of generated tokens.
        reference: Field of the dev items that contains a reference text: one worth imitating, such
            as the preferred answer or a canonical solution; of a list the first. A search may
            descend the loss of these texts, while the scorer alone decides what is better. `None`
            is "reference" if all dev items have it; a field that is named has to be in all of them.

    The others are those of `DataTask`.
    """

    scorer: Scorer = field(kw_only=True)
    template: Text = "{prompt}"
    chat: bool = False
    max_new_tokens: Positive = 200
    reference: str | None = None

    black_box = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fields = _template_fields(self.template)
        if self.reference in self.fields:
            raise UserError(f"task.reference={self.reference}: must not be a field of the template")

    @property
    def highest(self) -> float | None:
        """See `Task.highest`: the scorer's."""
        return self.scorer.highest

    @property
    def votes(self) -> bool:
        """See `Task.votes`: the scorer's."""
        return self.scorer.votes

    @property
    def needs_setup(self) -> bool:
        """See `Setup.needs_setup`: the scorer's."""
        return self.scorer.needs_setup

    def check(self) -> None:
        """Check the scorer; see `Setup.check`."""
        self.scorer.check()

    def open(self, device: str) -> None:
        """Open the scorer; see `Setup.open`."""
        self.scorer.open(device)

    def source_digests(self) -> dict[str, str]:
        """Return the scorer's; see `Setup.source_digests`."""
        return dict(self.scorer.source_digests())

    def item_error(self, item: Item) -> str | None:
        """See `DataTask.item_error`."""
        errors = (text_field_error(item, name) for name in self.fields)
        return next(filter(None, errors), None) or self.scorer.item_error(item)

    def items(self, split: str) -> tuple[Item, ...]:
        """See `Task.items`."""
        if split == "dev" and self.reference and (wrong := self.gold_error):
            raise UserError(f"task.reference={self.reference}: {wrong}")
        return super().items(split)

    @property
    def gold_error(self) -> str | None:
        """Why a dev item has no reference text; `None` if all have one."""
        name = self.reference or REFERENCE_FIELD
        if name in self.fields:
            return f'task {self.name} has no gold answers: "{name}" is part of the prompt'
        items = super().items("dev")
        lacking = [(item, wrong) for item in items if (wrong := _reference_error(item, name))]
        if not lacking:
            return None
        first, wrong = lacking[0]
        have = f"only {len(items) - len(lacking)}" if len(lacking) < len(items) else "none"
        have += f' of {len(items)} dev items have a text in "{name}"'
        return f"task {self.name} has no gold answers: {have} (item {first['id']!r}: {wrong})"

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `Task.gold_examples`: the reference text, and the end of the text."""
        return [self._reference_example(item) for item in items]

    def _reference_example(self, item: Item) -> Example:
        prompt = self.build_request(item).prompt
        value = item[self.reference or REFERENCE_FIELD]
        # Indentation belongs to a text that is code.
        text = str(value[0] if isinstance(value, list) else value).rstrip()
        answer = text if text[0].isspace() else format_continuation(prompt, text)
        return Example(prompt, (answer,), final=True)

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Request a text for every item in one round."""
        completions = yield [self.build_request(item) for item in items]
        return self.scorer.score(items, [completion.text for completion in completions])

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of a parsed answer; see `Scorer.grade`."""
        return self.scorer.grade(item, answer)

    def build_request(self, item: Item) -> Request:
        """Return the request for one item: the template filled in with its fields."""
        text = self.template.format_map(item)
        prompt: Prompt = (Message("user", text),) if self.chat else text
        return Request(prompt, self.max_new_tokens, stop_check=self.scorer.build_stop_check(item))


def _reference_error(item: Item, name: str) -> str | None:
    """Return why an item has no reference text in a field, or `None`."""
    if name not in item:
        return missing_field_error(item, name)
    value = item[name]
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, bool) or not isinstance(first, (str, int, float)):
        return "neither a text, a number, nor a list of these"
    return None if str(first).strip() else "it is empty"


def _template_fields(template: str) -> tuple[str, ...]:
    """Return the field names of a template."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"task.template={template!r}: is not a valid template: {error}") from None
    fields = tuple(dict.fromkeys(name for _, name, _, _ in parts if name is not None))
    if not fields or not all(name.isidentifier() for name in fields):
        raise UserError(
            f"task.template={template!r}: must contain fields of the items, such as {{question}}"
        )
    return fields
