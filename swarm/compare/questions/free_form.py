"""Questions that are answered in free text, and judged by other models where that is wanted."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from swarm.compare.asking import ModelCall, SampleOutcome, Script, SampleRequest
from swarm.compare.questions import Question, arguments
from swarm.compare.questions.frames import ColumnLayout, SampleRow
from swarm.compare.questions.judged_by import resolve_judges
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.compare.judges import FreeFormJudge, RatingJudge
    from swarm.compare.judges.judging import JudgeRun


class FreeForm(Question):
    """A question that is answered in free text; the column "answer" has the text.

    Args:
        temperature: Of sampling; `None` is the model's own.
        max_tokens: The most tokens of an answer; `None` is the model's own.
        judges: By the name of the column that each of them makes: a judge, its arguments as
            `Question.create` takes them, or its name in YAML.
        base: See `Question`.

    Raises:
        WrongValue: See `Question`; or a judge or its name cannot be one.
    """

    def __init__(
        self,
        *,
        temperature: float | None = 1,
        max_tokens: int | None = 1024,
        judges: "Mapping[str, str | dict[str, Any] | FreeFormJudge | RatingJudge] | None" = None,
        **base: Any,
    ) -> None:
        self.temperature, self.max_tokens = temperature, max_tokens
        if temperature is not None:
            arguments.validate_number("temperature", temperature, 0)
        if max_tokens is not None:
            arguments.validate_int("max_tokens", max_tokens)
        self.judges = judges
        super().__init__(**base)

    @property
    def judges(self) -> "dict[str, FreeFormJudge | RatingJudge] | None":
        """By the column that each of them makes; others may be set, as at first."""
        return self._judges

    @judges.setter
    def judges(self, judges: Any) -> None:
        self._judges = resolve_judges(judges)

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Question.params`."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        told = {key: value for key, value in own.items() if value is not None}
        return {**super().params(messages), **told}

    @property
    def layout(self) -> ColumnLayout:
        """See `Question.layout`."""
        judges = (self.judges or {}).items()
        far = [name + suffix for name, judge in judges for suffix in judge.suffixes]
        return super().layout._replace(near=tuple(self.judges or ()), far=tuple(far))

    def row(self, asked: ModelCall, sample: int) -> Script[SampleRow]:
        """The script of one answer, without what judges say of it."""
        return answer_row((yield (SampleRequest(asked, sample),))[0])

    def scripts(
        self, rows: Iterable[SampleRequest], during: ExitStack
    ) -> Iterator[Script[SampleRow] | Script[list[SampleRow]]]:
        """See `Question.scripts`; each answer is judged as soon as it is there."""
        if not self.judges:
            # Thousands of kept answers take half the time that they take one by one.
            return (self._answer_rows(list(some)) for _, some in groupby(rows, itemgetter(0)))
        from swarm.compare.judges.judging import JudgeRun

        judging = [
            during.enter_context(JudgeRun(name, judge)) for name, judge in self.judges.items()
        ]
        return (self._judge_row(asked, sample, judging) for asked, sample in rows)

    def _answer_rows(self, wants: list[SampleRequest]) -> Script[list[SampleRow]]:
        return [answer_row(said) for said in (yield wants)]

    def _judge_row(self, asked: ModelCall, sample: int, judging: "list[JudgeRun]") -> Script[SampleRow]:
        from swarm.compare.judges.judging import run_together

        row = yield from self.row(asked, sample)
        if row.error is not None:
            return row
        question, answer = asked.params["messages"][-1]["content"], row.columns["answer"]
        verdicts = yield from run_together([one.judge_answer(question, answer) for one in judging])
        columns = dict(row.columns)
        for verdict in verdicts:
            columns.update(verdict.columns)
        errors = "; ".join(verdict.error for verdict in verdicts if verdict.error is not None)
        return SampleRow(columns, errors or None, row.heard)


def answer_row(said: SampleOutcome) -> SampleRow:
    """The row of an answer, or of a failure."""
    if isinstance(said, UserError):
        return SampleRow({"answer": None}, str(said), (said,))
    return SampleRow({"answer": said.text}, None, (said,))
