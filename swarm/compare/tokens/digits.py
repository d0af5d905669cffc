"""How probable each number is that a model may write, over tokens of one digit or of several."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from swarm.compare.tokens import sort_by_probability, token_probabilities, unseen_probability
from swarm.models import Completion

TokenPath = tuple[str, ...]
"""The texts of an answer's first tokens."""

MINUS_SIGNS = "-\N{MINUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}"
PLUS_SIGNS = "+\N{FULLWIDTH PLUS SIGN}"

NUMBER_PATTERN = re.compile(rf"\s*([{MINUS_SIGNS}{PLUS_SIGNS}]?)(\d{{0,30}})(\s*)")
"""A whole number, or what one begins with; in the digits of any script."""

LEADING_NUMBER_PATTERN = re.compile(rf"\s*[{MINUS_SIGNS}{PLUS_SIGNS}]?\d{{1,30}}(?![\d_]|[.,]\d)")
"""A whole number that a text begins with."""

MIN_CONTINUATION_PROBABILITY = 0.01
"""Where digits after a number are more probable than this, the tokeniser splits numbers."""

MIN_ENDED_ANSWERS = 4
"""So many answers that end after a digit show that it does not."""

MAX_REQUESTS = 8
"""The most that one rating asks for, where a tokeniser splits numbers."""

MIN_SHARED_NUMBERS, MAX_SHARED_NUMBERS = 10, 1_000
"""How many numbers share what is known of their beginning; 1 may be more often 1 than 10."""

PARSE_CACHE_SIZE = 20_000
"""Texts that are read once; the same tokens come again and again."""


@lru_cache(PARSE_CACHE_SIZE)
def parse_integer(text: str) -> int | None:
    """The number, if that is all there is beside spaces; "5_0" is none."""
    found = NUMBER_PATTERN.fullmatch(text)
    if found is None or not found[2]:
        return None
    return int(found[2]) * (-1 if found[1] and found[1] in MINUS_SIGNS else 1)


def parse_leading_integer(text: str) -> int | None:
    """The whole number that a text begins with; neither "5_0" nor "8.5" begins with one."""
    found = LEADING_NUMBER_PATTERN.match(text)
    return parse_integer(found[0]) if found else None


@lru_cache(PARSE_CACHE_SIZE)
def count_digits(text: str) -> int:
    """How many digits there are in a number or its beginning; 0 in any other text."""
    found = NUMBER_PATTERN.fullmatch(text)
    return len(found[2]) if found else 0


@lru_cache(PARSE_CACHE_SIZE)
def can_continue(text: str, low: int, high: int) -> bool:
    """Whether a longer number from low to high may begin so; no number begins with a zero."""
    found = NUMBER_PATTERN.fullmatch(text)
    if found is None or (found[2] and found[3]):
        return False
    if found[2]:
        return bool(longer_numbers(text, low, high))
    below = found[1] and found[1] in MINUS_SIGNS
    return not found[1] or (-low if below else high) > 0


@lru_cache(PARSE_CACHE_SIZE)
def longer_numbers(text: str, low: int, high: int) -> list[range]:
    """The longer numbers from low to high that begin as this number does; none after a zero."""
    number = parse_integer(text) or 0
    if number < 0:
        return [range(1 - r.stop, 1 - r.start) for r in longer_numbers(str(-number), -high, -low)]
    found, most = [], number
    while 0 < number * 10 <= high:
        number, most = number * 10, most * 10 + 9
        found.append(range(max(number, low), min(most, high) + 1))
    return [some for some in found if some]


class NumberPrefix(NamedTuple):
    """One thing that may be written, with its probability; "whole", "beginning" or "unseen"."""

    text: str
    mass: float
    kind: str


class ProbabilityMass(NamedTuple):
    """Where the probability of an answer lies.

    Attributes:
        numbers: Of each number in range. Where numbers are split and an 8 is not known further, all
            longer numbers that begin so share it evenly if they are equally long, as 80 to 89 are.
        texts: Of everything that was seen, as it is written; "8..." is what begins with an 8 and is
            not known further.
        refused: Of what was seen and is no number in range.
        unresolved: Of beginnings that are not known further, the shared ones too.
        unseen: Of what the endpoint did not tell of.
    """

    numbers: dict[int, float]
    texts: dict[str, float]
    refused: float
    unresolved: float
    unseen: float


class TokenizerTraits(NamedTuple):
    """The most digits that a token has, and whether longer numbers are split; `None`: unknown."""

    most_digits: int
    splits: bool | None


class DigitTree:
    """What answers tell of the numbers from low to high, both included.

    A token that may be the beginning of a longer number is one where the answers that went through
    it say how it goes on. Where none did, it depends on the tokeniser: if numbers were seen to be
    split, tokens with as many digits as the longest are beginnings; else a token is the number.
    """

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self._answers = self._endings = 0
        self._told: dict[TokenPath, dict[str, float]] = {}
        self._ended: set[TokenPath] = set()

    def add_answer(self, answer: Completion) -> None:
        """Learn from an answer how probable the next token was at each of its places."""
        path: TokenPath = ()
        for token in answer.tokens:
            self._told.setdefault(path, token_probabilities(token))
            path += (token.text,)
        if answer.finish != "length":
            self._ended.add(path)
            text = "".join(path)
            self._endings += count_digits(text) > 0 and can_continue(text, self.low, self.high)
        self._answers += 1

    def compute_masses(self) -> ProbabilityMass:
        """What is known by now; at least one answer has been added."""
        numbers: dict[int, float] = {}
        texts: dict[str, float] = {}
        lost = {"refused": 0.0, "beginning": 0.0, "unseen": 0.0}
        most_digits = max(count_digits(token) for told in self._told.values() for token in told)
        tokeniser = TokenizerTraits(most_digits, self._splits_numbers(most_digits))
        for text, mass, kind in self._iter_leaves((), 1.0, tokeniser):
            if kind != "unseen":
                written = text if kind == "whole" else f"{text}..."
                texts[written] = texts.get(written, 0.0) + mass
            meant = self._numbers_of_leaf(text, kind, tokeniser)
            for number in meant:
                numbers[number] = numbers.get(number, 0.0) + mass / len(meant)
            if kind != "whole" or not meant:
                lost["refused" if kind == "whole" else kind] += mass
        return ProbabilityMass(dict(sorted(numbers.items())), sort_by_probability(texts), *lost.values())

    def _numbers_of_leaf(self, text: str, kind: str, tokeniser: TokenizerTraits) -> Sequence[int]:
        """The numbers in range that a leaf stands for, each as much."""
        if kind == "whole":
            number = parse_integer(text)
            return [] if number is None or not self.low <= number <= self.high else [number]
        if kind == "unseen" or not count_digits(text) or tokeniser != TokenizerTraits(1, True):
            return []
        numbers = longer_numbers(text, self.low, self.high)
        return numbers[0] if len(numbers) == 1 and MIN_SHARED_NUMBERS <= len(numbers[0]) <= MAX_SHARED_NUMBERS else []

    def _iter_leaves(self, path: TokenPath, mass: float, tokeniser: TokenizerTraits) -> Iterator[NumberPrefix]:
        told, before = self._told[path], "".join(path)
        in_number, ends = count_digits(before) > 0, 0.0
        yield NumberPrefix(before, mass * unseen_probability(told), "unseen")
        for token, p in told.items():
            way, text = (*path, token), before + token
            if in_number and not token[:1].isdecimal():
                ends += p
            elif not can_continue(text, self.low, self.high):
                yield NumberPrefix(text, mass * p, "whole")
            elif way in self._told:
                yield from self._iter_leaves(way, mass * p, tokeniser)
            else:
                kind = "whole" if self._is_complete(way, tokeniser) else "beginning"
                yield NumberPrefix(text, mass * p, kind)
        if ends:
            yield NumberPrefix(before, mass * ends, "whole")

    def _is_complete(self, way: TokenPath, tokeniser: TokenizerTraits) -> bool:
        """Whether nothing comes after what no answer went through."""
        if not count_digits(text := "".join(way)):
            # A token without any text is the end of the answer, but for some tokenisers' first.
            return not text
        if tokeniser.splits is not None and way in self._ended:
            return True
        return tokeniser.splits is False or count_digits(way[-1]) < tokeniser.most_digits

    def _splits_numbers(self, most_digits: int) -> bool | None:
        """Whether numbers are split; `None` as long as nothing is known of that."""
        after = [
            sum(p for token, p in told.items() if token[:1].isdecimal())
            for path, told in self._told.items()
            if count_digits(text := "".join(path)) and can_continue(text, self.low, self.high)
        ]
        if after or most_digits > 1 or self._endings >= MIN_ENDED_ANSWERS or self._answers >= MAX_REQUESTS:
            return any(p > MIN_CONTINUATION_PROBABILITY for p in after)
        return None
