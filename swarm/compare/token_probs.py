"""Probabilities of a model's first tokens, from log probabilities or estimated by sampling."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from swarm.compare.config import Config, EndpointClient
from swarm.compare.sampling import ModelCall, SampleOutcome, SampleRequest, Script
from swarm.errors import UserError
from swarm.models.base import Completion, Token
from swarm.models.http_errors import RequestError

MAX_TOP_LOGPROBS = 20
"""Limit of OpenAI's API."""


SAMPLING_HINT = "estimate_by_sampling=True estimates them from samples"


class NextTokenDistribution(NamedTuple):
    """Distribution of the next token.

    Attributes:
        api_kwargs: Parameters that were sent.
        answers: Answers from which it was read.
        answer: Probability, or natural logarithm, by token; the most probable first. Empty after an
            error.
        unseen: Probability that the endpoint did not report, from 0 to 1.
        low, high: Bounds of each token's 95 % interval, if estimated by sampling.
        error: Why there is no answer.
    """

    api_kwargs: dict[str, Any]
    answers: tuple[Completion, ...]
    answer: dict[str, float]
    unseen: float = 0.0
    low: dict[str, float] | None = None
    high: dict[str, float] | None = None
    error: UserError | None = None

    def to_logprobs(self) -> "NextTokenDistribution":
        """Return a copy with natural logarithms instead of probabilities."""
        low, high = (ends and to_logprobs(ends) for ends in (self.low, self.high))
        return self._replace(answer=to_logprobs(self.answer), low=low, high=high)


def with_logprobs(
    params: Mapping[str, Any], top_logprobs: int, max_tokens: int = 1
) -> dict[str, Any]:
    """Return the parameters with those that request log probabilities."""
    return {
        **params,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": top_logprobs,
    }


def read_next_token(call: ModelCall, samples: Sequence[int]) -> Script[NextTokenDistribution]:
    """Read the distribution of the first token, averaged over the samples.

    A token that one of them does not report has a probability of 0 there.

    Args:
        call: Call with the parameters of `with_logprobs`.
        samples: Sample numbers.
    """
    outcomes = yield [SampleRequest(call, sample) for sample in samples]
    answers = tuple(one for one in outcomes if isinstance(one, Completion))
    if error := missing_logprobs_error(outcomes, call.model):
        return NextTokenDistribution(call.api_kwargs, answers, {}, error=error)
    probabilities = [token_probabilities(answer.tokens[0]) for answer in answers]
    mean: dict[str, float] = {}
    for one in probabilities:
        for token, p in one.items():
            mean[token] = mean.get(token, 0.0) + p / len(probabilities)
    unseen = sum(unseen_probability(one) for one in probabilities) / len(probabilities)
    return NextTokenDistribution(call.api_kwargs, answers, sort_by_probability(mean), unseen)


def token_probabilities(token: Token) -> dict[str, float]:
    """Return the probability by token at this position, as far as the endpoint reports it.

    Probabilities of tokens with equal text, such as parts of one character, are summed. The sampled
    token is included even if it is not among the most probable; tokens with a probability of 0 are
    not.
    """
    found: dict[str, float] = {}
    for text, logprob in token.top:
        found[text] = found.get(text, 0.0) + _to_probability(logprob)
    found.setdefault(token.text, _to_probability(token.logprob))
    return {text: p for text, p in found.items() if p > 0}


def _to_probability(logprob: float) -> float:
    """Convert a log probability, at most 1: some endpoints report positive ones."""
    return math.exp(min(logprob, 0.0))


def unseen_probability(probs: Mapping[str, float]) -> float:
    """Return the probability mass that is not reported, from 0 to 1."""
    return min(1.0, max(0.0, 1.0 - sum(probs.values())))


def to_logprobs(found: Mapping[str, float]) -> dict[str, float]:
    """Return natural logarithms of probabilities; minus infinity for 0."""
    return {token: math.log(p) if p > 0 else -math.inf for token, p in found.items()}


def sort_by_probability(found: Mapping[str, float]) -> dict[str, float]:
    """Sort by value, the highest first."""
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def missing_logprobs_error(outcomes: Sequence[SampleOutcome], model: str) -> UserError | None:
    """Return why the first token's probabilities cannot be read from these; `None` if they can."""
    for one in outcomes:
        if isinstance(one, UserError):
            return _explain_refusal(model, one)
        if _has_logprobs(one):
            continue
        if (one.text or one.tokens) and any(_has_logprobs(other) for other in outcomes):
            return UserError(
                f"{model}: a response lacks the requested log probabilities, which "
                "others had; it is not stored and is requested again next time"
            )
        if one.text or one.tokens:
            return UserError(
                f"{model}: {_provider_name(model)} returns no log probabilities "
                f"(top_logprobs), which this question needs; {SAMPLING_HINT}"
            )
        finish_text = f" (finish: {one.finish})" if one.finish else ""
        return UserError(
            f"{model}: the answer has no token to read{finish_text}; if the model thinks before it "
            "answers, disable that or raise max_tokens with ModelAdapter.register"
        )
    return None


def _has_logprobs(one: SampleOutcome) -> bool:
    """Return whether the most probable tokens at the first position are known."""
    return isinstance(one, Completion) and bool(one.tokens and one.tokens[0].top)


def _explain_refusal(model: str, error: UserError) -> UserError:
    """Return a request's error, with the alternative if it concerns log probabilities."""
    if "logprob" not in str(error).lower() or (isinstance(error, RequestError) and error.passing):
        return error
    return UserError(
        f"{model}: {_provider_name(model)} refuses to return log probabilities; if it names a "
        f"lower limit, set top_logprobs, else {SAMPLING_HINT}: {error}"
    )


def _provider_name(model: str) -> str:
    """Return the endpoint or provider of a model for an error, without any request."""
    client = Config.client_cache.get(model)
    return client.base_url if isinstance(client, EndpointClient) else model.partition("/")[0]


DEFAULT_SAMPLES = 100
"""Samples of one estimate by default."""


def sample_count(estimate_by_sampling: int | bool) -> int:
    """Return the number of samples of an estimate: 0 for False, `DEFAULT_SAMPLES` for True."""
    return DEFAULT_SAMPLES if estimate_by_sampling is True else int(estimate_by_sampling)


def with_sampling(params: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the parameters for short samples of the model's unmodified distribution."""
    remaining = {key: value for key, value in params.items() if "logprobs" not in key}
    return {**remaining, "max_tokens": max_tokens, "temperature": 1}


def count_answers(call: ModelCall, samples: Sequence[int]) -> Script[NextTokenDistribution]:
    """Estimate the distribution of complete answers from samples, with Wilson 95 % intervals.

    With a max_tokens of 1 an answer is one token, if the endpoint returns its text unchanged; some
    strip the leading space. An answer without text counts as "".

    Args:
        call: The call.
        samples: Sample numbers; if one of them fails, there is no distribution.
    """
    call.together = True
    outcomes = yield [SampleRequest(call, sample) for sample in samples]
    answers = tuple(one for one in outcomes if isinstance(one, Completion))
    for one in outcomes:
        if isinstance(one, UserError):
            return NextTokenDistribution(call.api_kwargs, answers, {}, error=one)
    counts = Counter(answer.text for answer in answers).most_common()
    shares = {text: count / len(answers) for text, count in counts}
    ends = {text: share_interval(count, len(answers)) for text, count in counts}
    low = {text: end[0] for text, end in ends.items()}
    high = {text: end[1] for text, end in ends.items()}
    return NextTokenDistribution(call.api_kwargs, answers, shares, low=low, high=high)


def share_interval(count: int, n: int) -> tuple[float, float]:
    """Return the Wilson 95 % interval of a share."""
    from swarm.stats.significance import mean_interval

    found = mean_interval([1.0] * count + [0.0] * (n - count))
    return found.low, found.high
