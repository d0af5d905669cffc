"""What arbiters and members write, as it comes, and what is read from it."""

import json
import random
import time
from typing import Any

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
    parts = ("weighed", "they agree", "one says Lyon", True, ("the year", "the river"))
    assert read(WHOLE) == Verdict("Paris it is.", 0.9, *parts, raw=WHOLE)


# [S] stands for <synthesis>, [C] for <confidence>.
VERDICTS: list[tuple[str, str, float | None]] = [
    # Thoughts are none of it.
    ("<think>\n[S]draft[/S]\n</think>\n[S]real[/S]", "real", None),
    ("hm [S]draft[/S]\n</think>\n\n[S]real[/S]", "real", None),
    # The last one that is whole.
    ("[S]one[/S]\nBetter:\n[S]two[/S]", "two", None),
    ("[S]\ndraft\n\n[S]\nfinal\n[/S]", "final", None),
    ("[S]real[/S]\n[S][/S]", "real", None),
    ("[C]0.2[/C]\n[S]a[/S]\n[C]0.7[/C]", "a", 0.7),
    # Tags that are spoken of.
    ("[S]Write [S] first.[/S]", "Write [S] first.", None),
    ("[S]Say `[S]x[/S]` so[/S]\n[C]1[/C]", "Say `[S]x[/S]` so", 1.0),
    ("[S]\nEnd with [/S] as shown\nand stop\n[/S]", "End with [/S] as shown\nand stop", None),
    ("[S]A [C]0.1[/C][/S][C]0.8[/C]", "A [C]0.1[/C]", 0.8),
    # Case, wrappers, ends that are missing.
    ("<SYNTHESIS>x</Synthesis><Confidence> 0.5 </CONFIDENCE>", "x", 0.5),
    ("```xml\n<synthesis_output>\n[S]A[/S]\n</synthesis_output>\n```", "A", None),
    ("[S]A\n[C]0.4[/C]", "A", 0.4),
    ("[S]never closed <analysis>A</analysis> [C].7[/C]", "never closed", 0.7),
    ("[S]cut off in the", "cut off in the", None),
    # JSON.
    ('{"synthesis": "A", "confidence": 0.7}', "A", 0.7),
    ('Here:\n```json\n{"Synthesis": "A", "confidence": "95%"}\n```\nDone.', "A", 0.95),
    ('{"note": {"a": 1}} {"synthesis": "B\nC", "confidence": null}', "B\nC", None),
    ('[S]{"synthesis": "inner"}[/S]', '{"synthesis": "inner"}', None),
]


def tagged(text: str) -> str:
    """The text with the tags for which its letters stand."""
    for letter, name in {"S": "synthesis", "C": "confidence"}.items():
        text = text.replace(f"[{letter}]", f"<{name}>").replace(f"[/{letter}]", f"</{name}>")
    return text


@pytest.mark.parametrize(("short", "synthesis", "confidence"), VERDICTS)
def test_what_is_written_is_read(short: str, synthesis: str, confidence: float | None) -> None:
    found = read(reply := tagged(short))
    assert (found.synthesis, found.confidence) == (tagged(synthesis), confidence)
    assert found.source == "read" and found.raw == reply


@pytest.mark.parametrize(
    "reply",
    [
        *("", "just an answer", "Synthesis: a heading is no form that is asked for"),
        *("<think>\n[S]draft[/S]\n</think>", "[S][/S]", "[S]...[/S]\n[C]...[/C]"),
        *('{"answer": 1}', '{"synthesis": ', "[" * 3000, '{"a":' * 3000),
        *("My synthesis is that confidence matters", "<thinking>\n[S]never ended"),
    ],
)
def test_without_a_synthesis_there_is_no_verdict(reply: str) -> None:
    assert parse_verdict(tagged(reply)) is None


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


def test_confidences() -> None:
    read_as = {"0.9": 0.9, "0,8": 0.8, "95%": 0.95, "85": 0.85, "0.9 (high)": 0.9, "9/10": 0.9}
    read_as |= {"4 out of 5": 0.8, "**0.7**": 0.7}
    assert {said: parse_confidence(said) for said in read_as} == pytest.approx(read_as)
    # Nobody can say which of two things these are, or they are none.
    assert not any(map(parse_confidence, ("1.5", "10", "250", "-0.5", "3/0", "")))
    for value in (0.7, "0.7", "70%", 70):
        assert read(json.dumps({"synthesis": "a", "confidence": value})).confidence == 0.7
    assert read('{"synthesis": "a", "confidence": true}').confidence is None


def test_whether_another_iteration_is_needed_and_there_is_dissent() -> None:
    yes = ("true", "\nYes\n", "yes, once more", "1", "**True**")
    for said in (*yes, "false", "no", "No, it is fine: true", "", "maybe"):
        reply = f"<synthesis>a</synthesis><needs_iteration>{said}</needs_iteration>"
        assert read(reply).needs_iteration is (said in yes), said
    assert read('{"synthesis": "a", "needs_iteration": true}').needs_iteration
    for said in ("none", "None.", "N/A", "-", " "):
        assert read(f"<synthesis>a</synthesis><dissent>{said}</dissent>").dissent == ""


@pytest.mark.parametrize(
    "said",
    [
        *("- a\n- b", "* a\n• b", "1. a\n2) b", "<area>a</area>\n<area>b</area>", "a\nb"),
        ["a", "", "b"],
    ],
)
def test_refinement_areas(said: object) -> None:
    assert parse_areas(said) == ("a", "b")


def test_refinement_areas_of_several_lines_and_none() -> None:
    assert parse_areas("- a that\n  goes on\n- b") == ("a that goes on", "b")
    assert parse_areas("a") == ("a",)
    assert not any(map(parse_areas, ("none", "- None.", "", None)))


def test_orders() -> None:
    listed = ("3 > 1 > 2", "[3, 1, 2]", "**3** > **1** > **2**", "3\n1\n2", "3 > 1")
    listed += ("1. Answer 3\n2. Answer 1\n3. Answer 2", "<think>\n1 > 2 > 3\n</think>\n3 > 1 > 2")
    listed += ("Answer 3, then answer 1, then answer 2",)
    listed += ("Answer 1 has 40 faults.\nAnswer 2 is bad.\n3 > 1 > 2",)
    listed += ("First I thought 1 > 2 > 3, but no.\n\n3 > 1 > 2",)
    for reply in listed:
        assert parse_ranking(reply, [1, 2, 3]) == [3, 1, 2], reply
    for reply in ("", "3 is best", "7 > 8", "1 > 1 > 2", "none of them", "4, 5, 6"):
        assert parse_ranking(reply, [1, 2, 3]) is None, reply


SURE = "Confidence: 95% of it is mine.\nSo it is."
ANSWERS: dict[str, tuple[str, float | None]] = {
    "Paris\nConfidence: 0.8": ("Paris", 0.8),
    "Paris\n\n**Confidence:** 85%": ("Paris", 0.85),
    "Paris\n(Confidence: 9/10)": ("Paris", 0.9),
    "Paris\nConfidence level = 0.9 (fairly sure)": ("Paris", 0.9),
    "It is Paris. Confidence: 0.9": ("It is Paris.", 0.9),
    "<confidence>0.3</confidence>\nParis": ("Paris", 0.3),
    "<think>\nConfidence: 0.1\n</think>\nParis": ("Paris", None),
    "Paris\nConfidence: very high": ("Paris\nConfidence: very high", None),
    "Paris\nConfidence: 250": ("Paris", None),
    **{text: (text, None) for text in ("The 95% confidence interval is [1, 2]", SURE, "")},
    "a: 1\nconfidence: 0.5\nb: 2": ("a: 1\nconfidence: 0.5\nb: 2", None),
}


def test_an_answer_and_its_confidence() -> None:
    assert {text: split_confidence(text) for text in ANSWERS} == ANSWERS


def test_thoughts() -> None:
    rest = {
        "<think>hm</think>a": "a",
        "<thinking>\nx <thinking> y </thinking> z\n</thinking>\na": "a",
        "<THOUGHT_PROCESS>x</thought_process> a": "a",
        "a\n<scratchpad>x</scratchpad>\nb": "a\n\nb",
        "hm, so\n</think>\n\na": "a",
        "<think>never ended": "",
        "Use <think> and </think> so.": "Use <think> and </think> so.",
        "The end is `</think>` there.": "The end is `</think>` there.",
    }
    assert {text: strip_thoughts(text) for text in rest} == rest


def test_what_a_vote_is_for() -> None:
    keys = {
        "The answer is (B).": ("choice", "B"),
        "c": ("choice", "C"),
        "Answer: **D**": ("choice", "D"),
        "I take (b).": ("choice", "B"),
        "B) Paris": ("choice", "B"),
        "vitamin B": ("text", "vitamin b"),
        "so 3 + 4 = 7.0": ("number", "7"),
        "It is 1,200": ("number", "1200"),
        "The  Capital is: PARIS!": ("text", "capital is paris"),
        "!?": ("text", "!?"),
        "It was built in 1889.\nParis": ("text", "it was built in 1889 paris"),
    }
    assert {text: comparison_key(text) for text in keys} == keys


def test_groups_are_complete_and_keep_the_order() -> None:
    texts = ["the red house", "7", "red house!", "7.0", "8"]
    assert group_equal_answers(texts) == [[0, 2], [1, 3], [4]]
    # Long numbers are compared to their last digit.
    assert group_equal_answers([str(2**200), str(2**200 + 1), f"{2**200}.0"]) == [[0, 2], [1]]
    assert group_equal_answers(["-0", "0", "0.00", "100", "1"]) == [[0, 1, 2], [3], [4]]


@pytest.mark.parametrize(
    "reply",
    [
        *("9" * 5000, f"{'9' * 5000} > 1 > 2", "." * 50_000 + "a"),
        *(f"{' ' * 50_000}1{' ' * 50_000}\n3", f"x<confidence>{' ' * 50_000}y"),
        *("<think>\n<think>\n</think>\n" * 4000, f'<rank position="{"1" * 5000}">2</rank>'),
    ],
    ids=lambda reply: reply[:12].strip(),
)
def test_no_reply_takes_long_or_breaks_it(reply: str) -> None:
    began = time.process_time()
    split_confidence(reply)
    assert parse_ranking(reply, [1, 2, 3]) in (None, [2, 1, 3])
    assert parse_number_pick(reply, 3) in (None, 1, 2)
    assert parse_verdict(reply) is None and comparison_key(reply)
    assert time.process_time() - began < 3


def test_which_answer_a_reply_names() -> None:
    named: dict[str, Any] = {"2": 2, " **2**": 2, "Answer 2 is best": 2, '{"answer": 6}': 6}
    named |= {"2. Answer 1 is wrong": 2, "The best is answer 3, by far": 3, "Number 3 is best": 3}
    named |= {"3 is not as good as 2": 3, "The best is answer 2 (sure: 0.9)": 2}
    named |= dict.fromkeys(("it is 2, not 1", "none of the 2", "2nd", "1.5", "0", "11", ""))
    named |= {'{"synthesis":"x","analysis":"A1","confidence":0.9}': None}
    assert {reply: parse_number_pick(reply, 10) for reply in named} == named
    settled = {"": False, "1": False, "10": False, "10.": True, "Answer 1\n": True, "the 1 ": False}
    assert {text: has_number_pick(text) for text in settled} == settled
