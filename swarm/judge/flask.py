"""FLASK: responses scored from 1 to 5 by the skills that each instruction calls for.

After Ye et al. 2023 (2307.10928): python -m swarm.judge flask generate | judge | show.
"""

import argparse
import json
from pathlib import Path

from swarm.judge import flask_items as items
from swarm.judge import flask_reviews as reviews
from swarm.judge import flask_show as show
from swarm.judge.asking import closed, without_answer
from swarm.judge.options import (
    add_answering,
    add_asking,
    add_mixture,
    add_models,
    answering,
    file,
    folder,
    named,
    whole,
)
from swarm.places import find

QUESTIONS = "data/questions/flask.jsonl"
SKILLS = "data/questions/flask_skills.json"


def subcommands(parser: argparse.ArgumentParser) -> None:
    """The format's actions."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _generate_options(actions.add_parser("generate", help="answers of a model"))
    _judge_options(actions.add_parser("judge", help="scores of answers, skill by skill"))
    last = actions.add_parser("show", help="tables by skill, domain and difficulty")
    last.add_argument("--out", required=True, type=folder, metavar="FOLDER",
        help="as of judge; scores.csv and scores.json are written there")  # fmt: skip
    last.add_argument("--json", action="store_true", help="the lines as JSON")
    last.set_defaults(run=shown)


def _generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="who answers")
    add("--output", required=True, type=file, metavar="FILE.jsonl", help="where the answers go")
    add_mixture(parser)
    add_answering(parser, 2048, 0.7)
    _item_options(parser)
    parser.set_defaults(run=generate)


def _judge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--answers", nargs="+", required=True, metavar="FILE",
        help="answers that generate wrote; several, apart by spaces or commas")  # fmt: skip
    add("--judge", required=True, metavar="NAME", help="who judges")
    add("--max_tokens", type=whole, default=1024, metavar="N",
        help="the most new tokens of a reply (%(default)s)")  # fmt: skip
    add("--out", required=True, type=folder, metavar="FOLDER", help="where the reviews go")
    _item_options(parser)
    parser.set_defaults(run=judge)


def _item_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--questions", default=QUESTIONS, metavar="FILE", help="(%(default)s, our own)")
    add("--skills", default=SKILLS, metavar="FILE", help="the skills' scales (%(default)s)")
    add_asking(parser)
    add_models(parser)


def generate(given: argparse.Namespace) -> int:
    """Write a model's answers; 1 if one is missing."""
    asked = _items(given)
    requests = {
        item.id: reviews.request(
            item, given.max_tokens, given.temperature, given.system, given.seed
        )
        for item in asked
    }
    model = answering(given)
    replies = reviews.answer(model, given.model, requests, given.output, given.batch)
    return closed(replies, "answers", given.model, given.output)


def judge(given: argparse.Namespace) -> int:
    """Write a judge's reviews; 1 if a reply is missing."""
    asked = _items(given)
    files = [Path(name) for names in given.answers for name in names.split(",") if name]
    answers = items.read_answers(files)
    print(f"{len(asked)} questions of {given.questions}")
    for line in without_answer([item.id for item in asked], answers):
        print(line)
    replies, unread = reviews.review(
        named(given, given.judge), given.judge, asked, answers,
        items.read_skills(find(given.skills)), given.max_tokens, given.out, given.batch,
    )  # fmt: skip
    if unread:
        print(f"{unread} scores cannot be read; show counts them")
    return closed(replies, "reviews", given.judge, given.out / reviews.REVIEWS)


def shown(given: argparse.Namespace) -> int:
    """Print the tables, and write them as CSV and JSON."""
    lines = show.tables(given.out)
    show.write(given.out, lines)
    print("\n".join([json.dumps(lines, indent=1)] if given.json else show.told(lines)))
    return 0


def _items(given: argparse.Namespace) -> list[items.Item]:
    skills = items.read_skills(find(given.skills))
    return items.read_items(find(given.questions), skills)[: given.limit]
