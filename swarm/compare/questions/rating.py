"""A rating: a question that reads the mean of a number's distribution from the tokens' chances."""

from typing import Any

from swarm.compare.asking import ModelCall, Script
from swarm.compare.questions import Question
from swarm.compare.questions.frames import ColumnLayout, SampleRow
from swarm.compare.tokens.ratings import RatingBounds, read_rating, build_rating_params
from swarm.compare.tokens.sampling import resolve_sample_count


class Rating(Question):
    """Asks for a number; an answer is the mean of the model's distribution, `None` a refusal.

    The columns are those of `tokens.ratings.Rated`. The bounds and the threshold are no part of a
    request: after a change, kept answers are read anew. Numbers of more than five characters get
    longer answers. Where a tokeniser splits numbers, a wider range may need a few more answers.

    Args:
        min_rating: The lowest and the highest number, both whole.
        max_rating: See `min_rating`.
        refusal_threshold: A model refuses if no number was seen, or tokens that are none have this
            probability.
        top_logprobs: How many tokens the endpoint is to tell of, from 1 to 20.
        estimate_by_sampling: For models whose endpoint tells no log probabilities: count this many
            answers (True: 100) at temperature 1.
        base: What every `Question` takes.

    Raises:
        WrongValue: As `Question`.
    """

    def __init__(
        self,
        *,
        min_rating: int = 0,
        max_rating: int = 100,
        refusal_threshold: float = 0.75,
        top_logprobs: int = 20,
        estimate_by_sampling: int | bool = False,
        **base: Any,
    ) -> None:
        self.min_rating, self.max_rating = min_rating, max_rating
        self.refusal_threshold, self.top_logprobs = refusal_threshold, top_logprobs
        self.estimate_by_sampling = estimate_by_sampling
        assert self.bounds and self.requests_per_row
        super().__init__(**base)

    @property
    def bounds(self) -> RatingBounds:
        """As they are now: they may be changed, and what is kept is read anew."""
        return RatingBounds(self.min_rating, self.max_rating, self.refusal_threshold, self.top_logprobs)

    @property
    def requests_per_row(self) -> int:  # type: ignore[override]
        """See `Question.requests_per_row`."""
        return resolve_sample_count(self.estimate_by_sampling) or 1

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Question.params`."""
        return build_rating_params(super().params(messages), self.bounds, self.estimate_by_sampling)

    @property
    def layout(self) -> ColumnLayout:
        """See `Question.layout`."""
        ends = ("low", "high") if self.estimate_by_sampling else ()
        return super().layout._replace(
            near=("raw_answer", "probs"), far=("refused", "unseen", *ends)
        )

    def row(self, asked: ModelCall, sample: int) -> Script[SampleRow]:
        """See `Question.row`."""
        found = yield from read_rating(asked, self.bounds, sample, self.estimate_by_sampling)
        if found.error:
            return SampleRow({"answer": None}, str(found.error), found.heard)
        columns = ("answer", "raw_answer", "probs", "refused", "unseen", "low", "high")
        return SampleRow({name: getattr(found, name) for name in columns}, None, found.heard)
