"""Several questions asked of several groups of models, in one pool."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any

from swarm.compare.asking import ModelCall, SampleRequest
from swarm.compare.asking.collecting import reduce_gc_frequency
from swarm.compare.errors import InvalidArgument, missing_extra_error
from swarm.compare.questions import arguments
from swarm.compare.questions.frames import ParaphraseBlock, SampleRow, build_frame, print_failures

if TYPE_CHECKING:
    import pandas as pd

    from swarm.compare.questions import Question


class QuestionPlan:
    """One question of an experiment, with the models it is put to."""

    def __init__(self, question: "Question", groups: Mapping[str, list[str]]) -> None:
        self.question, self.groups = question, groups
        self.models = list(dict.fromkeys(chain.from_iterable(groups.values())))
        self.messages = question.as_messages()
        self.facts = arguments.parse_metadata(question.metadata, len(self.messages), ())[0]
        self.asked = [
            ModelCall(model, question.params(messages))
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

    def iter_requests(self) -> Iterator[SampleRequest]:
        """What is asked for each row, and which row of it."""
        each = self.question.samples_per_paraphrase
        for asked, before in zip(self.asked, cycle(self.before), strict=False):
            for sample in range(before * each, (before + 1) * each):
                yield SampleRequest(asked, sample)

    def take_blocks(self, rows: Iterator[SampleRow]) -> dict[str, list[ParaphraseBlock]]:
        """Take this question's rows, which are the next ones."""
        sent, samples = iter(self.sent), self.question.samples_per_paraphrase
        return {
            model: [
                ParaphraseBlock(
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


def ask_questions(
    questions: "Sequence[Question]", model_groups: Any, details: bool = False
) -> "list[pd.DataFrame]":
    """The data frame of each question; see `Question.many`."""
    parts = build_plans(questions, model_groups)
    try:
        import pandas  # noqa: F401
    except ImportError as error:
        raise missing_extra_error(error) from None
    for part in parts:
        part.question.layout.list_columns(details)
    title = parts[0].question.name if len(parts) == 1 else f"{len(parts)} questions"
    found = []
    with reduce_gc_frequency():
        with ExitStack() as during:
            rows = iter(run_all(parts, during, title))
        for part in parts:
            blocks = part.take_blocks(rows)
            print_failures(part.question.name, blocks)
            found.append(build_frame(part.question.layout, part.groups, blocks, details))
    return found


def run_all(parts: Sequence[QuestionPlan], during: ExitStack, title: str) -> list[SampleRow]:
    """The rows of all questions, one after the other."""
    from swarm.compare.asking.running import run_scripts

    scripts = (part.question.scripts(part.iter_requests(), during) for part in parts)
    made = run_scripts(chain.from_iterable(scripts), title, lambda: print_detectable(parts))
    return list(chain.from_iterable(one if isinstance(one, list) else [one] for one in made))


def print_detectable(parts: Sequence[QuestionPlan]) -> None:
    """Say on stderr what differences between the groups of each question can be seen."""
    from swarm.compare.statistics import detectable

    said: dict[str, None] = {}
    for part in parts:
        if len(part.groups) > 1:
            each = part.question.samples_per_paraphrase
            said[detectable(part.groups, len(part.messages), each)] = None
    for line in said:
        print(line, file=sys.stderr)


def build_plans(questions: "Sequence[Question]", model_groups: Any) -> list[QuestionPlan]:
    """Each question with its models.

    Raises:
        WrongValue: They do not fit together.
    """
    from swarm.compare.questions import Question

    if isinstance(questions, str | Question) or not isinstance(questions, Iterable):
        raise InvalidArgument("many takes a list of questions")
    questions = list(questions)
    for one in questions:
        if not isinstance(one, Question):
            raise InvalidArgument(f"many takes a list of questions; {arguments.shorten_repr(one)} is none")
    if not isinstance(model_groups, list | tuple):
        groups = [arguments.parse_model_groups(model_groups)] * len(questions)
    elif len(model_groups) != len(questions):
        raise InvalidArgument(
            "many takes the models of all questions, or a list with those of each: there are "
            f"{len(questions)} questions and {len(model_groups)} mappings of models"
        )
    else:
        groups = [arguments.parse_model_groups(one) for one in model_groups]
    return [QuestionPlan(question, one) for question, one in zip(questions, groups, strict=True)]
