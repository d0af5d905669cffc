"""What judges say in one run: asked once of each prompt, and written down to be listed."""

import time
from collections.abc import Generator, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from swarm.compare.asking import SampleOutcome, Script, SampleRequest
from swarm.compare.asking.cache import open_answer_cache
from swarm.compare.judges.templates import content_as_text

if TYPE_CHECKING:
    from swarm.compare.judges import BaseJudge

T = TypeVar("T")

CREATE_JUDGED_TABLE = (
    "CREATE TABLE IF NOT EXISTS judged (judge TEXT, question BLOB, answer BLOB, time REAL, "
    "PRIMARY KEY (judge, question, answer)) WITHOUT ROWID"
)
INSERT_JUDGED = "INSERT OR IGNORE INTO judged VALUES (?, ?, ?, ?)"
SELECT_JUDGED = "SELECT question, answer FROM judged WHERE judge = ? ORDER BY time, question, answer"


class JudgeVerdict(NamedTuple):
    """What a judge says of an answer: its columns, and why it says nothing."""

    columns: dict[str, Any]
    error: str | None


class JudgeRun:
    """One judge of a question, while its answers come.

    Args:
        name: The column that it makes.
        judge: It.
    """

    def __init__(self, name: str, judge: "BaseJudge") -> None:
        self.name, self.judge = name, judge
        self.pairs: dict[tuple[str, str], None] = {}
        self._said: dict[str, JudgeVerdict] = {}

    def __enter__(self) -> "JudgeRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Write down what was judged, after an interrupt too."""
        record_judged_pairs(self.judge.cache_key, list(self.pairs))

    def judge_answer(self, question: Any, answer: str) -> Script[JudgeVerdict]:
        """The script of one verdict; equal prompts have the same."""
        asked = content_as_text(question) if self.judge.uses_question else ""
        prompt = self.judge.template.fill(asked, answer)
        said = self._said.get(prompt)
        if said is None:
            columns, error = yield from self.judge.judge(prompt)
            named = {self.name + suffix: value for suffix, value in columns.items()}
            named[f"{self.name}_question"] = prompt
            why = None if error is None else f"judge {self.name}: {error}"
            said = self._said[prompt] = JudgeVerdict(named, why)
        if said.error is None:
            self.pairs[asked, answer] = None
        return said


def run_together(scripts: Sequence[Script[T]]) -> Script[list[T]]:
    """Several scripts as one, whose wants go out together."""
    if len(scripts) == 1:
        return [(yield from scripts[0])]
    results: dict[int, T] = {}
    waiting: dict[int, Sequence[SampleRequest]] = {}
    for number, script in enumerate(scripts):
        _advance_script(number, script, None, waiting, results)
    while waiting:
        heard = iter((yield [want for wants in waiting.values() for want in wants]))
        for number, wants in list(waiting.items()):
            _advance_script(number, scripts[number], list(islice(heard, len(wants))), waiting, results)
    return [results[number] for number in range(len(scripts))]


def _advance_script(
    number: int,
    script: Generator[Sequence[SampleRequest], list[SampleOutcome], T],
    heard: list[SampleOutcome] | None,
    waiting: dict[int, Sequence[SampleRequest]],
    results: dict[int, T],
) -> None:
    try:
        waiting[number] = next(script) if heard is None else script.send(heard)
    except StopIteration as done:
        waiting.pop(number, None)
        results[number] = done.value


def record_judged_pairs(judge: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Write down which pairs of question and answer a judge has judged.

    Raises:
        UserError: The file of kept answers cannot be written.
    """
    if not pairs:
        return
    now = time.time()
    rows = [(judge, encode_text(question), encode_text(answer), now) for question, answer in pairs]
    with open_answer_cache().open_connection() as connection, connection:
        connection.execute(CREATE_JUDGED_TABLE)
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(INSERT_JUDGED, rows)


def load_judged_pairs(judge: str) -> list[tuple[str, str]]:
    """The pairs that were written down of a judge, the oldest first.

    Raises:
        UserError: The file of kept answers cannot be read.
    """
    with open_answer_cache().open_connection() as connection:
        connection.execute(CREATE_JUDGED_TABLE)
        rows = connection.execute(SELECT_JUDGED, (judge,)).fetchall()
    return [(decode_text(question), decode_text(answer)) for question, answer in rows]


def encode_text(text: str) -> bytes:
    """A text as the table has it; halves of characters, which models do write, are no error."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """See `as_bytes`."""
    return data.decode("utf-8", "surrogatepass")
