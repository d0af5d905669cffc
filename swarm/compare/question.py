"""A question: what is asked of models, how often, and the data frame of what they say."""

import copy
import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare import validation, yaml_loader
from swarm.compare.dataframe import (
    ColumnLayout,
    ParaphraseBlock,
    SampleRow,
    build_frame,
    print_failures,
)
from swarm.compare.sampling.scheduler import reduce_gc_frequency
from swarm.compare.sampling.types import ModelCall, SampleRequest, Script
from swarm.errors import InvalidArgument, missing_extra_error

if TYPE_CHECKING:
    import pandas as pd

# `plot` and `view` of questions: on the class with a data frame, on a question with models too.


class PlotDescriptor:
    """`Question.plot(df, ...)` and `question.plot(models or df, ...)`; see `swarm.compare.plots`.

    The keys are those of `swarm.compare.plots.plot`. Of a question that gives ratings the column
    "probs" is shown, and groups are in the order in which they were given.
    """

    def __get__(self, question: "Question | None", kind: type) -> Any:
        return plot_frame if question is None else partial(plot_question, question)


class ViewDescriptor:
    """`Question.view(df, ...)` and `question.view(models or df, ...)`; see `swarm.compare.view`."""

    def __get__(self, question: "Question | None", kind: type) -> Any:
        return view_frame if question is None else partial(view_question, question)


FRAME_PLOT_ARGUMENTS = (
    "selected_categories",
    "selected_answers",
    "min_fraction",
    "colors",
    "title",
    "filename",
)
"""Further positional arguments of `Question.plot`, in llmcomp's order."""

QUESTION_PLOT_ARGUMENTS = FRAME_PLOT_ARGUMENTS[1:]
"""Those of a question's own `plot`."""


def plot_frame(
    df: Any,
    category_column: str = "group",
    answer_column: str | None = None,
    *further: Any,
    **more: Any,
) -> Any:
    """Plot a data frame.

    Raises:
        WrongValue: It is none.
    """
    plot = _import_plot()
    more |= _name_arguments(FRAME_PLOT_ARGUMENTS, further)
    return plot(require_frame("plot", df), answer_column, category_column, **more)


def _name_arguments(names: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by their names.

    Raises:
        TypeError: There are too many.
    """
    if len(values) > len(names):
        raise TypeError(f"plot takes at most {3 + len(names)} positional arguments")
    return dict(zip(names, values, strict=False))


def plot_question(
    question: "Question",
    models_or_df: Any,
    category_column: str = "group",
    answer_column: str | None = None,
    *further: Any,
    **more: Any,
) -> Any:
    """Plot what a question's models say."""
    plot = _import_plot()
    more |= _name_arguments(QUESTION_PLOT_ARGUMENTS, further)

    if isinstance(models_or_df, Mapping):
        df = question.df(models_or_df)
        if category_column in ("group", "model"):
            more.setdefault("selected_categories", list(dict.fromkeys(df[category_column])))
    else:
        df = require_frame("plot", models_or_df, "a mapping of models or ")
    if answer_column is None:
        answer_column = "probs" if question.type() == "rating" else "answer"
    return plot(df, category_column=category_column, answer_column=answer_column, **more)


def view_frame(df: Any, **more: Any) -> Any:
    """View a data frame.

    Raises:
        WrongValue: It is none.
    """
    from swarm.compare.view import view

    return view(require_frame("view", df), **more)


def view_question(question: "Question", models_or_df: Any, **more: Any) -> Any:
    """View what a question's models say."""
    from swarm.compare.view import view

    if isinstance(models_or_df, Mapping):
        return view(question.df(models_or_df), **more)
    return view(require_frame("view", models_or_df, "a mapping of models or "), **more)


def require_frame(method: str, value: Any, also: str = "") -> Any:
    """The value, which is a data frame.

    Raises:
        WrongValue: It is none.
    """
    import pandas as pd

    if not isinstance(value, pd.DataFrame):
        raise InvalidArgument(
            f"{method} takes {also}a data frame, not {type(value).__name__}; "
            f"models are shown by a question: question.{method}(models)"
        )
    return value


def _import_plot() -> Any:
    """What draws plots.

    Raises:
        UserError: A library of the extra is missing.
    """
    try:
        from swarm.compare.plots import plot
    except ImportError as error:
        raise missing_extra_error(error) from None
    return plot


QUESTION_TYPES = {
    "free_form": "swarm.compare.question_types.FreeForm",
    "next_token": "swarm.compare.question_types.NextToken",
    "rating": "swarm.compare.question_types.Rating",
    "free_form_judge": "swarm.compare.judges.FreeFormJudge",
    "rating_judge": "swarm.compare.judges.RatingJudge",
}
"""Class of each type of question."""


class Question(ABC):
    """What is asked in several wordings, so often each; `create` makes the type that is named.

    A type of its own is a subclass with `row`, and `params` and `layout` where it needs them.

    Args:
        name: For plots, reports and YAML; letters, digits and _ - [ ] ( ) . alone.
        paraphrases: What the user says, in one wording or several.
        messages: Instead of paraphrases: whole conversations, as chat endpoints take them.
        logit_bias: Of token ids, from -100 to 100.
        samples_per_paraphrase: How often each wording is asked of each model.
        system: What the system says before each paraphrase.
        metadata: A mapping for each paraphrase; its keys become columns of the data frame.

    Raises:
        WrongValue: An argument is not known or cannot have its value.
    """

    judges_answers = False
    """Whether it is asked about answers, as a judge."""

    requests_per_row = 1
    """Samples of the model's answer that one row is made of."""

    def __init__(
        self,
        name: str | None = validation.UNNAMED_QUESTION,
        paraphrases: Sequence[Any] | None = None,
        messages: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        logit_bias: Mapping[int, float] | None = None,
        samples_per_paraphrase: int = 1,
        system: str | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        **unknown: Any,
    ) -> None:
        validation.refuse_unknown(self.type(), list(unknown), validation.list_arguments(type(self)))
        self.name = validation.validate_name(name)
        asked = validation.validate_conversations(paraphrases, messages, system)
        self.paraphrases, self.messages = asked
        self.system, self.logit_bias = system, validation.validate_logit_bias(logit_bias)
        key = "samples_per_paraphrase"
        self.samples_per_paraphrase = validation.validate_int(key, samples_per_paraphrase)
        self.metadata = metadata
        number = len(self.paraphrases or self.messages or ())
        self.facts, self.fact_names = validation.parse_metadata(
            metadata, number, self.layout.list_columns()
        )

    @classmethod
    def type(cls) -> str:
        """The name of the type, as `create` takes it."""
        name = cls.__name__
        return "".join("_" * bool(n) * c.isupper() + c.lower() for n, c in enumerate(name))

    @staticmethod
    def create(**given: Any) -> Any:
        """A question of the type that `type` names, made of the other arguments.

        Raises:
            WrongValue: There is no such type, or the type refuses an argument.
        """
        kind = given.pop("type", None)
        if not isinstance(kind, str) or kind not in QUESTION_TYPES:
            raise InvalidArgument(f"type={kind!r}: must be one of {', '.join(QUESTION_TYPES)}")
        module, _, name = QUESTION_TYPES[kind].rpartition(".")
        return getattr(import_module(module), name)(**given)

    @staticmethod
    def load_dict(name: str, file: str | Path | None = None) -> dict[str, Any]:
        """The arguments for `create` of a question in YAML.

        Args:
            name: Its name.
            file: Where it is; `None` looks in all files of `Config.yaml_dir`.

        Raises:
            WrongValue: There is none of this name, two, or one that is broken.
        """
        return dict(yaml_loader.find_entry(name, file).said)

    @staticmethod
    def from_yaml(name: str, file: str | Path | None = None) -> Any:
        """The question of this name in YAML; see `load_dict` and `create`."""
        return yaml_loader.build_question(yaml_loader.find_entry(name, file))

    view = ViewDescriptor()
    plot = PlotDescriptor()

    def as_messages(self) -> list[list[dict[str, Any]]]:
        """The conversation of each paraphrase, as a chat endpoint takes it; copies."""
        if self.messages is not None:
            return copy.deepcopy(self.messages)
        return [self.turns(copy.deepcopy(one)) for one in self.paraphrases or ()]

    def turns(self, said: Any) -> list[dict[str, Any]]:
        """A conversation in which the user says this."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, {"role": "user", "content": said}]

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """What is asked with one conversation, before `ModelAdapter` makes it a model's."""
        bias = {} if self.logit_bias is None else {"logit_bias": dict(self.logit_bias)}
        return {"messages": messages, **bias}

    def settings(self) -> dict[str, Any]:
        """What a method of `Runner` is told beside the parameters."""
        return {}

    def get_runner_input(self) -> list[dict[str, Any]]:
        """One mapping for each row, for `Runner.get_many`; "_question" and "_paraphrase_ix" say
        which row it is."""
        return [
            {
                "params": self.params(copy.deepcopy(messages)),
                **self.settings(),
                "_question": messages[-1]["content"],
                "_paraphrase_ix": number,
            }
            for number, messages in enumerate(self.as_messages())
            for _ in range(self.samples_per_paraphrase)
        ]

    @property
    def layout(self) -> ColumnLayout:
        """The columns that the data frame has beside those of all questions."""
        return ColumnLayout(metadata=getattr(self, "fact_names", ()))

    @abstractmethod
    def row(self, asked: ModelCall, sample: int) -> Script[SampleRow]:
        """The script of one row.

        Args:
            asked: One paraphrase to one model.
            sample: Which row of them, from 0; with several requests in a row, those from
                `sample * requests_per_row` on are its own.
        """

    def scripts(
        self, rows: Iterable[SampleRequest], during: ExitStack
    ) -> Iterator[Script[SampleRow] | Script[list[SampleRow]]]:
        """The scripts of all rows, in their order; each makes one of them, or a list of some.

        Args:
            rows: What is asked and which row of it, of each.
            during: Ends after the last of them.
        """
        return (self.row(asked, sample) for asked, sample in rows)

    def df(
        self, model_groups: Mapping[str, Sequence[str]], details: bool = False
    ) -> "pd.DataFrame":
        """Ask all models, or read what they have answered before.

        Args:
            model_groups: Models by group; a model may be in several and is asked once.
            details: Give the columns `swarm.compare.dataframe.DETAIL_COLUMNS` too.

        Returns:
            A row for each group, model, paraphrase and sample, in this order. "error" says why a
            row has no answer, or lacks one of a judge.

        Raises:
            WrongValue: The models are not given as a mapping of lists.
        """
        return self.many([self], [model_groups], details)[0]

    @staticmethod
    def many(
        questions: "Sequence[Question]", model_groups: Any, details: bool = False
    ) -> "list[pd.DataFrame]":
        """Ask several questions at once; gives the data frame of each.

        Args:
            questions: All of them share the workers of `Config.max_workers`.
            model_groups: Of all questions, or a list with those of each.
            details: See `df`.

        Raises:
            WrongValue: As `df`; or there are not as many groups as questions.
        """

        return ask_questions(questions, model_groups, details)

    def clear_cache(self, model: str, judges: bool = False) -> bool:
        """Forget what a model answered to this question.

        Args:
            model: Its name.
            judges: Forget too what the question's judges said of these answers.

        Returns:
            Whether there was anything.
        """
        from swarm.compare.judge_cache import forget_answers

        return forget_answers(self, model, judges)


# Several questions asked of several groups of models, in one pool.


class QuestionPlan:
    """One question of an experiment, with the models it is put to."""

    def __init__(self, question: "Question", groups: Mapping[str, list[str]]) -> None:
        self.question, self.groups = question, groups
        self.models = list(dict.fromkeys(chain.from_iterable(groups.values())))
        self.messages = question.as_messages()
        self.facts = validation.parse_metadata(question.metadata, len(self.messages), ())[0]
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
    from swarm.compare.sampling.scheduler import run_scripts

    scripts = (part.question.scripts(part.iter_requests(), during) for part in parts)
    made = run_scripts(chain.from_iterable(scripts), title, lambda: print_detectable(parts))
    return list(chain.from_iterable(one if isinstance(one, list) else [one] for one in made))


def print_detectable(parts: Sequence[QuestionPlan]) -> None:
    """Say on stderr what differences between the groups of each question can be seen."""
    from swarm.stats.summary_table import detectable

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

    if isinstance(questions, str | Question) or not isinstance(questions, Iterable):
        raise InvalidArgument("many takes a list of questions")
    questions = list(questions)
    for one in questions:
        if not isinstance(one, Question):
            raise InvalidArgument(
                f"many takes a list of questions; {validation.shorten_repr(one)} is none"
            )
    if not isinstance(model_groups, list | tuple):
        groups = [validation.parse_model_groups(model_groups)] * len(questions)
    elif len(model_groups) != len(questions):
        raise InvalidArgument(
            "many takes the models of all questions, or a list with those of each: there are "
            f"{len(questions)} questions and {len(model_groups)} mappings of models"
        )
    else:
        groups = [validation.parse_model_groups(one) for one in model_groups]
    return [QuestionPlan(question, one) for question, one in zip(questions, groups, strict=True)]
