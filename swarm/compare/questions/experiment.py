"""Several questions asked of several groups of models, in one pool."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any

from swarm.compare.asking import Asked, Want
from swarm.compare.asking.collecting import rare_collections
from swarm.compare.errors import WrongValue, needed
from swarm.compare.questions import arguments
from swarm.compare.questions.frames import Block, Row, frame, tell_failures

if TYPE_CHECKING:
    import pandas as pd

    from swarm.compare.questions import Question


class Part:
    """One question of an experiment, with the models it is put to."""

    def __init__(self, question: "Question", groups: Mapping[str, list[str]]) -> None:
        self.question, self.groups = question, groups
        self.models = list(dict.fromkeys(chain.from_iterable(groups.values())))
        self.messages = question.as_messages()
        self.facts = arguments.facts(question.metadata, len(self.messages), ())[0]
        self.asked = [
            Asked(model, question.params(messages))
            for model in self.models
            for messages in self.messages
        ]
        # What a handler of ModelAdapter raises is raised before anything is asked.
        self.sent = [asked.api_kwargs for asked in self.asked]
        # Of one conversation that is there twice, the second has samples of its own.
        seen: Counter[str] = Counter()
        self.before = []
        for messages in self.messages:
            text = json.dumps(messages, sort_keys=True, default=str)
            self.before.append(seen[text])
            seen[text] += 1

    def rows(self) -> Iterator[Want]:
        """What is asked for each row, and which row of it."""
        each = self.question.samples_per_paraphrase
        for asked, before in zip(self.asked, cycle(self.before), strict=False):
            for sample in range(before * each, (before + 1) * each):
                yield Want(asked, sample)

    def blocks(self, rows: Iterator[Row]) -> dict[str, list[Block]]:
        """Take this question's rows, which are the next ones."""
        sent, samples = iter(self.sent), self.question.samples_per_paraphrase
        return {
            model: [
                Block(
                    messages[-1]["content"],
                    next(sent),
                    number,
                    self.facts[number],
                    list(islice(rows, samples)),
                )
                for number, messages in enumerate(self.messages)
            ]
            for model in self.models
        }


def frames_of(
    questions: "Sequence[Question]", model_groups: Any, details: bool = False
) -> "list[pd.DataFrame]":
    """The data frame of each question; see `Question.many`."""
    parts = parts_of(questions, model_groups)
    try:
        import pandas  # noqa: F401
    except ImportError as error:
        raise needed(error) from None
    for part in parts:
        part.question.layout.columns(details)
    title = parts[0].question.name if len(parts) == 1 else f"{len(parts)} questions"
    found = []
    with rare_collections():
        with ExitStack() as during:
            rows = iter(run_all(parts, during, title))
        for part in parts:
            blocks = part.blocks(rows)
            tell_failures(part.question.name, blocks)
            found.append(frame(part.question.layout, part.groups, blocks, details))
    return found


def run_all(parts: Sequence[Part], during: ExitStack, title: str) -> list[Row]:
    """The rows of all questions, one after the other."""
    from swarm.compare.asking.running import run

    scripts = (part.question.scripts(part.rows(), during) for part in parts)
    made = run(chain.from_iterable(scripts), title, lambda: tell_detectable(parts))
    return list(chain.from_iterable(one if isinstance(one, list) else [one] for one in made))


def tell_detectable(parts: Sequence[Part]) -> None:
    """Say on stderr what differences between the groups of each question can be seen."""
    from swarm.compare.statistics import detectable

    said: dict[str, None] = {}
    for part in parts:
        if len(part.groups) > 1:
            each = part.question.samples_per_paraphrase
            said[detectable(part.groups, len(part.messages), each)] = None
    for line in said:
        print(line, file=sys.stderr)


def parts_of(questions: "Sequence[Question]", model_groups: Any) -> list[Part]:
    """Each question with its models.

    Raises:
        WrongValue: They do not fit together.
    """
    from swarm.compare.questions import Question

    if isinstance(questions, str | Question) or not isinstance(questions, Iterable):
        raise WrongValue("many takes a list of questions")
    questions = list(questions)
    for one in questions:
        if not isinstance(one, Question):
            raise WrongValue(f"many takes a list of questions; {arguments.short(one)} is none")
    if not isinstance(model_groups, list | tuple):
        groups = [arguments.model_groups(model_groups)] * len(questions)
    elif len(model_groups) != len(questions):
        raise WrongValue(
            "many takes the models of all questions, or a list with those of each: there are "
            f"{len(questions)} questions and {len(model_groups)} mappings of models"
        )
    else:
        groups = [arguments.model_groups(one) for one in model_groups]
    return [Part(question, one) for question, one in zip(questions, groups, strict=True)]
