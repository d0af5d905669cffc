"""FLASK: responses scored from 1 to 5 by the skills that each instruction requires.

After Ye et al. 2023 (2307.10928): python -m swarm.judge flask generate | judge | show.
"""

import argparse
import json
from pathlib import Path

from swarm._util.files import find_path
from swarm.judge.batch_requests import describe_missing_answers, report_result
from swarm.judge.cli import (
    add_batch_options,
    add_generation_options,
    add_mixture_options,
    add_model_options,
    load_answering_model,
    load_model,
    parse_folder,
    parse_output_file,
    parse_positive_int,
)
from swarm.judge.flask import reviews
from swarm.judge.flask import reviews as items
from swarm.judge.flask import reviews as show

QUESTIONS_FILE = "data/questions/flask.jsonl"
SKILLS_FILE = "data/questions/flask_skills.json"


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Add the actions: generate, judge, show."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_generate_options(actions.add_parser("generate", help="answers of a model"))
    _add_judge_options(actions.add_parser("judge", help="scores of answers, skill by skill"))
    last = actions.add_parser("show", help="tables by skill, domain and difficulty")
    last.add_argument(
        "--out",
        required=True,
        type=parse_folder,
        metavar="FOLDER",
        help="as of judge; scores.csv and scores.json are written there",
    )
    last.add_argument("--json", action="store_true", help="the lines as JSON")
    last.set_defaults(run=print_tables)


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
    add_mixture_options(parser)
    add_generation_options(parser, 2048, 0.7)
    _add_item_options(parser)
    parser.set_defaults(run=generate)


def _add_judge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--answers",
        nargs="+",
        required=True,
        metavar="FILE",
        help="answers that generate wrote; several, apart by spaces or commas",
    )
    add("--judge", required=True, metavar="NAME", help="who judges")
    add(
        "--max_tokens",
        type=parse_positive_int,
        default=1024,
        metavar="N",
        help="the most new tokens of a reply (%(default)s)",
    )
    add("--out", required=True, type=parse_folder, metavar="FOLDER", help="where the reviews go")
    _add_item_options(parser)
    parser.set_defaults(run=judge)


def _add_item_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--questions", default=QUESTIONS_FILE, metavar="FILE", help="(%(default)s, our own)")
    add("--skills", default=SKILLS_FILE, metavar="FILE", help="the skills' scales (%(default)s)")
    add_batch_options(parser)
    add_model_options(parser)


def generate(given: argparse.Namespace) -> int:
    """Write a model's answers; return 1 if one is missing."""
    asked = _load_items(given)
    requests = {
        item.id: reviews.build_request(
            item, given.max_tokens, given.temperature, given.system, given.seed
        )
        for item in asked
    }
    model = load_answering_model(given)
    replies = reviews.write_answers(model, given.model, requests, given.output, given.batch)
    return report_result(replies, "answers", given.model, given.output)


def judge(given: argparse.Namespace) -> int:
    """Write a judge's reviews; return 1 if a reply is missing."""
    asked = _load_items(given)
    files = [Path(name) for names in given.answers for name in names.split(",") if name]
    answers = items.read_answers(files)
    print(f"{len(asked)} questions of {given.questions}")
    for line in describe_missing_answers([item.id for item in asked], answers):
        print(line)
    replies, unread = reviews.review_answers(
        load_model(given, given.judge),
        given.judge,
        asked,
        answers,
        items.read_skills(find_path(given.skills)),
        given.max_tokens,
        given.out,
        given.batch,
    )
    if unread:
        print(f"{unread} scores cannot be read; show counts them")
    return report_result(replies, "reviews", given.judge, given.out / reviews.REVIEWS_FILE)


def print_tables(given: argparse.Namespace) -> int:
    """Print the tables, and write them as CSV and JSON."""
    lines = show.compute_tables(given.out)
    show.write_tables(given.out, lines)
    print("\n".join([json.dumps(lines, indent=1)] if given.json else show.format_tables(lines)))
    return 0


def _load_items(given: argparse.Namespace) -> list[items.FlaskItem]:
    skills = items.read_skills(find_path(given.skills))
    return items.read_items(find_path(given.questions), skills)[: given.limit]
