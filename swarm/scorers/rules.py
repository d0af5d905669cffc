"""Scorers that parse an answer by a rule and compare it: a regular expression, a number, words."""

import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from math import isfinite
from typing import Any, Literal

from swarm._util.settings import Number, Text, checked
from swarm.errors import UserError
from swarm.tasks import parsing
from swarm.tasks.base import Item, Score
from swarm.tasks.dataset import gold_answer_error, missing_field_error
from swarm.tasks.free_text import Scorer


class RuleScorer(Scorer):
    """Base class of rules: an answer is parsed from the text, and its value is the score."""

    highest = 1.0
    votes = True

    @abstractmethod
    def read_answer(self, text: str) -> str | None:
        """Return the answer of a text, or `None`."""

    @abstractmethod
    def answer_value(self, item: Item, answer: str) -> float:
        """Return the value of an answer, 0 to 1."""

    def grade(self, item: Item, answer: str | None) -> float:
        return 0.0 if answer is None else self.answer_value(item, answer)

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        found = [self.read_answer(text) for text in texts]
        rows = zip(items, found, texts, strict=True)
        return [Score(self.grade(item, answer), answer, text) for item, answer, text in rows]


@checked("task.scorer")
@dataclass(eq=False)
class Regex(RuleScorer):
    """1 if the match of a regular expression is the item's "answer".

    For an item without an "answer", 1 if anything matches. The match is its first nonempty group,
    or the complete match of a pattern without groups, stripped; empty matches are skipped.

    Args:
        pattern: A Python regular expression; flags are inline, as in "(?i)answer: (\\\\w+)", and
            with "i" the comparison ignores case too.
        take: The match that counts, "first" or "last".
    """

    pattern: Text
    take: Literal["first", "last"] = "first"

    def __post_init__(self) -> None:
        try:
            self._compiled = re.compile(self.pattern)
        except re.error as error:
            wrong = f"is not a regular expression: {error}"
            raise UserError(f"task.scorer.pattern={self.pattern!r}: {wrong}") from None

    def item_error(self, item: Item) -> str | None:
        """Return an item's error; an "answer", if present, has to be a text or a number."""
        return gold_answer_error(item) if "answer" in item else None

    def read_answer(self, text: str) -> str | None:
        found = None
        for match in self._compiled.finditer(text):
            matched = next(filter(None, match.groups()), "" if match.re.groups else match.group())
            found = matched.strip() or found
            if found and self.take == "first":
                break
        return found

    def answer_value(self, item: Item, answer: str) -> float:
        if "answer" not in item:
            return 1.0
        pair = (answer.strip(), str(item["answer"]).strip())
        if self._compiled.flags & re.IGNORECASE:
            pair = (pair[0].casefold(), pair[1].casefold())
        return float(pair[0] == pair[1])


@checked("task.scorer")
@dataclass(eq=False)
class Numeric(RuleScorer):
    """1 if the number in a text (`swarm.tasks.parsing`) is close enough to the "answer".

    Close enough is `absolute`, or `relative` times the answer's size, whichever is more; both 0
    requires the same value, in any spelling.

    Args:
        take: The number that counts if none is marked by "answer is", "####" and the like: "first"
            for prompts that request the bare number, "last" for those that lead to reasoning.
        absolute: In the answer's unit.
        relative: A share of the answer, .01 for one percent.
    """

    take: Literal["first", "last"] = "last"
    absolute: Number = 0.0
    relative: Number = 0.0

    def item_error(self, item: Item) -> str | None:
        """Return an item's error; the "answer" has to be a number, or a text that is one."""
        if "answer" not in item:
            return missing_field_error(item, "answer")
        return None if _to_fraction(item["answer"]) is not None else 'its "answer" is not a number'

    def read_answer(self, text: str) -> str | None:
        return parsing.extract_answer(text, "number", self.take)

    def answer_value(self, item: Item, answer: str) -> float:
        gold, predicted = _to_fraction(item["answer"]), _to_fraction(answer)
        if gold is None or predicted is None:
            return 0.0
        # Exact arithmetic: .1 is a tenth here, as in the configuration.
        absolute, relative = (Fraction(str(one)) for one in (self.absolute, self.relative))
        return float(abs(predicted - gold) <= max(absolute, relative * abs(gold)))

    def build_stop_check(self, item: Item) -> Callable[[str], bool]:
        return partial(parsing.is_answer_final, "number", self.take)


@checked("task.scorer")
@dataclass(eq=False)
class F1(RuleScorer):
    """Overlap of a text's words with those of the "answer": the F1 of SQuAD, 0 to 1.

    The harmonic mean of precision and recall over words, counted with repetitions, in lower case
    and without ASCII punctuation and the articles a, an and the; of several answers (a list) the
    best counts. Source: Rajpurkar et al., SQuAD, EMNLP 2016, section 6.1.

    Args:
        lines: "first" reads the first line with a countable word, without "The answer is", and
            stops there; "all" reads the complete text.
    """

    votes = False

    lines: Literal["first", "all"] = "first"

    def item_error(self, item: Item) -> str | None:
        """Return an item's error; the "answer" has to be texts or numbers with countable words."""
        if "answer" not in item:
            return missing_field_error(item, "answer")
        if not (golds := _gold_values(item)):
            return 'its "answer" is empty'
        for one in golds:
            if (wrong := gold_answer_error({"answer": one})) is not None:
                return wrong
            if not split_words(str(one)):
                return f'its "answer" has no word other than articles: {one!r}'
        return None

    def read_answer(self, text: str) -> str | None:
        """See `RuleScorer.read_answer`; the words that count, with single blanks."""
        if self.lines == "first":
            lines = (parsing.ANSWER_LEAD.sub("", line) for line in text.split("\n"))
            text = next((line for line in lines if split_words(line)), "")
        return " ".join(split_words(text)) or None

    def answer_value(self, item: Item, answer: str) -> float:
        return max(
            token_f1(split_words(answer), split_words(str(one))) for one in _gold_values(item)
        )

    def build_stop_check(self, item: Item) -> Callable[[str], bool] | None:
        return self._is_line_complete if self.lines == "first" else None

    def _is_line_complete(self, text: str) -> bool:
        return self.read_answer(text.rpartition("\n")[0]) is not None


def split_words(text: str) -> list[str]:
    """Return the words of a text that SQuAD's F1 counts."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def token_f1(given: Sequence[str], gold: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of the `given` words, with repetitions."""
    shared = (Counter(given) & Counter(gold)).total()
    return 2 * shared / (len(given) + len(gold)) if shared else 0.0


def _gold_values(item: Item) -> list[Any]:
    answer = item["answer"]
    return list(answer) if isinstance(answer, (list, tuple)) else [answer]


def _to_fraction(value: object) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    if isinstance(value, float):
        return Fraction(str(value)) if isfinite(value) else None
    spelt = str(value).strip()
    if not parsing.is_number(spelt):
        return None
    numerator, _, denominator = parsing.normalize_number(spelt).partition("/")
    return Fraction(Decimal(numerator)) / int(denominator or 1)
