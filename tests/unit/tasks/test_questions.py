"""Our own question sets: complete, in the formats that are read, and without repetitions."""

import json
import re
from collections import Counter

from swarm._util.files import find_path
from swarm._util.jsonl import read_json_rows
from swarm.judge.flask import DIFFICULTY_ORDER, SKILLS_FILE, read_items, read_skills
from swarm.judge.flask import QUESTIONS_FILE as FLASK
from swarm.judge.mt_bench import QUESTIONS_FILE as MT_BENCH
from swarm.judge.mt_bench import REFERENCE_CATEGORIES, read_questions

ALPACA_EVAL = "data/questions/alpaca_eval.json"


def test_the_sets_are_complete() -> None:
    rows = read_json_rows(find_path(ALPACA_EVAL), {"instruction": str, "dataset": str})
    assert {row["dataset"] for row in rows} == {"own"}
    assert all(len(row["instruction"]) < 300 for row in rows)
    questions = read_questions(find_path(MT_BENCH))
    categories = "writing roleplay reasoning math coding extraction stem humanities".split()
    assert Counter(question.category for question in questions) == dict.fromkeys(categories, 2)
    for question in questions:
        assert len(question.turns) == 2
        assert len(question.reference) == (2 if question.category in REFERENCE_CATEGORIES else 0)
    skills = read_skills(find_path(SKILLS_FILE))
    items = read_items(find_path(FLASK), skills)
    assert len(skills) == len(items) == 12
    assert {skill for item in items for skill in item.skills} == set(skills)
    assert {item.difficulty for item in items} == set(DIFFICULTY_ORDER)
    assert all(len(item.skills) == 3 and item.answer for item in items)
    scores = [text for skill in skills.values() for text in skill.scoring.values()]
    assert len(scores) == len(set(scores)) == 60
    # No text is found twice.
    texts = [row["instruction"] for row in rows]
    texts += [turn for question in questions for turn in question.turns]
    texts += [json.loads(line)["instruction"] for line in find_path(FLASK).read_text().splitlines()]
    plain = [re.sub(r"\W+", " ", text).casefold() for text in texts]
    assert len(plain) == len(set(plain)) == 30 + 32 + 12
