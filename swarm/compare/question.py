"""Questions: requests to models, the number of samples, and the data frame of the answers.

Contains the base class `Question`, its `plot` and `view`, and the run of several questions over
several groups of models in one pool.
"""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm.compare import validation, yaml_loader
from swarm.compare.dataframe import (
    ColumnLayout,
    ParaphraseBlock,
    SampleRow,
    build_frame,
    copy_request,
    print_failures,
)
from swarm.compare.judge_cache import CacheOnlyReplay, content_as_text, replay_from_cache
from swarm.compare.sampling.backends import open_answer_cache
from swarm.compare.sampling.scheduler import reduce_gc_frequency, run_scripts
from swarm.compare.sampling.types import ModelCall, SampleRequest, Script
from swarm.errors import InvalidArgument, UserError, missing_extra_error

if TYPE_CHECKING:
    import pandas as pd


class PlotDescriptor:
    """`Question.plot(df, ...)` and `question.plot(models or df, ...)`; see `swarm.compare.plots`.

    The keys are those of `swarm.compare.plots.plot`. For a question that gives ratings the column
    "probs" is plotted, and groups are in the given order.
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
"""Those of `plot` on an instance."""


def plot_frame(
    df: Any,
    category_column: str = "group",
    answer_column: str | None = None,
    *further: Any,
    **more: Any,
) -> Any:
    """Plot a data frame.

    Raises:
        InvalidArgument: `df` is not a data frame.
    """
    plot = _import_plot()
    more |= _name_arguments(FRAME_PLOT_ARGUMENTS, further)
    return plot(require_frame("plot", df), answer_column, category_column, **more)


def _name_arguments(names: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    """Map positional arguments to their names.

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
    """Plot the answers of models to a question."""
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
        InvalidArgument: `df` is not a data frame.
    """
    from swarm.compare.view import view

    return view(require_frame("view", df), **more)


def view_question(question: "Question", models_or_df: Any, **more: Any) -> Any:
    """View the answers of models to a question."""
    from swarm.compare.view import view

    if isinstance(models_or_df, Mapping):
        return view(question.df(models_or_df), **more)
    return view(require_frame("view", models_or_df, "a mapping of models or "), **more)


def require_frame(method: str, value: Any, also: str = "") -> Any:
    """Return the value if it is a data frame.

    Raises:
        InvalidArgument: It is not.
    """
    import pandas as pd

    if not isinstance(value, pd.DataFrame):
        raise InvalidArgument(
            f"{method} takes {also}a data frame, not {type(value).__name__}; "
            f"models are shown by a question: question.{method}(models)"
        )
    return value


def _import_plot() -> Any:
    """Import the plot function.

    Raises:
        UserError: A library of the extra is missing.
    """
    try:
        from swarm.compare.plots import plot
    except ImportError as error:
        raise missing_extra_error(error, "compare") from None
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
    """A prompt in several wordings, each sampled several times; `create` builds the type given.

    A custom type is a subclass with `row`, and `params` and `layout` where needed.

    Args:
        name: Name for plots, reports and YAML; only letters, digits and _ - [ ] ( ) . are allowed.
        paraphrases: User turns, one per wording.
        messages: Instead of paraphrases: complete conversations in the chat format.
        logit_bias: Bias by token id, from -100 to 100.
        samples_per_paraphrase: Samples of each wording and model.
        system: System prompt before each paraphrase.
        metadata: One mapping per paraphrase; its keys become columns of the data frame.

    Raises:
        InvalidArgument: An argument is unknown or has an invalid value.
    """

    judges_answers = False
    """True for judges."""

    requests_per_row = 1
    """Number of samples of the model's answer in one row."""

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
        validated = validation.validate_conversations(paraphrases, messages, system)
        self.paraphrases, self.messages = validated
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
        """Return the name of the type, as `create` takes it."""
        name = cls.__name__
        return "".join("_" * bool(n) * c.isupper() + c.lower() for n, c in enumerate(name))

    @staticmethod
    def create(**given: Any) -> Any:
        """Build a question of the type named by `type` from the other arguments.

        Raises:
            InvalidArgument: The type does not exist, or it rejects an argument.
        """
        kind = given.pop("type", None)
        if not isinstance(kind, str) or kind not in QUESTION_TYPES:
            raise InvalidArgument(f"type={kind!r}: must be one of {', '.join(QUESTION_TYPES)}")
        module, _, name = QUESTION_TYPES[kind].rpartition(".")
        return getattr(import_module(module), name)(**given)

    @staticmethod
    def load_dict(name: str, file: str | Path | None = None) -> dict[str, Any]:
        """Return the arguments for `create` of a question in YAML.

        Args:
            name: Name of the question.
            file: File to read; `None` searches all files of `Config.yaml_dir`.

        Raises:
            InvalidArgument: No question or several have this name, or it is malformed.
        """
        return dict(yaml_loader.find_entry(name, file).fields)

    @staticmethod
    def from_yaml(name: str, file: str | Path | None = None) -> Any:
        """Build the question of this name in YAML; see `load_dict` and `create`."""
        return build_question(yaml_loader.find_entry(name, file))

    view = ViewDescriptor()
    plot = PlotDescriptor()

    def as_messages(self) -> list[list[dict[str, Any]]]:
        """Return a copy of each paraphrase's conversation, in the chat format."""
        if self.messages is not None:
            return copy.deepcopy(self.messages)
        return [self.turns(copy.deepcopy(one)) for one in self.paraphrases or ()]

    def turns(self, said: Any) -> list[dict[str, Any]]:
        """Return the conversation with this user turn."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, {"role": "user", "content": said}]

    def params(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the request parameters of one conversation, before `ModelAdapter` is applied."""
        bias = {} if self.logit_bias is None else {"logit_bias": dict(self.logit_bias)}
        return {"messages": messages, **bias}

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the `Runner` method beside the parameters."""
        return {}

    def get_runner_input(self) -> list[dict[str, Any]]:
        """Return one mapping per row for `Runner.get_many`; keys with _ identify the row."""
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
        """Columns of the data frame that are specific to this type and question."""
        return ColumnLayout(metadata=getattr(self, "fact_names", ()))

    @abstractmethod
    def row(self, call: ModelCall, sample: int) -> Script[SampleRow]:
        """Return the script of one row.

        Args:
            call: Request of one paraphrase to one model.
            sample: Index of the row among those of `call`, from 0; it uses the samples from
                `sample * requests_per_row` up to the next row's first.
        """

    def scripts(
        self, rows: Iterable[SampleRequest], during: ExitStack
    ) -> Iterator[Script[SampleRow] | Script[list[SampleRow]]]:
        """Return the scripts of all rows in order; each yields one row or a list of several.

        Args:
            rows: Request and sample index of each row.
            during: Closed after the last script has ended.
        """
        return (self.row(call, sample) for call, sample in rows)

    def df(
        self, model_groups: Mapping[str, Sequence[str]], details: bool = False
    ) -> "pd.DataFrame":
        """Query all models, or read their cached answers.

        Args:
            model_groups: Models by group; a model in several groups is queried once.
            details: Add the columns `swarm.compare.dataframe.DETAIL_COLUMNS`.

        Returns:
            One row per group, model, paraphrase and sample, in this order. "error" is the reason
                why an answer or a judge's verdict is missing.

        Raises:
            InvalidArgument: The models are not a mapping of lists.
        """
        return self.many([self], [model_groups], details)[0]

    @staticmethod
    def many(
        questions: "Sequence[Question]", model_groups: Any, details: bool = False
    ) -> "list[pd.DataFrame]":
        """Run several questions at once and return the data frame of each.

        Args:
            questions: Questions, which share the workers of `Config.max_workers`.
            model_groups: Groups of all questions, or a list with those of each.
            details: See `df`.

        Raises:
            InvalidArgument: As `df`; or the number of groups differs from that of questions.
        """

        return ask_questions(questions, model_groups, details)

    def get_results(self, models: Sequence[str]) -> "list[Result]":
        """Query the models, or read their cached answers, without a data frame.

        Args:
            models: Names of models, each once.

        Raises:
            InvalidArgument: The models are not a list of different names.
        """
        if not isinstance(models, str) and not models:
            return []
        plans = build_plans([self], {"all": models})
        if len(plans[0].models) < len(models):
            raise InvalidArgument("get_results: each model may be named once")
        return [
            Result(
                self,
                model,
                [
                    {
                        "api_kwargs": copy_request(block.api_kwargs),
                        "question": block.question,
                        "paraphrase_ix": block.paraphrase_ix,
                        **row.columns,
                        "error": row.error,
                    }
                    for block in blocks
                    for row in block.rows
                ],
            )
            for model, blocks in ask_plans(plans)[0].items()
        ]

    def many_models_execute(self, models: Sequence[str]) -> "list[Result]":
        """Query the models again; the new answers replace the cached ones. See `get_results`."""
        for model in [] if isinstance(models, str) else models:
            self.clear_cache(model)
        return self.get_results(models)

    def clear_cache(self, model: str, judges: bool = False) -> bool:
        """Delete a model's cached answers to this question.

        Args:
            model: Name of the model.
            judges: Also delete the verdicts of the question's judges on these answers.

        Returns:
            Whether anything was deleted.
        """
        return forget_answers(self, model, judges)


class Result(NamedTuple):
    """Answers of one model to a question.

    Attributes:
        data: One mapping per paraphrase and sample, with "answer", "question", "paraphrase_ix",
            "api_kwargs", "error" and the columns of the question type.
    """

    question: Question
    model: str
    data: list[dict[str, Any]]


class QuestionPlan:
    """One question of an experiment with its groups of models."""

    def __init__(self, question: "Question", groups: Mapping[str, list[str]]) -> None:
        self.question, self.groups = question, groups
        self.models = list(dict.fromkeys(chain.from_iterable(groups.values())))
        self.messages = question.as_messages()
        self.facts = validation.parse_metadata(question.metadata, len(self.messages), ())[0]
        self.calls = [
            ModelCall(model, question.params(messages))
            for model in self.models
            for messages in self.messages
        ]
        # Prepare all requests now, so that an error of a ModelAdapter handler is raised before any
        # request is sent.
        self.request_params = [call.api_kwargs for call in self.calls]
        # A conversation that occurs twice gets separate samples for its second occurrence.
        seen: Counter[str] = Counter()
        self.before = []
        for messages in self.messages:
            text = json.dumps(messages, sort_keys=True, default=str)
            self.before.append(seen[text])
            seen[text] += 1

    def iter_requests(self) -> Iterator[SampleRequest]:
        """Yield the request and sample index of each row."""
        each = self.question.samples_per_paraphrase
        for call, offset in zip(self.calls, cycle(self.before), strict=False):
            for sample in range(offset * each, (offset + 1) * each):
                yield SampleRequest(call, sample)

    def take_blocks(self, rows: Iterator[SampleRow]) -> dict[str, list[ParaphraseBlock]]:
        """Consume this question's rows, which are next in the iterator."""
        sent, samples = iter(self.request_params), self.question.samples_per_paraphrase
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
    """Return the data frame of each question; see `Question.many`."""
    parts = build_plans(questions, model_groups)
    try:
        import pandas  # noqa: F401
    except ImportError as error:
        raise missing_extra_error(error, "compare") from None
    for part in parts:
        part.question.layout.list_columns(details)
    with reduce_gc_frequency():
        return [
            build_frame(part.question.layout, part.groups, blocks, details)
            for part, blocks in zip(parts, ask_plans(parts), strict=True)
        ]


def ask_plans(parts: Sequence[QuestionPlan]) -> list[dict[str, list[ParaphraseBlock]]]:
    """Return the answers to each question by model; print how many failed."""
    title = parts[0].question.name if len(parts) == 1 else f"{len(parts)} questions"
    found = []
    with reduce_gc_frequency():
        with ExitStack() as during:
            rows = iter(run_all(parts, during, title))
        for part in parts:
            found.append(part.take_blocks(rows))
            print_failures(part.question.name, found[-1])
    return found


def run_all(parts: Sequence[QuestionPlan], during: ExitStack, title: str) -> list[SampleRow]:
    """Return the rows of all questions, one question after the other."""
    scripts = (part.question.scripts(part.iter_requests(), during) for part in parts)
    frames = run_scripts(chain.from_iterable(scripts), title, lambda: print_detectable(parts))
    return list(chain.from_iterable(one if isinstance(one, list) else [one] for one in frames))


def print_detectable(parts: Sequence[QuestionPlan]) -> None:
    """Print to stderr which differences between the groups of each question are detectable."""
    from swarm.stats.summary_table import detectable

    lines: dict[str, None] = {}
    for part in parts:
        if len(part.groups) > 1:
            each = part.question.samples_per_paraphrase
            lines[detectable(part.groups, len(part.messages), each)] = None
    for line in lines:
        print(line, file=sys.stderr)


def build_plans(questions: "Sequence[Question]", model_groups: Any) -> list[QuestionPlan]:
    """Pair each question with its models.

    Raises:
        InvalidArgument: They do not fit together.
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


def build_question(item: yaml_loader.QuestionEntry) -> Any:
    """Build the question of an item.

    Raises:
        InvalidArgument: It is invalid; the error names the file and the item.
    """
    try:
        return Question.create(**yaml_loader.resolve_local_judges(item))
    except UserError as error:
        raise InvalidArgument(f"{item.location}: {error}") from None
    except TypeError:
        raise InvalidArgument(f"{item.location}: its keys must be strings") from None


def load_questions(place: str | Path) -> list[Question]:
    """Build all questions of a file or a folder's files in order, without judges.

    Raises:
        InvalidArgument: A question is invalid, two have one name, or there is none.
    """
    found, wrong = yaml_loader.load_entries(place)
    if wrong:
        raise wrong[0]
    first: dict[str, yaml_loader.QuestionEntry] = {}
    for item in found:
        if (other := first.setdefault(item.fields["name"], item)) is not item:
            raise InvalidArgument(
                f"{other.location} and {item.location} have the same name; rename one"
            )
    questions = [item for item in found if not str(item.fields.get("type")).endswith("_judge")]
    if not questions:
        raise InvalidArgument(
            f"{place}: contains no questions; it must be {yaml_loader.EXPECTED_FORM}"
        )
    return [build_question(item) for item in questions]


def forget_answers(question: Question, model: str, judges: bool = False) -> bool:
    """Delete a model's cached answers to a question; see `Question.clear_cache`."""
    calls = [ModelCall(model, question.params(messages)) for messages in question.as_messages()]
    first, number = 0, question.samples_per_paraphrase
    dropped = 0
    while True:
        # Earlier runs may have had more samples than this question has now.
        rows = [
            (
                one,
                replay_from_cache(
                    question.row(one, sample) for sample in range(first, first + number)
                ),
            )
            for one in calls
        ]
        keys = [key for _, replays in rows for one in replays for key in one.keys]
        if judges:
            keys += [
                key for one, replays in rows for key in _judgement_keys(question, one, replays)
            ]
        found = open_answer_cache().delete(list(dict.fromkeys(keys)))
        dropped += found
        if first and not found:
            return dropped > 0
        first, number = first + number, max(number, first)


def _judgement_keys(
    question: Question, call: ModelCall, rows: Sequence[CacheOnlyReplay[Any]]
) -> list[str]:
    """Return the cache keys of the verdicts of the question's judges on these answers."""
    question_text = content_as_text(call.params["messages"][-1]["content"])
    answers = {row.result.columns["answer"] for row in rows if row.result}
    judges = (getattr(question, "judges", None) or {}).values()
    prompts = [
        (judge, judge.template.fill(question_text, a)) for judge in judges for a in sorted(answers)
    ]
    return [
        key
        for one in replay_from_cache(j.judge(prompt) for j, prompt in prompts)
        for key in one.keys
    ]
