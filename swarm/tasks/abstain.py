"""AbstainQA: a multiple-choice answer, then the model's verdict on that answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from swarm._util.settings import checked
from swarm.models.base import Completion, Request
from swarm.tasks.base import Item, Score, TaskRun
from swarm.tasks.multiple_choice import MultipleChoice, build_choice_prompt

REFLECTION_PROMPT = (
    "\nProposed answer: {}\n"
    "Is the proposed answer true or false? Directly answer with true or false."
)
"""Text appended to the first round's prompt (Model Swarms, evaluate.py)."""

ABSTENTION = "abstain"
"""Answer of a model that calls its own answer false; several models can vote for it."""

VERDICT = re.compile(
    r"""\A[\W_]*(?:(?P<no>no)|(?P<yes>yes))(?![\w'’-])
    |(?<![\w-])(?P<negated>(?:not|never|cannot|\w+n['’]t)\s+(?:\w+\s+){0,2}?)?
    (?:(?P<true>true)|(?P<false>false|untrue|incorrect|wrong)
      |(?P<right>correct|right|accurate))(?![\w'’-])""",
    re.VERBOSE | re.IGNORECASE,
)
"""A verdict on an answer. "Correct" counts only after "not": "the correct answer" is no verdict."""


@checked("task")
@dataclass(eq=False)
class Abstain(MultipleChoice):
    """Multiple-choice items in two rounds: the answer, then whether it is true or false.

    A model that replies "false" abstains. A right answer scores 1, a wrong one -1 and an abstention
    0 whatever the answer was: the utility is the effective reliability, -1 to 1. An unparsed answer
    counts as wrong unless the model abstains; a reply that is neither true nor false is no
    abstention.

    The second prompt is the first one with `REFLECTION_PROMPT`. It proposes the letter with its
    choice ("C: Paris"), or the text where no letter was parsed; with `parser` "original" always the
    text, as in the original.

    Args are those of `MultipleChoice`; the only `signal` is "accuracy", because a value depends on
    the answers of two rounds. `parser` "original" reads both rounds as the original: "false"
    anywhere in the reply abstains; otherwise the first verdict counts (`verdict`). `scoring`
    "logits" also takes the likelier of true and false; "text" is refused, as the second round shows
    the choices.

    Each score's measures are "abstained" and "right", the latter of the first round's answer.
    """

    signal: Literal["accuracy"] = "accuracy"
    scoring: Literal["generate", "logits"] = "generate"

    lowest = -1.0
    constants = (ABSTENTION,)
    rounds = 2

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Request an answer to every item in two rounds."""
        first = yield [self.build_request(item) for item in items]
        second = yield [self.build_reflection(*pair) for pair in zip(items, first, strict=True)]
        return [self.score_reply(*row) for row in zip(items, first, second, strict=True)]

    def grade(self, item: Item, answer: str | None) -> float:
        """Return 1 for the right letter, 0 for an abstention, else -1."""
        return {item["answer"]: 1.0, ABSTENTION: 0.0}.get(answer, -1.0)

    def build_request(self, item: Item) -> Request:
        """Return the first round's request for one item."""
        request = super().build_request(item)
        # The original continues writing after the letter, and shows the complete text.
        return replace(request, stop_check=None) if self.parser == "original" else request

    def build_reflection(self, item: Item, completion: Completion) -> Request:
        """Return the second round's request, about the model's own answer."""
        letter = self.read_answer(item, completion)
        if letter is None or (self.parser == "original" and self.scoring == "generate"):
            # The original strips the generated text.
            proposed = completion.text.strip() if self.parser == "original" else completion.text
        else:
            proposed = f"{letter}: {item['choices'][letter]}"
        text = build_choice_prompt(item, self.instruction) + REFLECTION_PROMPT.format(proposed)
        prompt = self.format_prompt(text)
        if self.scoring == "logits":
            space = "" if self.chat is True else " "
            return Request(prompt, 0, (f"{space}true", f"{space}false"))
        stop = contains_false if self.parser == "original" else is_decided
        return Request(prompt, self.max_new_tokens, stop_check=stop)

    def score_reply(self, item: Item, completion: Completion, reply: Completion) -> Score:
        """Score an answer together with the model's verdict on it."""
        letter = self.read_answer(item, completion)
        if self.scoring == "logits":
            true, false = reply.logprobs
            abstains = false > true
        elif self.parser == "original":
            abstains = contains_false(reply.text)
        else:
            abstains = verdict(reply.text) is False
        answer = ABSTENTION if abstains else letter
        measures = {"abstained": float(abstains), "right": float(letter == item["answer"])}
        text = f"{completion.text}\n{reply.text}" if reply.text else completion.text
        return Score(self.grade(item, answer), answer, text, measures=measures)


def verdict(text: str) -> bool | None:
    """Return whether a reply calls the proposed answer true; `None` without a verdict.

    The first match counts: "true" and, at the beginning, "yes"; "false", "untrue", "incorrect",
    "wrong" and, at the beginning, "no". After "not", "isn't" and the like the meaning is negated,
    and "not correct", "not right", "not accurate" are "false".
    """
    found = _verdict(text)
    if found is None:
        return None
    answer = bool(found["yes"] or found["true"] or found["right"])
    return answer != bool(found["negated"])


def is_decided(text: str) -> bool:
    """True if `verdict` is the same for `text` and for every text that begins with it."""
    found = _verdict(text)
    return found is not None and found.end() < len(text)


def _verdict(text: str) -> re.Match[str] | None:
    return next((one for one in VERDICT.finditer(text) if not one["right"] or one["negated"]), None)


def contains_false(text: str) -> bool:
    """Apply the original's rule: "false" occurs anywhere in the text, even in "falsetto"."""
    return "false" in text.lower()
