"""How often a model gives an answer, counted over samples, where its probabilities are not told."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.compare.asking import ModelCall, Script, SampleRequest
from swarm.compare.errors import InvalidArgument
from swarm.compare.tokens import NextTokenDistribution
from swarm.errors import UserError
from swarm.models import Completion

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
            f"estimate_by_sampling={estimate_by_sampling!r}: must be True ({DEFAULT_SAMPLES} samples), "
            "False, or a number of samples from 1 on"
        )
    return estimate_by_sampling


def with_sampling(params: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The parameters, for short samples of the model's own distribution."""
    left = {key: value for key, value in params.items() if "logprobs" not in key}
    return {**left, "max_tokens": max_tokens, "temperature": 1}


def sample_answers(params: Mapping[str, Any], model: str, num_samples: int) -> Script[NextTokenDistribution]:
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
    from swarm.report.statistics import mean_interval

    found = mean_interval([1.0] * count + [0.0] * (n - count))
    return found.low, found.high
