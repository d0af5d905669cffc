"""Our own question sets: in the formats that are read, with references that are right."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from swarm._util.files import find_path
from swarm._util.jsonl import read_json_rows
from swarm.judge.flask import DIFFICULTY_ORDER, SKILLS_FILE, read_items, read_skills
from swarm.judge.flask import QUESTIONS_FILE as FLASK
from swarm.judge.mt_bench import QUESTIONS_FILE as MT_BENCH
from swarm.judge.mt_bench import REFERENCE_CATEGORIES, MTBenchQuestion, read_questions

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


def tallest(names: str, pairs: list[tuple[str, str]]) -> list[str]:
    """The only order of people, the tallest first, in which the first of each pair is taller."""
    (order,) = [
        order
        for order in itertools.permutations(names.split())
        if all(order.index(a) < order.index(b) for a, b in pairs)
    ]
    return list(order)


def boxes(found: str) -> dict[str, str]:
    """What wrongly labelled boxes hold, if a fruit out of the one labelled mixed is `found`."""
    labels = ("apples", "pears", "mixed")
    (holds,) = [
        held
        for held in itertools.permutations(labels)
        if all(a != b for a, b in zip(labels, held, strict=True)) and held[2] in (found, "mixed")
    ]
    return dict(zip(labels, holds, strict=True))


def program(reference: str, name: str) -> Callable[..., Any]:
    """A function of a reference's program."""
    space: dict[str, Any] = {}
    exec(reference, space)
    made: Callable[..., Any] = space[name]
    return made


def divided(*by: int) -> int:
    return sum(any(n % d == 0 for d in by) for n in range(1, 101))


HEIGHTS = [("Anna", "Ben"), ("Ben", "Carl"), ("Carl", "Dora")]


def referenced(category: str) -> list[MTBenchQuestion]:
    return [one for one in read_questions(find_path(MT_BENCH)) if one.category == category]


def test_the_references_of_reasoning_follow() -> None:
    heights, fruit = referenced("reasoning")
    four = tallest("Anna Ben Carl Dora", HEIGHTS)
    five = tallest("Anna Ben Carl Dora Emil", [*HEIGHTS, ("Emil", "Ben"), ("Anna", "Emil")])
    for reference, first, order in zip(
        heights.reference, (four[1], five[2]), (four, five), strict=True
    ):
        assert reference.startswith(f"{first}.") and ", ".join(order) in reference
    assert "The box labelled mixed." in fruit.reference[0]
    for words in ("mixed holds pears", "apples is mixed", "pears holds apples"):
        assert f"labelled {words}" in fruit.reference[1]
    assert boxes("pears") == {"mixed": "pears", "apples": "mixed", "pears": "apples"}


def test_the_references_of_math_follow() -> None:
    price, divisors = referenced("math")
    now = 80 * 85 // 100
    assert price.reference[0].startswith(f"{now} euros")
    assert (
        price.reference[1].startswith(f"{now * 1.15:.2f} euros")
        and "0.9775" in (price.reference[1])
    )
    assert divisors.reference[0].startswith(f"{divided(3, 5)}:")
    assert divisors.reference[1].startswith(f"{100 - divided(3, 5, 7)}:")


def test_the_references_of_coding_run() -> None:
    words, brackets = referenced("coding")
    count = program(words.reference[0], "count_words")
    assert count("A b\na  B b") == {"a": 2, "b": 3}
    count = program(words.reference[1], "count_words")
    assert count("Yes, yes! No.") == {"yes": 2, "no": 1} and count("- it's") == {"it's": 1}
    balanced = program(brackets.reference[0], "is_balanced")
    assert balanced("a(b[c]{d})") and balanced("")
    assert not any(map(balanced, ("([)]", ")", "((")))


def test_the_reference_answers_of_the_rubric_are_right() -> None:
    items = {
        item.id: item.answer
        for item in read_items(find_path(FLASK), read_skills(find_path(SKILLS_FILE)))
    }
    positive = 100 * 0.99 / (100 * 0.99 + 99_900 * 0.01)
    for id_, right in {0: 4 * 12 - 9, 2: 17 * 23, 6: round(1 / (1 / 6 + 1 / 3))}.items():
        assert items[id_].startswith(f"{right}"), id_
    assert items[9].startswith(f"About {100 * positive:.0f} %") and f"{positive:.3f}" in items[9]
    middle = program(items[5].split("\n\n")[0], "median")
    assert [middle(numbers) for numbers in ([3, 1, 2], [4, 1, 3, 2])] == [2, 2.5]
    with pytest.raises(ValueError, match="no numbers"):
        middle([])
