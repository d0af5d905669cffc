"""Judges: questions about an answer, sent to another model."""

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from swarm.compare.judge_cache import JudgeTemplate, list_judgements
from swarm.compare.question import Question
from swarm.compare.question_types import RESERVED_SUFFIXES, FreeForm, Rating
from swarm.compare.sampling.types import ModelCall, SampleRequest, Script
from swarm.compare.token_probs.numbers import request_rating
from swarm.errors import InvalidArgument, UserError
from swarm.models.cache import make_cache_key

if TYPE_CHECKING:
    import pandas as pd


class BaseJudge(Question):
    """Base class of judges: one template, sent to one model once.

    Attributes:
        model: Name of the judging model.
        suffixes: Suffixes of the columns beside the verdict's.
        beside: Parameters that are not part of `cache_key`.
    """

    judges_answers = True
    model: str
    suffixes: ClassVar[tuple[str, ...]] = ("_question",)
    beside: ClassVar[tuple[str, ...]] = ("timeout",)

    def _validate_judge(self, model: str) -> None:
        """Check the arguments.

        Raises:
            InvalidArgument: This cannot be a judge.
        """
        if not isinstance(model, str) or not model.strip():
            raise InvalidArgument(
                f"{self.type()}: model={model!r}: must be the name of the judging model"
            )
        self.model = model
        if self.paraphrases is None or len(self.paraphrases) != 1:
            raise InvalidArgument(
                f"{self.type()}: a judge has exactly one paraphrase, its template"
            )
        if self.samples_per_paraphrase != 1:
            raise InvalidArgument(f"{self.type()}: a judge has samples_per_paraphrase=1")
        assert self.template

    @cached_property
    def template(self) -> JudgeTemplate:
        """Template of the prompt."""
        return JudgeTemplate((self.paraphrases or [""])[0])

    @property
    def uses_question(self) -> bool:
        """True if the template has {question}; if not, equal answers are judged once."""
        return self.template.uses_question

    @property
    def cache_key(self) -> str:
        """Key of the recorded pairs; judges that differ only in their bounds share it."""
        request_params = self.build_call(self.template.text).api_kwargs
        return make_cache_key(
            self.type(), {k: v for k, v in request_params.items() if k not in self.beside}
        )

    def build_call(self, prompt: str) -> ModelCall:
        """Build the request of a prompt, before a rating's parameters are added."""
        return ModelCall(self.model, self.params(self.turns(prompt)))

    def judge(self, prompt: str) -> Script[tuple[dict[str, Any], UserError | None]]:
        """Return the script of a verdict: columns by suffix ("": the verdict), error or `None`."""
        raise NotImplementedError

    def get_cache(self) -> "pd.DataFrame":
        """Return the cached verdicts of this judge, one row per judged answer.

        Returns:
            Columns question (`None` if the template does not use it), answer, judge_question,
                judge_answer; for ratings also judge_raw_answer.

        Raises:
            UserError: The answer cache cannot be read.
        """
        return list_judgements(self)


class FreeFormJudge(BaseJudge, FreeForm):
    """A judge that answers in text.

    Args:
        model: Name of the judging model.
        temperature: Sampling temperature.
        base: See `FreeForm`; one paraphrase, the template, with {answer} and optionally {question}.

    Raises:
        InvalidArgument: See `FreeForm`; or this cannot be a judge.
    """

    def __init__(self, *, model: str = "", temperature: float | None = 0, **base: Any) -> None:
        super().__init__(temperature=temperature, **base)
        if self.judges:
            raise InvalidArgument("free_form_judge: a judge has no judges")
        self._validate_judge(model)

    def judge(self, prompt: str) -> Script[tuple[dict[str, Any], UserError | None]]:
        """See `BaseJudge.judge`."""
        (reply,) = yield (SampleRequest(self.build_call(prompt), 0),)
        if isinstance(reply, UserError):
            return {"": None}, reply
        return {"": reply.text}, None


class RatingJudge(BaseJudge, Rating):
    """A judge that gives a number, read from its tokens' probabilities.

    Args:
        model: Name of the judging model.
        base: See `Rating`; one paraphrase, the template, with {answer} and optionally {question}.

    Raises:
        InvalidArgument: See `Rating`; or this cannot be a judge.
    """

    suffixes = RESERVED_SUFFIXES
    beside = ("timeout", "max_tokens", "max_completion_tokens")

    def __init__(self, *, model: str = "", **base: Any) -> None:
        super().__init__(**base)
        self._validate_judge(model)

    def judge(self, prompt: str) -> Script[tuple[dict[str, Any], UserError | None]]:
        """See `BaseJudge.judge`."""
        call = self.build_call(prompt)
        rating = yield from request_rating(
            call.params, self.model, self.bounds, 0, self.estimate_by_sampling
        )
        if rating.error:
            return {"": None, "_raw_answer": None, "_probs": None}, rating.error
        return {"": rating.answer, "_raw_answer": rating.raw_answer, "_probs": rating.probs}, None
