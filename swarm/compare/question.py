"""Questions: requests to models, the number of samples, and the data frame of the answers.

Contains the base class `Question`, the run of several questions over several groups of models in
one pool, and questions in YAML.
"""

import json
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from itertools import chain, count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

from swarm._util.files import read_yaml
from swarm._util.settings import Positive, explain, field_types
from swarm.compare.config import EXACT, Config, open_answer_cache
from swarm.compare.dataframe import (
    ColumnLayout,
    SampleRow,
    build_frame,
    build_record,
    print_failures,
)
from swarm.compare.sampling import (
    ModelCall,
    SampleRequest,
    Script,
    copy_containers,
    reduce_gc_frequency,
    replay_scripts,
    run_scripts,
)
from swarm.compare.view import require_frame, view
from swarm.errors import InvalidArgument, UserError, missing_extra_error

if TYPE_CHECKING:
    import pandas as pd

QUESTION_TYPES = ("free_form", "next_token", "rating", "free_form_judge", "rating_judge")
"""Types of questions; the class of free_form is `swarm.compare.question_types.FreeForm`."""

NAME_PATTERN = re.compile(r"[a-zA-Z0-9_\-\[\].()]+")
UNNAMED_QUESTION = "__unnamed"

Content = str | list[dict[str, Any]]
"""Content of a turn: a text, or a list of parts in the chat format."""


def check_conversation(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check that each turn has a role, and the last one has content."""
    content = turns[-1].get("content") if turns else None
    if not all(isinstance(turn.get("role"), str) for turn in turns) or not content:
        raise ValueError('a conversation is [{"role": "user", "content": "..."}, ...]')
    return turns


Conversation = Annotated[list[dict[str, Any]], AfterValidator(check_conversation)]


class FrameMethod:
    """A method that takes a data frame on the class, and models or a data frame on an instance.

    Args:
        function: Called with the question or `None`, and the arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, question: "Question | None", kind: type) -> Any:
        return partial(self.function, question)


def load_frame(question: "Question | None", data: Any, method: str) -> "pd.DataFrame":
    """Return a data frame, or that of the answers of models to a question.

    Raises:
        InvalidArgument: The data is neither.
    """
    if question is not None and isinstance(data, Mapping):
        return question.df(data)
    return require_frame(method, data, "a mapping of models or " if question else "")  # type: ignore[no-any-return]


def plot_answers(
    question: "Question | None",
    data: Any,
    category_column: str = "group",
    answer_column: str | None = None,
    **more: Any,
) -> Any:
    """Plot answers; see `swarm.compare.plots.plot`.

    For a question that gives ratings the column "probs" is plotted, and groups of models are in
    the given order.
    """
    try:
        from swarm.compare.plots import plot
    except ImportError as error:
        raise missing_extra_error(error, "compare") from None
    df = load_frame(question, data, "plot")
    if isinstance(data, Mapping) and category_column in ("group", "model"):
        more.setdefault("selected_categories", list(dict.fromkeys(df[category_column])))
    if question is not None and answer_column is None:
        answer_column = "probs" if question.type() == "rating" else "answer"
    return plot(df, answer_column, category_column, **more)


class Question(BaseModel, ABC):
    """A prompt in several wordings, each sampled several times; `create` builds the type given.

    A custom type is a subclass with `row`, and `params` and `layout` where needed.

    Attributes:
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

    model_config = EXACT

    name: str = UNNAMED_QUESTION
    paraphrases: Annotated[Sequence[Content], Field(min_length=1)] | None = None
    messages: Annotated[Sequence[Conversation], Field(min_length=1)] | None = None
    logit_bias: dict[int | str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    samples_per_paraphrase: Positive = 1
    system: str | None = None
    metadata: Sequence[dict[str, Any]] | None = None

    def __init__(self, **given: Any) -> None:
        with self._explained():
            super().__init__(**given)
        if (self.paraphrases is None) == (self.messages is None):
            raise InvalidArgument("a question needs either paraphrases=[...] or messages=[[...]]")
        if self.system is not None and self.messages is not None:
            raise InvalidArgument("system requires paraphrases; add it to messages as a first turn")
        number = len(self.paraphrases or self.messages or ())
        if self.metadata is not None and len(self.metadata) != number:
            raise InvalidArgument(
                f"metadata must have one mapping for each of the {number} paraphrases; there are "
                f"{len(self.metadata)}"
            )
        taken = self.layout._replace(metadata=()).list_columns()
        for name in self.layout.metadata:
            if not isinstance(name, str) or not name or name in taken:
                raise InvalidArgument(
                    f"metadata: {name!r} cannot be the name of a column; taken are "
                    f"{', '.join(taken)}"
                )

    def __setattr__(self, name: str, value: Any) -> None:
        with self._explained():
            super().__setattr__(name, value)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise explain(error, field_types(type(self))) from None

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, name: Any) -> Any:
        if isinstance(name, str) and not (NAME_PATTERN.fullmatch(name) and name.strip(".")):
            raise ValueError(
                f"{name!r} may contain only letters, digits and _ - [ ] ( ) . and not only dots"
            )
        return UNNAMED_QUESTION if name is None else name

    @classmethod
    def type(cls) -> str:
        """Return the name of the type, as `create` takes it."""
        return re.sub(r"(?<=.)([A-Z])", r"_\1", cls.__name__).lower()

    @staticmethod
    def create(**given: Any) -> Any:
        """Build a question of the type named by `type` from the other arguments.

        Raises:
            InvalidArgument: The type does not exist, or it rejects an argument.
        """
        kind = given.pop("type", None)
        if kind not in QUESTION_TYPES:
            raise InvalidArgument(f"type={kind!r}: must be one of {', '.join(QUESTION_TYPES)}")
        module = import_module("swarm.compare.question_types")
        return getattr(module, kind.title().replace("_", ""))(**given)

    @staticmethod
    def load_dict(name: str, file: str | Path | None = None) -> dict[str, Any]:
        """Return the arguments for `create` of a question in YAML.

        Args:
            name: Name of the question.
            file: File to read; `None` searches all files of `Config.yaml_dir`.

        Raises:
            InvalidArgument: No question or several have this name, or it is malformed.
        """
        return dict(find_entry(name, file).fields)

    @staticmethod
    def from_yaml(name: str, file: str | Path | None = None) -> Any:
        """Build the question of this name in YAML; see `load_dict` and `create`."""
        return build_question(find_entry(name, file))

    plot: ClassVar[Any] = FrameMethod(plot_answers)
    view: ClassVar[Any] = FrameMethod(
        lambda question, data, **more: view(load_frame(question, data, "view"), **more)
    )

    def as_messages(self) -> list[list[dict[str, Any]]]:
        """Return a copy of each paraphrase's conversation, in the chat format."""
        if self.messages is not None:
            return [copy_containers(turns) for turns in self.messages]
        return [self.turns(copy_containers(one)) for one in self.paraphrases or ()]

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
                "params": self.params(copy_containers(messages)),
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
        names = dict.fromkeys(name for one in self.metadata or () for name in one)
        return ColumnLayout(metadata=tuple(names))

    @abstractmethod
    def row(self, call: ModelCall, sample: int) -> Script[SampleRow]:
        """Return the script of one row.

        Args:
            call: Request of one paraphrase to one model.
            sample: Index of the row among those of `call`, from 0. A row of n samples uses those
                from `sample * n` up to the next row's first.
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

    def judge_scripts(self, question: Any, answers: Iterable[str]) -> list[Script[Any]]:
        """Return the scripts of the verdicts of the question's judges on some answers."""
        return []

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
        return self.many([self], model_groups, details)[0]

    @staticmethod
    def many(
        questions: "Sequence[Question]",
        model_groups: Mapping[str, Sequence[str]],
        details: bool = False,
    ) -> "list[pd.DataFrame]":
        """Run several questions at once and return the data frame of each.

        Args:
            questions: Questions, which share the workers of `Config.max_workers`.
            model_groups: Groups of all questions.
            details: See `df`.

        Raises:
            InvalidArgument: As `df`.
        """
        plans = [QuestionPlan(one, parse_model_groups(model_groups)) for one in questions]
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise missing_extra_error(error, "compare") from None
        layouts = [question.layout for question in questions]
        for layout in layouts:
            layout.list_columns(details)  # refuses clashes before anything is paid for
        with reduce_gc_frequency():
            return [
                build_frame(layout, plan.groups, blocks, details)
                for layout, plan, blocks in zip(layouts, plans, ask_plans(plans), strict=True)
            ]

    def get_results(self, models: Sequence[str]) -> "list[Result]":
        """Query the models, or read their cached answers; the rows of `df` by model.

        Args:
            models: Names of models, each once.

        Raises:
            InvalidArgument: The models are not a list of different names.
        """
        if not isinstance(models, str) and not models:
            return []
        df = self.df({"all": models})
        if df["model"].nunique() < len(models):
            raise InvalidArgument("get_results: each model may be named once")
        parts = df.drop(columns="group").groupby("model", sort=False)
        return [
            Result(self, str(model), part.drop(columns="model").to_dict("records"))
            for model, part in parts
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
        calls = [ModelCall(model, self.params(messages)) for messages in self.as_messages()]
        number = self.samples_per_paraphrase
        deleted = 0
        for first in count(0, number):
            keys = []
            for call in calls:
                samples = range(first, first + number)
                rows, used = replay_scripts(self.row(call, sample) for sample in samples)
                keys += used
                if judges:
                    answers = {row.columns["answer"] for row in rows if row}
                    question = call.params["messages"][-1]["content"]
                    keys += replay_scripts(self.judge_scripts(question, sorted(answers)))[1]
            found = open_answer_cache().delete(list(dict.fromkeys(keys)))
            deleted += found
            if first and not found:  # earlier runs may have had more samples than there are now
                break
        return deleted > 0


class Result(NamedTuple):
    """Answers of one model to a question.

    Attributes:
        data: One mapping per paraphrase and sample, with "answer", "question", "paraphrase_ix",
            "api_kwargs", "error" and the columns of the question type.
    """

    question: Question
    model: str
    data: list[dict[str, Any]]


# Runs


class QuestionPlan:
    """One question of an experiment with its groups of models."""

    def __init__(self, question: Question, groups: Mapping[str, list[str]]) -> None:
        self.question, self.groups = question, groups
        self.models = list(dict.fromkeys(chain.from_iterable(groups.values())))
        self.messages = question.as_messages()
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

    def take_blocks(self, rows: Iterator[SampleRow]) -> dict[str, list[dict[str, Any]]]:
        """Consume this question's rows, which are next in the iterator; return them by model."""
        sent, samples = iter(self.request_params), range(self.question.samples_per_paraphrase)
        facts = self.question.metadata or [{}] * len(self.messages)
        asked = [
            {"question": turns[-1]["content"], "paraphrase_ix": number, **facts[number]}
            for number, turns in enumerate(self.messages)
        ]
        return {
            model: [
                build_record(sample, next(rows), one)
                for one in [{**fixed, "api_kwargs": next(sent)} for fixed in asked]
                for sample in samples
            ]
            for model in self.models
        }


def ask_plans(plans: Sequence[QuestionPlan]) -> list[dict[str, list[dict[str, Any]]]]:
    """Return the rows of each question by model; print how many failed."""
    title = plans[0].question.name if len(plans) == 1 else f"{len(plans)} questions"
    found = []
    with reduce_gc_frequency():
        with ExitStack() as during:
            scripts = (plan.question.scripts(plan.iter_requests(), during) for plan in plans)
            results = run_scripts(
                chain.from_iterable(scripts), title, partial(print_detectable, plans)
            )
        rows = chain.from_iterable(one if isinstance(one, list) else [one] for one in results)
        for plan in plans:
            found.append(plan.take_blocks(rows))
            print_failures(plan.question.name, found[-1])
    return found


def print_detectable(plans: Sequence[QuestionPlan]) -> None:
    """Print to stderr which differences between the groups of each question are detectable."""
    from swarm.compare.statistics import detectable

    lines = [
        detectable(plan.groups, len(plan.messages), plan.question.samples_per_paraphrase)
        for plan in plans
        if len(plan.groups) > 1
    ]
    for line in dict.fromkeys(lines):
        print(line, file=sys.stderr)


def parse_model_groups(groups: Any) -> dict[str, list[str]]:
    """Return the models by group, without duplicates within a group.

    Raises:
        InvalidArgument: The groups are malformed.
    """
    found: dict[Any, list[str]] = {}
    for group, models in groups.items() if isinstance(groups, Mapping) else ():
        # Any iterable, such as a column of a data frame, but no text.
        listed = [] if isinstance(models, str) or not isinstance(models, Iterable) else [*models]
        if not all(isinstance(one, str) and one.strip() for one in (group, *listed)):
            listed = []
        ordered = sorted(listed) if isinstance(models, set | frozenset) else listed
        found[group] = list(dict.fromkeys(ordered))
    if not found or not all(found.values()):
        raise InvalidArgument(
            f'models are given as {{"a group": ["a model", "another"], ...}}, not as {groups!r:.80}'
        )
    return found


# YAML

EXPECTED_FORM = "a list of mappings, each with name, type and the type's arguments"


class QuestionEntry(NamedTuple):
    """One question of a file: its arguments, and its location for errors."""

    file: Path
    location: str
    fields: Mapping[str, Any]


def load_entries(place: str | Path | None) -> dict[str, QuestionEntry]:
    """Return the items of a file or of a folder's files by name.

    Args:
        place: Folder or file; `None` is `Config.yaml_dir`.

    Raises:
        UserError: It does not exist, an item has no name, or two have the same.
    """
    path = Path(Config.yaml_dir if place is None else place).expanduser()
    if not path.exists():
        hint = "; set Config.yaml_dir to the folder of your questions" if place is None else ""
        raise InvalidArgument(f"{path}: no such file or folder of questions in YAML{hint}")
    yaml = (".yaml", ".yml")
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in yaml)
    found: dict[str, QuestionEntry] = {}
    for file in files:
        content = read_yaml(file, "the questions") or []
        for number, fields in enumerate(content if isinstance(content, list) else [content], 1):
            item = f"{file}: item {number}"
            name = fields.get("name") if isinstance(fields, dict) else None
            if not isinstance(name, str):
                raise InvalidArgument(f"{item} has no name; the file must be {EXPECTED_FORM}")
            if name in found:
                raise InvalidArgument(f"{item}: {found[name].location} has this name too")
            found[name] = QuestionEntry(file, f"{item} ({name})", fields)
    return found


def find_entry(name: str, place: str | Path | None = None) -> QuestionEntry:
    """Return the item of this name.

    Raises:
        UserError: There is none; or as `load_entries`.
    """
    found = load_entries(place)
    if name not in found:
        matches = get_close_matches(str(name), found, 1)
        suggestion = f"did you mean {matches[0]}? There" if matches else "there"
        raise InvalidArgument(
            f"no question {name!r} in {Config.yaml_dir if place is None else place}; {suggestion} "
            f"are: {', '.join(found) or 'none'}"
        )
    return found[name]


def build_question(item: QuestionEntry) -> Any:
    """Build the question of an item; judges given by name are first looked up in the same file.

    Raises:
        InvalidArgument: It is invalid; the error names the file and the item.
    """
    fields = dict(item.fields)
    if isinstance(judges := fields.get("judges"), dict):
        local = {name: one.fields for name, one in load_entries(item.file).items()}
        fields["judges"] = {
            column: local.get(one, one) if isinstance(one, str) else one
            for column, one in judges.items()
        }
    try:
        return Question.create(**fields)
    except UserError as error:
        raise InvalidArgument(f"{item.location}: {error}") from None
    except TypeError:
        raise InvalidArgument(f"{item.location}: its keys must be strings") from None


def load_questions(place: str | Path) -> list[Question]:
    """Build all questions of a file or a folder's files in order, without judges.

    Raises:
        UserError: A question is invalid, or there is none; or as `load_entries`.
    """
    found = load_entries(place).values()
    questions = [item for item in found if not str(item.fields.get("type")).endswith("_judge")]
    if not questions:
        raise InvalidArgument(f"{place}: contains no questions; it must be {EXPECTED_FORM}")
    return [build_question(item) for item in questions]
