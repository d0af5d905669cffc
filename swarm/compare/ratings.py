"""Ratings: the distribution of a model's answer over numbers, for any tokenization of digits."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from swarm.compare.sampling import ModelCall, SampleRequest, Script
from swarm.compare.token_probs import (
    Reading,
    count_answers,
    missing_logprobs_error,
    sort_by_probability,
    token_probabilities,
    unseen_probability,
    with_logprobs,
    with_sampling,
)
from swarm.models.base import Completion

TokenPath = tuple[str, ...]
"""Texts of an answer's first tokens."""

MINUS_SIGNS = "-\N{MINUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}"
PLUS_SIGNS = "+\N{FULLWIDTH PLUS SIGN}"

NUMBER_PATTERN = re.compile(rf"\s*([{MINUS_SIGNS}{PLUS_SIGNS}]?)(\d{{0,30}})(\s*)")
"""An integer or the beginning of one; in the digits of any script."""

LEADING_NUMBER_PATTERN = re.compile(rf"\s*[{MINUS_SIGNS}{PLUS_SIGNS}]?\d{{1,30}}(?![\d_]|[.,]\d)")
"""An integer at the start of a text."""

MIN_CONTINUATION_PROBABILITY = 0.01
"""If digits after a number are more probable than this, the tokenizer splits numbers."""

MIN_ENDED_ANSWERS = 4
"""Number of answers ending after a digit that shows that the tokenizer does not split numbers."""

MAX_REQUESTS = 8
"""Maximum number of requests of one rating, if a tokenizer splits numbers."""

MIN_SHARED_NUMBERS, MAX_SHARED_NUMBERS = 10, 1_000
"""Bounds on how many numbers may share the mass of their common prefix. A prefix of fewer numbers,
such as 1 of 10 and 100, may itself be the answer.
"""

ROOM = 6
"""Tokens of a rating's answer: a space or a sign, and five digits with one token each."""

ENOUGH_PROBABILITY = 0.95
"""If more of a rating's probability is known than this, no further answers are requested."""

PARSE_CACHE_SIZE = 20_000
"""Size of the parse caches; the same tokens recur."""


@lru_cache(PARSE_CACHE_SIZE)
def parse_integer(text: str) -> int | None:
    """Parse a text that is an integer, up to spaces; `None` otherwise, as for "5_0"."""
    found = NUMBER_PATTERN.fullmatch(text)
    if found is None or not found[2]:
        return None
    return int(found[2]) * (-1 if found[1] and found[1] in MINUS_SIGNS else 1)


def parse_leading_integer(text: str) -> int | None:
    """Parse the integer at the start of a text; `None` for "5_0" or "8.5"."""
    found = LEADING_NUMBER_PATTERN.match(text)
    return parse_integer(found[0]) if found else None


@lru_cache(PARSE_CACHE_SIZE)
def count_digits(text: str) -> int:
    """Count the digits of an integer or its beginning; 0 for any other text."""
    found = NUMBER_PATTERN.fullmatch(text)
    return len(found[2]) if found else 0


@lru_cache(PARSE_CACHE_SIZE)
def can_continue(text: str, low: int, high: int) -> bool:
    """Return whether a longer number in [low, high] may begin so; no number begins with a zero."""
    found = NUMBER_PATTERN.fullmatch(text)
    if found is None or (found[2] and found[3]):
        return False
    if found[2]:
        return bool(longer_numbers(text, low, high))
    below = found[1] and found[1] in MINUS_SIGNS
    return not found[1] or (-low if below else high) > 0


@lru_cache(PARSE_CACHE_SIZE)
def longer_numbers(text: str, low: int, high: int) -> list[range]:
    """Return the longer numbers in [low, high] that begin with this number; none after a zero."""
    number = parse_integer(text) or 0
    if number < 0:
        # Mirrored at zero: -12 begins with -1 as 12 does with 1.
        return [range(1 - r.stop, 1 - r.start) for r in longer_numbers(str(-number), -high, -low)]
    found, last = [], number
    while 0 < number * 10 <= high:
        number, last = number * 10, last * 10 + 9
        found.append(range(max(number, low), min(last, high) + 1))
    return [numbers for numbers in found if numbers]


class ProbabilityMass(NamedTuple):
    """Distribution of an answer's probability.

    Attributes:
        numbers: Probability of each number in range. Where numbers are split and the continuation
            of an 8 is unknown, all longer numbers with this prefix share its mass evenly if they
            have the same length, as 80 to 89 do.
        texts: Probability of each text that was seen; "8..." is the prefix 8 with unknown
            continuation.
        refused: Probability of texts that are not numbers in range.
        unresolved: Probability of prefixes with unknown continuation, including shared ones.
        unseen: Probability that the endpoint did not report.
    """

    numbers: dict[int, float]
    texts: dict[str, float]
    refused: float
    unresolved: float
    unseen: float


class DigitTree:
    """Prefix tree of the answers' tokens, for the numbers from `low` to `high` inclusive.

    If answers passed through a token, they determine whether a longer number follows. Otherwise it
    depends on the tokenizer: if numbers are known to be split, tokens with the maximum number of
    digits are prefixes; else a token is the complete number.
    """

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self._answers = self._endings = 0
        self._told: dict[TokenPath, dict[str, float]] = {}
        self._ended: set[TokenPath] = set()
        # Of the tokenizer: maximum digits of a token, and whether numbers are split, if known.
        self._most_digits = 0
        self._splits: bool | None = None

    def add_answer(self, answer: Completion) -> None:
        """Add the probabilities of the next token at each position of an answer."""
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
        """Compute the distribution; requires at least one answer."""
        self._learn_tokenizer()
        numbers: dict[int, float] = defaultdict(float)
        texts: dict[str, float] = defaultdict(float)
        lost = {"refused": 0.0, "beginning": 0.0, "unseen": 0.0}
        for text, mass, kind in self._iter_leaves((), 1.0):
            if kind != "unseen":
                texts[text if kind == "whole" else f"{text}..."] += mass
            leaf_numbers = self._numbers_of_leaf(text, kind)
            for number in leaf_numbers:
                numbers[number] += mass / len(leaf_numbers)
            if kind != "whole" or not leaf_numbers:
                lost["refused" if kind == "whole" else kind] += mass
        return ProbabilityMass(
            dict(sorted(numbers.items())), sort_by_probability(texts), *lost.values()
        )

    def _learn_tokenizer(self) -> None:
        self._most_digits = max(count_digits(token) for one in self._told.values() for token in one)
        continuations = [
            sum(p for token, p in probs.items() if token[:1].isdecimal())
            for path, probs in self._told.items()
            if count_digits(text := "".join(path)) and can_continue(text, self.low, self.high)
        ]
        known = continuations or self._most_digits > 1 or self._answers >= MAX_REQUESTS
        splits = any(p > MIN_CONTINUATION_PROBABILITY for p in continuations)
        self._splits = splits if known or self._endings >= MIN_ENDED_ANSWERS else None

    def _iter_leaves(self, path: TokenPath, mass: float) -> Iterator[tuple[str, float, str]]:
        """Yield each possible text, its probability, and "whole", "beginning" or "unseen"."""
        probs, prefix = self._told[path], "".join(path)
        in_number, ends = count_digits(prefix) > 0, 0.0
        yield prefix, mass * unseen_probability(probs), "unseen"
        for token, p in probs.items():
            longer_path, text = (*path, token), prefix + token
            # Any token that does not begin with a digit ends the number.
            if in_number and not token[:1].isdecimal():
                ends += p
            elif not can_continue(text, self.low, self.high):
                yield text, mass * p, "whole"
            elif longer_path in self._told:
                yield from self._iter_leaves(longer_path, mass * p)
            else:
                yield text, mass * p, "whole" if self._is_complete(longer_path) else "beginning"
        if ends:
            yield prefix, mass * ends, "whole"

    def _numbers_of_leaf(self, text: str, kind: str) -> Sequence[int]:
        """Return the numbers in range that a leaf stands for, with equal shares."""
        if kind == "whole":
            number = parse_integer(text)
            return [] if number is None or not self.low <= number <= self.high else [number]
        split = self._splits and self._most_digits == 1
        if kind == "unseen" or not count_digits(text) or not split:
            return []
        numbers = longer_numbers(text, self.low, self.high)
        sharing = len(numbers) == 1 and MIN_SHARED_NUMBERS <= len(numbers[0]) <= MAX_SHARED_NUMBERS
        return numbers[0] if sharing else []

    def _is_complete(self, path: TokenPath) -> bool:
        """Return whether a path that no answer passed through is complete."""
        if not count_digits(text := "".join(path)):
            # An empty token is the end of the answer, except as the first token of some tokenizers.
            return not text
        if self._splits is not None and path in self._ended:
            return True
        return self._splits is False or count_digits(path[-1]) < self._most_digits


class RatingBounds(NamedTuple):
    """Range of ratings, and how they are read.

    Attributes:
        min_rating, max_rating: Lowest and highest rating.
        refusal_threshold: An answer is a refusal if tokens that are not ratings have this
            probability.
        top_logprobs: Number of tokens the endpoint reports at each position.
        samples: Number of samples that are counted instead, for endpoints without log
            probabilities; 0 reads these.
    """

    min_rating: int = 0
    max_rating: int = 100
    refusal_threshold: float = 0.75
    top_logprobs: int = 20
    samples: int = 0

    @property
    def max_tokens(self) -> int:
        """Maximum tokens: the longest number with one token per digit, and one more token.

        At least `ROOM`, so that most changes of the range send the same request and reuse cached
        answers.
        """
        return max(ROOM, 1 + max(len(str(end)) for end in (self.min_rating, self.max_rating)))


def build_rating_params(params: Mapping[str, Any], bounds: RatingBounds) -> dict[str, Any]:
    """Return the parameters of a rating's first request."""
    if bounds.samples:
        return with_sampling(params, bounds.max_tokens)
    return with_logprobs(params, bounds.top_logprobs, bounds.max_tokens)


def read_rating(call: ModelCall, bounds: RatingBounds, sample: int = 0) -> Script[Reading]:
    """Read a model's rating.

    One request suffices if a number is one token. If numbers turn out to be split, further answers
    at temperature 1 are requested, which follow the more probable prefixes and report their
    continuations: until `ENOUGH_PROBABILITY` is known, or `MAX_REQUESTS` have been sent.

    Args:
        call: Call with the parameters of `build_rating_params`.
        bounds: Range of ratings.
        sample: Index among several ratings.
    """
    if bounds.samples:
        return (yield from _estimate_rating(call, bounds, sample))
    other = {"temperature": 1, "max_tokens": bounds.max_tokens}
    more = ModelCall(call.model, {**call.params, **other})
    digits = DigitTree(bounds.min_rating, bounds.max_rating)
    answers: list[Completion] = []
    wants = [SampleRequest(call, sample)]
    while wants:
        outcomes = yield wants
        heard = [one for one in outcomes if isinstance(one, Completion)]
        answers += heard
        if error := missing_logprobs_error(outcomes, call.model):
            return Reading(tuple(answers), error=error)
        for one in heard:
            digits.add_answer(one)
        found, asked = digits.compute_masses(), len(answers)
        refuses = found.refused >= bounds.refusal_threshold
        known = refuses or found.unresolved <= 1 - ENOUGH_PROBABILITY
        further = range(asked, asked if known else min(2 * asked, MAX_REQUESTS))
        wants = [SampleRequest(more, sample * MAX_REQUESTS + index) for index in further]
    reading = Reading(tuple(answers), raw_answer=found.texts, refused=found.refused)
    reading = reading._replace(unseen=min(1.0, found.unseen + found.unresolved))
    return _with_mean(reading, found.numbers, bounds)


def _estimate_rating(call: ModelCall, bounds: RatingBounds, sample: int) -> Script[Reading]:
    from swarm.stats.significance import mean_interval

    number = bounds.samples
    counted = yield from count_answers(call, range(sample * number, (sample + 1) * number))
    if counted.error:
        return counted
    found = [parse_leading_integer(answer.text) for answer in counted.answers]
    ratings = [
        one for one in found if one is not None and bounds.min_rating <= one <= bounds.max_rating
    ]
    shares = {one: count / number for one, count in sorted(Counter(ratings).items())}
    refused = 1 - len(ratings) / number
    reading = Reading(counted.answers, raw_answer=counted.answer, refused=refused)
    reading = _with_mean(reading, shares, bounds)
    if reading.answer is None:
        return reading
    mean = mean_interval(ratings)
    return reading._replace(low=mean.low, high=mean.high)


def _with_mean(reading: Reading, masses: Mapping[int, float], bounds: RatingBounds) -> Reading:
    """Add the mean of the numbers, whose probabilities need not sum to 1; not to a refusal."""
    total = sum(masses.values())
    if total <= 0 or reading.refused >= bounds.refusal_threshold:
        return reading
    probs = {number: mass / total for number, mass in masses.items()}
    return reading._replace(answer=sum(number * p for number, p in probs.items()), probs=probs)
