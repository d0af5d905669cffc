"""Probabilities of a model's first tokens, from log probabilities or estimated by sampling."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from swarm.compare.config import Config, EndpointClient
from swarm.compare.dataframe import SampleRow
from swarm.compare.sampling import ModelCall, SampleRequest, Script
from swarm.errors import UserError
from swarm.models.base import Completion, Token
from swarm.models.http_errors import RequestError
from swarm.models.sampling import Outcome

MAX_TOP_LOGPROBS = 20
"""Limit of OpenAI's API."""

DEFAULT_SAMPLES = 100
"""Samples of one estimate by default."""

SAMPLING_HINT = "estimate_by_sampling=True estimates them from samples"


class Reading(NamedTuple):
    """What was read from tokens: the distribution of the next one, or a rating.

    Attributes:
        answers: Answers from which it was read.
        answer: Probability, or natural logarithm, by token, the most probable first; of a rating
            its mean. `None` after a refusal or an error.
        raw_answer: Of a rating the probability by token, the most probable first. If numbers of
            several tokens were read, by the numbers as written; "8..." is the prefix 8 with unknown
            continuation. By sampling: share by answer.
        probs: Of a rating the probability by number, with a sum of 1; `None` without an answer. For
            0 to 100, "8..." is shared evenly by 80 to 89; what may be 10 or 100 is left out.
        refused: Probability of texts that are not ratings.
        unseen: Probability that the endpoint did not report, from 0 to 1, including "8...".
        low, high: Bounds of the 95 % intervals, of each token or of the mean, if estimated by
            sampling.
        error: Why there is no answer.
    """

    answers: tuple[Completion, ...]
    answer: Any = None
    raw_answer: dict[str, float] | None = None
    probs: dict[int, float] | None = None
    refused: float = 0.0
    unseen: float = 0.0
    low: Any = None
    high: Any = None
    error: UserError | None = None

    def to_logprobs(self) -> "Reading":
        """Return a copy with natural logarithms instead of tokens' probabilities."""
        answer, low, high = (
            one and {token: math.log(p) if p > 0 else -math.inf for token, p in one.items()}
            for one in (self.answer, self.low, self.high)
        )
        return self._replace(answer=answer, low=low, high=high)

    def to_row(self, *columns: str) -> SampleRow:
        """Return the row of a data frame with "answer" and some of the other attributes."""
        if self.error:
            return SampleRow({"answer": None}, str(self.error), self.answers)
        found = self._asdict()
        return SampleRow({name: found[name] for name in ("answer", *columns)}, None, self.answers)


def with_logprobs(
    params: Mapping[str, Any], top_logprobs: int, max_tokens: int = 1
) -> dict[str, Any]:
    """Return the parameters with those that request log probabilities."""
    own = {"max_tokens": max_tokens, "temperature": 0}
    return {**params, **own, "logprobs": True, "top_logprobs": top_logprobs}


def with_sampling(params: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the parameters for short samples of the model's unmodified distribution."""
    remaining = {key: value for key, value in params.items() if "logprobs" not in key}
    return {**remaining, "max_tokens": max_tokens, "temperature": 1}


def sample_count(estimate_by_sampling: int | bool) -> int:
    """Return the number of samples of an estimate: 0 for False, `DEFAULT_SAMPLES` for True."""
    return DEFAULT_SAMPLES if estimate_by_sampling is True else int(estimate_by_sampling)


def read_next_token(call: ModelCall, samples: Sequence[int]) -> Script[Reading]:
    """Read the distribution of the first token, averaged over the samples.

    A token that one of them does not report has a probability of 0 there.

    Args:
        call: Call with the parameters of `with_logprobs`.
        samples: Sample numbers.
    """
    outcomes = yield [SampleRequest(call, sample) for sample in samples]
    answers = tuple(one for one in outcomes if isinstance(one, Completion))
    if error := missing_logprobs_error(outcomes, call.model):
        return Reading(answers, error=error)
    probabilities = [token_probabilities(answer.tokens[0]) for answer in answers]
    mean: dict[str, float] = {}
    for one in probabilities:
        for token, p in one.items():
            mean[token] = mean.get(token, 0.0) + p / len(probabilities)
    unseen = sum(unseen_probability(one) for one in probabilities) / len(probabilities)
    return Reading(answers, sort_by_probability(mean), unseen=unseen)


def count_answers(call: ModelCall, samples: Sequence[int]) -> Script[Reading]:
    """Estimate the distribution of complete answers from samples, with Wilson 95 % intervals.

    With a max_tokens of 1 an answer is one token, if the endpoint returns its text unchanged; some
    strip the leading space. An answer without text counts as "".

    Args:
        call: The call.
        samples: Sample numbers; if one of them fails, there is no distribution.
    """
    from swarm.stats.significance import mean_interval

    call.together = True
    outcomes = yield [SampleRequest(call, sample) for sample in samples]
    answers = tuple(one for one in outcomes if isinstance(one, Completion))
    if error := next((one for one in outcomes if isinstance(one, UserError)), None):
        return Reading(answers, error=error)
    n = len(answers)
    ends = {
        text: mean_interval([1.0] * count + [0.0] * (n - count))
        for text, count in Counter(answer.text for answer in answers).most_common()
    }
    mean, low, high = ({text: end[k] for text, end in ends.items()} for k in range(3))
    return Reading(answers, mean, low=low, high=high)


def token_probabilities(token: Token) -> dict[str, float]:
    """Return the probability by token at this position, as far as the endpoint reports it.

    Probabilities of tokens with equal text, such as parts of one character, are summed. The sampled
    token is included even if it is not among the most probable; tokens with a probability of 0 are
    not.
    """
    found: dict[str, float] = {}
    for text, logprob in token.top:
        # At most 1: some endpoints report positive log probabilities.
        found[text] = found.get(text, 0.0) + math.exp(min(logprob, 0.0))
    found.setdefault(token.text, math.exp(min(token.logprob, 0.0)))
    return {text: p for text, p in found.items() if p > 0}


def unseen_probability(probs: Mapping[str, float]) -> float:
    """Return the probability mass that is not reported, from 0 to 1."""
    return min(1.0, max(0.0, 1.0 - sum(probs.values())))


def sort_by_probability(found: Mapping[str, float]) -> dict[str, float]:
    """Sort by value, the highest first."""
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def missing_logprobs_error(outcomes: Sequence[Outcome], model: str) -> UserError | None:
    """Return why the first token's probabilities cannot be read from these; `None` if they can."""
    known = [
        isinstance(one, Completion) and bool(one.tokens and one.tokens[0].top) for one in outcomes
    ]
    if all(known):
        return None
    one = outcomes[known.index(False)]
    client = Config.client_cache.get(model)
    provider = client.base_url if isinstance(client, EndpointClient) else model.partition("/")[0]
    if isinstance(one, UserError):
        passing = isinstance(one, RequestError) and one.passing
        if passing or "logprob" not in str(one).lower():
            return one
        reason = (
            f"{provider} refuses to return log probabilities; if it names a lower limit, set "
            f"top_logprobs, else {SAMPLING_HINT}: {one}"
        )
    elif not one.text and not one.tokens:
        finish = f" (finish: {one.finish})" if one.finish else ""
        reason = (
            f"the answer has no token to read{finish}; if the model thinks before it answers, "
            "disable that or raise max_tokens with ModelAdapter.register"
        )
    elif any(known):
        reason = (
            "a response lacks the requested log probabilities, which others had; it is not stored "
            "and is requested again next time"
        )
    else:
        reason = (
            f"{provider} returns no log probabilities (top_logprobs), which this question needs; "
            f"{SAMPLING_HINT}"
        )
    return UserError(f"{model}: {reason}")
