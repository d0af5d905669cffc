"""Scorers that parse an answer by a rule and compare it: a regular expression, a number, words."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from math import isfinite
from typing import Any

from swarm._util import validation
from swarm.errors import UserError
from swarm.tasks import parsing
from swarm.tasks.base import Item, Score
from swarm.tasks.dataset import gold_answer_error


class RuleScorer:
    """Base class of rules: an answer is parsed from the text, and its value is the score."""

    highest: float | None = 1.0
    votes = True

    def read_answer(self, text: str) -> str | None:
        """Return the answer of a text, or `None`."""
        raise NotImplementedError

    def answer_value(self, item: Item, answer: str) -> float:
        """Return the value of an answer, 0 to 1."""
        raise NotImplementedError

    def grade(self, item: Item, answer: str | None) -> float:
        """See `swarm.tasks.free_text.Grader`."""
        return 0.0 if answer is None else self.answer_value(item, answer)

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        """See `swarm.tasks.free_text.Scorer`."""
        found = [self.read_answer(text) for text in texts]
        rows = zip(items, found, texts, strict=True)
        return [Score(self.grade(item, answer), answer, text) for item, answer, text in rows]


class Regex(RuleScorer):
    """1 if the match of a regular expression is the item's "answer".

    For an item without an "answer", 1 if anything matches. The match is its first nonempty group,
    or the complete match of a pattern without groups, stripped; empty matches are skipped.

    Args:
        pattern: A Python regular expression; flags are inline, as in "(?i)answer: (\\\\w+)", and
            with "i" the comparison ignores case too.
        take: The match that counts, "first" or "last".

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(self, pattern: str, take: str = "first") -> None:
        try:
            self.pattern = re.compile(validation.check_text("scorer.pattern", pattern))
        except re.error as error:
            raise UserError(
                f"task.scorer.pattern: {pattern!r} is not a regular expression: {error}."
            ) from None
        self.take = validation.check_one_of("scorer.take", take, ("first", "last"))

    def item_error(self, item: Item) -> str | None:
        """Return an item's error; an "answer", if present, has to be a text or a number."""
        return gold_answer_error(item["answer"]) if "answer" in item else None

    def read_answer(self, text: str) -> str | None:
        """See `RuleScorer.read_answer`."""
        found = None
        for match in self.pattern.finditer(text):
            matched = next(filter(None, match.groups()), "" if match.re.groups else match.group())
            found = matched.strip() or found
            if found and self.take == "first":
                break
        return found

    def answer_value(self, item: Item, answer: str) -> float:
        """See `RuleScorer.answer_value`."""
        if "answer" not in item:
            return 1.0
        pair = (answer.strip(), str(item["answer"]).strip())
        if self.pattern.flags & re.IGNORECASE:
            pair = (pair[0].casefold(), pair[1].casefold())
        return float(pair[0] == pair[1])


class Numeric(RuleScorer):
    """1 if the number in a text (`swarm.tasks.parsing`) is close enough to the "answer".

    Close enough is `absolute`, or `relative` times the answer's size, whichever is more; both 0
    requires the same value, in any spelling.

    Args:
        take: The number that counts if none is marked by "answer is", "####" and the like: "first"
            for prompts that request the bare number, "last" for those that lead to reasoning.
        absolute: In the answer's unit.
        relative: A share of the answer, .01 for one percent.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(self, take: str = "last", absolute: float = 0.0, relative: float = 0.0) -> None:
        self.take = validation.check_one_of("scorer.take", take, ("first", "last"))
        self.absolute = _check_tolerance("absolute", absolute)
        self.relative = _check_tolerance("relative", relative)

    def item_error(self, item: Item) -> str | None:
        """Return an item's error; the "answer" has to be a number, or a text that is one."""
        if "answer" not in item:
            return 'it has no "answer"'
        return None if _to_fraction(item["answer"]) is not None else 'its "answer" is not a number'

    def read_answer(self, text: str) -> str | None:
        """See `RuleScorer.read_answer`."""
        return parsing.extract_answer(text, "number", self.take)

    def answer_value(self, item: Item, answer: str) -> float:
        """See `RuleScorer.answer_value`."""
        gold, predicted = _to_fraction(item["answer"]), _to_fraction(answer)
        if gold is None or predicted is None:
            return 0.0
        return float(abs(predicted - gold) <= max(self.absolute, self.relative * abs(gold)))

    def build_stop_check(self, item: Item) -> Callable[[str], bool]:
        """See `swarm.tasks.free_text.SupportsEarlyStop`."""
        return partial(parsing.is_answer_final, "number", self.take)


class F1(RuleScorer):
    """Overlap of a text's words with those of the "answer": the F1 of SQuAD, 0 to 1.

    The harmonic mean of precision and recall over words, counted with repetitions, in lower case
    and without ASCII punctuation and the articles a, an and the; of several answers (a list) the
    best counts. Source: Rajpurkar et al., SQuAD, EMNLP 2016, section 6.1.

    Args:
        lines: "first" reads the first line with a countable word, without "The answer is", and
            stops there; "all" reads the complete text.

    Raises:
        UserError: A value is not allowed.
    """

    votes = False

    def __init__(self, lines: str = "first") -> None:
        self.lines = validation.check_one_of("scorer.lines", lines, ("first", "all"))

    def item_error(self, item: Item) -> str | None:
        """Return an item's error; the "answer" has to be texts or numbers with countable words."""
        if "answer" not in item:
            return 'it has no "answer"'
        if not (golds := _gold_values(item)):
            return 'its "answer" is empty'
        for one in golds:
            if (wrong := gold_answer_error(one)) is not None:
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
        """See `RuleScorer.answer_value`."""
        return max(
            token_f1(split_words(answer), split_words(str(one))) for one in _gold_values(item)
        )

    def build_stop_check(self, item: Item) -> Callable[[str], bool] | None:
        """See `swarm.tasks.free_text.SupportsEarlyStop`."""
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


def _check_tolerance(key: str, value: object) -> Fraction:
    number = _to_fraction(value) if not isinstance(value, str) else None
    if number is None or number < 0:
        raise UserError(f"task.scorer.{key}: {value!r} is not a number, 0 or more.")
    return number
