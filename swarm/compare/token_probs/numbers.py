"""A model's rating as a distribution over numbers, whatever its tokeniser does with digits."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from swarm.compare.sampling.types import ModelCall, SampleOutcome, SampleRequest, Script
from swarm.compare.token_probs import (
    count_answers,
    missing_logprobs_error,
    resolve_sample_count,
    sort_by_probability,
    token_probabilities,
    unseen_probability,
    validate_top_logprobs,
    with_logprobs,
    with_sampling,
)
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Completion

# How probable each number is that a model may write, over tokens of one digit or of several.

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
        return ProbabilityMass(
            dict(sorted(numbers.items())), sort_by_probability(texts), *lost.values()
        )

    def _numbers_of_leaf(self, text: str, kind: str, tokeniser: TokenizerTraits) -> Sequence[int]:
        """The numbers in range that a leaf stands for, each as much."""
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
        if (
            after
            or most_digits > 1
            or self._endings >= MIN_ENDED_ANSWERS
            or self._answers >= MAX_REQUESTS
        ):
            return any(p > MIN_CONTINUATION_PROBABILITY for p in after)
        return None


ROOM = 6
"""Tokens of a rating's answer: a space or a sign and five digits, one token each."""

ENOUGH_PROBABILITY = 0.95
"""Where more of a rating's probability is known than this, no more is asked."""


@dataclass(frozen=True)
class RatingBounds:
    """Which ratings there are, and when there is none.

    Args:
        min_rating, max_rating: The lowest and the highest; whole numbers.
        refusal_threshold: There is no rating where tokens that are none have this probability.
        top_logprobs: How many tokens the endpoint is to tell of at each place.

    Raises:
        WrongValue: A value is not allowed.
    """

    min_rating: int = 0
    max_rating: int = 100
    refusal_threshold: float = 0.75
    top_logprobs: int = 20

    def __post_init__(self) -> None:
        for key in ("min_rating", "max_rating"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidArgument(f"{key}={value!r}: must be a whole number")
        if self.min_rating >= self.max_rating:
            raise InvalidArgument(
                f"min_rating={self.min_rating}: must be below max_rating={self.max_rating}"
            )
        share = self.refusal_threshold
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidArgument(f"refusal_threshold={share!r}: must be above 0 and at most 1")
        validate_top_logprobs(self.top_logprobs)

    @property
    def max_tokens(self) -> int:
        """Room for the longest number in digits of a token each, and one token more.

        `ROOM` for all numbers that fit, so that a changed range sends the same request and kept
        answers are read anew.
        """
        longest = max(len(str(self.min_rating)), len(str(self.max_rating)))
        return max(ROOM, longest + 1)

    def contains(self, number: int) -> bool:
        """Whether it is a rating."""
        return self.min_rating <= number <= self.max_rating


class RatingResult(NamedTuple):
    """A rating.

    Attributes:
        answer: The mean; `None` if the model refuses, or there is an error.
        raw_answer: Token to probability, the most probable first. Where numbers of several tokens
            were read, the numbers as they are written; "8..." is what begins with 8 and is not
            known further. By sampling: answer to share.
        probs: Number to probability, their sum being 1; `None` where there is no answer. Of
            0 to 100, "8..." is shared evenly by 80 to 89; what may be 10 or 100 is left out.
        refused: The probability of what was seen and is no rating.
        unseen: The probability of what the endpoint did not tell of, "8..." included; it makes no
            refusal.
        low, high: The ends of the mean's 95 % interval, where it was estimated by sampling.
        error: Why there is nothing.
        api_kwargs: What was sent, of several requests the first.
        heard: The answers it was read from.
    """

    answer: float | None
    raw_answer: dict[str, float]
    probs: dict[int, float] | None
    refused: float
    unseen: float
    low: float | None
    high: float | None
    error: UserError | None
    api_kwargs: dict[str, Any]
    heard: tuple[Completion, ...] = ()


def build_rating_params(
    params: Mapping[str, Any], bounds: RatingBounds, estimate_by_sampling: int | bool = False
) -> dict[str, Any]:
    """What a rating asks for, of several requests the first."""
    if estimate_by_sampling:
        return with_sampling(params, bounds.max_tokens)
    return with_logprobs(params, bounds.top_logprobs, bounds.max_tokens)


def request_rating(
    params: Mapping[str, Any],
    model: str,
    bounds: RatingBounds,
    sample: int = 0,
    estimate_by_sampling: int | bool = False,
) -> Script[RatingResult]:
    """A model's rating; see `rating`.

    Args:
        params: What is asked; what has the model rate is added.
    """
    asked = ModelCall(model, build_rating_params(params, bounds, estimate_by_sampling))
    return read_rating(asked, bounds, sample, estimate_by_sampling)


def read_rating(
    asked: ModelCall,
    bounds: RatingBounds,
    sample: int = 0,
    estimate_by_sampling: int | bool = False,
) -> Script[RatingResult]:
    """A model's rating.

    One request tells it where a number is one token. Where numbers are seen to be split, further
    answers at temperature 1 are asked for, which go through the likelier beginnings and tell how
    these go on: until `KNOWN_WELL` is known, or `MAX_REQUESTS` were asked for.

    Args:
        asked: With parameters as `rating_params` gives them.
        bounds: Which ratings there are.
        sample: Which of several ratings.
        estimate_by_sampling: Count this many answers instead (True: 100), for models whose
            endpoint tells no log probabilities.
    """
    if number := resolve_sample_count(estimate_by_sampling):
        samples = range(sample * number, (sample + 1) * number)
        return (yield from _estimate_rating(asked, bounds, samples))
    heard = list((yield [SampleRequest(asked, sample)]))
    digits = DigitTree(bounds.min_rating, bounds.max_rating)
    found, error = _learn_answers(digits, heard, asked.model)
    other = {"temperature": 1, "max_tokens": bounds.max_tokens}
    more = ModelCall(asked.model, {**asked.params, **other})
    while found and (number := _count_further_samples(found, bounds, len(heard))):
        places = range(len(heard), len(heard) + number)
        came = yield [SampleRequest(more, sample * MAX_REQUESTS + place) for place in places]
        heard += came
        found, error = _learn_answers(digits, came, asked.model)
    answers = tuple(one for one in heard if isinstance(one, Completion))
    if found is None:
        return _build_failed_rating(error, asked, answers)
    unseen = min(1.0, found.unseen + found.unresolved)
    return _build_rating(found.numbers, found.texts, found.refused, unseen, bounds, asked, answers)


def _learn_answers(
    digits: DigitTree, heard: Sequence[SampleOutcome], model: str
) -> tuple[ProbabilityMass | None, UserError | None]:
    """What is known with these answers too, or why nothing can be learned from them."""
    if error := missing_logprobs_error(heard, model):
        return None, error
    for one in heard:
        if isinstance(one, Completion):
            digits.add_answer(one)
    return digits.compute_masses(), None


def _count_further_samples(found: ProbabilityMass, bounds: RatingBounds, asked: int) -> int:
    """How many more answers are worth asking for, when so many have been asked for."""
    refuses = found.refused >= bounds.refusal_threshold
    if refuses or found.unresolved <= 1 - ENOUGH_PROBABILITY:
        return 0
    return min(asked, MAX_REQUESTS - asked)


def _estimate_rating(
    asked: ModelCall, bounds: RatingBounds, samples: Sequence[int]
) -> Script[RatingResult]:
    """A rating by sampling."""
    from swarm.stats.tests import mean_interval

    said = yield from count_answers(asked, samples)
    if said.error:
        return _build_failed_rating(said.error, asked, said.heard)
    found = [parse_leading_integer(answer.text) for answer in said.heard]
    ratings = [one for one in found if one is not None and bounds.contains(one)]
    shares = {one: count / len(samples) for one, count in sorted(Counter(ratings).items())}
    refused = 1 - len(ratings) / len(samples)
    made = _build_rating(shares, said.answer, refused, 0.0, bounds, asked, said.heard)
    if made.answer is None:
        return made
    mean = mean_interval(ratings)
    return made._replace(low=mean.low, high=mean.high)


def _build_rating(
    masses: Mapping[int, float],
    written: dict[str, float],
    refused: float,
    unseen: float,
    bounds: RatingBounds,
    asked: ModelCall,
    heard: tuple[Completion, ...],
) -> RatingResult:
    """The rating that the probabilities of the numbers make; they need not add up to 1."""
    seen = sum(masses.values())
    answer, probs = None, None
    if seen > 0 and refused < bounds.refusal_threshold:
        probs = {number: mass / seen for number, mass in masses.items()}
        answer = sum(number * p for number, p in probs.items())
    return RatingResult(
        answer, written, probs, refused, unseen, None, None, None, asked.api_kwargs, heard
    )


def _build_failed_rating(
    error: UserError | None, asked: ModelCall, heard: tuple[Completion, ...]
) -> RatingResult:
    return RatingResult(None, {}, None, 0.0, 0.0, None, None, error, asked.api_kwargs, heard)
