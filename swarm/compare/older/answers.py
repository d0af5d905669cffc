"""What llmcomp cached, as answers that are kept here."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.compare.asking import Asked, Want
from swarm.compare.asking.cache import kept_answers
from swarm.compare.asking.finding import keys_of, source
from swarm.compare.tokens.ratings import Bounds
from swarm.errors import UserError
from swarm.models import Completion, Token
from swarm.models.as_json import completion_as_json

LENGTH = Bounds().max_tokens
"""Of a rating's answer here; llmcomp asked for one token."""


@dataclass
class Imported:
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


def sent(model: str, params: Mapping[str, Any]) -> Asked:
    """What was sent, which no `ModelAdapter` changes any more."""
    asked = Asked(model, params)
    asked.sent = dict(params)
    return asked


def completion_of(answer: Any) -> Completion | None:
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


def keep(asked: Asked, answers: Sequence[Completion], done: Imported) -> int:
    """Keep these as the first samples; gives how many were not kept before."""
    try:
        keys = keys_of([Want(asked, sample) for sample in range(len(answers))])
    except UserError as error:
        done.left_out[str(error)] += len(answers)
        return 0
    kept = kept_answers().get(keys)
    new = {
        key: {"prompt_tokens": 0, "new_tokens": 0, **completion_as_json(answer)}
        for key, answer in zip(keys, answers, strict=True)
        if key not in kept
    }
    if new:
        kept_answers().put_all(new, source(asked.model).label)
    return len(new)
