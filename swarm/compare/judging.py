"""Judges: the template of their prompts, their run on the answers of a question, their verdicts."""

import re
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from swarm._util.settings import Text
from swarm.compare.config import open_answer_cache
from swarm.compare.dataframe import SampleRow, as_column
from swarm.compare.question import Question
from swarm.compare.sampling import (
    ModelCall,
    SampleRequest,
    Script,
    reduce_gc_frequency,
    replay_scripts,
)
from swarm.errors import InvalidArgument
from swarm.models.cache import make_cache_key

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


def fill_template(text: str, question: str, answer: str) -> str:
    """Return a judge's prompt: a template with {answer} and optionally {question}, filled.

    If `str.format` can fill the text with the two fields, it is used, and doubled braces become
    single ones. In any other text, such as one that contains JSON, {question} and {answer} are
    replaced and other braces stay unchanged.
    """
    values = {"question": question, "answer": answer}
    try:
        return text.format(**values)
    except (ValueError, KeyError, IndexError, AttributeError):
        return re.sub(r"\{(question|answer)\}", lambda found: values[found[1]], text)


def uses_question(text: Any) -> bool:
    """Check a judge's template, and return whether it has {question}.

    Raises:
        InvalidArgument: It is no text, {answer} is missing, or a field looks like a misspelling.
    """
    fields = ("question", "answer")
    tried = fill_template(text, "\0", "\1") if isinstance(text, str) else ""
    for field in re.findall(r"\{([A-Za-z_]+)\}", text if tried else ""):
        if field not in fields and (near := get_close_matches(field.lower(), fields, 1, 0.7)):
            raise InvalidArgument(
                f"a judge's template has {{{field}}}; did you mean {{{near[0]}}}?"
            )
    if "\1" not in tried:
        raise InvalidArgument(
            f"a judge's template must be a text and must have {{answer}} in it, not {text!r:.80}"
        )
    return "\0" in tried


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
        if len(self.paraphrases or ()) != 1 or self.samples_per_paraphrase != 1:
            raise InvalidArgument(
                f"{self.type()}: a judge has one paraphrase, its template, and "
                "samples_per_paraphrase=1"
            )
        uses_question(self.template)

    @property
    def template(self) -> str:
        """Template of the prompt."""
        return (self.paraphrases or [""])[0]  # type: ignore[return-value]

    @property
    def uses_question(self) -> bool:
        """True if the template has {question}; if not, equal answers are judged once."""
        return uses_question(self.template)

    @property
    def cache_key(self) -> str:
        """Key of the recorded pairs; judges that differ only in their bounds share it."""
        sent = self.build_call(self.template).api_kwargs
        return make_cache_key(self.type(), {k: v for k, v in sent.items() if k not in self.beside})

    def judge(self, prompt: str) -> Script[SampleRow]:
        """Return the script of a verdict, whose columns are those of a question of this type."""
        return self.row(self.build_call(prompt), 0)

    def build_call(self, prompt: str) -> ModelCall:
        """Return the request of a verdict."""
        return ModelCall(self.model, self.params(self.turns(prompt)))

    def get_cache(self) -> "pd.DataFrame":
        """Return the cached verdicts of this judge, one row per judged answer.

        Returns:
            Columns question (`None` if the template does not use it), answer, judge_question,
                judge_answer; for ratings also judge_raw_answer.

        Raises:
            UserError: The answer cache cannot be read.
        """
        import pandas as pd

        pairs = load_judged_pairs(self.cache_key)
        prompts = [fill_template(self.template, question, answer) for question, answer in pairs]
        with reduce_gc_frequency():
            verdicts, _ = replay_scripts(self.judge(prompt) for prompt in prompts)
        names = ["question", "answer", "judge_question", "judge_answer", "judge_raw_answer"]
        rows = []
        for (question, answer), prompt, verdict in zip(pairs, prompts, verdicts, strict=True):
            if verdict is not None and verdict.error is None:
                found = (verdict.columns["answer"], verdict.columns.get("raw_answer"))
                rows.append((question if self.uses_question else None, answer, prompt, *found))
        shown = names if "_raw_answer" in self.suffixes else names[:4]
        return pd.DataFrame({name: as_column([x[k] for x in rows]) for k, name in enumerate(shown)})


class JudgeRun:
    """One judge of a question during a run; each distinct prompt is sent once.

    Args:
        name: Column of the verdict.
        judge: The judge.

    Attributes:
        pairs: The judged pairs of question and answer, as the keys.
    """

    def __init__(self, name: str, judge: BaseJudge) -> None:
        self.name, self.judge, self.template = name, judge, judge.template
        self.uses_question = judge.uses_question
        self.pairs: dict[tuple[str, str], None] = {}
        self._verdicts: dict[str, SampleRow] = {}
        self._calls: dict[str, ModelCall] = {}  # a request is prepared once for all equal prompts

    def judge_answer(self, question: Any, answer: str) -> Script[SampleRow]:
        """Return the script of one verdict, its columns and error; equal prompts share one."""
        question_text = content_as_text(question) if self.uses_question else ""
        prompt = fill_template(self.template, question_text, answer)
        verdict = self._verdicts.get(prompt)
        if verdict is None:
            call = self._calls.get(prompt) or self.judge.build_call(prompt)
            row = yield from self.judge.row(self._calls.setdefault(prompt, call), 0)
            columns = {self.name: row.columns["answer"]}
            for suffix in self.judge.suffixes:
                columns[self.name + suffix] = row.columns.get(suffix[1:])
            columns[f"{self.name}_question"] = prompt
            error = None if row.error is None else f"judge {self.name}: {row.error}"
            verdict = self._verdicts[prompt] = SampleRow(columns, error)
        if verdict.error is None:
            self.pairs[question_text, answer] = None
        return verdict

    def record(self) -> None:
        """Record which pairs the judge has judged.

        Raises:
            UserError: The answer cache cannot be written.
        """
        record_judged_pairs(self.judge.cache_key, self.pairs)


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


def record_judged_pairs(judge: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Record which pairs of question and answer a judge has judged."""
    now = time.time()
    # Lone surrogates, which models do produce, are allowed.
    rows = [(judge, *(text.encode("utf-8", "surrogatepass") for text in p), now) for p in pairs]

    def write(connection: sqlite3.Connection) -> None:
        connection.execute(CREATE_JUDGED_TABLE)
        with connection:
            # Takes the write lock at once: a read transaction that is upgraded later may fail.
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR IGNORE INTO judged VALUES (?, ?, ?, ?)", rows)

    if rows:
        open_answer_cache().run(write)


def load_judged_pairs(judge: str) -> list[tuple[str, str]]:
    """Return the recorded pairs of a judge, the oldest first; damaged ones are left out."""
    query = "SELECT question, answer FROM judged WHERE judge = ? ORDER BY time, question, answer"

    def read(connection: sqlite3.Connection) -> list[tuple[bytes, bytes]]:
        connection.execute(CREATE_JUDGED_TABLE)
        return connection.execute(query, (judge,)).fetchall()

    pairs = []
    for question, answer in open_answer_cache().run(read):
        with suppress(AttributeError, UnicodeDecodeError):
            decoded = (one.decode("utf-8", "surrogatepass") for one in (question, answer))
            pairs.append((next(decoded), next(decoded)))
    return pairs
