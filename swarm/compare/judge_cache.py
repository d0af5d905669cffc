"""Judges' prompts and verdicts, and cached answers: replay without requests, list, delete.

Contains the template of judges' prompts, the run of one judge with its table of judged pairs, and
scripts that are executed on cached answers only.
"""

import re
import sqlite3
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from string import Formatter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from swarm.compare.dataframe import as_column
from swarm.compare.sampling.backends import open_answer_cache
from swarm.compare.sampling.resolve import resolve_backend, sample_cache_keys
from swarm.compare.sampling.scheduler import reduce_gc_frequency
from swarm.compare.sampling.types import SampleOutcome, SampleRequest, Script
from swarm.compare.validation import shorten_repr
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Completion

if TYPE_CHECKING:
    import pandas as pd


TEMPLATE_FIELDS = ("question", "answer")
FIELD_PATTERN = re.compile(r"\{(question|answer)\}")
BRACED_WORD_PATTERN = re.compile(r"\{([A-Za-z_]+)\}")


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
            raise InvalidArgument(f"a judge's template must be one text, not {type(text).__name__}")
        self.text = text
        fields = parse_format_fields(text)
        self.plain = fields is None
        self.fields = set(FIELD_PATTERN.findall(text)) if fields is None else fields
        for field in BRACED_WORD_PATTERN.findall(text):
            matches = get_close_matches(field.lower(), TEMPLATE_FIELDS, 1, 0.7)
            if matches and field not in TEMPLATE_FIELDS:
                raise InvalidArgument(
                    f"a judge's template has {{{field}}}; did you mean {{{matches[0]}}}?"
                )
        if "answer" not in self.fields:
            raise InvalidArgument(
                f"a judge's template must have {{answer}} in it; this has not: {shorten_repr(text)}"
            )

    @property
    def uses_question(self) -> bool:
        """True if the prompt depends on the question."""
        return "question" in self.fields

    def fill(self, question: str, answer: str) -> str:
        """Return the prompt."""
        if not self.plain:
            return self.text.format(question=question, answer=answer)
        values = {"question": question, "answer": answer}
        return FIELD_PATTERN.sub(lambda found: values[found[1]], self.text)


def parse_format_fields(text: str) -> set[str] | None:
    """Return the fields of a text that `str.format` can fill; `None` if it cannot."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
        if not names <= set(TEMPLATE_FIELDS):
            return None
        text.format(question="", answer="")
    except (ValueError, KeyError, IndexError, AttributeError):
        return None
    return names


def content_as_text(content: Any) -> str:
    """Return a turn's text for a judge; parts that are not text are replaced by [TYPE]."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    return "\n".join(
        str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in content
    )


T = TypeVar("T")

CREATE_JUDGED_TABLE = (
    "CREATE TABLE IF NOT EXISTS judged (judge TEXT, question BLOB, answer BLOB, time REAL, "
    "PRIMARY KEY (judge, question, answer)) WITHOUT ROWID"
)
INSERT_JUDGED = "INSERT OR IGNORE INTO judged VALUES (?, ?, ?, ?)"
SELECT_JUDGED = (
    "SELECT question, answer FROM judged WHERE judge = ? ORDER BY time, question, answer"
)


class Judge(Protocol):
    """What is used of a judge here; see `swarm.compare.judges.BaseJudge`."""

    suffixes: ClassVar[tuple[str, ...]]

    @property
    def template(self) -> JudgeTemplate:
        """Template of the prompt."""

    @property
    def uses_question(self) -> bool:
        """True if the prompt depends on the question."""

    @property
    def cache_key(self) -> str:
        """Key of the recorded pairs."""

    def judge(self, prompt: str) -> Script[tuple[dict[str, Any], UserError | None]]:
        """Return the script of a verdict: columns by suffix, error or `None`."""


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

    def __init__(self, name: str, judge: Judge) -> None:
        self.name, self.judge = name, judge
        self.pairs: dict[tuple[str, str], None] = {}
        self._said: dict[str, JudgeVerdict] = {}

    def __enter__(self) -> "JudgeRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Record the judged pairs, also after an interrupt."""
        record_judged_pairs(self.judge.cache_key, list(self.pairs))

    def judge_answer(self, question: Any, answer: str) -> Script[JudgeVerdict]:
        """Return the script of one verdict; equal prompts share one verdict."""
        question_text = content_as_text(question) if self.judge.uses_question else ""
        prompt = self.judge.template.fill(question_text, answer)
        verdict = self._said.get(prompt)
        if verdict is None:
            columns, error = yield from self.judge.judge(prompt)
            named = {self.name + suffix: value for suffix, value in columns.items()}
            named[f"{self.name}_question"] = prompt
            error_text = None if error is None else f"judge {self.name}: {error}"
            verdict = self._said[prompt] = JudgeVerdict(named, error_text)
        if verdict.error is None:
            self.pairs[question_text, answer] = None
        return verdict


def run_together(scripts: Sequence[Script[T]]) -> Script[list[T]]:
    """Combine several scripts into one, whose requests are sent together."""
    if len(scripts) == 1:
        return [(yield from scripts[0])]
    results: dict[int, T] = {}
    pending: dict[int, Sequence[SampleRequest]] = {}
    for number, script in enumerate(scripts):
        _advance_script(number, script, None, pending, results)
    while pending:
        outcomes = iter((yield [want for wants in pending.values() for want in wants]))
        for number, wants in list(pending.items()):
            _advance_script(
                number, scripts[number], list(islice(outcomes, len(wants))), pending, results
            )
    return [results[number] for number in range(len(scripts))]


def _advance_script(
    number: int,
    script: Generator[Sequence[SampleRequest], list[SampleOutcome], T],
    outcomes: list[SampleOutcome] | None,
    pending: dict[int, Sequence[SampleRequest]],
    results: dict[int, T],
) -> None:
    try:
        pending[number] = next(script) if outcomes is None else script.send(outcomes)
    except StopIteration as done:
        pending.pop(number, None)
        results[number] = done.value


def record_judged_pairs(judge: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Record which pairs of question and answer a judge has judged.

    Raises:
        UserError: The answer cache cannot be written.
    """
    if not pairs:
        return
    timestamp = time.time()
    rows = [
        (judge, encode_text(question), encode_text(answer), timestamp) for question, answer in pairs
    ]

    def write(connection: sqlite3.Connection) -> None:
        connection.execute(CREATE_JUDGED_TABLE)
        with connection:
            # Takes the write lock at once: a read transaction that is upgraded later may fail.
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(INSERT_JUDGED, rows)

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
            pairs.append((decode_text(question), decode_text(answer)))
    return pairs


def encode_text(text: str) -> bytes:
    """Encode a text for the table; lone surrogates, which models do produce, are allowed."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Decode a text of the table; see `encode_text`."""
    return data.decode("utf-8", "surrogatepass")


class CacheOnlyReplay(Generic[T]):
    """A script that runs on cached answers only.

    Attributes:
        keys: Cache keys of all answers it requested, cached or not.
        result: Its result; `None` if a requested answer is not cached.
    """

    def __init__(self, script: Script[T]) -> None:
        self.script = script
        self.keys: list[str] = []
        self.result: T | None = None
        self.advance_script(None)

    def advance_script(self, heard: list[Any] | None) -> None:
        """Advance the script to its next request or its end."""
        self.wants: Sequence[SampleRequest] = ()
        try:
            self.wants = next(self.script) if heard is None else self.script.send(heard)
        except StopIteration as done:
            self.result = done.value

    def send_cached(self, heard: Mapping[str, Completion], keys: Sequence[str]) -> None:
        """Send the cached answers to the script; close it if one is missing."""
        self.keys += keys
        if all(key in heard for key in keys):
            self.advance_script([heard[key] for key in keys])
        else:
            self.wants = ()
            self.script.close()


def replay_from_cache(scripts: Iterable[Script[T]]) -> list[CacheOnlyReplay[T]]:
    """Run scripts on cached answers only, in lockstep.

    Each step looks up the requests of all scripts with one query per model.

    Raises:
        UserError: A model does not exist, or the answer cache cannot be read.
    """
    all_of_them = pending = [CacheOnlyReplay(script) for script in scripts]
    while pending := [one for one in pending if one.wants]:
        wants = [want for one in pending for want in one.wants]
        keys = sample_cache_keys(wants)
        models = {key: want.call.model for key, want in zip(keys, wants, strict=True)}
        sources_of = {name: resolve_backend(name) for name in set(models.values())}
        cached: dict[str, Completion] = {}
        for name, model in sources_of.items():
            cached |= model.get_cached([key for key, other in models.items() if other == name])
        last = 0
        for one in pending:
            first, last = last, last + len(one.wants)
            one.send_cached(cached, keys[first:last])
    return all_of_them


def list_judgements(judge: Judge) -> "pd.DataFrame":
    """List the cached verdicts of a judge; see `swarm.compare.judges.BaseJudge.get_cache`."""
    import pandas as pd

    pairs = load_judged_pairs(judge.cache_key)
    prompts = [judge.template.fill(question, answer) for question, answer in pairs]
    with reduce_gc_frequency():
        replayed = replay_from_cache(judge.judge(prompt) for prompt in prompts)
    raw = "_raw_answer" in judge.suffixes
    columns = ["question", "answer", "judge_question", "judge_answer"] + ["judge_raw_answer"] * raw
    rows = []
    for (question, answer), prompt, one in zip(pairs, prompts, replayed, strict=True):
        if one.result is None or one.result[1] is not None:
            continue
        result_columns = one.result[0]
        row = (question if judge.uses_question else None, answer, prompt, result_columns[""])
        rows.append((*row, result_columns["_raw_answer"]) if raw else row)
    return pd.DataFrame(
        {name: as_column([row[n] for row in rows]) for n, name in enumerate(columns)}
    )
