"""Reads the verdict in a judge's reply: a grade from 1 to 10, or which of two answers is better.

Only the reply is read, never what was judged. A reply that gives several verdicts has none: the
form that is wanted, in double brackets, goes before others; where several stand in brackets and
differ (a judge may repeat what an answer told it to say), a line that is nothing but a verdict
decides.
"""

import re
import unicodedata
from collections.abc import Callable
from typing import TypeVar

from swarm.scorers.rating import parse_rating

T = TypeVar("T")

MAX_REPLY_CHARS = 20_000
"""Characters at a reply's end that are looked at."""

DOUBLE_BRACKETS = re.compile(r"\[\[([^\[\]\n]{1,40})\]\]")
SINGLE_BRACKETS = re.compile(r"(?<!\[)\[([^\[\]\n]{1,40})\](?![\](])")
CUT_OFF = re.compile(r"\[[^\[\]]{0,20}\Z")
"""The end of a reply that had no room for its grade: "[[1" may have been a 10."""

LABEL_PATTERN = re.compile(
    r"[\W_]*(?:(?:my|the|final|overall|rating|score|grade|verdict|answer|is)\b[\W_]*)*(?:/\s*10)?[\W_]*"
)
"""What a line that is nothing but a verdict may hold beside it."""

GRADE_PATTERN = re.compile(
    r"[^\w\-]*(?:(?:rating|score|grade)[^\w\-]{1,3})?"
    r"(?P<value>\d{1,4}(?:[.,]\d{1,2})?)(?:\s*/\s*10)?\W*"
)
PICK_PATTERN = re.compile(
    r"\W*(?:(?:assistant|answer|model|response|verdict)[\W_]{1,3})?(?P<pick>[abc]|tie)\W*"
)
PLAIN_PICK_PATTERN = re.compile(
    r"\b(?:verdict|winner|choice|decision|better(?: answer| one)?)\b\W{0,3}(?:is\b)?\W{0,5}"
    r"(?:(?:assistant|answer|model)\s)?\W{0,3}\b(?P<pick>[abc]|(?:a )?tie)\b"
    r"(?=[\s*_\"')\]]*(?:\Z|[.,;:!?\n]))"
)
WHOLE_PICK_PATTERN = re.compile(r"\W*(?:(?:assistant|answer|model)\s)?(?P<pick>[abc]|tie)\W*")


def parse_grade(reply: str) -> float | None:
    """The grade, 1 to 10, halves and tenths too, or `None` where there is none or more than one.

    "[[7]]", "[[7.5]]", "[[7/10]]" and "[[rating: 7]]" are grades; so is, where nothing stands in
    double brackets, what `swarm.scorers.rating` reads as a clear one: "Rating: 7/10", "[7]", "7 out
    of 10". "The answer is 7" is none: a judge may only have answered the question itself.
    "[[0]]" and "[[85]]" are on a scale that was not asked for.
    """
    text = _reply_end(reply)
    marks = _find_marks(text, DOUBLE_BRACKETS, _parse_grade_mark)
    if marks:
        return _decide_mark(marks, text, DOUBLE_BRACKETS, _parse_grade_mark)
    return None if CUT_OFF.search(text) else parse_rating(text, clear=True)


def parse_pick(reply: str) -> str | None:
    """Which answer is better, "A" or "B", "tie", or `None` where that is not said or said twice.

    "[[A]]", "[[B]]" and "[[C]]" (neither) are verdicts; "[[tie]]" and "[[Answer A]]" too, the same
    in single brackets, "Verdict: A", and a reply that is nothing but the letter.
    """
    text = _reply_end(reply).casefold()
    for form in (DOUBLE_BRACKETS, SINGLE_BRACKETS):
        if marks := _find_marks(text, form, _parse_pick_mark):
            return _decide_mark(marks, text, form, _parse_pick_mark)
    if whole := WHOLE_PICK_PATTERN.fullmatch(text):
        return _normalize_pick(whole["pick"])
    said = {_normalize_pick(match["pick"]) for match in PLAIN_PICK_PATTERN.finditer(text)}
    return said.pop() if len(said) == 1 else None


def _reply_end(reply: str) -> str:
    return unicodedata.normalize("NFKC", reply[-MAX_REPLY_CHARS:])


def _find_marks(text: str, form: re.Pattern[str], read: Callable[[str], T | None]) -> set[T]:
    """The verdicts in brackets; what else stands in brackets is none."""
    found = (read(match[1]) for match in form.finditer(text))
    return {verdict for verdict in found if verdict is not None}


def _decide_mark(
    marks: set[T], text: str, form: re.Pattern[str], read: Callable[[str], T | None]
) -> T | None:
    if len(marks) > 1:
        lines = (line for line in text.splitlines() if form.search(line))
        alone = [line for line in lines if LABEL_PATTERN.fullmatch(form.sub(" ", line).casefold())]
        marks = _find_marks("\n".join(alone), form, read)
    verdict = marks.pop() if len(marks) == 1 else None
    return verdict if verdict != 0 else None


def _parse_grade_mark(mark: str) -> float | None:
    """What stands in brackets as a grade; 0 is a number that is none."""
    if not (match := GRADE_PATTERN.fullmatch(mark.casefold())):
        return None
    value = float(match["value"].replace(",", "."))
    return value if 1 <= value <= 10 else 0.0


def _parse_pick_mark(mark: str) -> str | None:
    match = PICK_PATTERN.fullmatch(mark)
    return _normalize_pick(match["pick"]) if match else None


def _normalize_pick(word: str) -> str:
    return "tie" if word in ("c", "tie", "a tie") else word.upper()
