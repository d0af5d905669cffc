"""A question: what is asked of models, how often, and the data frame of what they say."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.asking import ModelCall, Script, SampleRequest
from swarm.compare.errors import InvalidArgument
from swarm.compare.questions import arguments, yamls
from swarm.compare.questions.frames import ColumnLayout, SampleRow
from swarm.compare.questions.showing import PlotDescriptor, ViewDescriptor

if TYPE_CHECKING:
    import pandas as pd

QUESTION_TYPES = {
    "free_form": "swarm.compare.questions.free_form.FreeForm",
    "next_token": "swarm.compare.questions.next_token.NextToken",
    "rating": "swarm.compare.questions.rating.Rating",
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
        name: str | None = arguments.UNNAMED_QUESTION,
        paraphrases: Sequence[Any] | None = None,
        messages: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        logit_bias: Mapping[int, float] | None = None,
        samples_per_paraphrase: int = 1,
        system: str | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        **unknown: Any,
    ) -> None:
        arguments.refuse_unknown(self.type(), list(unknown), arguments.list_arguments(type(self)))
        self.name = arguments.validate_name(name)
        asked = arguments.validate_conversations(paraphrases, messages, system)
        self.paraphrases, self.messages = asked
        self.system, self.logit_bias = system, arguments.validate_logit_bias(logit_bias)
        key = "samples_per_paraphrase"
        self.samples_per_paraphrase = arguments.validate_int(key, samples_per_paraphrase)
        self.metadata = metadata
        number = len(self.paraphrases or self.messages or ())
        self.facts, self.fact_names = arguments.parse_metadata(metadata, number, self.layout.list_columns())

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
        return dict(yamls.find_entry(name, file).said)

    @staticmethod
    def from_yaml(name: str, file: str | Path | None = None) -> Any:
        """The question of this name in YAML; see `load_dict` and `create`."""
        return yamls.build_question(yamls.find_entry(name, file))

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
            details: Give the columns `swarm.compare.questions.frames.DETAILS` too.

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
        from swarm.compare.questions.experiment import ask_questions

        return ask_questions(questions, model_groups, details)

    def clear_cache(self, model: str, judges: bool = False) -> bool:
        """Forget what a model answered to this question.

        Args:
            model: Its name.
            judges: Forget too what the question's judges said of these answers.

        Returns:
            Whether there was anything.
        """
        from swarm.compare.judges.judged import forget_answers

        return forget_answers(self, model, judges)
