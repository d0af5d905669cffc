"""A model's rating as a distribution over numbers, whatever its tokeniser does with digits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from swarm.compare.asking import ModelCall, SampleOutcome, Script, SampleRequest
from swarm.compare.errors import InvalidArgument
from swarm.compare.tokens import validate_top_logprobs, with_logprobs, missing_logprobs_error
from swarm.compare.tokens.digits import MAX_REQUESTS, DigitTree, ProbabilityMass, parse_leading_integer
from swarm.compare.tokens.sampling import resolve_sample_count, count_answers, with_sampling
from swarm.errors import UserError
from swarm.models import Completion

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
    asked: ModelCall, bounds: RatingBounds, sample: int = 0, estimate_by_sampling: int | bool = False
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


def _estimate_rating(asked: ModelCall, bounds: RatingBounds, samples: Sequence[int]) -> Script[RatingResult]:
    """A rating by sampling."""
    from swarm.report.statistics import mean_interval

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
    return RatingResult(answer, written, probs, refused, unseen, None, None, None, asked.api_kwargs, heard)


def _build_failed_rating(error: UserError | None, asked: ModelCall, heard: tuple[Completion, ...]) -> RatingResult:
    return RatingResult(None, {}, None, 0.0, 0.0, None, None, error, asked.api_kwargs, heard)
