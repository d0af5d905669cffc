"""Questions with right answers; what a search maximizes: accuracy, log probability or both."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, Self

from swarm._util.settings import Positive, checked
from swarm.errors import UserError
from swarm.models.base import Completion, Example, Message, Request
from swarm.tasks.base import Item, Score, TaskRun
from swarm.tasks.dataset import DataTask

Signal = Literal["accuracy", "logprob", "both"]

MIN_LOGPROB = -100.0
"""Lower bound of a log probability, in nats per token; also the value where numbers overflow.

One item that a model considers impossible must not outweigh all others.
"""

Prompt = str | tuple[Message, ...]


@checked("task")
@dataclass(eq=False)
class QuestionTask(DataTask):
    """Items with a "question" and an "answer" each, requested in one round and scored by a signal.

    - "accuracy": 1 for a right answer, 0 for a wrong one. Few items change between two similar
      models, so that a search sees steps and noise.
    - "logprob": the mean natural log probability of the gold answer's tokens after the prompt, from
      `MIN_LOGPROB` to 0. The model reads the answer (teacher forcing, one forward pass) and
      generates nothing: a score's answer and text are empty, and the answer is `None` if the number
      was not finite.
    - "both": the mean of right or wrong and the probability that "logprob" is the logarithm of, 0
      to 1. Each score's measures are "correct" and "logprob". Costs two prompts per item.

    Whatever the signal, `grade` scores an answer as right or wrong, and `metric_task` is the task
    by its accuracy, on which a verdict is based.

    Args:
        instruction: A line before the question; `None` leaves it out.
        chat: Send the prompt as one user turn through the model's chat template; "auto" as a search
            decides (`swarm.loop.prompt_form`).
        max_new_tokens: Maximum number of generated tokens.
        signal: As above.

    The others are those of `DataTask`.
    """

    instruction: str | None = None
    chat: bool | Literal["auto"] = False
    max_new_tokens: Positive = 10
    signal: Signal = "accuracy"  # type: ignore[assignment]

    gold_error = None
    line_answers = False
    """Whether an answer is a complete line, so that what follows it counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.highest = 0.0 if self.signal == "logprob" else 1.0
        if self.signal == "logprob":
            self.lowest = MIN_LOGPROB
        # With another signal a value is not that of an answer.
        self.votes = self.votes and self.signal == "accuracy"

    @property
    def metric_task(self) -> Self:
        """The task by its accuracy, on the same items, read once; itself if that is its signal."""
        if self.signal == "accuracy":
            return self
        plain = copy(self)
        plain.signal, plain.highest, plain.lowest, plain.votes = "accuracy", 1.0, 0.0, True
        return plain

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Send all requests of the items in one round.

        Raises:
            UserError: The signal needs log probabilities, and the model returns none.
        """
        requests = [] if self.signal == "logprob" else [self.build_request(item) for item in items]
        golds = [] if self.signal == "accuracy" else [self.gold_request(item) for item in items]
        completions = yield [*requests, *golds]
        answered, forced = completions[: len(requests)], completions[len(requests) :]
        likely = [self._gold_score(completion) for completion in forced]
        if self.signal == "logprob":
            return likely
        scores = [self.score_completion(*pair) for pair in zip(items, answered, strict=True)]
        if self.signal == "accuracy":
            return scores
        return [
            replace(
                score,
                value=(score.value + math.exp(one.value)) / 2,
                measures={"correct": score.value, "logprob": one.value},
            )
            for score, one in zip(scores, likely, strict=True)
        ]

    @abstractmethod
    def build_request(self, item: Item) -> Request:
        """Return the request for an answer to one item."""

    @abstractmethod
    def read_answer(self, item: Item, completion: Completion) -> str | None:
        """Return the answer of a completion of that request, or `None`."""

    def score_completion(self, item: Item, completion: Completion) -> Score:
        """Score a completion by its answer: 1 or 0."""
        answer = self.read_answer(item, completion)
        return Score(self.grade(item, answer), answer, completion.text)

    def scored_part(self, item: Item, text: str) -> tuple[str, bool]:
        """See `Task.scored_part`: up to the end of the answer, which is one whatever follows."""
        answer = self.read_answer(item, Completion(text))
        if answer is None or self.line_answers:
            return super().scored_part(item, text)
        while text and self.read_answer(item, Completion(text[:-1])) == answer:
            text = text[:-1]
        return text, False

    def gold_text(self, item: Item) -> str:
        """Return the gold answer as the text that is scored."""
        return str(item["answer"]).strip()

    def gold_request(self, item: Item) -> Request:
        """Return a request that scores the gold answer as the continuation of the item's prompt."""
        prompt = self.build_request(item).prompt
        return Request(prompt, 0, (format_continuation(prompt, self.gold_text(item)),))

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `Task.gold_examples`: the gold answer, directly after the prompt."""
        requests = [self.gold_request(item) for item in items]
        return [Example(request.prompt, request.choices) for request in requests]

    def format_prompt(self, text: str) -> Prompt:
        """Return a prompt's text, or with `chat` the text as one user turn."""
        return (Message("user", text),) if self.chat is True else text

    def _gold_score(self, completion: Completion) -> Score:
        """Score the gold answer, the request's only choice, by its nats per token."""
        if len(completion.logprobs) != 1 or len(completion.choice_tokens) != 1:
            raise UserError(f"""task.signal={self.signal} needs a model that returns log
                probabilities of the gold answer; this one does not: use task.signal=accuracy""")
        nats = completion.logprobs[0] / max(1, completion.choice_tokens[0])
        if not math.isfinite(nats):
            return Score(MIN_LOGPROB, None)
        return Score(min(0.0, max(MIN_LOGPROB, nats)), "")  # rounding can lift one of 0 above it


def format_continuation(prompt: Prompt, answer: str) -> str:
    """Return the answer as a continuation of a prompt.

    After a chat header, or white space, an answer starts at once; else with a space.
    """
    space = " " if isinstance(prompt, str) and not prompt[-1:].isspace() else ""
    return space + answer
