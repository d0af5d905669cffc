"""Exact match: each item is a prompt whose answer is a yes or no, a number or a phrase."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from swarm._util import validation
from swarm.errors import UserError
from swarm.models.base import Completion, Example, Message, Request
from swarm.tasks import parsing
from swarm.tasks.base import Item, Score
from swarm.tasks.dataset import (
    DataFile,
    DataFiles,
    DataFileTask,
    gold_answer_error,
    text_field_error,
)
from swarm.tasks.search_signal import SearchSignalTask

LINE_PARSERS = ("whole", "cased")
"""Parsers that compare the complete first line."""

COMPARISONS = {
    "anchored": parsing.is_same_answer,
    "original": parsing.is_same_original,
    "whole": parsing.is_same_line,
    "cased": parsing.is_same_cased_line,
}
"""Comparison of an answer with the gold answer, by parser."""


class ExactMatch(DataFileTask, SearchSignalTask):
    """Items `{"question", "answer"}`; the question is the prompt and the answer is compared.

    The gold answer's kind decides how a text is parsed (`swarm.tasks.parsing`), in the same way for
    dev and test.

    Args:
        name: The task's name.
        file: Path of the data file, or of one for each split; `None` is data/eval/NAME.json.
        dev_limit: Maximum number of dev items; `None` is all (see `DataFile` for the order).
        test_limit: Maximum number of test items; `None` is all.
        ids: "file" or "position" (see `DataFile`).
        dedupe: Divide items that are in dev and in test alike between them (see `DataFile`).
        instruction: A line before the question; `None` leaves it out, as the original does.
        chat: Send the prompt as one user turn through the model's chat template; the original
            continues it as plain text.
        max_new_tokens: Maximum number of generated tokens.
        parser: "anchored" parses an answer and compares complete values; "original" is the
            original's rule: the gold answer occurs anywhere in the text, "No" in "Node" and "18" in
            "118" too; "whole" compares the complete first line that is not blank, in any case, and
            "cased" with upper and lower case, for answers like "DOG" to "Write dog in capital
            letters". With both, a model that continues after the right answer without a new line
            is wrong, so `max_new_tokens` has to allow two tokens more than the longest answer.
        take: The number that counts where none is marked: "first" for prompts that request the bare
            answer, "last" for those that lead to reasoning. The other parsers ignore it.
        last_words: With the original parser, the number of last words searched; `None` is the
            complete text. For gsm8k the original takes 5 on dev and 10 on test; here one number
            applies to both.
        signal: The quantity a search maximizes: "accuracy", "logprob" (of the gold answer directly
            after the prompt) or "both"; see `swarm.tasks.search_signal.SearchSignalTask`.
        dev_seed: Draws the dev items anew (see `DataFile`); `None` is file order.
        too_long: Treatment of items that exceed the model's context (see `DataFile`).

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        name: str,
        file: DataFiles | None = None,
        dev_limit: int | None = None,
        test_limit: int | None = None,
        ids: str = "file",
        dedupe: bool = True,
        instruction: str | None = None,
        chat: bool = False,
        max_new_tokens: int = 10,
        parser: str = "anchored",
        take: str = "first",
        last_words: int | None = None,
        signal: str = "accuracy",
        dev_seed: int | None = None,
        too_long: str = "refuse",
    ) -> None:
        super().__init__(signal)
        limits = (dev_limit, test_limit)
        self.data = DataFile(
            name, file, *limits, ids, match_item_error, dedupe, dev_seed=dev_seed, too_long=too_long
        )
        self.name = self.data.name
        self.instruction = validation.check_optional_text("instruction", instruction)
        self.chat = validation.check_bool("chat", chat)
        self.max_new_tokens = validation.check_positive_int("max_new_tokens", max_new_tokens)
        self.parser = _check_parser(parser)
        self.take = validation.check_one_of("take", take, ("first", "last"))
        self.last_words = validation.check_optional_int("last_words", last_words)

    def grade(self, item: Item, answer: str | None) -> float:
        """Return 1 for an answer with the gold answer's value, else 0."""
        same = COMPARISONS[self.parser]
        return float(answer is not None and same(answer, str(item["answer"])))

    def build_request(self, item: Item) -> Request:
        """Return the request for one item."""
        text = "\n".join(filter(None, [self.instruction, item["question"]]))
        prompt = (Message("user", text),) if self.chat else text
        if self.parser == "original":
            return Request(prompt, self.max_new_tokens)
        if self.parser in LINE_PARSERS:
            return Request(prompt, self.max_new_tokens, stop_check=parsing.is_line_final)
        kind = parsing.answer_kind(str(item["answer"]))
        decided = partial(parsing.is_answer_final, kind, self.take)
        return Request(prompt, self.max_new_tokens, stop_check=decided)

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `swarm.tasks.base.HasGoldAnswers`; with `LINE_PARSERS` the answer ends the text."""
        return [replace(e, final=self.parser in LINE_PARSERS) for e in super().gold_examples(items)]

    def score_completion(self, item: Item, completion: Completion) -> Score:
        """Score one completion."""
        if self.parser == "original":
            answer = parsing.extract_original(completion.text, self.last_words)
        elif self.parser == "whole":
            answer = parsing.extract_line(completion.text)
        elif self.parser == "cased":
            answer = parsing.extract_cased_line(completion.text)
        else:
            kind = parsing.answer_kind(str(item["answer"]))
            answer = parsing.extract_answer(completion.text, kind, self.take)
        return Score(self.grade(item, answer), answer, completion.text)


def _check_parser(parser: object) -> str:
    """Return the parser's name; the error of another value explains the parsers."""
    if isinstance(parser, str) and parser in COMPARISONS:
        return parser
    known = "; ".join(f"{name}: {meaning}" for name, meaning in parsing.PARSER_MEANINGS.items())
    raise UserError(f"task.parser: {parser!r} is not one of {', '.join(COMPARISONS)} ({known}).")


def match_item_error(item: Item) -> str | None:
    """Return the error of an exact-match item, or `None`."""
    if (error := text_field_error(item, "question")) is not None:
        return error
    return gold_answer_error(item["answer"]) if "answer" in item else 'it has no "answer"'
