"""MT-Bench: two-turn questions in eight categories, graded or compared by a judge.

After Zheng et al. 2023 (2306.05685): python -m swarm.judge mt_bench generate | judge | show.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from swarm._util.files import find_path
from swarm.errors import UserError
from swarm.judge.batch_requests import BATCH_SIZE, describe_missing_answers, report_result
from swarm.judge.cli import (
    add_mixture_options,
    add_model_options,
    load_answering_model,
    load_model,
    parse_folder,
    parse_index,
    parse_output_file,
    parse_positive_int,
    parse_temperature,
)
from swarm.judge.mt_bench import answers
from swarm.judge.mt_bench import judgements as show
from swarm.judge.mt_bench import judgements as verdicts
from swarm.judge.mt_bench.answers import REFERENCE_CATEGORIES, has_reference

QUESTIONS_FILE = "data/questions/mt_bench.jsonl"

JUDGING_MODES = ("single", "pairwise-baseline", "pairwise-all")


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Add the actions: generate, judge, show."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_generate_options(actions.add_parser("generate", help="answers of a model, turn by turn"))
    _add_judge_options(actions.add_parser("judge", help="grades of answers, or verdicts on pairs"))
    _add_show_options(actions.add_parser("show", help="tables by category and turn"))


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="who answers")
    add(
        "--output",
        required=True,
        type=parse_output_file,
        metavar="FILE.jsonl",
        help="where the answers go",
    )
    add(
        "--num_choices",
        type=parse_positive_int,
        default=1,
        metavar="N",
        help="answers to each question; the first is judged (%(default)s)",
    )
    add(
        "--temperature",
        "--force_temperature",
        type=parse_temperature,
        help="in place of the category's; a question's own goes before it",
    )
    add(
        "--max_tokens",
        type=parse_positive_int,
        default=1024,
        metavar="N",
        help="the most new tokens of one turn's answer (%(default)s)",
    )
    add_mixture_options(parser)
    _add_question_options(parser)
    parser.set_defaults(run=generate)


def _add_judge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mode", choices=JUDGING_MODES, default=JUDGING_MODES[0], help="(%(default)s)")
    add(
        "--answers",
        nargs="+",
        required=True,
        metavar="FILE",
        help="answers that generate wrote; several, apart by spaces or commas",
    )
    add("--judge", required=True, metavar="NAME", help="who judges")
    add("--baseline", metavar="NAME", help="with whom pairwise-baseline compares all others")
    add("--references", metavar="FILE", help="answers that stand for the questions' references")
    add(
        "--max_tokens",
        type=parse_positive_int,
        default=1024,
        metavar="N",
        help="the most new tokens of a reply (%(default)s)",
    )
    add("--out", required=True, type=parse_folder, metavar="FOLDER", help="where the judgements go")
    _add_question_options(parser)
    parser.set_defaults(run=judge)


def _add_show_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mode", choices=JUDGING_MODES, default=JUDGING_MODES[0], help="(%(default)s)")
    add("--baseline", metavar="NAME", help="of pairwise-baseline")
    add("--out", required=True, type=parse_folder, metavar="FOLDER", help="as of judge")
    add("--json", action="store_true", help="the lines as JSON")
    parser.set_defaults(run=print_tables)


def _add_question_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--questions", default=QUESTIONS_FILE, metavar="FILE", help="(%(default)s, our own)")
    add(
        "--question_begin",
        type=parse_index,
        metavar="N",
        help="only from the Nth question on, from 0",
    )
    add("--question_end", type=parse_index, metavar="N", help="and before this one")
    add(
        "--first_n",
        "--limit",
        type=parse_positive_int,
        metavar="N",
        help="only the first N of these",
    )
    add(
        "--parallel",
        "--batch",
        type=parse_positive_int,
        default=BATCH_SIZE,
        metavar="N",
        help="requests at once; answers are kept after each batch (%(default)s)",
    )
    add_model_options(parser)


def generate(given: argparse.Namespace) -> int:
    """Write a model's answers; return 1 if a question has none."""
    questions = answers.read_questions(
        find_path(given.questions), given.question_begin, given.question_end
    )[: given.first_n]
    settings = answers.AnswerSettings(
        given.num_choices, given.temperature, given.max_tokens, given.parallel
    )
    model = load_answering_model(given)
    replies = answers.answer_questions(model, given.model, questions, settings, given.output)
    return report_result(replies, "answers", given.model, given.output)


def judge(given: argparse.Namespace) -> int:
    """Write a judge's rows; return 1 if a reply is missing."""
    questions = answers.read_questions(
        find_path(given.questions), given.question_begin, given.question_end, given.references
    )[: given.first_n]
    files = [Path(name) for names in given.answers for name in names.split(",") if name]
    found = answers.read_answers(files)
    baseline = _resolve_baseline(given)
    if given.mode != "single":
        verdicts.list_matches(list(found), baseline)
    print(f"{len(questions)} questions of {given.questions}")
    ids = [question.id for question in questions]
    for line in [*describe_missing_answers(ids, found), *_describe_missing_references(questions)]:
        print(line)
    one = verdicts.MTBenchJudge(
        load_model(given, given.judge), given.judge, given.max_tokens, given.out, given.parallel
    )
    if given.mode == "single":
        replies, unread = verdicts.grade_answers(one, questions, found)
    else:
        replies, unread = verdicts.compare_answers(one, questions, found, baseline)
    if unread:
        print(f"{unread} of {len(replies.answers)} replies hold no verdict; show counts them")
    return report_result(replies, "verdicts", given.judge, one.rows_path(_row_kind(given.mode)))


def print_tables(given: argparse.Namespace) -> int:
    """Print the tables."""
    kind = _row_kind(given.mode)
    lines = show.compute_tables(given.out, kind, _resolve_baseline(given))
    print(
        "\n".join([json.dumps(lines, indent=1)] if given.json else show.format_tables(lines, kind))
    )
    return 0


def _resolve_baseline(given: argparse.Namespace) -> str | None:
    """Return the baseline model, in the mode that has one.

    Raises:
        UserError: It is missing there, or given in another mode.
    """
    if given.mode != "pairwise-baseline":
        if given.baseline:
            raise UserError(f"--baseline has no place in --mode {given.mode}")
        return None
    if not given.baseline:
        raise UserError("--mode pairwise-baseline needs --baseline NAME, a model with answers")
    return str(given.baseline)


def _row_kind(mode: str) -> str:
    return "single" if mode == "single" else "pair"


def _describe_missing_references(questions: Sequence[answers.MTBenchQuestion]) -> list[str]:
    """Return a line about questions whose reference answer is missing."""
    bare = sum(
        question.category in REFERENCE_CATEGORIES and not has_reference(question, 0)
        for question in questions
    )
    return [
        f"{bare} questions of {', '.join(REFERENCE_CATEGORIES)} have no reference answer"
    ] * bool(bare)
