"""What arbiters and members write, as it comes, and what is read from it."""

import json
import random
import time

import pytest

from swarm._util.replies import has_number_pick, parse_number_pick, parse_ranking, strip_thoughts
from swarm.multi_agent.consortium.prompts import (
    parse_areas,
    parse_confidence,
    parse_verdict,
    split_confidence,
)
from swarm.multi_agent.consortium.results import Verdict
from swarm.multi_agent.consortium.strategies import comparison_key, group_equal_answers

WHOLE = """<reasoning>weighed</reasoning>
<synthesis>
Paris it is.
</synthesis>
<analysis>they agree</analysis>
<dissent>one says Lyon</dissent>
<confidence>0.9</confidence>
<refinement_areas>
- the year
- the river
</refinement_areas>
<needs_iteration>
true
</needs_iteration>"""


def read(reply: str) -> Verdict:
    found = parse_verdict(reply)
    assert found is not None, reply
    return found


def test_the_form_is_read_whole() -> None:
    assert read(WHOLE) == Verdict(
        "Paris it is.",
        0.9,
        "weighed",
        "they agree",
        "one says Lyon",
        True,
        ("the year", "the river"),
        raw=WHOLE,
    )


@pytest.mark.parametrize(
    ("reply", "synthesis", "confidence"),
    [
        # Thoughts are none of it.
        (
            "<think>\n<synthesis>draft</synthesis>\n</think>\n<synthesis>real</synthesis>",
            "real",
            None,
        ),
        ("<thinking><confidence>0.1</confidence></thinking><synthesis>a</synthesis>", "a", None),
        ("hm <synthesis>draft</synthesis>\n</think>\n\n<synthesis>real</synthesis>", "real", None),
        # The last one that is whole.
        ("<synthesis>one</synthesis>\nBetter:\n<synthesis>two</synthesis>", "two", None),
        ("<synthesis>draft</synthesis> hm, rather: <synthesis>final</synthesis>", "final", None),
        ("<synthesis>\ndraft\n\n<synthesis>\nfinal\n</synthesis>", "final", None),
        ("<synthesis>real</synthesis>\n<synthesis></synthesis>", "real", None),
        (
            "<confidence>0.2</confidence>\n<synthesis>a</synthesis>\n<confidence>0.7</confidence>",
            "a",
            0.7,
        ),
        # Tags that are spoken of.
        ("<synthesis>Write <synthesis> first.</synthesis>", "Write <synthesis> first.", None),
        (
            "<synthesis>Say `<synthesis>x</synthesis>` so</synthesis>\n<confidence>1</confidence>",
            "Say `<synthesis>x</synthesis>` so",
            1.0,
        ),
        (
            "<synthesis>\nEnd with </synthesis> as shown\nand stop\n</synthesis>",
            "End with </synthesis> as shown\nand stop",
            None,
        ),
        (
            "<synthesis>A <confidence>0.1</confidence></synthesis><confidence>0.8</confidence>",
            "A <confidence>0.1</confidence>",
            0.8,
        ),
        ("<synthesis>a <analysis>b</synthesis>\n<analysis>c</analysis>", "a <analysis>b", None),
        # Case, wrappers, ends that are missing.
        ("<SYNTHESIS>x</Synthesis><Confidence> 0.5 </CONFIDENCE>", "x", 0.5),
        (
            "```xml\n<synthesis_output>\n<synthesis>A</synthesis>\n</synthesis_output>\n```",
            "A",
            None,
        ),
        ("<synthesis>A\n<confidence>0.4</confidence>", "A", 0.4),
        (
            "<synthesis>never closed <analysis>A</analysis> <confidence>.7</confidence>",
            "never closed",
            0.7,
        ),
        ("<synthesis>cut off in the", "cut off in the", None),
        # JSON.
        ('{"synthesis": "A", "confidence": 0.7}', "A", 0.7),
        ('Here:\n```json\n{"Synthesis": "A", "confidence": "95%"}\n```\nDone.', "A", 0.95),
        ('{"note": {"a": 1}} {"synthesis": "B\nC", "confidence": null}', "B\nC", None),
        ('<synthesis>{"synthesis": "inner"}</synthesis>', '{"synthesis": "inner"}', None),
    ],
)
def test_what_is_written_is_read(reply: str, synthesis: str, confidence: float | None) -> None:
    found = read(reply)
    assert (found.synthesis, found.confidence) == (synthesis, confidence)
    assert found.source == "read" and found.raw == reply


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "just an answer",
        "Synthesis: a heading is no form that is asked for",
        "<think>\n<synthesis>draft</synthesis>\n</think>",
        "<synthesis></synthesis>",
        "<synthesis>...</synthesis>\n<confidence>...</confidence>",
        '{"answer": 1}',
        '{"synthesis": ',
        "My synthesis is that confidence matters",
        "[" * 3000,
        '{"a":' * 3000,
        "<thinking>\n<synthesis>never ended</synthesis>",
    ],
)
def test_without_a_synthesis_there_is_no_verdict(reply: str) -> None:
    assert parse_verdict(reply) is None


def test_nothing_that_is_written_breaks_the_reader() -> None:
    words = "<synthesis> </synthesis> <confidence> </confidence> <think> </think> a 0.9 { } "
    words += '"synthesis": " Confidence: ** <area> 3>1 % /0 \x00 </thinking>'
    pieces = [*words.split(), "\n", "- "]
    draws = random.Random(0)
    read_some = 0
    for _ in range(4000):
        text = "".join(draws.choices(pieces, k=draws.randrange(1, 25)))
        found = parse_verdict(text)
        answer, confidence = split_confidence(text)
        assert answer == answer.strip()
        assert sorted(parse_ranking(text, [1, 2, 3]) or [1, 2, 3]) == [1, 2, 3]
        for sure in (confidence, found.confidence if found else None):
            assert sure is None or 0 <= sure <= 1
        if found:
            assert found.synthesis.strip()
            read_some += 1
    assert 200 < read_some < 3800


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("0.9", 0.9),
        ("0,8", 0.8),
        ("95%", 0.95),
        ("85", 0.85),
        ("0.9 (high)", 0.9),
        ("9/10", 0.9),
        ("4 out of 5", 0.8),
        ("**0.7**", 0.7),
        # Nobody can say which of two things these are, or they are none.
        ("1.5", None),
        ("10", None),
        ("250", None),
        ("-0.5", None),
        ("3/0", None),
        ("", None),
    ],
)
def test_confidences(said: str, number: float | None) -> None:
    assert parse_confidence(said) == (None if number is None else pytest.approx(number))


@pytest.mark.parametrize("value", [0.7, "0.7", "70%", 70])
def test_a_confidence_in_json_is_read_as_elsewhere(value: object) -> None:
    assert read(json.dumps({"synthesis": "a", "confidence": value})).confidence == 0.7
    assert read('{"synthesis": "a", "confidence": true}').confidence is None


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("true", True),
        ("\nYes\n", True),
        ("yes, once more", True),
        ("1", True),
        ("**True**", True),
        ("false", False),
        ("no", False),
        ("No, it is fine: true", False),
        ("", False),
        ("maybe", False),
    ],
)
def test_whether_another_iteration_is_needed(said: str, wanted: bool) -> None:
    reply = f"<synthesis>a</synthesis><needs_iteration>{said}</needs_iteration>"
    assert read(reply).needs_iteration is wanted
    assert read('{"synthesis": "a", "needs_iteration": true}').needs_iteration


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("- a\n- b", ("a", "b")),
        ("* a\n• b", ("a", "b")),
        ("1. a\n2) b", ("a", "b")),
        ("<area>a</area>\n<area>b</area>", ("a", "b")),
        ("a\nb", ("a", "b")),
        ("a", ("a",)),
        ("- a that\n  goes on\n- b", ("a that goes on", "b")),
        ("none", ()),
        ("- None.", ()),
        ("", ()),
        (["a", "", "b"], ("a", "b")),
        (None, ()),
    ],
)
def test_refinement_areas(said: object, found: tuple[str, ...]) -> None:
    assert parse_areas(said) == found


@pytest.mark.parametrize("said", ["none", "None.", "N/A", "-", " "])
def test_no_dissent_is_none(said: str) -> None:
    assert read(f"<synthesis>a</synthesis><dissent>{said}</dissent>").dissent == ""


@pytest.mark.parametrize(
    "reply",
    [
        "3 > 1 > 2",
        "[3, 1, 2]",
        "**3** > **1** > **2**",
        "3\n1\n2",
        "1. Answer 3\n2. Answer 1\n3. Answer 2",
        "Answer 3, then answer 1, then answer 2",
        "3 > 1",
        "<think>\n1 > 2 > 3\n</think>\n3 > 1 > 2",
        "Answer 1 has 40 faults.\nAnswer 2 is bad.\n3 > 1 > 2",
        "First I thought 1 > 2 > 3, but no.\n\n3 > 1 > 2",
    ],
)
def test_orders(reply: str) -> None:
    assert parse_ranking(reply, [1, 2, 3]) == [3, 1, 2]


@pytest.mark.parametrize(
    "reply", ["", "3 is best", "7 > 8", "1 > 1 > 2", "none of them", "4, 5, 6"]
)
def test_what_is_no_order(reply: str) -> None:
    assert parse_ranking(reply, [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("text", "answer", "confidence"),
    [
        ("Paris\nConfidence: 0.8", "Paris", 0.8),
        ("Paris\n\n**Confidence:** 85%", "Paris", 0.85),
        ("Paris\n**Confidence: 0.9**", "Paris", 0.9),
        ("Paris\n(Confidence: 9/10)", "Paris", 0.9),
        ("Paris\nConfidence level = 0.9 (fairly sure)", "Paris", 0.9),
        ("It is Paris. Confidence: 0.9", "It is Paris.", 0.9),
        ("<confidence>0.3</confidence>\nParis", "Paris", 0.3),
        ("<think>\nConfidence: 0.1\n</think>\nParis", "Paris", None),
        ("Paris\nConfidence: very high", "Paris\nConfidence: very high", None),
        ("Paris\nConfidence: 250", "Paris", None),
        ("The 95% confidence interval is [1, 2]", "The 95% confidence interval is [1, 2]", None),
        (
            "Confidence: 95% of it is mine.\nSo it is.",
            "Confidence: 95% of it is mine.\nSo it is.",
            None,
        ),
        ("a: 1\nconfidence: 0.5\nb: 2", "a: 1\nconfidence: 0.5\nb: 2", None),
        ("", "", None),
    ],
)
def test_an_answer_and_its_confidence(text: str, answer: str, confidence: float | None) -> None:
    assert split_confidence(text) == (answer, confidence)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>hm</think>a", "a"),
        ("<thinking>\nx <thinking> y </thinking> z\n</thinking>\na", "a"),
        ("<THOUGHT_PROCESS>x</thought_process> a", "a"),
        ("a\n<scratchpad>x</scratchpad>\nb", "a\n\nb"),
        ("hm, so\n</think>\n\na", "a"),
        ("<think>never ended", ""),
        ("Use <think> and </think> so.", "Use <think> and </think> so."),
        ("The end is `</think>` there.", "The end is `</think>` there."),
    ],
)
def test_thoughts(text: str, rest: str) -> None:
    assert strip_thoughts(text) == rest


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("The answer is (B).", ("choice", "B")),
        ("c", ("choice", "C")),
        ("Answer: **D**", ("choice", "D")),
        ("I take (b).", ("choice", "B")),
        ("B) Paris", ("choice", "B")),
        ("vitamin B", ("text", "vitamin b")),
        ("so 3 + 4 = 7.0", ("number", "7")),
        ("It is 1,200", ("number", "1200")),
        ("The  Capital is: PARIS!", ("text", "capital is paris")),
        ("!?", ("text", "!?")),
        ("It was built in 1889.\nParis", ("text", "it was built in 1889 paris")),
    ],
)
def test_what_a_vote_is_for(text: str, key: tuple[str, str]) -> None:
    assert comparison_key(text) == key


def test_groups_are_complete_and_keep_the_order() -> None:
    texts = ["the red house", "7", "red house!", "7.0", "8"]
    assert group_equal_answers(texts) == [[0, 2], [1, 3], [4]]
    # The first and the last are both like the middle one, and not like each other.
    chain = ["abcdefgh", "abcdefxy", "abcdwvxy"]
    assert group_equal_answers(chain, 0.7) == [[0, 1], [2]] and group_equal_answers(chain, 0.4) == [
        [0, 1, 2]
    ]
    assert group_equal_answers(["100001", "100002"], 0.1) == [[0], [1]]


@pytest.mark.parametrize(
    "reply",
    [
        "9" * 5000,
        f"{'9' * 5000} > 1 > 2",
        "." * 50_000 + "a",
        f"{' ' * 50_000}1{' ' * 50_000}\n3",
        f"x<confidence>{' ' * 50_000}y",
        "<think>\n<think>\n</think>\n" * 4000,
        f'<rank position="{"1" * 5000}">2</rank>',
    ],
    ids=lambda reply: reply[:12].strip(),
)
def test_no_reply_takes_long_or_breaks_it(reply: str) -> None:
    began = time.process_time()
    split_confidence(reply)
    assert parse_ranking(reply, [1, 2, 3]) in (None, [2, 1, 3]) and parse_number_pick(reply, 3) in (
        None,
        1,
        2,
    )
    assert parse_verdict(reply) is None and comparison_key(reply)
    assert time.process_time() - began < 3


def test_long_numbers_are_compared_to_their_last_digit() -> None:
    assert group_equal_answers([str(2**200), str(2**200 + 1), f"{2**200}.0"]) == [[0, 2], [1]]
    assert group_equal_answers(["-0", "0", "0.00", "100", "1"]) == [[0, 1, 2], [3], [4]]


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("2", 2),
        (" **2**", 2),
        ("Answer 2 is best", 2),
        ("2. Answer 1 is wrong", 2),
        ("The best is answer 3, by far", 3),
        ("3 is not as good as 2", 3),
        ("it is 2, not 1", None),
        ("Number 3 is best", 3),
        ('{"answer": 6}', 6),
        ('{"synthesis":"x","analysis":"A1","confidence":0.9}', None),
        ("none of the 2", None),
        ("2nd", None),
        ("1.5", None),
        ("The best is answer 2 (sure: 0.9)", 2),
        ("0", None),
        ("11", None),
        ("", None),
    ],
)
def test_which_answer_a_reply_names(reply: str, number: int | None) -> None:
    assert parse_number_pick(reply, 10) == number


def test_a_choice_is_settled_once_its_number_is_whole() -> None:
    assert [has_number_pick(text) for text in ("", "1", "10", "10.", "Answer 1\n", "the 1 ")] == [
        *(False, False, False, True, True, False)
    ]
