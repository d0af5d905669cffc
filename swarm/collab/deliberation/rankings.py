"""Reading the order in which a model puts answers."""

import re
from collections.abc import Sequence

from swarm.collab.deliberation.said import strip_thoughts

RANK_TAG = re.compile(r"<rank\s+position\s*=\s*['\"]?(\d{1,9})['\"]?\s*>[^\d<]*(\d+)", re.IGNORECASE)


def parse_ranking(reply: str, labels: Sequence[int]) -> list[int] | None:
    """The order in which a reply puts the answers with these numbers, best first.

    Read are 3 > 1 > 2, a list, lines with a number each, "Answer 3, Answer 1", and tags of ranks;
    of several orders the last. What the reply leaves out comes behind, in the labels' order.
    """
    said = strip_thoughts(reply)
    blocks = re.findall(
        r"<ranking>((?:(?!<ranking>).)*?)</ranking>", said, re.IGNORECASE | re.DOTALL
    )
    for text in (*reversed(blocks), said):
        if found := _find_order(text, labels):
            return [*found, *(label for label in labels if label not in found)]
    return None


def _find_order(text: str, labels: Sequence[int]) -> list[int]:
    if ranks := RANK_TAG.findall(text):
        return _valid_labels([number for _, number in sorted(ranks, key=lambda one: int(one[0]))], labels)
    rows = [row for row in text.split("\n") if re.search(r"\d", row)]
    for row in reversed(rows):
        numbers = re.findall(r"\d+", row)
        whole = len(numbers) == len(labels) > 1 or (len(numbers) > 1 and ">" in row)
        if whole and (found := _valid_labels(numbers, labels)):
            return found
    # A line for each: behind a place in the list there may be the answer's number.
    last = []
    for row in rows:
        listed = re.match(r"\W*\d+\s*[.):]\D*?(\d+)", row)
        named = re.search(r"(?:answer|response)\W*(\d+)", row, re.IGNORECASE)
        plain = re.fullmatch(r"\W*(\d+)\W*", row)
        if match := listed or plain or named:
            last.append(match[1])
    return _valid_labels(last[-len(labels) :], labels) if len(last) >= len(labels) else []


def _valid_labels(numbers: Sequence[str], labels: Sequence[int]) -> list[int]:
    """The numbers, if each is a label and none is there twice."""
    found = [int(number) for number in numbers if len(number) < 10]
    clear = len(set(found)) == len(numbers) and set(found) <= set(labels)
    return found if clear else []
