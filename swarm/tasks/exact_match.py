"""Exact match: each item is a prompt whose answer is a yes or no, a number or a phrase."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from swarm._util.settings import Positive, checked
from swarm.models.base import Completion, Example, Request
from swarm.tasks import parsing
from swarm.tasks.base import Item
from swarm.tasks.dataset import gold_answer_error, text_field_error
from swarm.tasks.questions import QuestionTask

LINE_PARSERS = ("whole", "cased")
"""Parsers that compare the complete first line."""


@checked("task")
@dataclass(eq=False)
class ExactMatch(QuestionTask):
    """Items `{"question", "answer"}`; the question is the prompt and the answer is compared.

    The gold answer's kind decides how a text is parsed (`swarm.tasks.parsing`), in the same way for
    dev and test.

    Args:
        parser: What is compared with the gold answer: "anchored" the number, yes or no or phrase
            that is given as the answer; "original" the gold answer anywhere in the text, as in the
            paper's code; "whole" the complete first line that is not blank, in any case; "cased"
            the same with upper and lower case, for answers like "DOG" to "Write dog in capital
            letters". With the last two, a model that continues after the right answer without a new
            line is wrong, so `max_new_tokens` has to allow two tokens more than the longest answer.
        take: The number that counts where none is marked: "first" for prompts that request the bare
            answer, "last" for those that lead to reasoning. The other parsers ignore it.
        last_words: With the original parser, the number of last words searched; `None` is the
            complete text. For gsm8k the original takes 5 on dev and 10 on test; here one number
            applies to both.

    The others are those of `QuestionTask`.
    """

    parser: Literal["anchored", "original", "whole", "cased"] = "anchored"
    take: Literal["first", "last"] = "first"
    last_words: Positive | None = None

    def item_error(self, item: Item) -> str | None:
        return match_item_error(item)

    def grade(self, item: Item, answer: str | None) -> float:
        """Return 1 for an answer with the gold answer's value, else 0."""
        gold = str(item["answer"])
        if answer is None:
            return 0.0
        if self.parser in LINE_PARSERS:
            return float(parsing.is_same_line(answer, gold, self.parser == "cased"))
        return float(
            gold in answer if self.parser == "original" else parsing.is_same_answer(answer, gold)
        )

    def build_request(self, item: Item) -> Request:
        """Return the request for one item."""
        text = "\n".join(filter(None, [self.instruction, item["question"]]))
        kind = parsing.answer_kind(str(item["answer"]))
        stop: Callable[[str], bool] | None = partial(parsing.is_answer_final, kind, self.take)
        if self.parser != "anchored":
            stop = parsing.is_line_final if self.parser in LINE_PARSERS else None
        return Request(self.format_prompt(text), self.max_new_tokens, stop_check=stop)

    @property
    def line_answers(self) -> bool:  # type: ignore[override]
        return self.parser in LINE_PARSERS

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `Task.gold_examples`; with `LINE_PARSERS` the answer ends the text."""
        return [replace(e, final=self.line_answers) for e in super().gold_examples(items)]

    def read_answer(self, item: Item, completion: Completion) -> str | None:
        if self.parser == "original":
            return parsing.extract_original(completion.text, self.last_words)
        if self.parser in LINE_PARSERS:
            return parsing.extract_line(completion.text, self.parser == "cased")
        kind = parsing.answer_kind(str(item["answer"]))
        return parsing.extract_answer(completion.text, kind, self.take)


def match_item_error(item: Item) -> str | None:
    """Return the error of an exact-match item, or `None`."""
    return text_field_error(item, "question") or gold_answer_error(item)
