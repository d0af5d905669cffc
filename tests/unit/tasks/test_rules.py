"""Rules that read an answer and compare it: regular expressions, numbers, words."""

import pickle
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.scorers.rules import F1, Numeric, Regex, RuleScorer, split_words, token_f1


def scored(rule: RuleScorer, text: str, **item: Any) -> tuple[float, str | None]:
    (score,) = rule.score([{"id": 0, **item}], [text])
    assert score.text == text
    assert rule.grade(item, score.answer) == score.value
    return score.value, score.answer


@pytest.mark.parametrize(
    ("pattern", "take", "text", "gold", "found"),
    [
        (r"answer: (\w+)", "first", "answer: cat, answer: dog", "cat", (1.0, "cat")),
        (r"answer: (\w+)", "last", "answer: cat, answer: dog", "cat", (0.0, "dog")),
        (r"\d+", "first", "in 1989 or 1990", "1989", (1.0, "1989")),
        (r"\d+", "first", "in 1989 or 1990", 1989, (1.0, "1989")),
        (r"<a>(.*?)</a>|<b>(.*?)</b>", "first", "so <b> it </b>", "it", (1.0, "it")),
        (r"(\d*)", "first", "none, then 7", "7", (1.0, "7")),
        (r"(\d*)", "last", "7, then none", "7", (1.0, "7")),
        (r"answer: (\w+)", "first", "Answer: cat", "cat", (0.0, None)),
        (r"(?i)answer: (\w+)", "first", "ANSWER: CAT", "cat", (1.0, "CAT")),
        (r"answer: (\w+)", "first", "answer: CAT", "cat", (0.0, "CAT")),
        (r"(?s)<a>(.*)</a>", "first", "<a>\n x\n</a>", "x", (1.0, "x")),
        (r"\d+", "first", "nothing", "1", (0.0, None)),
    ],
)
def test_regex(pattern: str, take: str, text: str, gold: Any, found: Any) -> None:
    assert scored(Regex(pattern, take), text, answer=gold) == found


def test_without_an_answer_any_match_is_right() -> None:
    rule = Regex(r"\bplease\b")
    assert scored(rule, "yes please") == (1.0, "please")
    assert scored(rule, "no") == (0.0, None)
    assert (
        rule.item_error({}) is None and rule.item_error({"answer": ""}) == 'its "answer" is empty'
    )
    assert "neither a string nor a number" in str(rule.item_error({"answer": None}))


@pytest.mark.parametrize(
    ("keys", "text", "gold", "found"),
    [
        ({}, "so 5 and 7", 7, (1.0, "7")),
        ({"take": "first"}, "so 5 and 7", 5, (1.0, "5")),
        ({}, "#### 1,234.50\nmore 3", "1234.5", (1.0, "1234.5")),
        ({}, "She has $1,234.50 left", 1234.5, (1.0, "1234.5")),
        ({}, "1 234", "1,234", (1.0, "1234")),
        ({}, "118", 18, (0.0, "118")),
        ({}, "-3", 3, (0.0, "-3")),
        ({"relative": 0.01}, "about 99.5", 100, (1.0, "99.5")),
        ({"relative": 0.01}, "about 98.9", 100, (0.0, "98.9")),
        ({"relative": 0.01}, "-99", -100, (1.0, "-99")),
        ({"absolute": 0.5}, "2.5", 2, (1.0, "2.5")),
        ({"absolute": 0.5}, "2.51", 2, (0.0, "2.51")),
        ({"absolute": 1, "relative": 0.5}, "14", 10, (1.0, "14")),
        ({"relative": 0.1}, "0.001", 0, (0.0, "0.001")),
        ({}, "0.1 + 0.2 = 0.3", 0.3, (1.0, "0.3")),
        ({"relative": 0.01}, "it is 6.02e23", 6.022e23, (1.0, "602" + "0" * 21)),
        ({}, "none", 3, (0.0, None)),
        ({}, "The answer is 2/6.", "1/3", (1.0, "1/3")),
        ({"absolute": 0.01}, "about 0.33", "1/3", (1.0, "0.33")),
        ({}, "The answer is twelve.", 12, (1.0, "12")),
    ],
)
def test_numeric(keys: dict[str, Any], text: str, gold: Any, found: Any) -> None:
    assert scored(Numeric(**keys), text, answer=gold) == found


def test_a_marked_number_settles_the_answer() -> None:
    decided = pickle.loads(pickle.dumps(Numeric().build_stop_check({"answer": 18})))
    assert not decided("so 18 is") and not decided("#### 18") and decided("#### 18\n")


@pytest.mark.parametrize("gold", ["many", "", None, True, [1], float("nan"), float("inf")])
def test_a_gold_answer_that_is_no_number_is_named(gold: Any) -> None:
    assert Numeric().item_error({"answer": gold}) == 'its "answer" is not a number'
    assert 'no "answer"' in str(Numeric().item_error({})) and F1().item_error({})


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("The Eiffel Tower", "eiffel tower", 1.0),
        ("the tower", "Eiffel Tower", 2 / 3),
        ("tower tower", "Eiffel Tower", 0.5),  # a word counts as often as it is there
        ("in Paris, France.", ["Paris", "Paris, France"], 0.8),
        ("a cat and a dog", "cat", 0.5),
        ("nothing like it", "Paris", 0.0),
        ("The answer is: Paris\nQuestion: Rome?", "Paris", 1.0),
        ("...\n Paris", "Paris", 1.0),
        ("it's", "its", 1.0),
        (" the\n", "Paris", 0.0),
        ("1,000", 1000, 1.0),
    ],
)
def test_f1(text: str, gold: Any, value: float) -> None:
    found, answer = scored(F1(), text, answer=gold)
    assert found == pytest.approx(value)
    assert (answer is None) == (text.strip() == "the")


def test_f1_of_the_whole_text() -> None:
    text = "Paris\nand Rome"
    assert scored(F1(), text, answer="Paris Rome") == (pytest.approx(2 / 3), "paris")
    assert scored(F1("all"), text, answer="Paris Rome") == (0.8, "paris and rome")
    assert F1("all").build_stop_check({}) is None


def test_f1_stops_after_the_line() -> None:
    decided = pickle.loads(pickle.dumps(F1())).build_stop_check({})
    assert decided is not None
    assert [decided(text) for text in ("", "\n", "Paris", "\nthe\n", "\nParis\n")] == [
        *(False, False, False, False, True)
    ]


def test_the_words_that_count() -> None:
    assert split_words("The  Cat's an A-team, a\tdog!") == ["cats", "ateam", "dog"]
    assert token_f1([], ["x"]) == token_f1([], []) == 0.0


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("the", "no word other than articles: 'the'"),
        (["Paris", ""], "is empty"),
        (["Paris", "..."], "no word"),
        ({"a": 1}, "neither a string nor a number"),
    ],
)
def test_a_gold_answer_without_words_is_named(gold: Any, message: str) -> None:
    assert message in str(F1().item_error({"answer": gold}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regex("("), r"task.scorer.pattern='\(': is not a regular expression"),
        (lambda: Regex("x", take="middle"), "task.scorer.take=middle: must be first or last"),
        (lambda: Numeric(relative=-0.1), "task.scorer.relative=-0.1: must be a number, at least 0"),
        (lambda: F1(lines="two"), "task.scorer.lines=two: must be first or all"),
    ],
)
def test_a_wrong_key_is_named(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
