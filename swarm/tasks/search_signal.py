"""What a search climbs on a task with right answers: accuracy, how likely they are, or both."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Self

from swarm._util import validation
from swarm.errors import UserError
from swarm.models.base import Completion, Example, Message, Request
from swarm.tasks.base import Item, Score, TaskRun, mean_score

SIGNALS = ("accuracy", "logprob", "both")

MIN_LOGPROB = -100.0
"""Nats a token: the lowest log probability that is told apart, and that of a model whose numbers
overflow. One item that a model holds for impossible must not outweigh all others."""


class SearchSignalTask(ABC):
    """Items with an "answer" each, asked about in one round and valued by a signal.

    - "accuracy": 1 for a right answer, 0 for a wrong one. Few items change between two models that
      are near each other, so that a search sees steps and noise.
    - "logprob": the mean natural log probability of the gold answer's tokens after the prompt, from
      `LEAST` to 0. The model reads the answer (teacher forcing, one forward) and writes nothing: a
      score's answer and text are empty, and the answer `None` where there was no number.
    - "both": the mean of right or wrong and the probability that "logprob" is the logarithm of,
      0 to 1. Each score's measures are "correct" and "logprob". Costs two prompts an item.

    Whatever the signal, `grade` values an answer as right or wrong, and `plain` is the task by its
    accuracy, which a verdict rests on.

    Args:
        signal: As above.

    Raises:
        UserError: A value is not allowed.
    """

    signals: Sequence[str] = SIGNALS
    """Those that a class of tasks knows."""

    def __init__(self, signal: str) -> None:
        self.signal = validation.check_one_of("signal", signal, self.signals)

    @property
    def highest(self) -> float:
        """See `Task`."""
        return 0.0 if self.signal == "logprob" else 1.0

    @property
    def lowest(self) -> float:
        """See `Task`."""
        return MIN_LOGPROB if self.signal == "logprob" else 0.0

    @property
    def votes(self) -> bool:
        """See `Task`; with another signal than accuracy a value is not that of an answer."""
        return self.signal == "accuracy"

    @property
    def metric_task(self) -> Self:
        """The task by its accuracy, of the same items, read once; itself if that is its signal."""
        if self.signal == "accuracy":
            return self
        plain = copy(self)
        plain.signal = "accuracy"
        return plain

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Ask about every item in one round.

        Raises:
            UserError: The signal needs log probabilities, and the model gives none.
        """
        asked = [] if self.signal == "logprob" else [self.build_request(item) for item in items]
        golds = [] if self.signal == "accuracy" else [self.gold_request(item) for item in items]
        said = yield [*asked, *golds]
        answered, forced = said[: len(asked)], said[len(asked) :]
        likely = [self._logprob_per_token(completion) for completion in forced]
        if self.signal == "logprob":
            return [_logprob_score(logprob) for logprob in likely]
        scores = [
            self.score_completion(item, one) for item, one in zip(items, answered, strict=True)
        ]
        if self.signal == "accuracy":
            return scores
        return [_combine_score(score, one) for score, one in zip(scores, likely, strict=True)]

    def utility(self, scores: Sequence[Score]) -> float:
        """The mean value: the accuracy, nats a token, or the mean of accuracy and probability."""
        return mean_score(scores)

    @abstractmethod
    def build_request(self, item: Item) -> Request:
        """What is put to the model about one item, for its answer."""

    @abstractmethod
    def score_completion(self, item: Item, completion: Completion) -> Score:
        """What the completion of that request is worth: 1 or 0."""

    def gold_text(self, item: Item) -> str:
        """The gold answer in the words that are scored."""
        return str(item["answer"]).strip()

    def gold_request(self, item: Item) -> Request:
        """The item's prompt with its gold answer as the continuation to be scored."""
        prompt = self.build_request(item).prompt
        return Request(prompt, 0, (format_continuation(prompt, self.gold_text(item)),))

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `swarm.tasks.base.HasGoldAnswers`: the gold answer's tokens, straight after the
        prompt."""
        requests = [self.gold_request(item) for item in items]
        return [Example(request.prompt, request.choices) for request in requests]

    def _logprob_per_token(self, completion: Completion) -> float:
        """Nats a token of the request's only choice; not finite where the model's are not."""
        if len(completion.logprobs) != 1 or len(completion.choice_tokens) != 1:
            raise UserError(
                f"task.signal={self.signal} needs a model that gives the log probability of the "
                "gold answer and its tokens; this one does not: use task.signal=accuracy."
            )
        return completion.logprobs[0] / max(1, completion.choice_tokens[0])


def format_continuation(prompt: str | tuple[Message, ...], answer: str) -> str:
    """The answer as it continues a prompt.

    After a chat header, or white space, an answer starts at once; else with a space.
    """
    space = " " if isinstance(prompt, str) and not prompt[-1:].isspace() else ""
    return space + answer


def _logprob_score(logprob: float) -> Score:
    return Score(_clip_logprob(logprob), "" if math.isfinite(logprob) else None)


def _combine_score(score: Score, logprob: float) -> Score:
    logprob = _clip_logprob(logprob)
    value = (score.value + math.exp(logprob)) / 2
    return replace(score, value=value, measures={"correct": score.value, "logprob": logprob})


def _clip_logprob(logprob: float) -> float:
    """The value of a log probability; rounding can lift one of 0 above it."""
    return min(0.0, max(MIN_LOGPROB, logprob)) if math.isfinite(logprob) else MIN_LOGPROB
