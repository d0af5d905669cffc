"""What llmcomp cached, as answers that are kept here."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.compare.asking import ModelCall, SampleRequest
from swarm.compare.asking.cache import open_answer_cache
from swarm.compare.asking.finding import sample_cache_keys, resolve_backend
from swarm.compare.tokens.ratings import RatingBounds
from swarm.errors import UserError
from swarm.models import Completion, Token
from swarm.models.as_json import completion_to_json

LENGTH = RatingBounds().max_tokens
"""Of a rating's answer here; llmcomp asked for one token."""


@dataclass
class CacheImportResult:
    """What came over.

    Attributes:
        answers, judgements: That are kept now and were not before.
        failed: Empty answers in the place of failures; they are asked again.
        left_out: Others that were left out, by the reason.
    """

    answers: int = 0
    judgements: int = 0
    failed: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        told = [
            f"{self.answers} answers and {self.judgements} judgements imported",
            *([f"{self.failed} failures left out"] if self.failed else []),
            *(f"{number} left out: {why}" for why, number in self.left_out.items()),
        ]
        return "; ".join(told)


def as_rating(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as a `Rating` sends them here."""
    name = "max_completion_tokens" if "max_completion_tokens" in params else "max_tokens"
    return {**params, name: LENGTH}


def build_sent_call(model: str, params: Mapping[str, Any]) -> ModelCall:
    """What was sent, which no `ModelAdapter` changes any more."""
    asked = ModelCall(model, params)
    asked.sent = dict(params)
    return asked


def parse_completion(answer: Any) -> Completion | None:
    """A text, or a token's probabilities or their logarithms; `None` if it is neither.

    Where the probabilities are a mean over several requests, they become one answer's.
    """
    if isinstance(answer, str):
        return Completion(answer)
    if not isinstance(answer, dict) or not answer:
        return None
    top = sorted(answer.items(), key=lambda one: -one[1])
    if any(p > 0 for p in answer.values()):
        top = [(text, math.log(p)) for text, p in top if p > 0]
    return Completion(top[0][0], finish="length", tokens=(Token(*top[0], tuple(top)),))


def store_answers(asked: ModelCall, answers: Sequence[Completion], done: CacheImportResult) -> int:
    """Keep these as the first samples; gives how many were not kept before."""
    try:
        keys = sample_cache_keys([SampleRequest(asked, sample) for sample in range(len(answers))])
    except UserError as error:
        done.left_out[str(error)] += len(answers)
        return 0
    kept = open_answer_cache().get(keys)
    new = {
        key: {"prompt_tokens": 0, "new_tokens": 0, **completion_to_json(answer)}
        for key, answer in zip(keys, answers, strict=True)
        if key not in kept
    }
    if new:
        open_answer_cache().put_many(new, resolve_backend(asked.model).label)
    return len(new)
