"""Free text: each item is a prompt, and a scorer assigns values to a model's texts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Literal

from swarm._util.settings import Positive, Text, checked
from swarm.errors import UserError
from swarm.models.base import Example, Message, Request
from swarm.tasks.base import Item, Score, Setup, TaskRun
from swarm.tasks.dataset import DataTask, missing_field_error, text_field_error
from swarm.tasks.questions import Prompt, format_continuation


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
        chat: Send the prompt as one user turn through the model's chat template; "auto" as a search
            decides (`swarm.loop.prompt_form`).
        max_new_tokens: Maximum number of generated tokens.
        reference: Field of the dev items that contains a reference text: one worth imitating, such
            as the preferred answer or a canonical solution; of a list the first. A search may
            descend the loss of these texts, while the scorer alone decides what is better. `None`
            is "reference" if all dev items have it; a field that is named has to be in all of them.
        constants: Texts that a model might give to every item: the best on dev is a baseline.

    The others are those of `DataTask`.
    """

    scorer: Scorer = field(kw_only=True)
    template: Text = "{prompt}"
    chat: bool | Literal["auto"] = False
    max_new_tokens: Positive = 200
    reference: str | None = None
    constants: Sequence[Text] = ()

    black_box = True

    def __post_init__(self) -> None:
        super().__post_init__()
        shown = f"task.template={self.template!r}"
        try:
            names = [name for _, name, _, _ in Formatter().parse(self.template) if name is not None]
        except ValueError as error:
            raise UserError(f"{shown}: is not a valid template: {error}") from None
        if not names or not all(name.isidentifier() for name in names):
            raise UserError(f"{shown}: must contain fields of the items, such as {{question}}")
        self.fields = tuple(dict.fromkeys(names))
        if self.reference in self.fields:
            raise UserError(f"task.reference={self.reference}: must not be a field of the template")
        self._reference = self.reference or "reference"
        self.highest, self.votes = self.scorer.highest, self.scorer.votes
        self.needs_setup = self.scorer.needs_setup

    def check(self) -> None:
        self.scorer.check()

    def open(self, device: str) -> None:
        self.scorer.open(device)

    def source_digests(self) -> Mapping[str, str]:
        return self.scorer.source_digests()

    def item_error(self, item: Item) -> str | None:
        errors = (text_field_error(item, name) for name in self.fields)
        return next(filter(None, errors), None) or self.scorer.item_error(item)

    def items(self, split: str) -> tuple[Item, ...]:
        if split == "dev" and self.reference and (wrong := self.gold_error):
            raise UserError(f"task.reference={self.reference}: {wrong}")
        return super().items(split)

    @property
    def gold_error(self) -> str | None:
        """Why a dev item has no reference text; `None` if all have one."""
        name = self._reference
        if name in self.fields:
            return f'task {self.name} has no gold answers: "{name}" is part of the prompt'
        items = super().items("dev")
        lacking = [(item, wrong) for item in items if (wrong := self._reference_error(item))]
        if not lacking:
            return None
        first, wrong = lacking[0]
        have = f"only {len(items) - len(lacking)}" if len(lacking) < len(items) else "none"
        have += f' of {len(items)} dev items have a text in "{name}"'
        return f"task {self.name} has no gold answers: {have} (item {first['id']!r}: {wrong})"

    def _reference_error(self, item: Item) -> str | None:
        """Return why an item has no reference text, or `None`."""
        if self._reference not in item:
            return missing_field_error(item, self._reference)
        value = item[self._reference]
        first = value[0] if isinstance(value, list) and value else value
        if type(first) not in (str, int, float):
            return "neither a text, a number, nor a list of these"
        return None if str(first).strip() else "it is empty"

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `Task.gold_examples`: the reference text, and the end of the text."""
        examples = []
        for item in items:
            prompt, value = self.build_request(item).prompt, item[self._reference]
            # Indentation belongs to a text that is code.
            text = str(value[0] if isinstance(value, list) else value).rstrip()
            answer = text if text[0].isspace() else format_continuation(prompt, text)
            examples.append(Example(prompt, (answer,), final=True))
        return examples

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
        prompt: Prompt = (Message("user", text),) if self.chat is True else text
        return Request(prompt, self.max_new_tokens, stop_check=self.scorer.build_stop_check(item))
