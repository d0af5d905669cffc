"""Judgements in MT-Bench's format: grades, pairwise verdicts, and their tables."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swarm._util.format import format_table
from swarm._util.jsonl import FieldTypes, JsonRow, merge_rows, read_json_rows, row_sort_key
from swarm._util.replies import parse_grade, parse_letter_pick
from swarm.errors import UserError
from swarm.judge.batch_requests import BATCH_SIZE, BatchResult, send_requests
from swarm.judge.mt_bench.answers import (
    MTBenchQuestion,
    QuestionId,
    build_comparison_prompt,
    build_grade_prompt,
    has_reference,
)
from swarm.models.base import Completion, Model, Request
from swarm.stats.intervals import Average, average_scores

AnswersByModel = Mapping[str, Mapping[QuestionId, Sequence[str]]]
"""Answers by model and question, one per turn."""

UNPARSED_SCORE = -1.0
"""Score of an unparsed reply, as in the original."""

ERROR_WINNER = "error"
"""Winner of an unparsed verdict, as in the original."""

SINGLE_FIELDS = ("question_id", "model", "turn")
PAIR_FIELDS = ("question_id", "model_1", "model_2", "turn")


class MTBenchJudge(NamedTuple):
    """A judge and its settings.

    Attributes:
        model, name: The model and its name.
        max_tokens: Maximum number of new tokens of a reply.
        folder: Folder of the output, with one file per judge.
        batch: Requests per batch.
    """

    model: Model
    name: str
    max_tokens: int
    folder: Path
    batch: int = BATCH_SIZE

    def rows_path(self, kind: str) -> Path:
        """Return the path of the judge's rows of a kind, "single" or "pair"."""
        return self.folder / f"{self.name.replace('/', '_')}_{kind}.jsonl"

    def send_prompts(self, prompts: Mapping[str, str], kind: str) -> BatchResult:
        """Return greedy replies to prompts; stored ones are not requested again."""
        requests = {
            key: Request(prompt, self.max_tokens, temperature=0.0)
            for key, prompt in prompts.items()
        }
        return send_requests(self.model, self.name, requests, self.rows_path(kind), self.batch)


class QuestionTurn(NamedTuple):
    """One turn of a question to judge."""

    question: MTBenchQuestion
    number: int

    def prompt_kind(self, name: str) -> str:
        """Return the original's name of the kind of prompt."""
        reference = "-reference" if has_reference(self.question, self.number) else ""
        return f"{name}{reference}{'-multi-turn' if self.number else ''}"


def grade_answers(
    judge: MTBenchJudge, questions: Sequence[MTBenchQuestion], answers: AnswersByModel
) -> tuple[BatchResult, int]:
    """Grade every turn of every answer separately, from 1 to 10.

    Rows: {question_id, category, model, judge: [name, kind of prompt], user_prompt, judgment,
    score, turn, tstamp}; a reply without a grade has the score -1. A missing reply has no row.

    Returns:
        The replies, and the number of unparsed ones.

    Raises:
        UserError: A file cannot be read or written.
    """
    asked = {
        f"{turn.question.id} turn {turn.number + 1} {model}": (turn, model)
        for turn in _list_turns(questions)
        for model, mine in answers.items()
        if turn.number < len(mine.get(turn.question.id, ()))
    }
    prompts = {
        key: build_grade_prompt(turn.question, answers[model][turn.question.id], turn.number)
        for key, (turn, model) in asked.items()
    }
    replies = judge.send_prompts(prompts, "single")
    rows = []
    for key, reply in replies.answers.items():
        turn, model = asked[key]
        found = parse_grade(reply.text)
        rows.append(
            {
                "question_id": turn.question.id,
                "category": turn.question.category,
                "model": model,
                "judge": [judge.name, turn.prompt_kind("single")],
                "user_prompt": prompts[key],
                "judgment": reply.text,
                "score": UNPARSED_SCORE if found is None else found,
                "turn": turn.number + 1,
                "tstamp": time.time(),
            }
        )
    gone = [
        (asked[key][0].question.id, asked[key][1], asked[key][0].number + 1)
        for key in replies.failures
    ]
    merge_rows(judge.rows_path("single"), SINGLE_FIELDS, rows, gone)
    return replies, sum(row["score"] == UNPARSED_SCORE for row in rows)


def compare_answers(
    judge: MTBenchJudge,
    questions: Sequence[MTBenchQuestion],
    answers: AnswersByModel,
    baseline: str | None,
) -> tuple[BatchResult, int]:
    """Compare the answers of two models, each pair in both orders.

    Rows: {question_id, category, model_1, model_2, g1_winner, g2_winner, judge, g1_user_prompt,
    g1_judgment, g2_user_prompt, g2_judgment, turn, tstamp}. In the first game model_1 is A, in the
    second one model_2 is; a winner is "model_1", "model_2", "tie" or, if unparsed, "error". A pair
    with a missing reply has no row.

    Args:
        baseline: Model to compare all others with; `None`: all pairs.

    Returns:
        The replies, and the number of unparsed ones.

    Raises:
        UserError: The baseline has no answers, or a file cannot be read or written.
    """
    games = {
        (turn, *models): [
            f"{turn.question.id} turn {turn.number + 1} {a} - {b}"
            for a, b in (models, models[::-1])
        ]
        for turn in _list_turns(questions)
        for models in list_matches(list(answers), baseline)
        if all(turn.number < len(answers[model].get(turn.question.id, ())) for model in models)
    }
    prompts = {}
    for (turn, *models), keys in games.items():
        first, second = (answers[model][turn.question.id] for model in models)
        prompts[keys[0]] = build_comparison_prompt(turn.question, first, second, turn.number)
        prompts[keys[1]] = build_comparison_prompt(turn.question, second, first, turn.number)
    replies = judge.send_prompts(prompts, "pair")
    rows, gone = [], []
    for (turn, one, other), keys in games.items():
        if replies.failures.keys() & set(keys):
            gone.append((turn.question.id, one, other, turn.number + 1))
        else:
            said = [replies.answers[key] for key in keys]
            rows.append(
                _comparison_row(judge, turn, (one, other), [prompts[key] for key in keys], said)
            )
    merge_rows(judge.rows_path("pair"), PAIR_FIELDS, rows, gone)
    return replies, sum(
        row[game] == ERROR_WINNER for row in rows for game in ("g1_winner", "g2_winner")
    )


def list_matches(models: Sequence[str], baseline: str | None) -> list[tuple[str, str]]:
    """Return the pairs of models to compare.

    Raises:
        UserError: There are fewer than two models, or the baseline is not among them.
    """
    if baseline is not None and baseline not in models:
        raise UserError(
            f"--baseline {baseline}: there are no answers of it; there are answers of "
            f"{', '.join(sorted(models))}"
        )
    if len(models) < 2:
        raise UserError("--answers: a comparison needs the answers of two models or more")
    if baseline is not None:
        return [(model, baseline) for model in sorted(models) if model != baseline]
    return list(itertools.combinations(sorted(models), 2))


def _comparison_row(
    judge: MTBenchJudge,
    turn: QuestionTurn,
    models: tuple[str, str],
    prompts: Sequence[str],
    said: Sequence[Completion],
) -> JsonRow:
    winners = [
        {"A": first, "B": second, "tie": "tie", None: ERROR_WINNER}[parse_letter_pick(reply.text)]
        for reply, (first, second) in zip(
            said, [("model_1", "model_2"), ("model_2", "model_1")], strict=True
        )
    ]
    return {
        "question_id": turn.question.id,
        "category": turn.question.category,
        "model_1": models[0],
        "model_2": models[1],
        "g1_winner": winners[0],
        "g2_winner": winners[1],
        "judge": [judge.name, turn.prompt_kind("pair")],
        "g1_user_prompt": prompts[0],
        "g1_judgment": said[0].text,
        "g2_user_prompt": prompts[1],
        "g2_judgment": said[1].text,
        "turn": turn.number + 1,
        "tstamp": time.time(),
    }


def _list_turns(questions: Iterable[MTBenchQuestion]) -> list[QuestionTurn]:
    return [QuestionTurn(question, i) for question in questions for i in range(len(question.turns))]


GRADE_ROW_FIELDS: FieldTypes = {
    "question_id": (int, str),
    "model": str,
    "judge": (list, str),
    "turn": int,
    "score": (int, float),
}
PAIR_ROW_FIELDS: FieldTypes = {
    "question_id": (int, str),
    "model_1": str,
    "model_2": str,
    "judge": (list, str),
    "turn": int,
    "g1_winner": str,
    "g2_winner": str,
}

ALL_LABEL = "all"


class TurnVerdict(NamedTuple):
    """A judge's verdict on a model's turn.

    Attributes:
        other: The opponent in a comparison, or "".
        value: A grade, or a win in percent; `None` is unparsed.
        turned: True if the two orders of a pair disagree, which counts as a tie.
    """

    other: str
    value: float | None
    turned: bool = False


VerdictsByTurn = dict[tuple[Any, ...], TurnVerdict]
"""Verdicts by (question_id, category, turn, opponent)."""


def compute_tables(folder: Path, kind: str, baseline: str | None = None) -> list[JsonRow]:
    """Compute the table rows of each judge and model, by category and turn, each with "all".

    A row is {judge, model, category, turn, average, low, high, n, unparsed}; for pairs the average
    is the adjusted win rate in percent, with a tie as half a win and a disagreement between the two
    orders as a tie, and the row also has {wins, ties, losses, turned}: the counts, and the number
    of ties that are disagreements. Unparsed verdicts are excluded from averages.

    Args:
        folder: Folder of the judgements.
        kind: "single" or "pair".
        baseline: For pairs, only comparisons with this model, without its own rows.

    Raises:
        UserError: There are none, or a file is invalid.
    """
    files = sorted(folder.glob(f"*_{kind}.jsonl"))
    fields = SINGLE_FIELDS if kind == "single" else PAIR_FIELDS
    latest: dict[tuple[Any, ...], JsonRow] = {}
    for path in files:
        for row in read_json_rows(path, GRADE_ROW_FIELDS if kind == "single" else PAIR_ROW_FIELDS):
            latest[(_judge_name(row), *(row[field] for field in fields))] = row
    found: dict[tuple[str, str], VerdictsByTurn] = {}
    for (judge, *_), row in latest.items():
        for model, said in (
            _grade_verdict(row) if kind == "single" else _pair_verdicts(row, baseline)
        ):
            place = (row["question_id"], row.get("category", "-"), row["turn"], said.other)
            found.setdefault((judge, model), {})[place] = said
    if not found:
        raise UserError(f"{folder}: there are no judgements of this kind; run judge first")
    return [line for who in sorted(found) for line in _table_lines(*who, found[who], kind)]


def _judge_name(row: JsonRow) -> str:
    return str(row["judge"][0] if isinstance(row["judge"], list) else row["judge"])


def _grade_verdict(row: JsonRow) -> list[tuple[str, TurnVerdict]]:
    value = None if row["score"] == UNPARSED_SCORE else float(row["score"])
    return [(row["model"], TurnVerdict("", value))]


def _pair_verdicts(row: JsonRow, baseline: str | None) -> list[tuple[str, TurnVerdict]]:
    """Return a pair's verdicts, from the side of each model."""
    games = (row["g1_winner"], row["g2_winner"])
    winner = games[0] if games[0] == games[1] else "tie"
    values = {"model_1": 100.0, "model_2": 0.0, "tie": 50.0}
    first = None if ERROR_WINNER in games or winner not in values else values[winner]
    second = None if first is None else 100.0 - first
    turned = first is not None and games[0] != games[1]
    sides = [
        (row["model_1"], TurnVerdict(row["model_2"], first, turned)),
        (row["model_2"], TurnVerdict(row["model_1"], second, turned)),
    ]
    return [side for side in sides if baseline is None or side[1].other == baseline]


def _table_lines(judge: str, model: str, values: VerdictsByTurn, kind: str) -> list[JsonRow]:
    categories = sorted({category for _, category, _, _ in values})
    turns = sorted({turn for _, _, turn, _ in values})
    lines = []
    for category in [ALL_LABEL, *categories]:
        for turn in [*turns, ALL_LABEL]:
            some = {
                place: value
                for place, value in values.items()
                if category in (ALL_LABEL, place[1]) and turn in (ALL_LABEL, place[2])
            }
            if some:
                won = {} if kind == "single" else _count_outcomes(some)
                lines.append(
                    {
                        "judge": judge,
                        "model": model,
                        "category": category,
                        "turn": turn,
                        **average_scores(_group_by_question(some)).to_row(),
                        **won,
                    }
                )
    return lines


def _group_by_question(values: VerdictsByTurn) -> list[list[float | None]]:
    found: dict[Any, list[float | None]] = {}
    for place in sorted(values, key=row_sort_key):
        found.setdefault(place[0], []).append(values[place].value)
    return list(found.values())


def _count_outcomes(values: VerdictsByTurn) -> JsonRow:
    said = [one.value for one in values.values()]
    counts = {"wins": said.count(100.0), "ties": said.count(50.0), "losses": said.count(0.0)}
    return {**counts, "turned": sum(one.turned for one in values.values())}


def format_tables(lines: Sequence[JsonRow], kind: str) -> list[str]:
    """Format the tables as text, one per judge."""
    text = []
    what = (
        "grades from 1 to 10"
        if kind == "single"
        else ("adjusted win rates in percent with won-tied-lost")
    )
    for judge in dict.fromkeys(line["judge"] for line in lines):
        mine = [line for line in lines if line["judge"] == judge]
        turns = list(dict.fromkeys(line["turn"] for line in mine))
        head = [
            "model",
            "category",
            *(f"turn {turn}" if turn != ALL_LABEL else "all turns" for turn in turns),
        ]
        rows: dict[tuple[str, str], dict[Any, str]] = {}
        for line in mine:
            rows.setdefault((line["model"], line["category"]), {})[line["turn"]] = _format_cell(
                line
            )
        text.append(f"judge {judge}: {what}, 95 % intervals over questions")
        text += format_table(
            head, [[*who, *_row_cells(cells, turns)] for who, cells in rows.items()]
        )
    return text


def _row_cells(cells: Mapping[Any, str], turns: Sequence[Any]) -> list[str]:
    return [cells.get(turn, "") for turn in turns]


def _format_cell(line: JsonRow) -> str:
    shown = str(Average(*(line[name] for name in ("average", "low", "high", "n", "unparsed"))))
    if "wins" not in line:
        return shown
    turned = f" ({line['turned']} tied by order)" if line["turned"] else ""
    return f"{shown} {line['wins']}-{line['ties']}-{line['losses']}{turned}"
