"""Multiple choice: each item is a question with lettered choices, one of which is right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Literal

from swarm._util.settings import Text, checked
from swarm.errors import UserError
from swarm.models.base import Completion, Example, Request
from swarm.tasks import parsing
from swarm.tasks.base import Item
from swarm.tasks.dataset import missing_field_error, text_field_error
from swarm.tasks.questions import Prompt, QuestionTask, format_continuation

QUESTION_FIELD = "{question}"
"""Placeholder of an item's question in a template."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@checked("task")
@dataclass(eq=False)
class MultipleChoice(QuestionTask):
    """Items `{"question", "choices": {letter: text}, "answer": letter}`; an answer is a letter.

    The prompt is the original's (Model Swarms, evaluate.py): the instruction, "Question: ...", a
    line "A: ..." for each choice, "The answer is"; a file's "icl_prompt" comes first.

    With `scoring` "text" the prompt shows no choices: it is `template` with the item's question.
    The answer is the choice whose text has the highest log probability per character after the
    prompt, `acc_norm` of the lm-evaluation-harness (Gao et al., doi 10.5281/zenodo.5371628). White
    space around a choice is dropped, and one space is put before it unless the prompt ends in white
    space or is a chat turn; the length counts the characters without that space. The instruction
    and a file's "icl_prompt" concern letters and are left out.

    Args:
        scoring: "generate" generates a text and parses a letter from it; "logits" takes the letter
            of the highest log probability, in one pass and never unparsed; "text" the choice of the
            highest log probability per character, without showing the choices.
        parser: "anchored" is the rule of `swarm.tasks.parsing`; "original" the original's, which
            reads "Answer: C" as A.
        template: The prompt with `scoring` "text"; `{question}` is replaced by the item's question.

    The others are those of `QuestionTask`.
    """

    instruction: str | None = "Please choose an option that best answers the question."
    scoring: Literal["generate", "logits", "text"] = "generate"
    parser: Literal["anchored", "original"] = "anchored"
    template: Text = "Question: {question}\nAnswer:"

    def __post_init__(self) -> None:
        super().__post_init__()
        if QUESTION_FIELD not in self.template:
            raise UserError(f"task.template={self.template!r}: must contain {QUESTION_FIELD}")

    def item_error(self, item: Item) -> str | None:
        return choice_item_error(item)

    def grade(self, item: Item, answer: str | None) -> float:
        """Return 1 for the right letter, else 0."""
        return float(answer == item["answer"])

    def build_request(self, item: Item) -> Request:
        """Return the request for one item."""
        prompt = self._build_prompt(item)
        if self.scoring != "generate":
            return Request(prompt, 0, self._build_options(item, prompt))
        original = self.parser == "original"
        final = parsing.is_original_letter_final if original else parsing.is_letter_final
        stop = partial(final, dict(item["choices"]))
        return Request(prompt, self.max_new_tokens, stop_check=stop)

    def gold_text(self, item: Item) -> str:
        """Return the right letter, or with `scoring` "text" the right choice's text."""
        gold: str = item["answer"]
        return item["choices"][gold].strip() if self.scoring == "text" else gold

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `Task.gold_examples`: the right choice's share among all choices.

        A choice is its letter; with `scoring` "text" it is its text, and the shares are those of
        the log probabilities per character (nats per character, softmax over the choices).
        """
        examples = []
        for item in items:
            prompt = self._build_prompt(item)
            gold = list(item["choices"]).index(item["answer"])
            units = tuple(map(float, self._lengths(item))) if self.scoring == "text" else ()
            examples.append(Example(prompt, self._build_options(item, prompt), gold, units=units))
        return examples

    def _build_prompt(self, item: Item) -> Prompt:
        if self.scoring == "text":
            return self.format_prompt(self.template.replace(QUESTION_FIELD, item["question"]))
        return self.format_prompt(build_choice_prompt(item, self.instruction))

    def _build_options(self, item: Item, prompt: Prompt) -> tuple[str, ...]:
        """Return each choice as a continuation of the prompt."""
        choices = item["choices"]
        texts = [one.strip() for one in choices.values()] if self.scoring == "text" else choices
        return tuple(format_continuation(prompt, text) for text in texts)

    def _lengths(self, item: Item) -> list[int]:
        """Return the units by which the log probabilities of the choices are divided."""
        texts = item["choices"].values()
        return [len(text.strip()) if self.scoring == "text" else 1 for text in texts]

    def read_answer(self, item: Item, completion: Completion) -> str | None:
        """Return the letter that a completion picks, or `None`.

        Raises:
            UserError: Choices were to be scored and the model returned no log probabilities.
        """
        choices = item["choices"]
        if self.scoring == "generate":
            original = self.parser == "original"
            extract = parsing.extract_letter_original if original else parsing.extract_letter
            return extract(completion.text, choices)
        if len(completion.logprobs) != len(choices):
            raise UserError(f"""task.scoring={self.scoring} needs a model that returns log
                probabilities of choices; this one does not: use task.scoring=generate""")
        rows = zip(completion.logprobs, self._lengths(item), choices, strict=True)
        known = [
            (logprob / length, letter) for logprob, length, letter in rows if not isnan(logprob)
        ]
        return max(known, key=lambda pair: pair[0])[1] if known else None


def build_choice_prompt(item: Item, instruction: str | None) -> str:
    """Return the prompt that ends in "The answer is", for any task with choices."""
    lines = [item["icl_prompt"]] if "icl_prompt" in item else []
    lines += [instruction] if instruction else []
    lines += [f"Question: {item['question']}"]
    lines += [f"{letter}: {text}" for letter, text in item["choices"].items()]
    return "\n".join([*lines, "The answer is"])


def choice_item_error(item: Item) -> str | None:
    """Return the error of a multiple-choice item, or `None`."""
    if error := text_field_error(item, "question"):
        return error
    choices = item.get("choices")
    if not isinstance(choices, Mapping) or len(choices) < 2:
        return 'its "choices" are not an object with at least two entries'
    for letter, text in choices.items():
        if len(letter) != 1 or letter not in LETTERS:
            return f'a key of its choices is not one capital letter: "{letter}"'
        if not isinstance(text, str):
            return f'one of its choices is not a string: "{letter}"'
        if not text.strip():
            return f"it has an empty choice: {letter}"
    if "answer" not in item:
        return missing_field_error(item, "answer")
    if item["answer"] not in list(choices):
        among = f"{item['answer']!r} is not one of {', '.join(choices)}"
        return f'its "answer" is not among its choices: {among}'
    return None
