"""Questions of several turns and the answers to them, in MT-Bench's format (Zheng et al. 2023)."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import UserError
from swarm.files import short_digest
from swarm.judge.asking import BATCH_SIZE, BatchResult, send_requests
from swarm.judge.files import FieldTypes, JsonRow, index_rows, read_json_rows
from swarm.judge.merging import rows_by_key, merge_rows
from swarm.models import Message, Model, Request

QuestionId = int | str

CATEGORY_TEMPERATURES = {"extraction": 0.0, "math": 0.0, "coding": 0.0, "reasoning": 0.0, "stem": 0.1,
    "humanities": 0.1}  # fmt: skip
"""What the original samples with, by category."""

DEFAULT_TEMPERATURE = 0.7
"""For writing, roleplay, and every category that is not named."""

QUESTION_FIELDS: FieldTypes = {"question_id": (int, str), "category": str, "turns": list}
ANSWER_FIELDS: FieldTypes = {"question_id": (int, str), "model_id": str, "choices": list}


@dataclass(frozen=True, slots=True)
class MTBenchQuestion:
    """One question.

    Attributes:
        id: By which answers and judgements are joined to it.
        category: Such as "math".
        turns: What the user says, turn by turn.
        reference: A right answer to each turn, or nothing.
        temperature: The one that it must be answered with, if any.
    """

    id: QuestionId
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are made.

    Attributes:
        choices: Answers to each question.
        temperature: In place of the category's; a question's own goes before it.
        max_tokens: The most new tokens of a turn's answer.
        batch: Questions at once.
    """

    choices: int = 1
    temperature: float | None = None
    max_tokens: int = 1024
    batch: int = BATCH_SIZE


def read_questions(path: str | Path, begin: int | None = None, end: int | None = None,
                   references: str | Path | None = None) -> list[MTBenchQuestion]:  # fmt: skip
    """The questions of a file, in its order.

    Args:
        path: One {question_id, category, turns, reference?, required_temperature?} a line.
        begin, end: Only those from this place on and before that one, counted from 0.
        references: A file of answers that are to stand for the questions' own references.

    Raises:
        UserError: The file cannot be read or holds something else.
    """
    rows = index_rows(path, read_json_rows(path, QUESTION_FIELDS), "question_id")
    given = read_answers([references]) if references else {}
    right = {id_: turns for answers in given.values() for id_, turns in answers.items()}
    questions = [_parse_question(path, row, right) for row in list(rows.values())[begin:end]]
    if not questions:
        raise UserError(f"{path}: it has {len(rows)} questions, and none is left to ask")
    return questions


def _parse_question(path: str | Path, row: JsonRow, right: dict[QuestionId, tuple[str, ...]]) -> MTBenchQuestion:
    turns, reference = row["turns"], row.get("reference") or []
    temperature = row.get("required_temperature")
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f'{path}: question {row["question_id"]}: its "turns" are no list of texts')
    if not isinstance(reference, list) or not all(isinstance(one, str) for one in reference):
        raise UserError(f'{path}: question {row["question_id"]}: its "reference" is no list of '
                        "texts, one a turn")  # fmt: skip
    if temperature is not None and not isinstance(temperature, (int, float)):
        raise UserError(f'{path}: question {row["question_id"]}: its "required_temperature" is no '
                        "number")  # fmt: skip
    reference = right.get(row["question_id"], tuple(reference))
    return MTBenchQuestion(row["question_id"], row["category"], tuple(turns), reference, temperature)


def read_answers(paths: Iterable[str | Path]) -> dict[str, dict[QuestionId, tuple[str, ...]]]:
    """The answers of each model to each question, turn by turn: the first choice, the last row.

    Raises:
        UserError: A file cannot be read or holds something else.
    """
    found: dict[str, dict[QuestionId, tuple[str, ...]]] = {}
    for path in paths:
        rows = rows_by_key(("question_id", "model_id"), read_json_rows(path, ANSWER_FIELDS))
        for (id_, model), row in rows.items():
            try:
                turns = tuple(row["choices"][0]["turns"])
            except (LookupError, TypeError):
                turns = ()
            if not turns or not all(isinstance(turn, str) for turn in turns):
                raise UserError(
                    f'{path}: question {id_}: its "choices" are no list of {{"index", "turns"}}'
                )
            found.setdefault(model, {})[id_] = turns
    return found


def answer_questions(
    model: Model, name: str, questions: Sequence[MTBenchQuestion], settings: AnswerSettings, output: Path
) -> BatchResult:
    """Have a model answer: all first turns together, then all second ones, and so on.

    Each answer is kept beside the output as it comes, and the same call goes on from there. A
    question of which any turn failed has no row.

    Args:
        name: The model's, as the rows are to call it.
        output: JSONL of {question_id, answer_id, model_id, choices: [{index, turns}], tstamp},
            sorted; rows of other questions and models stay.

    Raises:
        UserError: A file cannot be read or written.
    """
    said: dict[tuple[QuestionId, int], list[str]] = {
        (question.id, choice): [] for question in questions for choice in range(settings.choices)
    }
    every = BatchResult()
    for turn in range(max(len(question.turns) for question in questions)):
        open_ = {
            f"{question.id} choice {choice} turn {turn + 1}": (question, choice)
            for question in questions
            for choice in range(settings.choices)
            if len(said[question.id, choice]) == turn < len(question.turns)
        }
        requests = {
            key: _build_request(question, said[question.id, choice], choice, settings)
            for key, (question, choice) in open_.items()
        }
        replies = send_requests(model, name, requests, output, settings.batch)
        for key, completion in replies.answers.items():
            question, choice = open_[key]
            said[question.id, choice].append(completion.text)
        every.answers |= replies.answers
        every.failures |= replies.failures
        every.kept += replies.kept
    rows = [_answer_row(name, question, [said[question.id, choice] for choice in range(settings.choices)])
            for question in questions]  # fmt: skip
    whole = [row for row in rows if row is not None]
    failed = {question.id for question in questions} - {row["question_id"] for row in whole}
    merge_rows(output, ("question_id", "model_id"), whole, [(id_, name) for id_ in failed])
    return every


def _build_request(question: MTBenchQuestion, said: Sequence[str], choice: int, settings: AnswerSettings) -> Request:
    prompt = [Message("user", question.turns[0])]
    for answer_, next_ in zip(said, question.turns[1:], strict=False):
        # Some endpoints refuse an empty turn.
        prompt += [Message("assistant", answer_ or "(nothing)"), Message("user", next_)]
    temperature = question.temperature
    if temperature is None:
        temperature = settings.temperature
    if temperature is None:
        temperature = CATEGORY_TEMPERATURES.get(question.category, DEFAULT_TEMPERATURE)
    return Request(tuple(prompt), settings.max_tokens, temperature=temperature, sample=choice)


def _answer_row(name: str, question: MTBenchQuestion, choices: Sequence[Sequence[str]]) -> JsonRow | None:
    """A question's row, if every turn of every choice is answered."""
    if any(len(turns) < len(question.turns) for turns in choices):
        return None
    listed = [{"index": index, "turns": list(turns)} for index, turns in enumerate(choices)]
    return {
        "question_id": question.id,
        "answer_id": short_digest([name, question.id, listed]),
        "model_id": name,
        "choices": listed,
        "tstamp": time.time(),
    }
