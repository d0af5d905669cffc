"""Judges: the template of their prompts, their run on the answers of a question, their verdicts."""

import re
import sqlite3
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from swarm._util.settings import Text
from swarm.compare.config import open_answer_cache
from swarm.compare.dataframe import as_column
from swarm.compare.question import Question
from swarm.compare.sampling import (
    ModelCall,
    SampleRequest,
    Script,
    reduce_gc_frequency,
    replay_scripts,
)
from swarm.errors import InvalidArgument, UserError
from swarm.models.cache import make_cache_key

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

TEMPLATE_FIELDS = ("question", "answer")
FIELD_PATTERN = re.compile(r"\{(question|answer)\}")


class JudgeTemplate:
    """Template of a judge's prompt.

    If `str.format` can fill the text with the two fields, it is used, and doubled braces become
    single ones. In any other text, such as one that contains JSON, {question} and {answer} are
    replaced and other braces stay unchanged.

    Args:
        text: Template with {answer} and optionally {question}.

    Raises:
        InvalidArgument: {answer} is missing, or a field looks like a misspelling.
    """

    def __init__(self, text: Any) -> None:
        if not isinstance(text, str):
            raise InvalidArgument(f"a judge's template must be one text, not {text!r:.80}")
        self.text = text
        for field in re.findall(r"\{([A-Za-z_]+)\}", text):
            matches = get_close_matches(field.lower(), TEMPLATE_FIELDS, 1, 0.7)
            if matches and field not in TEMPLATE_FIELDS:
                raise InvalidArgument(
                    f"a judge's template has {{{field}}}; did you mean {{{matches[0]}}}?"
                )
        tried = self.fill("\0", "\1")
        self.uses_question = "\0" in tried
        if "\1" not in tried:
            raise InvalidArgument(
                f"a judge's template must have {{answer}} in it; this has not: {text!r:.80}"
            )

    def fill(self, question: str, answer: str) -> str:
        """Return the prompt."""
        values = {"question": question, "answer": answer}
        try:
            return self.text.format(**values)
        except (ValueError, KeyError, IndexError, AttributeError):
            return FIELD_PATTERN.sub(lambda found: values[found[1]], self.text)


def content_as_text(content: Any) -> str:
    """Return a turn's text for a judge; parts that are not text are replaced by [TYPE]."""
    if isinstance(content, str):
        return content
    return "\n".join(
        str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"
        for part in content or ()
    )


class BaseJudge(Question):
    """Base class of judges: one template, sent to one model once.

    Attributes:
        model: Name of the judging model.
        suffixes: Suffixes of the columns beside the verdict's.
        beside: Parameters that are not part of `cache_key`.
    """

    model: Text
    suffixes: ClassVar[tuple[str, ...]] = ("_question",)
    beside: ClassVar[tuple[str, ...]] = ("timeout",)

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.paraphrases is None or len(self.paraphrases) != 1:
            raise InvalidArgument(f"{self.type()}: a judge has one paraphrase, its template")
        if self.samples_per_paraphrase != 1:
            raise InvalidArgument(f"{self.type()}: a judge has samples_per_paraphrase=1")
        self.uses_question  # noqa: B018  (checks the template)

    @property
    def template(self) -> JudgeTemplate:
        """Template of the prompt."""
        return JudgeTemplate((self.paraphrases or [""])[0])

    @property
    def uses_question(self) -> bool:
        """True if the template has {question}; if not, equal answers are judged once."""
        return self.template.uses_question

    @property
    def cache_key(self) -> str:
        """Key of the recorded pairs; judges that differ only in their bounds share it."""
        call = ModelCall(self.model, self.params(self.turns(self.template.text)))
        sent = {key: value for key, value in call.api_kwargs.items() if key not in self.beside}
        return make_cache_key(self.type(), sent)

    @abstractmethod
    def judge(self, prompt: str) -> Script[tuple[dict[str, Any], UserError | None]]:
        """Return the script of a verdict: columns by suffix ("": the verdict), error or `None`."""

    def get_cache(self) -> "pd.DataFrame":
        """Return the cached verdicts of this judge, one row per judged answer.

        Returns:
            Columns question (`None` if the template does not use it), answer, judge_question,
                judge_answer; for ratings also judge_raw_answer.

        Raises:
            UserError: The answer cache cannot be read.
        """
        import pandas as pd

        template, pairs = self.template, load_judged_pairs(self.cache_key)
        prompts = [template.fill(question, answer) for question, answer in pairs]
        with reduce_gc_frequency():
            verdicts, _ = replay_scripts(self.judge(prompt) for prompt in prompts)
        raw = "_raw_answer" in self.suffixes
        names = ["question", "answer", "judge_question", "judge_answer"]
        rows = []
        for (question, answer), prompt, verdict in zip(pairs, prompts, verdicts, strict=True):
            if verdict is not None and verdict[1] is None:
                row = (question if template.uses_question else None, answer, prompt, verdict[0][""])
                rows.append((*row, verdict[0]["_raw_answer"]) if raw else row)
        names += ["judge_raw_answer"] * raw
        columns = {name: as_column([row[n] for row in rows]) for n, name in enumerate(names)}
        return pd.DataFrame(columns)


class JudgeVerdict(NamedTuple):
    """A judge's verdict on an answer: its columns, and the error if there is none."""

    columns: dict[str, Any]
    error: str | None


class JudgeRun:
    """One judge of a question during a run; each distinct prompt is sent once.

    Args:
        name: Column of the verdict.
        judge: The judge.
    """

    def __init__(self, name: str, judge: BaseJudge) -> None:
        self.name, self.judge, self.template = name, judge, judge.template
        self.pairs: dict[tuple[str, str], None] = {}
        self._verdicts: dict[str, JudgeVerdict] = {}

    def __enter__(self) -> "JudgeRun":
        return self

    def __exit__(self, *_: object) -> None:
        """Record the judged pairs, also after an interrupt."""
        record_judged_pairs(self.judge.cache_key, list(self.pairs))

    def judge_answer(self, question: Any, answer: str) -> Script[JudgeVerdict]:
        """Return the script of one verdict; equal prompts share one verdict."""
        question_text = content_as_text(question) if self.template.uses_question else ""
        prompt = self.template.fill(question_text, answer)
        verdict = self._verdicts.get(prompt)
        if verdict is None:
            columns, error = yield from self.judge.judge(prompt)
            named = {self.name + suffix: value for suffix, value in columns.items()}
            named[f"{self.name}_question"] = prompt
            error_text = None if error is None else f"judge {self.name}: {error}"
            verdict = self._verdicts[prompt] = JudgeVerdict(named, error_text)
        if verdict.error is None:
            self.pairs[question_text, answer] = None
        return verdict


def run_together(scripts: Sequence[Script[T]]) -> Script[list[T]]:
    """Combine several scripts into one, whose requests are sent together."""
    results: dict[int, T] = {}
    heard: dict[int, Any] = dict.fromkeys(range(len(scripts)))
    while heard:
        wants: dict[int, Sequence[SampleRequest]] = {}
        for number, outcomes in heard.items():
            try:
                wants[number] = scripts[number].send(outcomes)
            except StopIteration as end:
                results[number] = end.value
        if not wants:
            break
        found = iter((yield [want for each in wants.values() for want in each]))
        heard = {number: list(islice(found, len(each))) for number, each in wants.items()}
    return [results[number] for number in range(len(scripts))]


CREATE_JUDGED_TABLE = (
    "CREATE TABLE IF NOT EXISTS judged (judge TEXT, question BLOB, answer BLOB, time REAL, "
    "PRIMARY KEY (judge, question, answer)) WITHOUT ROWID"
)
INSERT_JUDGED = "INSERT OR IGNORE INTO judged VALUES (?, ?, ?, ?)"
SELECT_JUDGED = (
    "SELECT question, answer FROM judged WHERE judge = ? ORDER BY time, question, answer"
)


def record_judged_pairs(judge: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Record which pairs of question and answer a judge has judged.

    Raises:
        UserError: The answer cache cannot be written.
    """
    now = time.time()
    # Lone surrogates, which models do produce, are allowed.
    rows = [(judge, *(text.encode("utf-8", "surrogatepass") for text in p), now) for p in pairs]

    def write(connection: sqlite3.Connection) -> None:
        connection.execute(CREATE_JUDGED_TABLE)
        with connection:
            # Takes the write lock at once: a read transaction that is upgraded later may fail.
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(INSERT_JUDGED, rows)

    if rows:
        open_answer_cache().run(write)


def load_judged_pairs(judge: str) -> list[tuple[str, str]]:
    """Return the recorded pairs of a judge, the oldest first; damaged ones are left out.

    Raises:
        UserError: The answer cache cannot be read.
    """

    def read(connection: sqlite3.Connection) -> list[tuple[bytes, bytes]]:
        connection.execute(CREATE_JUDGED_TABLE)
        return connection.execute(SELECT_JUDGED, (judge,)).fetchall()

    pairs = []
    for question, answer in open_answer_cache().run(read):
        with suppress(AttributeError, UnicodeDecodeError):
            texts = (one.decode("utf-8", "surrogatepass") for one in (question, answer))
            pairs.append((next(texts), next(texts)))
    return pairs
