"""A judge's grades of answers, and its verdicts on pairs of them, as MT-Bench's rows."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from swarm.errors import UserError
from swarm.judge.asking import BATCH_SIZE, BatchResult, send_requests
from swarm.judge.files import JsonRow
from swarm.judge.merging import merge_rows
from swarm.judge.mt_bench_answers import QuestionId, MTBenchQuestion
from swarm.judge.mt_bench_prompts import build_comparison_prompt, build_grade_prompt, has_reference
from swarm.judge.verdicts import parse_grade, parse_pick
from swarm.models import Completion, Model, Request

AnswersByModel = Mapping[str, Mapping[QuestionId, Sequence[str]]]
"""By model and question, turn by turn."""

UNPARSED_SCORE = -1.0
"""The score of a reply in which no grade can be read, as in the original."""

ERROR_WINNER = "error"
"""The winner where no verdict can be read, as in the original."""

SINGLE_FIELDS = ("question_id", "model", "turn")
PAIR_FIELDS = ("question_id", "model_1", "model_2", "turn")


class MTBenchJudge(NamedTuple):
    """Who judges, and how.

    Attributes:
        model, name: The model and its name.
        max_tokens: The most new tokens of a reply.
        folder: Where the rows go; they are kept beside one another by judge.
        batch: Questions at once.
    """

    model: Model
    name: str
    max_tokens: int
    folder: Path
    batch: int = BATCH_SIZE

    def rows_path(self, kind: str) -> Path:
        """Where the judge's rows of a kind are, "single" or "pair"."""
        return self.folder / f"{self.name.replace('/', '_')}_{kind}.jsonl"

    def send_prompts(self, prompts: Mapping[str, str], kind: str) -> BatchResult:
        """The replies to prompts, greedy; what was replied before is not asked again."""
        requests = {key: Request(prompt, self.max_tokens, temperature=0.0)
                    for key, prompt in prompts.items()}  # fmt: skip
        return send_requests(self.model, self.name, requests, self.rows_path(kind), self.batch)


class QuestionTurn(NamedTuple):
    """One turn of a question that is to be judged."""

    question: MTBenchQuestion
    number: int

    def prompt_kind(self, name: str) -> str:
        """What the original calls the prompt: of which kind it is."""
        reference = "-reference" if has_reference(self.question, self.number) else ""
        return f"{name}{reference}{'-multi-turn' if self.number else ''}"


def grade_answers(judge: MTBenchJudge, questions: Sequence[MTBenchQuestion], answers: AnswersByModel) -> tuple[BatchResult, int]:
    """Have every turn of every answer graded, by itself, from 1 to 10.

    Rows: {question_id, category, model, judge: [name, kind of prompt], user_prompt, judgment,
    score, turn, tstamp}; a reply without a grade has the score -1. A missing reply has no row.

    Returns:
        The replies, and in how many of them no grade can be read.

    Raises:
        UserError: A file cannot be read or written.
    """
    asked = {
        f"{turn.question.id} turn {turn.number + 1} {model}": (turn, model)
        for turn in _list_turns(questions)
        for model, mine in answers.items()
        if turn.number < len(mine.get(turn.question.id, ()))
    }
    prompts = {key: build_grade_prompt(turn.question, answers[model][turn.question.id], turn.number)
               for key, (turn, model) in asked.items()}  # fmt: skip
    replies = judge.send_prompts(prompts, "single")
    rows = []
    for key, reply in replies.answers.items():
        turn, model = asked[key]
        found = parse_grade(reply.text)
        rows.append({
            "question_id": turn.question.id,
            "category": turn.question.category,
            "model": model,
            "judge": [judge.name, turn.prompt_kind("single")],
            "user_prompt": prompts[key],
            "judgment": reply.text,
            "score": UNPARSED_SCORE if found is None else found,
            "turn": turn.number + 1,
            "tstamp": time.time(),
        })  # fmt: skip
    gone = [(asked[key][0].question.id, asked[key][1], asked[key][0].number + 1)
            for key in replies.failures]  # fmt: skip
    merge_rows(judge.rows_path("single"), SINGLE_FIELDS, rows, gone)
    return replies, sum(row["score"] == UNPARSED_SCORE for row in rows)


def compare_answers(
    judge: MTBenchJudge, questions: Sequence[MTBenchQuestion], answers: AnswersByModel, baseline: str | None
) -> tuple[BatchResult, int]:
    """Have the answers of two models compared, each pair in both orders.

    Rows: {question_id, category, model_1, model_2, g1_winner, g2_winner, judge, g1_user_prompt,
    g1_judgment, g2_user_prompt, g2_judgment, turn, tstamp}. In the first game model_1 is A, in the
    second one model_2 is; a winner is "model_1", "model_2", "tie" or, where it cannot be read,
    "error". A pair of which a reply is missing has no row.

    Args:
        baseline: With whom every other model is compared; `None`: all with all.

    Returns:
        The replies, and in how many of them no verdict can be read.

    Raises:
        UserError: The baseline has no answers, or a file cannot be read or written.
    """
    games = {
        (turn, *models): [f"{turn.question.id} turn {turn.number + 1} {a} - {b}"
                          for a, b in (models, models[::-1])]
        for turn in _list_turns(questions)
        for models in list_matches(list(answers), baseline)
        if all(turn.number < len(answers[model].get(turn.question.id, ())) for model in models)
    }  # fmt: skip
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
            rows.append(_comparison_row(judge, turn, (one, other), [prompts[key] for key in keys], said))
    merge_rows(judge.rows_path("pair"), PAIR_FIELDS, rows, gone)
    return replies, sum(row[game] == ERROR_WINNER for row in rows for game in ("g1_winner", "g2_winner"))


def list_matches(models: Sequence[str], baseline: str | None) -> list[tuple[str, str]]:
    """Who is compared with whom.

    Raises:
        UserError: There is nobody to compare, or the baseline is none of the models.
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
    judge: MTBenchJudge, turn: QuestionTurn, models: tuple[str, str], prompts: Sequence[str],
    said: Sequence[Completion],
) -> JsonRow:  # fmt: skip
    winners = [
        {"A": first, "B": second, "tie": "tie", None: ERROR_WINNER}[parse_pick(reply.text)]
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
