"""The function of conf/task/sentences.yaml: does a text keep to a form, and to the words asked?"""

import re
from collections.abc import Mapping
from typing import Any

SHORTEST, LONGEST = 4, 8
"""Words of a brief sentence."""

SENTENCE = re.compile(r"[A-Z][^.!?\n]*[.!?]")
"""One sentence alone: a capital letter first, its only mark last."""


def score(prompt: str, answer: str, item: Mapping[str, Any]) -> float:
    """Return the share of the item's words in the text; a third of it if it keeps to no form.

    The forms, a third each: one sentence alone, and 4 to 8 words.
    """
    words = re.findall(r"[\w'-]+", answer.lower())
    kept = sum(word in words for word in item["words"]) / len(item["words"])
    forms = bool(SENTENCE.fullmatch(answer.strip())) + (SHORTEST <= len(words) <= LONGEST)
    return kept * (1 + forms) / 3
