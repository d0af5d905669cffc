"""How a model's answer begins: a question that reads the probabilities of its first token."""

from typing import Any

from swarm.compare.asking import ModelCall, Script
from swarm.compare.errors import InvalidArgument
from swarm.compare.questions import Question, arguments
from swarm.compare.questions.frames import ColumnLayout, SampleRow
from swarm.compare.tokens import validate_top_logprobs, read_next_token, with_logprobs
from swarm.compare.tokens.sampling import resolve_sample_count, count_answers, with_sampling


class NextToken(Question):
    """Asks for one token; an answer is a dictionary of tokens, the most probable first.

    The column "unseen" is the probability of all tokens that the endpoint does not tell of. By
    sampling, "low" and "high" are dictionaries with the ends of the tokens' 95 % intervals.

    Args:
        top_logprobs: How many tokens the endpoint is to tell of, from 1 to 20.
        convert_to_probs: Whether to give probabilities; else their natural logarithms.
        num_samples: How many requests a row is the mean of.
        estimate_by_sampling: For models whose endpoint tells no log probabilities: count this many
            answers of one token (True: 100) at temperature 1, in place of `num_samples` requests.
        base: What every `Question` takes.

    Raises:
        WrongValue: As `Question`.
    """

    def __init__(
        self,
        *,
        top_logprobs: int = 20,
        convert_to_probs: bool = True,
        num_samples: int = 1,
        estimate_by_sampling: int | bool = False,
        **base: Any,
    ) -> None:
        if not isinstance(convert_to_probs, bool):
            raise InvalidArgument(f"convert_to_probs={convert_to_probs!r}: must be True or False")
        self.top_logprobs = validate_top_logprobs(top_logprobs)
        self.convert_to_probs = convert_to_probs
        self.num_samples = arguments.validate_int("num_samples", num_samples)
        self.estimate_by_sampling = estimate_by_sampling
        assert self.requests_per_row
        super().__init__(**base)

    @property
    def requests_per_row(self) -> int:  # type: ignore[override]
        """See `Question.requests_per_row`."""
        return resolve_sample_count(self.estimate_by_sampling) or self.num_samples

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Question.params`."""
        params = super().params(messages)
        if self.estimate_by_sampling:
            return with_sampling(params, 1)
        return with_logprobs(params, self.top_logprobs)

    def settings(self) -> dict[str, Any]:
        """See `Question.settings`."""
        if self.estimate_by_sampling:
            return {"num_samples": self.requests_per_row}
        return {"convert_to_probs": self.convert_to_probs, "num_samples": self.num_samples}

    @property
    def layout(self) -> ColumnLayout:
        """See `Question.layout`."""
        ends = ("low", "high") if self.estimate_by_sampling else ()
        return super().layout._replace(far=("unseen", *ends))

    def row(self, asked: ModelCall, sample: int) -> Script[SampleRow]:
        """See `Question.row`."""
        number = self.requests_per_row
        samples = range(sample * number, (sample + 1) * number)
        if not self.estimate_by_sampling:
            found = yield from read_next_token(asked, samples)
        else:
            found = yield from count_answers(asked, samples)
        if not self.convert_to_probs:
            found = found.to_logprobs()
        if found.error:
            return SampleRow({"answer": None}, str(found.error), found.heard)
        columns = ("answer", "unseen", "low", "high")
        return SampleRow({name: getattr(found, name) for name in columns}, None, found.heard)
