"""Multiple choice: each item is a question with lettered choices, one of which is right."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan

from swarm.errors import UserError
from swarm.models import Completion, Example, Message, Request
from swarm.tasks import Item, Score, keys, letters
from swarm.tasks.data import DataFile, Files, wrong_text
from swarm.tasks.signal import Signalled

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Choice(Signalled):
    """Items `{"question", "choices": {letter: text}, "answer": letter}`; an answer is a letter.

    The prompt is the original's (Model Swarms, evaluate.py): the instruction, "Question: ...",
    a line "A: ..." for each choice, "The answer is"; a file's "icl_prompt" comes first.

    Args:
        name: The task's name.
        file: Path of the data file, or of one for each split; `None` is data/eval/NAME.json.
        dev_limit: The most dev items; `None` is all (see `DataFile` for the order).
        test_limit: The most test items; `None` is all.
        ids: "file" or "position" (see `DataFile`).
        dedupe: Divide items that are in dev and in test alike between them (see `DataFile`).
        instruction: First line of the prompt; `None` leaves it out.
        chat: Put the prompt as one user turn through the model's chat template; the original
            continues it as plain text.
        scoring: "generate" lets the model write and reads a letter from the text; "logits" takes
            the letter of the highest log probability, in one pass and never unparsed.
        max_new_tokens: The most tokens to be written, with `scoring` "generate".
        parser: "anchored" is the rule of swarm/tasks/letters.py; "original" the original's, which
            reads "Answer: C" as A.
        signal: What a search climbs: "accuracy", "logprob" (of the letter) or "both"; see
            `swarm.tasks.signal.Signalled`.
        dev_seed: Draws the dev items anew (see `DataFile`); `None` keeps the file's order.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        name: str,
        file: Files | None = None,
        dev_limit: int | None = None,
        test_limit: int | None = None,
        ids: str = "file",
        dedupe: bool = True,
        instruction: str | None = "Please choose an option that best answers the question.",
        chat: bool = False,
        scoring: str = "generate",
        max_new_tokens: int = 10,
        parser: str = "anchored",
        signal: str = "accuracy",
        dev_seed: int | None = None,
    ) -> None:
        super().__init__(signal)
        self.data = DataFile(
            name, file, dev_limit, test_limit, ids, wrong_choice, dedupe, dev_seed=dev_seed
        )
        self.name = self.data.name
        self.instruction = keys.optional_words("instruction", instruction)
        self.chat = keys.switch("chat", chat)
        self.scoring = keys.one_of("scoring", scoring, ("generate", "logits"))
        self.max_new_tokens = keys.whole_number("max_new_tokens", max_new_tokens)
        self.parser = keys.one_of("parser", parser, ("anchored", "original"))

    def items(self, split: str) -> Sequence[Item]:
        """The items of "dev" or "test"; see `Task.items`."""
        return self.data.items(split)

    def grade(self, item: Item, answer: str | None) -> float:
        """1 for the right letter, else 0."""
        return float(answer == item["answer"])

    def request(self, item: Item) -> Request:
        """What is put to the model about one item."""
        text = choice_prompt(item, self.instruction)
        prompt = (Message("user", text),) if self.chat else text
        if self.scoring == "logits":
            # A plain prompt goes on with a space; after a chat header an answer starts at once.
            space = "" if self.chat else " "
            return Request(prompt, 0, tuple(space + letter for letter in item["choices"]))
        return Request(prompt, self.max_new_tokens, decided=self._decided(item["choices"]))

    def examples(self, items: Sequence[Item]) -> list[Example]:
        """See `swarm.tasks.Supervised`: the right letter's share among all letters."""
        return [self._example(item) for item in items]

    def _example(self, item: Item) -> Example:
        prompt = self.request(item).prompt
        space = "" if self.chat else " "
        letters = list(item["choices"])
        choices = tuple(space + letter for letter in letters)
        return Example(prompt, choices, letters.index(item["answer"]))

    def score(self, item: Item, completion: Completion) -> Score:
        """What one completion is worth."""
        answer = self.read(item, completion)
        return Score(self.grade(item, answer), answer, completion.text)

    def read(self, item: Item, completion: Completion) -> str | None:
        """The letter a completion picks, or `None`.

        Raises:
            UserError: Choices were to be scored and the model gave no log probabilities.
        """
        choices = item["choices"]
        if self.scoring == "logits":
            return _likeliest(list(choices), completion.logprobs)
        if self.parser == "original":
            return letters.read_original(completion.text, choices)
        return letters.read(completion.text, choices)

    def _decided(self, choices: Mapping[str, str]) -> Callable[[str], bool]:
        settled = letters.settled_original if self.parser == "original" else letters.settled
        return partial(settled, dict(choices))


def choice_prompt(item: Item, instruction: str | None) -> str:
    """The text that ends in "The answer is", for any task that asks about choices."""
    lines = [item["icl_prompt"]] if "icl_prompt" in item else []
    lines += [instruction] if instruction else []
    lines += [f"Question: {item['question']}"]
    lines += [f"{letter}: {text}" for letter, text in item["choices"].items()]
    return "\n".join([*lines, "The answer is"])


def wrong_choice(item: Item) -> str | None:
    """What is wrong with a multiple-choice item, or `None`."""
    if (wrong := wrong_text(item, "question")) is not None:
        return wrong
    choices = item.get("choices")
    if not isinstance(choices, Mapping) or len(choices) < 2:
        return 'its "choices" are not an object of at least two'
    for letter, text in choices.items():
        if len(letter) != 1 or letter not in LETTERS:
            return f'a letter of its choices is not one capital: "{letter}"'
        if not isinstance(text, str):
            return f'one of its choices is not a text: "{letter}"'
        if not text.strip():
            return f"it has an empty choice: {letter}"
    if "answer" not in item:
        return 'it has no "answer"'
    if item["answer"] not in list(choices):
        among = f"{item['answer']!r} is not one of {', '.join(choices)}"
        return f'its "answer" is not among its choices: {among}'
    return None


def _likeliest(options: Sequence[str], logprobs: Sequence[float]) -> str | None:
    if len(logprobs) != len(options):
        raise UserError(
            "task.scoring=logits needs a model that gives the log probability of every choice;"
            " this one does not: use task.scoring=generate."
        )
    known = [(value, key) for value, key in zip(logprobs, options, strict=True) if not isnan(value)]
    return max(known, key=lambda pair: pair[0])[1] if known else None
