"""Votes: which answers say the same."""

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from difflib import SequenceMatcher

NUMBER_PATTERN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
CHOICE_PATTERN = re.compile(
    r"(?:(?:\A|\b(?:answer|option|choice)(?: is)?:?)[\s*_(\[]*|[(\[])(?P<end>[A-J])[\s*_)\].:]*\Z"
    r"|\A[*_(]*(?P<begin>[A-J])\)",
    re.IGNORECASE,
)
ARTICLES = re.compile(r"\b(?:the|a|an)\b")


def comparison_key(text: str) -> tuple[str, str]:
    """What an answer says, for comparison: a choice's letter, a number or a text.

    A letter from A to J that is the last line, or ends it in brackets or behind "answer", or begins
    it as in "B) Paris"; else the last number of the last line; else the text without case, marks
    and articles.
    """
    last = text.strip().rsplit("\n", 1)[-1]
    if choice := CHOICE_PATTERN.search(last):
        return "choice", (choice["end"] or choice["begin"]).upper()
    if numbers := NUMBER_PATTERN.findall(last):
        number = Decimal(numbers[-1].replace(",", ""))
        exact = f"{number:f}"  # `normalize` would round a long one
        return "number", (
            exact.rstrip("0").rstrip(".") if "." in exact else exact
        ) if number else "0"
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = re.sub(r"\W+", " ", ARTICLES.sub(" ", plain)).strip()
    return "text", words or text


def group_equal_answers(texts: Sequence[str], similarity: float = 1.0) -> list[list[int]]:
    """Places of the answers that say the same, by their first ones.

    An answer joins the first group with all of which it agrees.

    Args:
        texts: The answers.
        similarity: From which likeness on two texts agree; numbers and choices have to be equal.
    """
    keys = [comparison_key(text) for text in texts]
    found: list[list[int]] = []
    for place, key in enumerate(keys):
        for group in found:
            if all(_answers_agree(key, keys[other], similarity) for other in group):
                group.append(place)
                break
        else:
            found.append([place])
    return found


def _answers_agree(one: tuple[str, str], other: tuple[str, str], similarity: float) -> bool:
    if one == other:
        return True
    if similarity >= 1 or one[0] != "text" or other[0] != "text":
        return False
    first, second = sorted((one[1], other[1]))  # difflib's likeness is not the same both ways
    return SequenceMatcher(None, first, second, autojunk=False).ratio() >= similarity
