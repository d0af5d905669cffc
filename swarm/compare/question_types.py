"""The types of questions: free text with optional judges, next tokens, ratings, and judges."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from swarm._util.settings import Number, Positive
from swarm.compare.config import AS_GIVEN
from swarm.compare.dataframe import LEADING_COLUMNS, MIDDLE_COLUMNS, ColumnLayout, SampleRow
from swarm.compare.judging import (
    BaseJudge,
    JudgeRun,
    content_as_text,
    fill_template,
    run_together,
)
from swarm.compare.question import Question
from swarm.compare.ratings import RatingBounds, build_rating_params, read_rating
from swarm.compare.sampling import ModelCall, SampleRequest, Script
from swarm.compare.token_probs import (
    MAX_TOP_LOGPROBS,
    count_answers,
    read_next_token,
    sample_count,
    with_logprobs,
    with_sampling,
)
from swarm.errors import InvalidArgument, UserError
from swarm.models.sampling import Outcome

RESERVED_COLUMNS = (*LEADING_COLUMNS, *MIDDLE_COLUMNS, "raw_answer", "probs", "error")
RESERVED_SUFFIXES = ("_question", "_raw_answer", "_probs")
"""Reserved suffixes of judges' column names; see also `RESERVED_COLUMNS`."""

TopLogprobs = Annotated[int, Field(ge=1, le=MAX_TOP_LOGPROBS)]
"""Number of tokens that the endpoint reports at each position."""


def resolve_judge(name: Any, setting: Any) -> BaseJudge:
    """Return the judge of a column.

    Args:
        name: Column of the verdicts.
        setting: A judge, its arguments, or its name in YAML.

    Raises:
        InvalidArgument: The column is reserved, or the setting does not define a judge.
    """
    text = name if isinstance(name, str) else ""
    if not text or text[0] == "_" or text in RESERVED_COLUMNS or text.endswith(RESERVED_SUFFIXES):
        raise InvalidArgument(
            f"{name!r} cannot be a judge's column: not {', '.join(RESERVED_COLUMNS)}, and none "
            f"that starts with _ or ends with {', '.join(RESERVED_SUFFIXES)}"
        )
    judge = setting
    try:
        if isinstance(setting, str):
            judge = Question.from_yaml(setting)
        elif isinstance(setting, Mapping):
            judge = Question.create(**setting)
    except InvalidArgument as error:
        raise InvalidArgument(f"judge {name}: {error}") from None
    if not isinstance(judge, BaseJudge):
        kind = judge.type() if isinstance(judge, Question) else type(judge).__name__
        raise InvalidArgument(
            f"judge {name}: must be a free_form_judge or a rating_judge, its arguments or its "
            f"name in YAML; it is a {kind}"
        )
    return judge


class FreeForm(Question):
    """A question answered in free text; the column "answer" contains the text.

    Attributes:
        temperature: Sampling temperature; `None` is the model's default.
        max_tokens: Maximum tokens of an answer; `None` is the model's default.
        judges: By column: a judge, its arguments as `Question.create` takes them, or its name in
            YAML.

    Raises:
        InvalidArgument: See `Question`; or a judge or its name is invalid.
    """

    temperature: Annotated[Number, AS_GIVEN] | None = 1
    max_tokens: Positive | None = 1024
    judges: dict[Any, Any] | None = None

    @field_validator("judges")
    @classmethod
    def _resolve_judges(cls, judges: dict[Any, Any] | None) -> dict[str, BaseJudge] | None:
        return judges and {name: resolve_judge(name, given) for name, given in judges.items()}

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        settings = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        given = {key: value for key, value in settings.items() if value is not None}
        return {**super().params(messages), **given}

    @property
    def layout(self) -> ColumnLayout:
        judges = self.judges or {}
        far = [name + suffix for name, judge in judges.items() for suffix in judge.suffixes]
        return super().layout._replace(near=tuple(judges), far=tuple(far))

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
        judging = [JudgeRun(name, judge) for name, judge in self.judges.items()]
        for run in judging:
            during.callback(run.record)  # also after an interrupt
        return (self._judge_row(call, sample, judging) for call, sample in rows)

    def judge_scripts(self, question: Any, answers: Iterable[str]) -> list[Script[Any]]:
        text, judges = content_as_text(question), [*(self.judges or {}).values()]
        return [j.judge(fill_template(j.template, text, one)) for j in judges for one in answers]

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


def answer_row(outcome: Outcome) -> SampleRow:
    """Return the row of an answer or of a failure."""
    if isinstance(outcome, UserError):
        return SampleRow({"answer": None}, str(outcome), (outcome,))
    return SampleRow({"answer": outcome.text}, None, (outcome,))


class TokenQuestion(Question):
    """A question whose answers are read from the probabilities of tokens.

    Attributes:
        top_logprobs: Number of tokens the endpoint reports, from 1 to 20.
        estimate_by_sampling: For endpoints without log probabilities: count this many answers
            (True: 100) at temperature 1.
    """

    top_logprobs: TopLogprobs = MAX_TOP_LOGPROBS
    estimate_by_sampling: bool | Positive = False
    near: ClassVar[tuple[str, ...]] = ()
    far: ClassVar[tuple[str, ...]] = ("unseen",)

    @property
    def layout(self) -> ColumnLayout:
        ends = ("low", "high") if self.estimate_by_sampling else ()
        return super().layout._replace(near=self.near, far=(*self.far, *ends))


class NextToken(TokenQuestion):
    """A request for one token; an answer is a dictionary of tokens, the most probable first.

    The column "unseen" is the probability of all tokens that the endpoint does not report. With
    sampling, "low" and "high" are dictionaries of the bounds of 95 % intervals.

    Attributes:
        top_logprobs: Number of tokens the endpoint reports, from 1 to 20.
        convert_to_probs: Whether to return probabilities instead of natural logarithms.
        num_samples: Number of requests averaged in a row.
        estimate_by_sampling: For endpoints without log probabilities: count this many one-token
            answers (True: 100) at temperature 1, instead of `num_samples` requests.
    """

    convert_to_probs: bool = True
    num_samples: Positive = 1

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        params = super().params(messages)
        if self.estimate_by_sampling:
            return with_sampling(params, 1)
        return with_logprobs(params, self.top_logprobs)

    def settings(self) -> dict[str, Any]:
        if self.estimate_by_sampling:
            return {"num_samples": sample_count(self.estimate_by_sampling)}
        return {"convert_to_probs": self.convert_to_probs, "num_samples": self.num_samples}

    def row(self, call: ModelCall, sample: int) -> Script[SampleRow]:
        number = sample_count(self.estimate_by_sampling) or self.num_samples
        read = count_answers if self.estimate_by_sampling else read_next_token
        found = yield from read(call, range(sample * number, (sample + 1) * number))
        return (found if self.convert_to_probs else found.to_logprobs()).to_row(
            "unseen", "low", "high"
        )


class Rating(TokenQuestion):
    """A request for a number; an answer is the mean of the model's distribution, `None` a refusal.

    The columns are those of `swarm.compare.token_probs.Reading`. The bounds and the threshold are
    not part of a request: after a change, cached answers are evaluated again. Numbers of more than
    five characters request longer answers. Where a tokenizer splits numbers, a wider range may need
    a few additional answers.

    Attributes:
        min_rating: Lowest number, an integer.
        max_rating: Highest number, an integer.
        refusal_threshold: An answer is a refusal if no number was seen, or if tokens that are not
            numbers have this probability.
        top_logprobs: Number of tokens the endpoint reports, from 1 to 20.
        estimate_by_sampling: For endpoints without log probabilities: count this many answers
            (True: 100) at temperature 1.
    """

    min_rating: int = 0
    max_rating: int = 100
    refusal_threshold: Annotated[float, Field(gt=0, le=1)] = 0.75
    near: ClassVar[tuple[str, ...]] = ("raw_answer", "probs")
    far: ClassVar[tuple[str, ...]] = ("refused", "unseen")

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.bounds  # noqa: B018  (checks them)

    @property
    def bounds(self) -> RatingBounds:
        """Current bounds: they may be changed, and cached answers are then evaluated again.

        Raises:
            InvalidArgument: The range is empty.
        """
        if self.min_rating >= self.max_rating:
            raise InvalidArgument(
                f"min_rating={self.min_rating}: must be below max_rating={self.max_rating}"
            )
        return RatingBounds(
            self.min_rating,
            self.max_rating,
            self.refusal_threshold,
            self.top_logprobs,
            sample_count(self.estimate_by_sampling),
        )

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return build_rating_params(super().params(messages), self.bounds)

    def row(self, call: ModelCall, sample: int) -> Script[SampleRow]:
        found = yield from read_rating(call, self.bounds, sample)
        return found.to_row("raw_answer", "probs", "refused", "unseen", "low", "high")


class FreeFormJudge(BaseJudge, FreeForm):
    """A judge that answers in text.

    Attributes:
        model: Name of the judging model.
        temperature: Sampling temperature.

    Raises:
        InvalidArgument: See `FreeForm`; or this cannot be a judge. It has one paraphrase, the
            template, with {answer} and optionally {question}.
    """

    temperature: Annotated[Number, AS_GIVEN] | None = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.judges:
            raise InvalidArgument("free_form_judge: a judge has no judges")


class RatingJudge(BaseJudge, Rating):
    """A judge that gives a number, read from its tokens' probabilities.

    Attributes:
        model: Name of the judging model.

    Raises:
        InvalidArgument: See `Rating`; or this cannot be a judge. It has one paraphrase, the
            template, with {answer} and optionally {question}.
    """

    suffixes: ClassVar[tuple[str, ...]] = RESERVED_SUFFIXES
    beside: ClassVar[tuple[str, ...]] = ("timeout", "max_tokens", "max_completion_tokens")
