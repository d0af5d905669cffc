"""How probable a model's first tokens are, read from the log probabilities an endpoint tells."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from swarm.compare.sampling.types import ModelCall, SampleOutcome, SampleRequest, Script
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Completion, Token

MOST_TOP_LOGPROBS = 20
"""What OpenAI's API allows."""


SAMPLING_HINT = "estimate_by_sampling=True estimates them from samples"


class NextTokenDistribution(NamedTuple):
    """How a model goes on.

    Attributes:
        answer: Token to probability, or to its natural logarithm; the most probable first. Empty
            where there is an error.
        unseen: The probability that the endpoint did not tell of, from 0 to 1.
        low, high: The ends of each token's 95 % interval, where it was estimated by sampling.
        error: Why there is no answer.
        api_kwargs: What was sent.
        heard: The answers it was read from.
    """

    answer: dict[str, float]
    unseen: float
    low: dict[str, float] | None
    high: dict[str, float] | None
    error: UserError | None
    api_kwargs: dict[str, Any]
    heard: tuple[Completion, ...] = ()

    def to_logprobs(self) -> "NextTokenDistribution":
        """The same with natural logarithms for probabilities."""
        low, high = (ends and to_logprobs(ends) for ends in (self.low, self.high))
        return self._replace(answer=to_logprobs(self.answer), low=low, high=high)


def validate_top_logprobs(value: object) -> int:
    """The number of tokens that an endpoint is to tell of.

    Raises:
        WrongValue: It is no whole number from 1 to 20.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= MOST_TOP_LOGPROBS:  # type: ignore[operator]
        raise InvalidArgument(
            f"top_logprobs={value!r}: must be a whole number from 1 to {MOST_TOP_LOGPROBS}"
        )
    return value  # type: ignore[return-value]


def with_logprobs(
    params: Mapping[str, Any], top_logprobs: int, max_tokens: int = 1
) -> dict[str, Any]:
    """The parameters, with all that has an endpoint tell how probable its tokens were."""
    return {
        **params,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": top_logprobs,
    }


def read_next_token(
    asked: ModelCall, samples: Sequence[int], convert_to_probs: bool = True
) -> Script[NextTokenDistribution]:
    """The distribution of the first token, as the mean of what the samples tell.

    A token that one of them does not tell of has a probability of 0 there. Probabilities are
    averaged also where their logarithms are wanted.

    Args:
        asked: With parameters as `telling` gives them.
        samples: Their numbers.
        convert_to_probs: Whether probabilities are wanted; else natural logarithms.
    """
    heard = yield [SampleRequest(asked, sample) for sample in samples]
    answers = tuple(one for one in heard if isinstance(one, Completion))
    if error := missing_logprobs_error(heard, asked.model):
        return NextTokenDistribution({}, 0.0, None, None, error, asked.api_kwargs, answers)
    told = [token_probabilities(answer.tokens[0]) for answer in answers]
    mean: dict[str, float] = {}
    for one in told:
        for token, p in one.items():
            mean[token] = mean.get(token, 0.0) + p / len(told)
    unseen = sum(unseen_probability(one) for one in told) / len(told)
    found = NextTokenDistribution(
        sort_by_probability(mean), unseen, None, None, None, asked.api_kwargs, answers
    )
    return found if convert_to_probs else found.to_logprobs()


def token_probabilities(token: Token) -> dict[str, float]:
    """Token to probability at the place of this token, as far as the endpoint tells.

    Of tokens that are written alike, as parts of one character are, the probabilities are added
    up. The token that was chosen is told of even where it is not among the likeliest; one with a
    probability of 0 is not.
    """
    found: dict[str, float] = {}
    for text, logprob in token.top:
        found[text] = found.get(text, 0.0) + _to_probability(logprob)
    found.setdefault(token.text, _to_probability(token.logprob))
    return {text: p for text, p in found.items() if p > 0}


def _to_probability(logprob: float) -> float:
    """At most 1, whatever an endpoint tells."""
    return math.exp(min(logprob, 0.0))


def unseen_probability(told: Mapping[str, float]) -> float:
    """The probability that is not told of."""
    return min(1.0, max(0.0, 1.0 - sum(told.values())))


def to_logprobs(found: Mapping[str, float]) -> dict[str, float]:
    """Natural logarithms of probabilities; of 0, minus infinity."""
    return {token: math.log(p) if p > 0 else -math.inf for token, p in found.items()}


def sort_by_probability(found: Mapping[str, float]) -> dict[str, float]:
    """The same, the highest value first."""
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def missing_logprobs_error(heard: Sequence[SampleOutcome], model: str) -> UserError | None:
    """Why the probabilities of the first token cannot be read from these; `None` if they can."""
    for one in heard:
        if isinstance(one, UserError):
            return _explain_refusal(model, one)
        if _has_logprobs(one):
            continue
        if (one.text or one.tokens) and any(_has_logprobs(other) for other in heard):
            return UserError(
                f"{model}: an answer came without the log probabilities that were asked for, which "
                "others had; it is not kept and is asked for again the next time"
            )
        if one.text or one.tokens:
            return UserError(
                f"{model}: {_provider_name(model)} gives no log probabilities of its likeliest "
                "tokens "
                f"(top_logprobs), which this question reads; {SAMPLING_HINT}"
            )
        why = f" (finish: {one.finish})" if one.finish else ""
        return UserError(
            f"{model}: the answer has no token to read{why}; where the model thinks before it "
            "answers, turn that off or allow more max_tokens by ModelAdapter.register"
        )
    return None


def _has_logprobs(one: SampleOutcome) -> bool:
    """Whether the likeliest tokens at the answer's first place are known."""
    return isinstance(one, Completion) and bool(one.tokens and one.tokens[0].top)


def _explain_refusal(model: str, error: UserError) -> UserError:
    """The error that a request came to, with the alternative if it is about log probabilities."""
    if "logprob" not in str(error).lower() or getattr(error, "passing", False):
        return error
    return UserError(
        f"{model}: {_provider_name(model)} refuses to tell log probabilities; where it names a "
        "lower "
        f"limit set top_logprobs, else {SAMPLING_HINT}: {error}"
    )


def _provider_name(model: str) -> str:
    """Who answers for a model, in an error; nobody is asked."""
    from swarm.compare.config import Config

    client = Config.client_cache.get(model)
    return getattr(client, "base_url", None) or model.partition("/")[0]


# How often a model gives an answer, counted over samples, where its probabilities are not told.

DEFAULT_SAMPLES = 100
"""Of one estimate, where no number is given."""


def resolve_sample_count(estimate_by_sampling: object) -> int:
    """How many samples an estimate has; 0: there is none.

    Args:
        estimate_by_sampling: False, True for `SAMPLES`, or their number.

    Raises:
        WrongValue: It is something else.
    """
    if isinstance(estimate_by_sampling, bool):
        return DEFAULT_SAMPLES if estimate_by_sampling else 0
    if not isinstance(estimate_by_sampling, int) or estimate_by_sampling < 1:
        raise InvalidArgument(
            f"estimate_by_sampling={estimate_by_sampling!r}: must be True ({DEFAULT_SAMPLES} "
            "samples), "
            "False, or a number of samples from 1 on"
        )
    return estimate_by_sampling


def with_sampling(params: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The parameters, for short samples of the model's own distribution."""
    left = {key: value for key, value in params.items() if "logprobs" not in key}
    return {**left, "max_tokens": max_tokens, "temperature": 1}


def sample_answers(
    params: Mapping[str, Any], model: str, num_samples: int
) -> Script[NextTokenDistribution]:
    """The distribution of whole answers; see `counted`.

    Args:
        params: Sent as they are.
        model: Who is asked.
        num_samples: How many answers are counted.
    """
    return count_answers(ModelCall(model, params), range(num_samples))


def count_answers(asked: ModelCall, samples: Sequence[int]) -> Script[NextTokenDistribution]:
    """The distribution of whole answers over samples, each with its 95 % interval, Wilson's.

    With a max_tokens of 1 an answer is one token, as far as the endpoint gives its text unchanged;
    some take away the space that it begins with. An answer without text counts as "".

    Args:
        asked: What is asked.
        samples: Their numbers; if one of them fails, there is no distribution.
    """
    asked.together = True
    heard = yield [SampleRequest(asked, sample) for sample in samples]
    answers = tuple(one for one in heard if isinstance(one, Completion))
    for one in heard:
        if isinstance(one, UserError):
            return NextTokenDistribution({}, 0.0, None, None, one, asked.api_kwargs, answers)
    counts = Counter(answer.text for answer in answers).most_common()
    shares = {text: count / len(answers) for text, count in counts}
    ends = {text: share_interval(count, len(answers)) for text, count in counts}
    low = {text: end[0] for text, end in ends.items()}
    high = {text: end[1] for text, end in ends.items()}
    return NextTokenDistribution(shares, 0.0, low, high, None, asked.api_kwargs, answers)


def share_interval(count: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share, Wilson's."""
    from swarm.stats.tests import mean_interval

    found = mean_interval([1.0] * count + [0.0] * (n - count))
    return found.low, found.high
