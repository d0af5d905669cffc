"""Ratings: the distribution of a model's answer over numbers, for any tokenization of digits."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from swarm.compare.sampling import ModelCall, SampleOutcome, SampleRequest, Script
from swarm.compare.token_probs import (
    count_answers,
    missing_logprobs_error,
    sort_by_probability,
    token_probabilities,
    unseen_probability,
    with_logprobs,
    with_sampling,
)
from swarm.errors import UserError
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


class NumberPrefix(NamedTuple):
    """A possible text with its probability; `kind` is "whole", "beginning" or "unseen"."""

    text: str
    mass: float
    kind: str


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


class TokenizerTraits(NamedTuple):
    """Maximum digits of a token, and whether longer numbers are split; `None`: unknown."""

    most_digits: int
    splits: bool | None


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
        numbers: dict[int, float] = {}
        texts: dict[str, float] = {}
        lost = {"refused": 0.0, "beginning": 0.0, "unseen": 0.0}
        most_digits = max(count_digits(token) for probs in self._told.values() for token in probs)
        tokeniser = TokenizerTraits(most_digits, self._splits_numbers(most_digits))
        for text, mass, kind in self._iter_leaves((), 1.0, tokeniser):
            if kind != "unseen":
                written = text if kind == "whole" else f"{text}..."
                texts[written] = texts.get(written, 0.0) + mass
            leaf_numbers = self._numbers_of_leaf(text, kind, tokeniser)
            for number in leaf_numbers:
                numbers[number] = numbers.get(number, 0.0) + mass / len(leaf_numbers)
            if kind != "whole" or not leaf_numbers:
                lost["refused" if kind == "whole" else kind] += mass
        return ProbabilityMass(
            dict(sorted(numbers.items())), sort_by_probability(texts), *lost.values()
        )

    def _numbers_of_leaf(self, text: str, kind: str, tokeniser: TokenizerTraits) -> Sequence[int]:
        """Return the numbers in range that a leaf stands for, with equal shares."""
        if kind == "whole":
            number = parse_integer(text)
            return [] if number is None or not self.low <= number <= self.high else [number]
        if kind == "unseen" or not count_digits(text) or tokeniser != TokenizerTraits(1, True):
            return []
        numbers = longer_numbers(text, self.low, self.high)
        return (
            numbers[0]
            if len(numbers) == 1 and MIN_SHARED_NUMBERS <= len(numbers[0]) <= MAX_SHARED_NUMBERS
            else []
        )

    def _iter_leaves(
        self, path: TokenPath, mass: float, tokeniser: TokenizerTraits
    ) -> Iterator[NumberPrefix]:
        probs, prefix = self._told[path], "".join(path)
        in_number, ends = count_digits(prefix) > 0, 0.0
        yield NumberPrefix(prefix, mass * unseen_probability(probs), "unseen")
        for token, p in probs.items():
            longer_path, text = (*path, token), prefix + token
            # Any token that does not begin with a digit ends the number.
            if in_number and not token[:1].isdecimal():
                ends += p
            elif not can_continue(text, self.low, self.high):
                yield NumberPrefix(text, mass * p, "whole")
            elif longer_path in self._told:
                yield from self._iter_leaves(longer_path, mass * p, tokeniser)
            else:
                kind = "whole" if self._is_complete(longer_path, tokeniser) else "beginning"
                yield NumberPrefix(text, mass * p, kind)
        if ends:
            yield NumberPrefix(prefix, mass * ends, "whole")

    def _is_complete(self, path: TokenPath, tokeniser: TokenizerTraits) -> bool:
        """Return whether a path that no answer passed through is complete."""
        if not count_digits(text := "".join(path)):
            # An empty token is the end of the answer, except as the first token of some tokenizers.
            return not text
        if tokeniser.splits is not None and path in self._ended:
            return True
        return tokeniser.splits is False or count_digits(path[-1]) < tokeniser.most_digits

    def _splits_numbers(self, most_digits: int) -> bool | None:
        """Return whether numbers are split; `None` while unknown."""
        continuations = [
            sum(p for token, p in probs.items() if token[:1].isdecimal())
            for path, probs in self._told.items()
            if count_digits(text := "".join(path)) and can_continue(text, self.low, self.high)
        ]
        if (
            continuations
            or most_digits > 1
            or self._endings >= MIN_ENDED_ANSWERS
            or self._answers >= MAX_REQUESTS
        ):
            return any(p > MIN_CONTINUATION_PROBABILITY for p in continuations)
        return None


ROOM = 6
"""Tokens of a rating's answer: a space or a sign, and five digits with one token each."""

ENOUGH_PROBABILITY = 0.95
"""If more of a rating's probability is known than this, no further answers are requested."""


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
        longest = max(len(str(self.min_rating)), len(str(self.max_rating)))
        return max(ROOM, longest + 1)


class RatingResult(NamedTuple):
    """A rating.

    Attributes:
        answers: Answers from which it was read.
        answer: Mean; `None` after a refusal or an error.
        raw_answer: Probability by token, the most probable first. If numbers of several tokens were
            read, by the numbers as written; "8..." is the prefix 8 with unknown continuation. By
            sampling: share by answer.
        probs: Probability by number, with a sum of 1; `None` without an answer. For 0 to 100,
            "8..." is shared evenly by 80 to 89; what may be 10 or 100 is left out.
        refused: Probability of texts that are not ratings.
        unseen: Probability that the endpoint did not report, including "8..."; does not count as
            refusal.
        low, high: Bounds of the mean's 95 % interval, if estimated by sampling.
        error: Why there is no rating.
    """

    answers: tuple[Completion, ...]
    answer: float | None = None
    raw_answer: dict[str, float] | None = None
    probs: dict[int, float] | None = None
    refused: float = 0.0
    unseen: float = 0.0
    low: float | None = None
    high: float | None = None
    error: UserError | None = None


def build_rating_params(params: Mapping[str, Any], bounds: RatingBounds) -> dict[str, Any]:
    """Return the parameters of a rating's first request."""
    if bounds.samples:
        return with_sampling(params, bounds.max_tokens)
    return with_logprobs(params, bounds.top_logprobs, bounds.max_tokens)


def read_rating(call: ModelCall, bounds: RatingBounds, sample: int = 0) -> Script[RatingResult]:
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
    outcomes = list((yield [SampleRequest(call, sample)]))
    digits = DigitTree(bounds.min_rating, bounds.max_rating)
    found, error = _learn_answers(digits, outcomes, call.model)
    other = {"temperature": 1, "max_tokens": bounds.max_tokens}
    more = ModelCall(call.model, {**call.params, **other})
    while found and (number := _count_further_samples(found, bounds, len(outcomes))):
        indices = range(len(outcomes), len(outcomes) + number)
        further = yield [SampleRequest(more, sample * MAX_REQUESTS + index) for index in indices]
        outcomes += further
        found, error = _learn_answers(digits, further, call.model)
    answers = tuple(one for one in outcomes if isinstance(one, Completion))
    if found is None:
        return RatingResult(answers, error=error)
    unseen = min(1.0, found.unseen + found.unresolved)
    return _build_rating(answers, found.numbers, found.texts, found.refused, unseen, bounds)


def _learn_answers(
    digits: DigitTree, outcomes: Sequence[SampleOutcome], model: str
) -> tuple[ProbabilityMass | None, UserError | None]:
    """Add answers; return the distribution so far, or why nothing can be read from them."""
    if error := missing_logprobs_error(outcomes, model):
        return None, error
    for one in outcomes:
        if isinstance(one, Completion):
            digits.add_answer(one)
    return digits.compute_masses(), None


def _count_further_samples(found: ProbabilityMass, bounds: RatingBounds, requested: int) -> int:
    """Return how many further answers to request after `requested` of them."""
    refuses = found.refused >= bounds.refusal_threshold
    if refuses or found.unresolved <= 1 - ENOUGH_PROBABILITY:
        return 0
    return min(requested, MAX_REQUESTS - requested)


def _estimate_rating(call: ModelCall, bounds: RatingBounds, sample: int) -> Script[RatingResult]:
    """Estimate a rating by sampling."""
    from swarm.stats.significance import mean_interval

    number = bounds.samples
    counted = yield from count_answers(call, range(sample * number, (sample + 1) * number))
    if counted.error:
        return RatingResult(counted.answers, error=counted.error)
    found = [parse_leading_integer(answer.text) for answer in counted.answers]
    ratings = [
        one for one in found if one is not None and bounds.min_rating <= one <= bounds.max_rating
    ]
    shares = {one: count / number for one, count in sorted(Counter(ratings).items())}
    refused = 1 - len(ratings) / number
    rating = _build_rating(counted.answers, shares, counted.answer, refused, 0.0, bounds)
    if rating.answer is None:
        return rating
    mean = mean_interval(ratings)
    return rating._replace(low=mean.low, high=mean.high)


def _build_rating(
    answers: tuple[Completion, ...],
    masses: Mapping[int, float],
    written: dict[str, float],
    refused: float,
    unseen: float,
    bounds: RatingBounds,
) -> RatingResult:
    """Build a rating from the probabilities of numbers, which need not sum to 1."""
    total = sum(masses.values())
    answer, probs = None, None
    if total > 0 and refused < bounds.refusal_threshold:
        probs = {number: mass / total for number, mass in masses.items()}
        answer = sum(number * p for number, p in probs.items())
    return RatingResult(answers, answer, written, probs, refused, unseen)
