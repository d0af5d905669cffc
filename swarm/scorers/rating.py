"""Reads a rating from 1 to 10 in a judge's reply, whatever form the judge gave it."""

import re
import unicodedata
from collections.abc import Iterator
from itertools import islice

MAX_PARSED_CHARACTERS = 10_000
"""Characters of a reply that are looked at."""

RATING_DIGITS = r"\d{1,4}(?:[.,]\d{1,2})?(?![^\W_]|[.,]\d|\s*%)"
RATING_NUMBER = rf"(?<![^\W_])(?<![.,/\-⁄]){RATING_DIGITS}"
RATING_VALUE = (
    rf"(?P<value>{RATING_NUMBER})"
    # A range, such as 7-8, is no rating.
    rf"(?:\s*(?:[-–—]|to|or)\s*(?P<other>{RATING_DIGITS}))?"
    r"(?P<part>[\s*_(]{0,4}(?:/|out\s{1,3}of|of)[\s*_]{0,4}(?P<scale>\d{1,4})(?:[.,]0{1,2})?"
    r"(?!\d|[.,]\d))?"
    # Nor is 8/10/2024.
    r"(?!\s*/)"
)
RATING_END = (
    r"(?=[\s*_`\"')\]}]{0,8}(?:\Z|[.,;:!?\n–—])"
    r"|\s{1,3}(?:because|for|as|since|overall|but|though)\b)"
)
"""Behind a number that counts nothing, as it would in "3 examples"."""

TEN = r"10(?:[.,]0{1,2})?(?![^\W_]|[.,]\d|\s*[/%])"
SCALE = re.compile(
    # Behind a number, "out of 10" is a part of the rating and not alone.
    rf"(?P<rated>\d[\s*_(]{{0,4}})?(?:/|\bout\s{{1,3}}of\b|\(of\b)[\s*_]{{0,4}}{TEN}"
    rf"|\b(?:max(?:imum)?|scale)\b\W{{0,3}}(?:\b(?:of|is)\b\s{{1,3}})?{TEN}"
    rf"|(?:\bfrom\s{{1,3}})?(?<![\d.,/])[01]\s{{0,3}}(?:[-–—]|to)\s{{0,3}}{TEN}"
    r"|(?<![\w.,/\-])(?:0|1|10)\s{0,3}(?:=|(?:is|being|means)\b)",
    re.IGNORECASE,
)
"""The scale itself, "(1-10)", "(out of 10)" or "(10 = best)", repeated by the judge."""

LIST_MARK = re.compile(r"^\s{0,8}\d{1,2}[.)]\s{1,8}(?=\S)", re.MULTILINE)

MARKED_RATING = re.compile(
    r"\b(?:rating|score|grade)\b[\W_]{0,12}(?:\b(?:is|of|as|would be)\b[\W_]{0,12})?" + RATING_VALUE,
    re.IGNORECASE,
)
GIVEN_RATING = re.compile(
    r"\b(?:give|giving|rate|score|scoring|assign|award|deserves?|earns?)\b[^.!?\d\n]{0,40}"
    rf"{RATING_VALUE}{RATING_END}",
    re.IGNORECASE,
)
PLAIN_RATING = re.compile(rf"{RATING_VALUE}(?P<end>{RATING_END})?", re.IGNORECASE)
LONE_RATING = re.compile(rf"[\W_]*{RATING_VALUE}[\W_]*\Z", re.IGNORECASE)


def parse_rating(reply: str, clear: bool = False) -> float | None:
    """The rating, 1 to 10, or `None` where there is none, several, or one that is out of range.

    The clearest form that the reply has decides: after the word rating or score; "8/10" and
    "8 out of 10"; a first line that is a number; "I'd give it an 8"; the reply's only number, but
    neither of the last two where it counts something, as in "3 examples". The scale, "(1-10)" or
    "(out of 10)", is no rating.

    Ratings in that form have to agree: "7-8/10" and "8/10, no, 7/10" are none, and so are "4/5"
    and "85/100", for they are on a scale that was not asked for.

    Args:
        reply: What the judge wrote.
        clear: Only the first three forms count, which no number in a text on numbers has.
    """
    text = unicodedata.normalize("NFKC", reply[:MAX_PARSED_CHARACTERS])
    text = SCALE.sub(lambda match: match[0] if match["rated"] else " ", text)
    for found in islice(_find_ratings(text), 3 if clear else None):
        if found:
            values = {_rating_value(match) for match in found}
            return values.pop() if len(values) == 1 else None
    return None


def _find_ratings(text: str) -> Iterator[list[re.Match[str]]]:
    """What is found of each form, the clearest form first."""
    yield list(MARKED_RATING.finditer(text))
    yield [match for match in PLAIN_RATING.finditer(text) if match["part"]]
    first = text.strip().split("\n", 1)[0]
    yield [match] if (match := LONE_RATING.match(first)) else []
    yield list(GIVEN_RATING.finditer(text))
    only = list(PLAIN_RATING.finditer(LIST_MARK.sub("", text)))
    yield only if all(match["end"] is not None for match in only) else []


def _rating_value(match: re.Match[str]) -> float | None:
    """The rating of one match, if it is one."""
    if match["other"] or match["scale"] not in (None, "10"):
        return None
    value = float(match["value"].replace(",", "."))
    return value if 1 <= value <= 10 else None
