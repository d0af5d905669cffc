"""A model's rating as a distribution over numbers, whatever its tokeniser does with digits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from swarm.compare.asking import Asked, Heard, Script, Want
from swarm.compare.errors import WrongValue
from swarm.compare.tokens import checked_top_logprobs, telling, untold
from swarm.compare.tokens.digits import MAX_REQUESTS, Digits, Masses, first_number
from swarm.compare.tokens.sampling import checked_samples, counted, sampled
from swarm.errors import UserError
from swarm.models import Completion

ROOM = 6
"""Tokens of a rating's answer: a space or a sign and five digits, one token each."""

KNOWN_WELL = 0.95
"""Where more of a rating's probability is known than this, no more is asked."""


@dataclass(frozen=True)
class Bounds:
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
                raise WrongValue(f"{key}={value!r}: must be a whole number")
        if self.min_rating >= self.max_rating:
            raise WrongValue(
                f"min_rating={self.min_rating}: must be below max_rating={self.max_rating}"
            )
        share = self.refusal_threshold
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise WrongValue(f"refusal_threshold={share!r}: must be above 0 and at most 1")
        checked_top_logprobs(self.top_logprobs)

    @property
    def max_tokens(self) -> int:
        """Room for the longest number in digits of a token each, and one token more.

        `ROOM` for all numbers that fit, so that a changed range sends the same request and kept
        answers are read anew.
        """
        longest = max(len(str(self.min_rating)), len(str(self.max_rating)))
        return max(ROOM, longest + 1)

    def has(self, number: int) -> bool:
        """Whether it is a rating."""
        return self.min_rating <= number <= self.max_rating


class Rated(NamedTuple):
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


def rating_params(
    params: Mapping[str, Any], bounds: Bounds, estimate_by_sampling: int | bool = False
) -> dict[str, Any]:
    """What a rating asks for, of several requests the first."""
    if estimate_by_sampling:
        return sampled(params, bounds.max_tokens)
    return telling(params, bounds.top_logprobs, bounds.max_tokens)


def rated(
    params: Mapping[str, Any],
    model: str,
    bounds: Bounds,
    sample: int = 0,
    estimate_by_sampling: int | bool = False,
) -> Script[Rated]:
    """A model's rating; see `rating`.

    Args:
        params: What is asked; what has the model rate is added.
    """
    asked = Asked(model, rating_params(params, bounds, estimate_by_sampling))
    return rating(asked, bounds, sample, estimate_by_sampling)


def rating(
    asked: Asked, bounds: Bounds, sample: int = 0, estimate_by_sampling: int | bool = False
) -> Script[Rated]:
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
    if number := checked_samples(estimate_by_sampling):
        samples = range(sample * number, (sample + 1) * number)
        return (yield from _estimated(asked, bounds, samples))
    heard = list((yield [Want(asked, sample)]))
    digits = Digits(bounds.min_rating, bounds.max_rating)
    found, error = _learned(digits, heard, asked.model)
    other = {"temperature": 1, "max_tokens": bounds.max_tokens}
    more = Asked(asked.model, {**asked.params, **other})
    while found and (number := _further(found, bounds, len(heard))):
        places = range(len(heard), len(heard) + number)
        came = yield [Want(more, sample * MAX_REQUESTS + place) for place in places]
        heard += came
        found, error = _learned(digits, came, asked.model)
    answers = tuple(one for one in heard if isinstance(one, Completion))
    if found is None:
        return _failed(error, asked, answers)
    unseen = min(1.0, found.unseen + found.unresolved)
    return _rating(found.numbers, found.texts, found.refused, unseen, bounds, asked, answers)


def _learned(
    digits: Digits, heard: Sequence[Heard], model: str
) -> tuple[Masses | None, UserError | None]:
    """What is known with these answers too, or why nothing can be learned from them."""
    if error := untold(heard, model):
        return None, error
    for one in heard:
        if isinstance(one, Completion):
            digits.add(one)
    return digits.masses(), None


def _further(found: Masses, bounds: Bounds, asked: int) -> int:
    """How many more answers are worth asking for, when so many have been asked for."""
    refuses = found.refused >= bounds.refusal_threshold
    if refuses or found.unresolved <= 1 - KNOWN_WELL:
        return 0
    return min(asked, MAX_REQUESTS - asked)


def _estimated(asked: Asked, bounds: Bounds, samples: Sequence[int]) -> Script[Rated]:
    """A rating by sampling."""
    from swarm.report.statistics import mean_interval

    said = yield from counted(asked, samples)
    if said.error:
        return _failed(said.error, asked, said.heard)
    found = [first_number(answer.text) for answer in said.heard]
    ratings = [one for one in found if one is not None and bounds.has(one)]
    shares = {one: count / len(samples) for one, count in sorted(Counter(ratings).items())}
    refused = 1 - len(ratings) / len(samples)
    made = _rating(shares, said.answer, refused, 0.0, bounds, asked, said.heard)
    if made.answer is None:
        return made
    mean = mean_interval(ratings)
    return made._replace(low=mean.low, high=mean.high)


def _rating(
    masses: Mapping[int, float],
    written: dict[str, float],
    refused: float,
    unseen: float,
    bounds: Bounds,
    asked: Asked,
    heard: tuple[Completion, ...],
) -> Rated:
    """The rating that the probabilities of the numbers make; they need not add up to 1."""
    seen = sum(masses.values())
    answer, probs = None, None
    if seen > 0 and refused < bounds.refusal_threshold:
        probs = {number: mass / seen for number, mass in masses.items()}
        answer = sum(number * p for number, p in probs.items())
    return Rated(answer, written, probs, refused, unseen, None, None, None, asked.api_kwargs, heard)


def _failed(error: UserError | None, asked: Asked, heard: tuple[Completion, ...]) -> Rated:
    return Rated(None, {}, None, 0.0, 0.0, None, None, error, asked.api_kwargs, heard)
