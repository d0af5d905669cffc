"""The types of questions: free text with optional judges, next-token probabilities, and ratings."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from typing import Any

from swarm.compare import validation
from swarm.compare.dataframe import LEADING_COLUMNS, MIDDLE_COLUMNS, ColumnLayout, SampleRow
from swarm.compare.judge_cache import Judge, JudgeRun, run_together
from swarm.compare.question import Question
from swarm.compare.sampling.types import ModelCall, SampleOutcome, SampleRequest, Script
from swarm.compare.token_probs import (
    count_answers,
    read_next_token,
    resolve_sample_count,
    validate_top_logprobs,
    with_logprobs,
    with_sampling,
)
from swarm.compare.token_probs.numbers import RatingBounds, build_rating_params, read_rating
from swarm.errors import InvalidArgument, UserError

RESERVED_COLUMNS = (*LEADING_COLUMNS, *MIDDLE_COLUMNS, "raw_answer", "probs", "error")
RESERVED_SUFFIXES = ("_question", "_raw_answer", "_probs")
"""Reserved suffixes of judges' column names; see also `RESERVED_COLUMNS`."""


def resolve_judges(judges: Any) -> dict[str, Any] | None:
    """Resolve the judges of a question.

    Args:
        judges: By column: a judge, its arguments, or its name in YAML; or `None`.

    Raises:
        InvalidArgument: A column is reserved, or a value does not define a judge.
    """
    if judges is None:
        return None
    if not isinstance(judges, Mapping):
        raise InvalidArgument("judges must be a mapping: the column of each, and the judge")
    for name in judges:
        wrong = (
            name in RESERVED_COLUMNS
            or not isinstance(name, str)
            or not name
            or name.startswith("_")
        )
        if wrong or name.endswith(RESERVED_SUFFIXES):
            raise InvalidArgument(
                f"judges: {name!r} cannot be a judge's column: not {', '.join(RESERVED_COLUMNS)}, "
                "and none "
                f"that starts with _ or ends with {', '.join(RESERVED_SUFFIXES)}"
            )
    return {name: resolve_judge(name, given) for name, given in judges.items()}


def resolve_judge(name: str, setting: Any) -> Any:
    """Resolve one judge; see `resolve_judges`."""
    judge = setting
    if isinstance(setting, str):
        judge = Question.from_yaml(setting)
    elif isinstance(setting, Mapping):
        try:
            judge = Question.create(**setting)
        except InvalidArgument as error:
            raise InvalidArgument(f"judge {name}: {error}") from None
    if not getattr(judge, "judges_answers", False):
        kind = judge.type() if isinstance(judge, Question) else type(judge).__name__
        raise InvalidArgument(
            f"judge {name}: must be a free_form_judge or a rating_judge, its arguments or its "
            f"name in YAML; it is a {kind}"
        )
    return judge


class FreeForm(Question):
    """A question answered in free text; the column "answer" contains the text.

    Args:
        temperature: Sampling temperature; `None` is the model's default.
        max_tokens: Maximum tokens of an answer; `None` is the model's default.
        judges: By column: a judge, its arguments as `Question.create` takes them, or its name in
            YAML.
        base: See `Question`.

    Raises:
        InvalidArgument: See `Question`; or a judge or its name is invalid.
    """

    def __init__(
        self,
        *,
        temperature: float | None = 1,
        max_tokens: int | None = 1024,
        judges: Mapping[str, str | dict[str, Any] | Judge] | None = None,
        **base: Any,
    ) -> None:
        self.temperature, self.max_tokens = temperature, max_tokens
        if temperature is not None:
            validation.validate_number("temperature", temperature, 0)
        if max_tokens is not None:
            validation.validate_int("max_tokens", max_tokens)
        self.judges = judges
        super().__init__(**base)

    @property
    def judges(self) -> dict[str, Judge] | None:
        """Judges by column; the setter takes the same values as the argument."""
        return self._judges

    @judges.setter
    def judges(self, judges: Any) -> None:
        self._judges = resolve_judges(judges)

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Question.params`."""
        settings = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        given = {key: value for key, value in settings.items() if value is not None}
        return {**super().params(messages), **given}

    @property
    def layout(self) -> ColumnLayout:
        """See `Question.layout`."""
        judges = (self.judges or {}).items()
        far = [name + suffix for name, judge in judges for suffix in judge.suffixes]
        return super().layout._replace(near=tuple(self.judges or ()), far=tuple(far))

    def row(self, call: ModelCall, sample: int) -> Script[SampleRow]:
        """Return the script of one answer, without judges."""
        return answer_row((yield (SampleRequest(call, sample),))[0])

    def scripts(
        self, rows: Iterable[SampleRequest], during: ExitStack
    ) -> Iterator[Script[SampleRow] | Script[list[SampleRow]]]:
        """See `Question.scripts`; each answer is judged as soon as it arrives."""
        if not self.judges:
            # One script per paraphrase and model: reading thousands of cached answers takes half
            # the time of one script per row.
            return (self._answer_rows(list(group)) for _, group in groupby(rows, itemgetter(0)))
        judging = [
            during.enter_context(JudgeRun(name, judge)) for name, judge in self.judges.items()
        ]
        return (self._judge_row(call, sample, judging) for call, sample in rows)

    def _answer_rows(self, wants: list[SampleRequest]) -> Script[list[SampleRow]]:
        return [answer_row(outcome) for outcome in (yield wants)]

    def _judge_row(
        self, call: ModelCall, sample: int, judging: list[JudgeRun]
    ) -> Script[SampleRow]:
        row = yield from self.row(call, sample)
        if row.error is not None:
            return row
        question, answer = call.params["messages"][-1]["content"], row.columns["answer"]
        verdicts = yield from run_together([one.judge_answer(question, answer) for one in judging])
        columns = dict(row.columns)
        for verdict in verdicts:
            columns.update(verdict.columns)
        errors = "; ".join(verdict.error for verdict in verdicts if verdict.error is not None)
        return SampleRow(columns, errors or None, row.outcomes)


def answer_row(outcome: SampleOutcome) -> SampleRow:
    """Return the row of an answer or of a failure."""
    if isinstance(outcome, UserError):
        return SampleRow({"answer": None}, str(outcome), (outcome,))
    return SampleRow({"answer": outcome.text}, None, (outcome,))


class NextToken(Question):
    """A request for one token; an answer is a dictionary of tokens, the most probable first.

    The column "unseen" is the probability of all tokens that the endpoint does not report. With
    sampling, "low" and "high" are dictionaries of the bounds of 95 % intervals.

    Args:
        top_logprobs: Number of tokens the endpoint reports, from 1 to 20.
        convert_to_probs: Whether to return probabilities instead of natural logarithms.
        num_samples: Number of requests averaged in a row.
        estimate_by_sampling: For endpoints without log probabilities: count this many one-token
            answers (True: 100) at temperature 1, instead of `num_samples` requests.
        base: See `Question`.

    Raises:
        InvalidArgument: See `Question`.
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
        self.num_samples = validation.validate_int("num_samples", num_samples)
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

    def row(self, call: ModelCall, sample: int) -> Script[SampleRow]:
        """See `Question.row`."""
        number = self.requests_per_row
        samples = range(sample * number, (sample + 1) * number)
        if not self.estimate_by_sampling:
            found = yield from read_next_token(call, samples)
        else:
            found = yield from count_answers(call, samples)
        if not self.convert_to_probs:
            found = found.to_logprobs()
        if found.error:
            return SampleRow({"answer": None}, str(found.error), found.answers)
        columns = ("answer", "unseen", "low", "high")
        return SampleRow({name: getattr(found, name) for name in columns}, None, found.answers)


class Rating(Question):
    """A request for a number; an answer is the mean of the model's distribution, `None` a refusal.

    The columns are those of `swarm.compare.token_probs.numbers`. The bounds and the threshold are
    not part of a request: after a change, cached answers are evaluated again. Numbers of more than
    five characters request longer answers. Where a tokenizer splits numbers, a wider range may need
    a few additional answers.

    Args:
        min_rating: Lowest number, an integer.
        max_rating: Highest number, an integer.
        refusal_threshold: An answer is a refusal if no number was seen, or if tokens that are not
            numbers have this probability.
        top_logprobs: Number of tokens the endpoint reports, from 1 to 20.
        estimate_by_sampling: For endpoints without log probabilities: count this many answers
            (True: 100) at temperature 1.
        base: See `Question`.

    Raises:
        InvalidArgument: See `Question`.
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
        """Current bounds: they may be changed, and cached answers are then evaluated again."""
        return RatingBounds(
            self.min_rating, self.max_rating, self.refusal_threshold, self.top_logprobs
        )

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
            return SampleRow({"answer": None}, str(found.error), found.answers)
        columns = ("answer", "raw_answer", "probs", "refused", "unseen", "low", "high")
        return SampleRow({name: getattr(found, name) for name in columns}, None, found.answers)
